"""The sessions alive on this replica: who listens to them here, and what other replicas tell of them.

A session is here while it has a connection here or an answer of it is made here: a response outlives its socket.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from chat_server import joining
from chat_server.core import close_codes
from chat_server.core.ids import new_id
from chat_server.core.items import SessionSettings, StatusDetails
from chat_server.core.principal import Principal
from chat_server.core.response import Outcome, ResumePoint
from chat_server.errors import ClientError, StoreError
from chat_server.live import Connection, Gap, LiveSession
from chat_server.settings import Settings
from chat_server.store import messages
from chat_server.store.messages import AnyChange, Cancel, Text
from chat_server.store.redis import LEASE_MS, Store
from chat_server.store.replies import Cut

log = logging.getLogger(__name__)

#: seconds between lease renewals, between heartbeats' ticks, and between looks at answers whose owner may be gone.
_TICK_S = 1.0
_RETRY_S = 0.5
#: seconds to wait for messages that the store has told but that have not arrived.
_JOIN_S = 2.0
_LOOK_S = 0.005
#: seconds after trouble with the store in which no answer of another replica is ended: first the owners get to renew.
_GRACE_S = LEASE_MS / 1000
#: seconds after which an answer of the store is trouble: others may have waited longer.
_SLOW_S = 0.5


class Hub:
    """One replica's live sessions. ``run`` must be running: it listens, renews the lease and owns the tasks."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings = settings
        self._store = store
        self._sessions: dict[str, LiveSession] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._lease_holds = False
        self._listening = False
        self._trouble_at = float("-inf")
        self._was_ready = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether the store answers and other replicas are heard: sessions can be served."""
        return self._lease_holds and self._listening

    async def wait_ready(self) -> None:
        """Until ``ready`` for the first time. The caller sets the deadline, if there is one."""
        await self._was_ready.wait()

    def _note_ready(self) -> None:
        if self.ready:
            self._was_ready.set()

    # --- opening and closing

    async def check_room(self, principal: Principal) -> None:
        """Raises ClientError 429 if the principal has as many sessions as one may have."""
        count = await self._store.session_count(principal, now_ms())
        if count >= self._settings.limits.max_sessions_per_user:
            raise ClientError(
                "too_many_sessions",
                f"You have {count} conversations, which is the limit. Delete some.",
                type="rate_limit_error",
                status=429,
                retry_after_ms=60_000,
            )

    async def create(self, principal: Principal, model: str) -> LiveSession:
        """A new session. Raises ClientError 429 if the principal has too many."""
        await self.check_room(principal)
        session_id = new_id("sess")
        await self._store.create_session(session_id, principal, model, SessionSettings())
        return await self.open(principal, session_id)

    async def open(self, principal: Principal, session_id: str) -> LiveSession:
        """The principal's session. Raises ClientError 404 if there is none of this id, or it is someone else's.

        The caller must call ``close_if_idle`` with it at the end.
        """
        while True:
            live = self._sessions.setdefault(session_id, LiveSession(session_id))
            async with live.lock:
                if live.closed:  # between our look and the lock
                    continue
                try:
                    if not live.loaded:
                        await self._load(live)
                    if live.owner != principal:
                        raise joining.no_session(session_id)
                except BaseException:
                    await self._retire_if_idle(live)
                    raise
                return live

    async def _load(self, live: LiveSession) -> None:
        async with self._reading(live):
            state = await self._store.watch(live.id)
            if state is None:
                raise joining.no_session(live.id)
            live.load(state)
            live.watched = True
        await self._end_orphan(live)

    @asynccontextmanager
    async def _reading(self, live: LiveSession) -> AsyncIterator[None]:
        """While its state is read: what is told meanwhile is applied after it, for it may be newer."""
        live.held = []
        live.reading = True
        try:
            yield
        finally:
            live.reading = False
            held, live.held = live.held, []
        for message in held if live.loaded else ():
            self._take(live, message)

    async def join(
        self,
        live: LiveSession,
        connection: Connection,
        *,
        resumed: bool,
        history: int | None,
        held: ResumePoint | None = None,
    ) -> None:
        """Give a connection the state, and everything after it: see ``joining.join``."""
        async with live.lock:
            await joining.join(self._store, live, connection, resumed=resumed, history=history, held=held)

    async def leave(self, live: LiveSession, connection: Connection) -> None:
        """A connection is gone. Its answer goes on."""
        live.connections.discard(connection)
        connection.outbox.close()
        await self.close_if_idle(live)

    async def close_if_idle(self, live: LiveSession) -> None:
        """Stop listening to a session that has neither connections nor an answer here."""
        async with live.lock:
            await self._retire_if_idle(live)

    async def _retire_if_idle(self, live: LiveSession) -> None:
        if live.closed or live.connections or live.turn is not None:
            return
        live.closed = True
        try:
            if live.watched:
                await self._store.unwatch(live.id)
        except StoreError as error:
            log.info("A session was left while the store is away: %s", error)
        finally:
            # Only now: whoever comes back waits for the lock, so no `watch` can be overtaken by this `unwatch`.
            if self._sessions.get(live.id) is live:
                del self._sessions[live.id]

    def drop(self, live: LiveSession) -> None:
        """What we know of a session is not what is stored: its clients come back and get what is.

        An answer that is made here goes on; the session is read again when somebody joins.
        """
        live.close_connections(close_codes.RESTART, "reconnect to go on")
        live.unload()

    # --- messages of the store

    def apply(self, live: LiveSession, message: bytes) -> AnyChange | Text:
        """Apply what the store answered or another replica told; a session with a gap is dropped."""
        decoded = messages.decode(message)
        assert not isinstance(decoded, Cancel), "it is no news of the session"
        self._take(live, decoded)
        return decoded

    def _take(self, live: LiveSession, message: AnyChange | Text) -> None:
        held = bool(live.held)
        try:
            live.take(message)
        except Gap:
            self._lost_one(live)
        if live.held and not held:
            live.held_since = time.monotonic()

    async def apply_own(self, live: LiveSession, message: bytes) -> None:
        """Apply what the store answered to our own write. Holds the session's lock.

        The answer may overtake messages of other replicas that come before it: it waits for them, for a while.
        """
        change = self.apply(live, message)
        for _ in range(round(_JOIN_S / _LOOK_S)):
            if not any(held is change for held in live.held):
                return
            await asyncio.sleep(_LOOK_S)
        self._lost_one(live)

    def _lost_one(self, live: LiveSession) -> None:
        log.info("Session %s: a message is missing; its connections start again", live.id)
        self.drop(live)

    def doubt(self, live: LiveSession) -> None:
        """A write was not answered: it may have been done all the same. The session is compared with the store."""
        live.doubted = True

    def _hear(self, raw: bytes) -> None:
        try:
            message = messages.decode(raw)
        except ValueError:
            log.error("Another replica told something that is no message of this version")
            return
        live = self._sessions.get(message.session)
        if isinstance(message, Cancel):
            if live is not None:
                live.stop(message.response, Cut(message.cut))
        elif live is not None and (live.loaded or live.reading):
            try:
                self._take(live, message)
            except Exception:
                log.exception("Session %s: a message could not be applied; its connections start again", live.id)
                self.drop(live)

    async def _listen(self) -> None:
        """Hear what other replicas tell, until cancelled."""
        heard_before = False
        while True:
            try:
                async with self._store.inbox() as inbox:
                    if heard_before:  # nothing is known of what was said meanwhile
                        for live in list(self._sessions.values()):
                            await self._compare(live)
                    heard_before = self._listening = True
                    self._note_ready()
                    async for raw in inbox:
                        self._hear(raw)
            except StoreError as error:
                self._trouble_at = time.monotonic()
                log.debug("The inbox broke: %s", error)
            finally:
                self._listening = False
            await asyncio.sleep(_RETRY_S)

    async def _compare(self, live: LiveSession) -> None:
        """Watch a session again; drop it if it is not as we know it."""
        async with live.lock:
            if live.closed or not live.loaded:
                return
            async with self._reading(live):
                state = await self._store.watch(live.id)
                if state is None or not live.catch_up(state):
                    self.drop(live)

    # --- answers that nobody makes any more

    async def _end_orphan(self, live: LiveSession) -> None:
        """End an answer whose replica is gone, with the text that is stored of it. Holds the session's lock."""
        response = live.response
        if response is None or live.turn is not None:
            return
        ours = live.response_owner == self._store.replica_id  # without a turn: begun by a write that we gave up
        if not ours and await self._lives(live.response_owner):
            return
        token = new_id("token")
        live.doubted = True  # until it is done: each step may stay without an answer
        taken = await self._store.take_over(live.id, live.response_token, token)
        if taken is None:
            return
        length, epochs = len(taken.text), list(response.epochs)
        details = StatusDetails(type="incomplete")
        if taken.wish is not None:
            details = StatusDetails(type="cancelled", reason="client_cancelled")
            if taken.wish.length < length:
                length = taken.wish.length
                epochs.append((new_id("epoch"), length))
        outcome = Outcome(
            status="incomplete" if taken.wish is None else "cancelled",
            details=details,
            text_length=length,
            epochs=epochs,
            keeps_item=length > 0,
        )
        reply = await self._store.end(
            live.id,
            response.id,
            token,
            response.make_item("incomplete", taken.text[:length], outcome),
            rest_offset=response.length,
            rest=taken.text[response.length :],
            outcome=outcome,
            cut=taken.wish.length if taken.wish else None,
        )
        if isinstance(reply, bytes):
            log.warning("Session %s: nobody makes an answer any more; it ends as it stands", live.id)
            await self.apply_own(live, reply)
            live.doubted = False

    async def _lives(self, replica_id: str) -> bool:
        """Whether another replica may live: its lease holds, or the store's trouble may have kept it from renewing."""
        began = time.monotonic()
        alive = await self._store.is_alive(replica_id)
        now = time.monotonic()
        if now - began > _SLOW_S:
            self._trouble_at = now
        return alive or now - self._trouble_at < _GRACE_S

    async def _sweep(self) -> None:
        for live in list(self._sessions.values()):
            if live.held and time.monotonic() - live.held_since > _JOIN_S:
                self._lost_one(live)
            if live.doubted and self.ready:
                live.doubted = False
                try:
                    await self._compare(live)
                except StoreError:
                    live.doubted = True
                    raise
            if live.response is not None and live.turn is None:
                async with live.lock:
                    if not live.closed and live.loaded:
                        await self._end_orphan(live)

    # --- what goes on by itself

    async def run(self) -> None:
        """Lease, inbox, ticks, orphans, and the tasks given to ``spawn``, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._every(_TICK_S, self._renew), name="lease")
                tasks.create_task(self._every(_TICK_S, self._tick), name="ticks")
                tasks.create_task(self._every(_TICK_S, self._sweep), name="orphans")
                tasks.create_task(self._listen(), name="inbox")
        finally:
            self._tasks = None

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        """Run something that belongs to no connection; it must not raise."""
        assert self._tasks is not None, "run() runs"
        self._tasks.create_task(work, name=name)

    async def _every(self, interval_s: float, action: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await action()
            except StoreError as error:
                log.debug("%s", error)
            except Exception:
                log.exception("A periodic task failed; it goes on")
            await asyncio.sleep(interval_s)

    async def _renew(self) -> None:
        held = self._lease_holds
        began = time.monotonic()
        try:
            await self._store.renew_lease(now_ms())
            if time.monotonic() - began > _SLOW_S:
                self._trouble_at = time.monotonic()
            self._lease_holds = True
            self._note_ready()
        except StoreError as error:
            self._lease_holds = False
            self._trouble_at = time.monotonic()
            if held:
                log.warning("The store is away: %s", error)
            raise
        if not held:
            log.info("The store is up")

    async def _tick(self) -> None:
        now, wall = time.monotonic(), now_ms()
        for live in list(self._sessions.values()):
            response = live.response
            state = response.heartbeat_state if response else "idle"
            for connection in list(live.connections):
                connection.outbox.tick(now, wall, state, response.id if response else None)

    def statistics(self) -> dict[str, int]:
        """How much lives here."""
        lives = self._sessions.values()
        return {
            "sessions": len(lives),
            "connections": sum(len(live.connections) for live in lives),
            "responses": sum(live.turn is not None for live in lives),
        }


def now_ms() -> int:
    """Wall clock, for stored times and for people; durations come from the monotonic clock."""
    return time.time_ns() // 1_000_000
