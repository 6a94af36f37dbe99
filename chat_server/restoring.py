"""Writing again what the store lost: each replica gives back the sessions of the answers that it makes, or just ended.

A store that fails over may come back without its last moments; what was told is then known by a replica, and by no
server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from chat_server.core.items import to_wire
from chat_server.core.response import Response, cancelled_in_queue
from chat_server.errors import StoreUnavailable
from chat_server.hub import Hub, now_ms
from chat_server.live import LiveSession
from chat_server.store.committer import Committer
from chat_server.store.messages import end_body
from chat_server.store.redis import Store
from chat_server.store.replies import KEEP_ALL, Held, Snapshot
from chat_server.turn import Turn

log = logging.getLogger(__name__)

#: seconds for which an end is kept to be written again.
_KEEP_ENDED_S = 5.0
#: seconds for which a store that is away is waited for, and between two tries.
_PATIENCE_S = 600.0
_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class _Ended:
    """A session whose answer ended a moment ago (monotonic), and as it was then."""

    at: float
    snapshot: Snapshot


class Restorer:
    """Knows what this replica may have to write again."""

    def __init__(self, *, hub: Hub, store: Store, committer: Committer) -> None:
        self._hub = hub
        self._store = store
        self._committer = committer
        #: by session.
        self._ended: dict[str, _Ended] = {}
        hub.when_back = self.check_kept

    def refused(self, live: LiveSession, turn: Turn, reply: str) -> None:
        """The store does not take an answer from us: find out why, and give it back what it lost."""
        log.info("Session %s: the store says %r to our answer", live.id, reply)
        self._hub.spawn(self._give_back(live, turn), name=f"restore {live.id}")

    async def _give_back(self, live: LiveSession, turn: Turn) -> None:
        """Find out whether an answer is somebody else's now, or the store lost it: then it gets it back."""
        deadline = time.monotonic() + _PATIENCE_S
        while not turn.writer.lost and time.monotonic() < deadline:
            try:
                async with live.lock:
                    if await self.restore(live, turn):
                        self._committer.resume(turn.writer)
                        return
                    break
            except StoreUnavailable:
                await asyncio.sleep(_RETRY_S)
            except Exception:
                log.exception("Session %s: it could not be written again", live.id)
                break
        self._committer.lose(turn.writer)

    async def restore(self, live: LiveSession, turn: Turn) -> bool:
        """Write the session again, if the store holds an older one. Holds the session's lock.

        False if the answer is not ours any more.
        """
        if live.turn is not turn:
            return False
        return await self._restore_as(live.id, _snapshot(live, turn)) or await self._store.holds(
            live.id, turn.writer.token
        )

    async def _restore_as(self, session_id: str, snapshot: Snapshot) -> bool:
        if snapshot.response:
            # First: the store may have lost too that somebody looks after the answer, and perhaps nobody makes it yet.
            await self._store.replicas.confirm_running([session_id], now_ms())
        restored = await self._store.restore(session_id, snapshot)
        if restored:
            log.warning("Session %s: the store had lost changes; it is written again", session_id)
            live = self._hub.find(session_id)
            if live is not None:
                live.doubted = True  # that we listen to it may be lost too
        return restored

    async def know(self, live: LiveSession) -> int:
        """The version of the session that we know all of: what changed while nobody here listened is read."""
        if not live.loaded:
            [held] = await self._store.held([live.id])
            if held is not None and held.version > live.known:
                await self._hub.load(live)
        return live.known

    async def write_again(self, live: LiveSession) -> bool:
        """Write a session again that the store holds an older copy of, if we can. Holds the session's lock."""
        if live.turn is not None:
            return await self.restore(live, live.turn)
        if live.id in self._ended:
            return await self._restore_as(live.id, self._ended[live.id].snapshot)
        return False

    def keep_end(self, live: LiveSession) -> None:
        """An answer ended here just now; the session's lock is held, and all of its items are known."""
        self._ended[live.id] = _Ended(time.monotonic(), _snapshot(live, None))

    async def check_kept(self) -> None:
        """Whether the store still holds our answers, and those that ended a moment ago.

        An end is kept until it was found in the store when it was old enough: a store that is away may come back
        without it.
        """
        makes = {live.id: (live, live.turn) for live in self._hub.sessions if live.turn is not None}
        ended = dict(self._ended)
        known = {session_id: Held(kept.snapshot.version, 0) for session_id, kept in ended.items()}
        known |= {live.id: Held(live.known, turn.response.byte_length) for live, turn in makes.values()}
        held = {
            session_id: holds
            for session_id, holds in zip(known, await self._store.held(list(known)), strict=True)
            if holds is not None
        }

        async def check(session_id: str) -> None:
            knew, holds = known[session_id], held[session_id]
            if session_id in makes:
                await self._check_made(*makes[session_id], knew, holds)
            else:
                await self._check_ended(session_id, ended[session_id], holds)

        await self._hub.each(held, check)

    async def _check_made(self, live: LiveSession, turn: Turn, knew: Held, holds: Held) -> None:
        if holds.wish is not None:
            live.stop(*holds.wish)  # the message that says so may be lost
        if holds.version < knew.version:
            async with live.lock:
                if live.turn is turn and not await self.restore(live, turn):
                    self._committer.lose(turn.writer)
        elif holds.size < knew.size:
            await self._committer.store_whole(turn.writer)

    async def _check_ended(self, session_id: str, kept: _Ended, holds: Held) -> None:
        if holds.version < kept.snapshot.version:
            await self._restore_as(session_id, kept.snapshot)
        elif time.monotonic() - kept.at > _KEEP_ENDED_S and self._ended.get(session_id) is kept:
            del self._ended[session_id]


def _snapshot(live: LiveSession, turn: Turn | None) -> Snapshot:
    """The session as this replica knows it, with the answer that is made here."""
    fields: dict[str, str | bytes] = {}
    text = ""
    response = turn.response if turn is not None else live.response
    if response is not None:
        token = turn.writer.token if turn is not None else live.response_token
        fields = _fields(response, token) | {"replica": live.response_owner}
        later = response.epochs[len(response.begun.epochs) :]
        if later:
            fields["later"] = to_wire(later)[1:-1]
        if turn is not None and turn.stopped:
            fields["cancel"] = str((turn.cut or KEEP_ALL).length)
        # With what is under way: it may be told by an answer of the store that comes only after this.
        text = response.text_under_way()
    queued = live.queued
    if queued is not None:
        item, outcome = cancelled_in_queue(queued)
        waits = _fields(queued, live.queued_token) | {
            "ended_item": to_wire(item),
            "end": end_body(queued.id, 0, "", outcome),
        }
        fields |= {f"q_{name}": value for name, value in waits.items()}
    made = {one.item_id for one in (response, queued) if one is not None}
    items = live.conversation.items if live.conversation is not None else ()
    return Snapshot(
        version=live.known,
        owner=live.owner,
        model=live.model,
        settings=live.settings,
        created_ms=live.created_ms,
        items=tuple(item for item in items if item.status != "in_progress" or item.id in made),
        response=fields,
        text=text,
    )


def _fields(response: Response, token: str) -> dict[str, str | bytes]:
    """What the response hash holds of a response (``store/lua/_queue.lua``)."""
    begun = response.begun
    return {
        "id": response.id,
        "item_id": response.item_id,
        "in_reply_to": begun.in_reply_to if isinstance(begun.in_reply_to, str) else "",
        "token": token,
        "begun": to_wire(begun),
        "message": "",
    }
