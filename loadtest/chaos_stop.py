"""One wish to stop an answer: sent, sent again after a cut, and watched until the engine is idle."""

from __future__ import annotations

import asyncio
import time

from loadtest.chaos_client import Client, Scene
from loadtest.chaos_model import Answer, Asked
from loadtest.chaos_report import CANCEL_ACROSS, CANCEL_SAME
from loadtest.chaos_texts import Violation

#: seconds in which a cancelled answer must leave its engine.
IDLE_S = 15.0


class Stopping:
    """``begin`` once, ``send`` again on a new connection, ``check`` when the answer has ended."""

    def __init__(self, scene: Scene, asked: Asked, answer: Answer | None, seen: float | None) -> None:
        """``seen``: the part of what is held now that the person has seen; None: left to the server."""
        self._scene = scene
        self._asked = asked
        self._answer = answer
        self._fields: dict[str, object] = {}
        if answer is not None:
            self._fields["response_id"] = answer.id
        if seen is not None:
            self._fields["seen"] = round(seen * len(answer.text)) if answer is not None else 0
        self._sent_at, self._which = 0.0, CANCEL_ACROSS
        self._gone: asyncio.Task[float | None] | None = None

    async def begin(self, client: Client) -> None:
        """Send it, and watch the engines from now on."""
        answer = self._answer
        if answer is not None:
            owner = await self._scene.audit.owner(client.session_id, answer.id)
            if client.place is not None and client.place.id == owner:
                self._which = CANCEL_SAME
        self._sent_at = time.monotonic()
        await self.send(client)
        if answer is not None:
            self._gone = asyncio.create_task(self._scene.audit.until_gone(answer.id, IDLE_S))

    async def send(self, client: Client) -> None:
        """Harmless when done again: the first wish counts."""
        told = client.reader.answer_to(self._asked.item_id)
        seen = self._fields.get("seen")
        # Without ``seen``: what was sent to that connection, which is at least what arrived.
        cut = (seen, seen) if isinstance(seen, int) else (len(told.text) if told else 0, None)
        self._asked.stops.append(cut)
        await client.send("response.cancel", **self._fields)

    async def check(self, answer: Answer) -> None:
        """The answer that ended has left its engine, and how soon. Raises Violation."""
        if self._gone is None:
            return
        gone = await self._gone
        if gone is None:
            raise Violation("orphan", f"{answer.id} did not leave its engine within {IDLE_S:.0f} s of its cancel")
        if answer.status == "cancelled" and self._scene.shaken_at < self._sent_at:
            self._scene.tally.latencies[self._which].append(gone - self._sent_at)

    def close(self) -> None:
        if self._gone is not None:
            self._gone.cancel()
