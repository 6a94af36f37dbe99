"""Looking after answers: those made here are confirmed, those that nobody makes go on, those that nobody reads end.

An answer that nobody makes is found in a session that somebody here reads; or in the index of all running answers, when
its owner has not confirmed it for a while.
"""

from __future__ import annotations

import logging
import time

from chat_server.answers import Answers
from chat_server.errors import ClientError, StoreUnavailable
from chat_server.hub import Hub, now_ms
from chat_server.live import LiveSession
from chat_server.restoring import Restorer
from chat_server.settings import Limits
from chat_server.store.redis import Store
from chat_server.store.replicas import LEASE_MS
from chat_server.store.replies import KEEP_ALL, Cut

log = logging.getLogger(__name__)

#: seconds between looks at answers whose owner may be gone: those that somebody here reads, and all.
_LOOK_S = 0.5
_LOOK_EVERYWHERE_S = 1.0
#: seconds between two signs of ours that we make an answer; milliseconds without one after which others look at it.
_CONFIRM_S = 1.0
_UNCONFIRMED_MS = LEASE_MS + 500
#: answers that are looked at in one go.
_MOST = 1000


class Supervisor:
    """One replica's care for answers, its own and those of replicas that are gone. ``run`` must be running."""

    def __init__(self, *, hub: Hub, store: Store, answers: Answers, restorer: Restorer, limits: Limits) -> None:
        self._hub = hub
        self._store = store
        self._answers = answers
        self._restorer = restorer
        self._limits = limits
        self._confirmed_at = 0.0
        self._looked_at = 0.0

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        await self._hub.every(_LOOK_S, self._look, sooner=self._hub.look_now)

    async def _look(self) -> None:
        now = time.monotonic()
        if not self._hub.ready:
            return
        alive: dict[str, bool] = {}

        async def mind(session_id: str) -> None:
            async with mirrored[session_id].lock:
                await self._go_on(mirrored[session_id], alive)

        async def visit(session_id: str) -> None:
            await self._visit(session_id, alive)

        loaded = [live for live in self._hub.sessions if live.loaded]
        mirrored = {live.id: live for live in loaded if live.response is not None and live.turn is None}
        await self._hub.each(mirrored, mind)
        asked_for = list(self._hub.asked_for)
        self._hub.asked_for.clear()  # one that can not be visited now is found below, later
        await self._hub.each(asked_for, visit)
        if now - self._confirmed_at > _CONFIRM_S:
            self._confirmed_at = now
            await self._store.replicas.confirm_running([live.id for live in self._hub.sessions if live.turn], now_ms())
            await self._restorer.check_kept()
            await self._abandon_unwatched()
        if now - self._looked_at > _LOOK_EVERYWHERE_S:
            # The first time all of them: their owners may be gone for longer than we are here.
            before = now_ms() - _UNCONFIRMED_MS if self._looked_at else now_ms()
            self._looked_at = now
            await self._hub.each(await self._store.replicas.unconfirmed(before, _MOST), visit)

    async def _visit(self, session_id: str, alive: dict[str, bool]) -> None:
        """Look at a session that perhaps nobody here listens to."""
        try:
            live = await self._hub.open_for_work(session_id)
        except StoreUnavailable:
            raise
        except Exception as error:  # it is gone, or broken
            if not isinstance(error, ClientError):
                log.warning("Session %s: it can not be read (%s)", session_id, type(error).__name__)
            await self._store.replicas.forget_running(session_id)
            return
        try:
            async with live.lock:
                await self._go_on(live, alive)
            if live.response is None or not live.loaded:
                await self._store.replicas.forget_running(session_id)
        finally:
            await self._hub.close(live)

    async def _go_on(self, live: LiveSession, alive: dict[str, bool]) -> None:
        """Go on with an answer that nobody makes any more. Holds the session's lock.

        ``alive``: what was found out about replicas in this round.
        """
        if live.response is None or live.turn is not None or live.closed or not live.loaded:
            return
        owner = live.response_owner
        if not owner:
            if not self._answers.left_lately(live.id):
                await self._answers.take_over(live, "replica_drained")
        elif owner == self._store.replica_id:
            # Without a turn: the store lost its end, or it was begun by a write that we gave up, or follows one that we
            # ended.
            if await self._restorer.write_again(live):
                live.drop()
            else:
                await self._answers.take_over(live, "replica_lost")
        else:
            if owner not in alive:
                alive[owner] = await self._hub.lease.lives(owner)
            if not alive[owner]:
                await self._answers.take_over(live, "replica_lost")

    async def _abandon_unwatched(self) -> None:
        """Stop the answers of sessions that nobody has been connected to for too long; what is stored stays."""
        alone = [live for live in self._hub.sessions if live.turn is not None and not live.connections]
        since = await self._store.unwatched_ms([live.id for live in alone])
        window_ms = self._limits.resume_window_s * 1000
        left_alone = {
            live.id: live.turn
            for live, unwatched in zip(alone, since, strict=True)
            if live.turn is not None and unwatched is not None and unwatched >= window_ms
        }

        async def abandon(session_id: str) -> None:
            turn = left_alone[session_id]
            wish = None if turn.stopped else await self._store.cancel(session_id, turn.response.id, KEEP_ALL.length)
            if isinstance(wish, Cut):
                log.info("Session %s: nobody came back for an answer; it is stopped", session_id)
                turn.stop(wish)

        await self._hub.each(left_alone, abandon)
