"""One wish to stop an answer: sent, sent again after a cut, and watched until the engine is idle."""

from __future__ import annotations

import asyncio
import time

from loadtest.chaos_client import Client, Scene
from loadtest.chaos_line import Line
from loadtest.chaos_model import Answer, Asked
from loadtest.chaos_report import AFTER_DONE, CANCEL_ACROSS, CANCEL_SAME
from loadtest.chaos_texts import Violation

#: seconds in which a cancelled answer must leave its engine.
IDLE_S = 15.0
#: seconds after its stop was sent in which an answer may still come to its own end: it was on its way.
IGNORED_S = 1.0
#: seconds from the told end of a stopped answer to the engine without it. The stream is closed before that is told; the
#: rest is what the engine needs to notice, and we to look.
CLOSED_S = 0.25


class Stopping:
    """``begin`` once, ``send`` again on a new connection; ``judge_end`` and ``check`` when the answer has ended."""

    def __init__(
        self, scene: Scene, asked: Asked, answer: Answer | None, seen: float | None, *, certain: bool = True
    ) -> None:
        """``seen``: the part of what is held now that the person has seen; None: left to the server. ``certain``: the
        server can not miss it, for it was told of the answer, or asked for it on the same connection just now."""
        self._scene = scene
        self._asked = asked
        self._answer = answer
        self._fields: dict[str, object] = {}
        if answer is not None:
            self._fields["response_id"] = answer.id
        if seen is not None:
            self._fields["seen"] = round(seen * len(answer.text)) if answer is not None else 0
        self._certain = certain
        self._begun_at, self._which = 0.0, CANCEL_ACROSS
        #: the last time that it was sent: when, by whom and on which connection
        self._sent: tuple[float, Client, Line | None] | None = None
        self._gone: asyncio.Task[float | None] | None = None

    async def begin(self, client: Client) -> None:
        """Send it, and watch the engines from now on."""
        answer = self._answer
        if answer is not None:
            owner = await self._scene.audit.owner(client.session_id, answer.id)
            if client.place is not None and client.place.id == owner:
                self._which = CANCEL_SAME
        self._begun_at = time.monotonic()
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
        self._sent = time.monotonic(), client, client.line
        await client.send("response.cancel", **self._fields)

    def judge_end(self, answer: Answer) -> None:
        """Unless something befell the stop or the answer, it did not go on for long. Raises Violation."""
        if answer.status != "completed" or self._sent is None or not self._certain:
            return
        sent_at, client, line = self._sent
        broken = line is None or client.line is not line
        befell = self._scene.shaken_at >= sent_at or self._asked.kills or self._asked.loss
        another = self._answer is not None and self._answer.id != answer.id
        after = self._scene.audit.ended.get(answer.id, sent_at) - sent_at
        if not (broken or befell or another) and after > IGNORED_S:
            raise Violation("end", f"the stop of {answer.id} was ignored: {after:.1f} s later it ended completed")

    async def check(self, answer: Answer) -> None:
        """The answer that ended has left its engine: before its end was told, if it was stopped. Raises Violation."""
        if self._gone is None:
            return
        gone = await self._gone
        if gone is None:
            raise Violation("orphan", f"{answer.id} did not leave its engine within {IDLE_S:.0f} s of its cancel")
        if answer.status != "cancelled" or self._scene.shaken_at >= self._begun_at:
            return
        latencies, after = self._scene.tally.latencies, max(gone - self._scene.audit.ended[answer.id], 0.0)
        latencies[self._which].append(gone - self._begun_at)
        latencies[AFTER_DONE].append(after)
        if after > CLOSED_S:
            raise Violation("orphan", f"{answer.id} was on its engine for {after:.2f} s after its end was told")

    def close(self) -> None:
        if self._gone is not None:
            self._gone.cancel()
