"""The sessions alive on this replica: who listens to them here, and what other replicas tell of them.

A session is here while it has a connection here or an answer of it is made here: a response outlives its socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any

from chat_server import comparing, joining
from chat_server.connections import Connection
from chat_server.core import close_codes
from chat_server.core.conversation import Conversation
from chat_server.core.ids import new_id
from chat_server.core.items import SessionSettings
from chat_server.core.principal import Principal
from chat_server.core.response import ResumePoint
from chat_server.errors import ClientError, StoreError, StoreUnavailable
from chat_server.lease import Lease
from chat_server.live import LiveSession
from chat_server.settings import Settings
from chat_server.store import messages
from chat_server.store.messages import AnyChange, Cancel, Change, Text, Wake
from chat_server.store.redis import Store
from chat_server.store.replies import Cut

log = logging.getLogger(__name__)

#: seconds between lease renewals, between heartbeats' ticks, and between looks at sessions that may miss something.
_TICK_S = 1.0
_RETRY_S = 0.1
#: seconds to wait for messages that the store has told but that have not arrived.
_JOIN_S = 3.0
_LOOK_S = 0.005
#: seconds after which a message that waits for another one is a reason to look at the store.
_HELD_S = 0.3
#: seconds without the store after which connections are closed: their clients try another replica.
_AWAY_S = 30.0
#: seconds in which the store gets back what it lost before anybody new is let in; what is left is done later.
_BACK_S = 2.0
#: seconds after others are heard again before anybody new is let in.
_SETTLE_S = 0.3
#: sessions on one server of the store that are looked after at a time: one may wait for its lock for seconds.
_AT_ONCE = 16
#: sessions that others ask us to look at; what is left out is found all the same, later.
_MOST_ASKED = 10_000


class Hub:
    """One replica's live sessions. ``run`` must be running: it listens, renews the lease and owns the tasks."""

    def __init__(self, settings: Settings, store: Store) -> None:
        # The embedded store has one replica at a time.
        self.lease = Lease(store.replicas, alone=settings.redis_url is None and settings.workers == 1)
        self._settings = settings
        self._store = store
        self._sessions: dict[str, LiveSession] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._listening = False
        self._was_ready = asyncio.Event()
        #: this replica ends, and has no time for what ends with it.
        self.leaving = False
        #: called when others are heard again, before anything is compared with the store.
        self.when_back: Callable[[], Awaitable[None]] | None = None
        #: sessions that another replica asked us to look at, and that there is something to look at.
        self.asked_for: set[str] = set()
        self.look_now = asyncio.Event()
        #: where others are heard now; None while they are not.
        self._inbox: AsyncIterator[bytes] | None = None
        self._sweep_now = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether the store answers and other replicas are heard: sessions can be served."""
        return self.lease.holds and self._listening

    @property
    def sessions(self) -> list[LiveSession]:
        """Those that are here now."""
        return list(self._sessions.values())

    async def wait_ready(self) -> None:
        """Until ``ready`` for the first time. The caller sets the deadline, if there is one."""
        await self._was_ready.wait()

    def _note_ready(self) -> None:
        if self.ready:
            self._was_ready.set()

    def find(self, session_id: str) -> LiveSession | None:
        """A session that is here now."""
        return self._sessions.get(session_id)

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

        It stays here until the caller has called ``close``.
        """
        return await self._open(session_id, principal)

    async def open_for_work(self, session_id: str) -> LiveSession:
        """A session of whoever it is, for an answer that has to go on. As ``open`` otherwise."""
        return await self._open(session_id, None)

    async def _open(self, session_id: str, principal: Principal | None) -> LiveSession:
        while True:
            live = self._sessions.setdefault(session_id, LiveSession(session_id))
            async with live.lock:
                if live.closed:  # between our look and the lock
                    continue
                try:
                    if not live.loaded:
                        await self.load(live)
                    if principal is not None and live.owner != principal:
                        raise joining.no_session(session_id)
                except BaseException:
                    await self._retire_if_idle(live)
                    raise
                live.guests += 1
                return live

    async def load(self, live: LiveSession) -> None:
        """Read a session, and listen to it from now on. Holds the session's lock. Raises ClientError 404."""
        with live.being_read():
            state = await self._store.watch(live.id)
            if state is None:
                if await self._may_come_back(live):
                    raise StoreUnavailable("The store lost this session; it is written again.")
                raise joining.no_session(live.id)
            live.watched = True
            if live.turn is not None:  # nobody told us what changed while nobody here listened
                if state.version < live.known:
                    raise StoreUnavailable("The store lost changes of this session; they are written again.")
                held = await self._store.last_items(live.id, 0)
                if held is None or held[0] < state.version:  # between the two it lost some
                    raise StoreUnavailable("The store lost changes of this session; they are written again.")
                live.conversation = Conversation(held[2])
            live.load(state)
            live.asked_at = time.monotonic()

    async def _may_come_back(self, live: LiveSession) -> bool:
        """Whether a session that is not in the store may be one that it lost, and that somebody writes again."""
        troubled = live.turn is not None or time.monotonic() - self.lease.trouble_at < comparing.RESTORE_S
        return troubled and not await self._store.was_deleted(live.id)

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
            await self._bring_up(live)
        restored_by = self.lease.trouble_at + comparing.RESTORE_S
        await joining.wait_for_claimed(live, held, least_s=restored_by - time.monotonic())
        async with live.lock:
            await self._bring_up(live)
            await joining.join(self._store, live, connection, resumed=resumed, history=history, held=held)

    async def _bring_up(self, live: LiveSession) -> None:
        """Know a session as the store does. Holds its lock."""
        if live.doubted:  # what it missed would look as if the client had more than there is
            await comparing.read_missed(self._store, live)
        if not live.loaded:  # it was dropped since it was opened
            await self.load(live)

    def leave(self, live: LiveSession, connection: Connection) -> None:
        """A connection is gone. Its answer goes on."""
        live.connections.discard(connection)
        connection.outbox.close()

    async def close(self, live: LiveSession) -> None:
        """The caller of ``open`` is done with it."""
        live.guests -= 1
        await self.close_if_idle(live)

    async def close_if_idle(self, live: LiveSession) -> None:
        """Stop listening to a session that nobody here has open; forget it if no answer of it is made here."""
        async with live.lock:
            await self._retire_if_idle(live)

    async def _retire_if_idle(self, live: LiveSession) -> None:
        if live.closed or live.guests:
            return
        # An answer that is made here goes on, but nobody here listens to the session: what is said of it is not heard,
        # and it is read again when somebody comes.
        live.closed = live.turn is None
        live.unload()
        try:
            if live.watched and not self.leaving:  # else we are soon no watcher of any
                live.watched = False
                await self._store.unwatch(live.id)
        except StoreError as error:
            log.info("A session was left while the store is away: %s", error)
        finally:
            # Only now: whoever comes back waits for the lock, so no `watch` can be overtaken by this `unwatch`.
            if live.closed and self._sessions.get(live.id) is live:
                del self._sessions[live.id]

    # --- messages of the store

    def apply(self, live: LiveSession, message: bytes) -> AnyChange | Text:
        """Apply what the store answered or another replica told."""
        decoded = messages.decode(message)
        assert not isinstance(decoded, Cancel | Wake), "it is no news of the session"
        live.take(decoded)
        return decoded

    async def apply_own(self, live: LiveSession, message: bytes) -> AnyChange | Text:
        """Apply what the store answered to our own write. Holds the session's lock.

        The answer may overtake messages of other replicas that come before it: it waits for them for a moment, then
        what they told is read.
        """
        change = self.apply(live, message)
        for _ in range(round(_HELD_S / _LOOK_S)):
            if not live.waits(change):
                return change
            await asyncio.sleep(_LOOK_S)
        with contextlib.suppress(StoreUnavailable):
            await comparing.read_missed(self._store, live)
        if live.loaded and isinstance(change, Change) and live.version < change.version:
            self._lost_one(live)
        return change

    def _lost_one(self, live: LiveSession) -> None:
        log.info("Session %s: a message is missing; its connections start again", live.id)
        live.drop()

    def _hear(self, raw: bytes) -> None:
        try:
            message = messages.decode(raw)
        except ValueError:
            log.error("Another replica told something that is no message of this version")
            return
        live = self._sessions.get(message.session)
        if isinstance(message, Wake):
            if len(self.asked_for) < _MOST_ASKED:
                self.asked_for.add(message.session)
                self.look_now.set()
        elif isinstance(message, Cancel):
            if live is not None:
                live.stop(message.response, Cut(message.cut))
        elif live is not None and (live.loaded or live.reading):
            try:
                live.take(message)
                if live.response is not None and not live.response_owner:
                    self.look_now.set()
            except Exception:
                log.exception("Session %s: a message could not be applied; its connections start again", live.id)
                live.drop()

    async def _listen(self) -> None:
        """Hear what other replicas tell, until cancelled."""
        heard_before = False
        while True:
            try:
                async with self._store.replicas.inbox() as inbox:
                    self._inbox = inbox
                    if heard_before:
                        self._look_back(inbox)
                    else:
                        self._listening = True
                        self._note_ready()
                    heard_before = True
                    async for raw in inbox:
                        self._hear(raw)
            except StoreError as error:
                self.lease.trouble()
                log.debug("The inbox broke: %s", error)
            except Exception:
                log.exception("The inbox failed; it is opened again")
            finally:
                self._listening, self._inbox = False, None
            await asyncio.sleep(_RETRY_S)

    def _look_back(self, inbox: AsyncIterator[bytes]) -> None:
        """Nothing is known of what others told for a while: all sessions are compared with the store."""
        for live in self.sessions:
            live.doubted = True
        self.spawn(self._come_back(inbox), name="coming back")

    async def _come_back(self, inbox: AsyncIterator[bytes]) -> None:
        """Serve again, when the store got back what it may have lost: from us, and from others, who come back too."""
        await asyncio.gather(self._tell_back(), asyncio.sleep(_SETTLE_S))
        if self._inbox is inbox:  # else it broke again
            self._listening = True
            self._note_ready()
            self._sweep_now.set()

    async def _tell_back(self) -> None:
        if self.when_back is None:
            return
        try:
            async with asyncio.timeout(_BACK_S):
                await self.when_back()
        except TimeoutError:
            log.info("It takes long to give the store back what it lost; it goes on")
        except StoreError as error:
            log.debug("%s", error)
        except Exception:
            log.exception("What was kept of answers could not be checked")

    async def _compare_doubted(self) -> None:
        async def compare(session_id: str) -> None:
            live = doubted[session_id]
            async with live.lock:
                await comparing.read_missed(self._store, live)

        doubted = {live.id: live for live in self.sessions if live.doubted}
        await self.each(doubted, compare)

    # --- messages that never came

    async def _sweep(self) -> None:
        """Find sessions that are not as we know them: messages may be lost, and the store may have lost writes."""
        now = time.monotonic()
        for live in self.sessions:
            if live.held and now - live.held_since > _JOIN_S:
                self._lost_one(live)
            elif live.held and now - live.held_since > _HELD_S:
                live.doubted = True  # what they wait for is in the store
        if not self.ready:
            if not self.lease.holds and now - self.lease.lost_at > _AWAY_S:
                for live in self.sessions:
                    live.connections.close(close_codes.OVERLOADED, "the store is away")
            return
        await self._compare_doubted()
        await comparing.ask(self._store, comparing.due(self.sessions, now))

    # --- what goes on by itself

    async def each(self, session_ids: Iterable[str], work: Callable[[str], Awaitable[None]]) -> None:
        """Do something for each session, some at a time: the trouble of one keeps it from no other.

        When a server of the store is away, the rest of its sessions are left, and only those. What is known of a
        session with a trouble of its own can not be used: its clients come back and get what is.
        """
        shards: defaultdict[str, deque[str]] = defaultdict(deque)
        for session_id in session_ids:
            shards[self._store.shard(session_id)].append(session_id)

        async def go_through(waiting: deque[str]) -> None:
            while waiting:
                session_id = waiting.popleft()
                try:
                    await work(session_id)
                except StoreUnavailable as error:
                    log.debug("%s", error)
                    waiting.clear()
                except Exception:
                    log.exception("Session %s: it could not be looked after", session_id)
                    live = self._sessions.get(session_id)
                    if live is not None:
                        live.drop()

        lanes = [waiting for waiting in shards.values() for _ in range(min(_AT_ONCE, len(waiting)))]
        await asyncio.gather(*(go_through(waiting) for waiting in lanes))

    async def run(self) -> None:
        """Lease, inbox, ticks, and the tasks given to ``spawn``, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self.every(_TICK_S, self._renew), name="lease")
                tasks.create_task(self.every(_TICK_S, self._tick), name="ticks")
                tasks.create_task(self.every(_TICK_S, self._sweep, sooner=self._sweep_now), name="sweep")
                tasks.create_task(self._listen(), name="inbox")
        finally:
            self._tasks = None

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        """Run something that belongs to no connection; what it raises ends nothing else."""

        async def run() -> None:
            try:
                await work
            except Exception:
                log.exception("%s failed", name)

        assert self._tasks is not None, "run() runs"
        # Closed: it may be cancelled before it began.
        self._tasks.create_task(run(), name=name).add_done_callback(lambda _: work.close())

    @staticmethod
    async def every(
        interval_s: float, action: Callable[[], Coroutine[Any, Any, None]], *, sooner: asyncio.Event | None = None
    ) -> None:
        """Do something again and again, until cancelled; a store that is away is waited for.

        ``sooner`` cuts a pause short.
        """
        pause = asyncio.Event() if sooner is None else sooner
        while True:
            try:
                await action()
            except StoreError as error:
                log.debug("%s", error)
            except Exception:
                log.exception("A periodic task failed; it goes on")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await pause.wait()
            pause.clear()

    async def _renew(self) -> None:
        await self.lease.renew(now_ms())
        self._note_ready()

    async def _tick(self) -> None:
        now, wall = time.monotonic(), now_ms()
        for live in self.sessions:
            live.tick(now, wall, store_away=live.away or not self.ready)

    def connections(self) -> list[Connection]:
        """All that are open here."""
        return [connection for live in self._sessions.values() for connection in live.connections]

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
