"""Answers outside of the conversation: each belongs to the connection that asked, and ends with it.

Nothing of them is stored, so nothing waits for the store and nobody else hears of them.
"""

from __future__ import annotations

import asyncio
import logging

from msgspec import UNSET

from chat_server.core.items import Item
from chat_server.core.principal import Principal
from chat_server.core.response import Begun, Response
from chat_server.edge.outbox import Outbox
from chat_server.errors import ClientError
from chat_server.store.committer import Writer
from chat_server.store.replies import Cut
from chat_server.turn import Conductor, Turn

log = logging.getLogger(__name__)

#: that one connection may have at once.
_MOST = 4


class _Unstored:
    """Takes the text of a turn instead of the committer: it may be told at once."""

    def add(self, writer: Writer) -> None:
        if writer.response.take_commit() is not None:
            writer.response.stored_in_flight()
            writer.on_stored()

    def lose(self, writer: Writer) -> None:
        raise AssertionError("nobody else owns it")


class PrivateAnswers:
    """Those of one connection. ``close`` ends them."""

    def __init__(self, conductor: Conductor, outbox: Outbox) -> None:
        self._conductor = conductor
        self._outbox = outbox
        self._turns: dict[str, Turn] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, session_id: str, principal: Principal, begun: Begun, items: tuple[Item, ...]) -> None:
        """Answer the conversation's ``items``, or its own input if it has one. Raises ClientError for too many."""
        if len(self._turns) >= _MOST:
            message = f"{_MOST} responses outside of the conversation are in progress, which is the limit."
            raise ClientError("too_many_responses", message, retryable=True, retry_after_ms=1000)
        response = Response(begun, previous_item_id=None, private=True)
        writer = Writer(
            session_id=session_id,
            token="",
            response=response,
            on_stored=self._outbox.pump,
            on_wish=lambda: None,
            on_refused=lambda _: None,
            on_lost=lambda: None,
        )
        turn = Turn(
            session_id=session_id,
            principal=principal,
            response=response,
            writer=writer,
            prompt=items if begun.input is UNSET else tuple(begun.input),
            binding=None,  # it is found out: the engine that holds the conversation's prefix
            committer=_Unstored(),
        )
        self._turns[response.id] = turn
        self._outbox.begin(response)
        task = asyncio.create_task(self._run(turn), name=f"private turn {response.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, turn: Turn) -> None:
        try:
            await self._conductor.run_unstored(turn)
            self._outbox.end(turn.response)
        except Exception:
            log.exception("An answer outside of a conversation failed")
        finally:
            self._turns.pop(turn.response.id, None)

    def cancel(self, response_id: str, cut: Cut) -> bool:
        """Stop one; False if there is none of this id."""
        turn = self._turns.get(response_id)
        if turn is None:
            return False
        turn.stop(cut)
        return True

    async def close(self) -> None:
        """Stop them all; nobody is there to hear of them."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
