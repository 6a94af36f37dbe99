"""One replica's hub and answers without a server: what they ask of the store is answered by the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from chat_server.answers import Answers
from chat_server.core.items import SessionSettings
from chat_server.core.principal import LOCAL
from chat_server.errors import StoreError, StoreUnavailable
from chat_server.hub import Hub
from chat_server.live import LiveSession
from chat_server.restoring import Restorer
from chat_server.settings import Settings
from chat_server.store.committer import Writer
from chat_server.store.replies import Held, RunningState, SessionState
from tests.core.answers import begun
from tests.test_live import FakeConnection
from tests.turns import Script

AWAY = StoreUnavailable("away")


class PlayedReplicas:
    """What other replicas say, and say of themselves: they are all gone."""

    def __init__(self, store: PlayedStore) -> None:
        self._store = store
        #: sessions with a running answer that nobody confirms
        self.orphans: list[str] = []
        #: those that we confirmed
        self.confirmed: list[str] = []
        self.subscriptions = 0
        self._broken = asyncio.Event()

    async def confirm_running(self, session_ids: Sequence[str], now_ms: int) -> None:
        self.confirmed += session_ids

    async def unconfirmed(self, before_ms: float, most: int) -> list[str]:
        return self.orphans

    async def forget_running(self, session_id: str) -> None:
        self._store.asked.append(("forget", session_id))

    async def wake(self, session_id: str, now_ms: int) -> None:
        pass

    async def renew_lease(self, now_ms: int) -> None:
        if "lease" in self._store.troubles:
            raise self._store.troubles["lease"]

    async def is_alive(self, replica_id: str) -> bool:
        return False

    # the inbox

    @asynccontextmanager
    async def inbox(self) -> AsyncIterator[AsyncIterator[bytes]]:
        self.subscriptions += 1
        yield self._listen()

    async def _listen(self) -> AsyncIterator[bytes]:
        messages: list[bytes] = []
        for message in messages:
            yield message
        await self._broken.wait()
        self._broken.clear()
        raise AWAY

    def break_inbox(self) -> None:
        self._broken.set()


class PlayedStore:
    """A store of several servers: the first letter of a session's id names the one on which it lies.

    Each session has an answer that was begun by a replica which is gone.
    """

    replica_id = "replica_1"

    def __init__(self) -> None:
        #: what a question about a session comes to, if not to an answer; and the servers that do not even say that
        self.troubles: dict[str, Exception] = {}
        self.silent: set[str] = set()
        #: the sessions of each round trip that asked for many, and of each question of a kind
        self.rounds: list[list[str]] = []
        self.asked: list[tuple[str, str]] = []
        self.replicas = PlayedReplicas(self)

    def shard(self, session_id: str) -> str:
        return session_id[0]

    async def _answer(self, kind: str, session_id: str) -> None:
        self.asked.append((kind, session_id))
        while self.shard(session_id) in self.silent:
            await asyncio.sleep(0.001)
        if session_id in self.troubles:
            raise self.troubles[session_id]

    def asked_for(self, kind: str) -> set[str]:
        return {session_id for asked, session_id in self.asked if asked == kind}

    async def watch(self, session_id: str, *, changes: bool = False) -> SessionState:
        await self._answer("compare" if changes else "watch", session_id)
        running = RunningState(begun(), "item_1", "token_1", "replica_gone", "")
        return SessionState(LOCAL, 0, "m", SessionSettings(), 10, 1, running)

    async def unwatch(self, session_id: str) -> None:
        pass

    async def take_over(self, session_id: str, *_: str) -> None:
        await self._answer("take_over", session_id)

    async def hand_over(self, session_id: str, *_: str, known: int = -1) -> None:
        await self._answer("hand_over", session_id)

    async def restore(self, session_id: str, *_: Any) -> None:
        await self._answer("restore", session_id)

    async def renew_watch(self, session_ids: Sequence[str]) -> list[Held | None]:
        self.rounds.append(list(session_ids))
        return [None if session_id in self.troubles else Held(10, 0) for session_id in session_ids]

    async def held(self, session_ids: Sequence[str]) -> list[Held | None]:
        return [None if session_id in self.troubles else Held(10, 0) for session_id in session_ids]

    async def unwatched_ms(self, session_ids: Sequence[str]) -> list[int | None]:
        return [None if session_id in self.troubles else -1 for session_id in session_ids]


class PlayedCommitter:
    """Notes what it is asked for; of ``stuck`` sessions commits are under way for ever."""

    def __init__(self) -> None:
        self.stuck: set[str] = set()
        self.lost: list[Writer] = []
        self.stored_again: list[Writer] = []

    async def settle(self, writer: Writer) -> None:
        while writer.session_id in self.stuck:
            await asyncio.sleep(0.001)

    async def store_rest(self, writer: Writer) -> bool:
        return True

    async def store_whole(self, writer: Writer) -> None:
        self.stored_again.append(writer)

    def lose(self, writer: Writer) -> None:
        self.lost.append(writer)


def restorer_of(hub: Hub, store: PlayedStore, committer: PlayedCommitter) -> Restorer:
    parts = cast("Any", {"store": store, "committer": committer})
    return Restorer(hub=hub, **parts)


def answers_of(hub: Hub, store: PlayedStore, committer: PlayedCommitter, restorer: Restorer | None = None) -> Answers:
    """Answers that are never made: nothing conducts them."""
    parts = cast("Any", {"store": store, "committer": committer, "conductor": None})
    return Answers(hub=hub, restorer=restorer or restorer_of(hub, store, committer), **parts)


@asynccontextmanager
async def running_hub(store: PlayedStore) -> AsyncIterator[Hub]:
    """A hub at work; whatever happens meanwhile, it must still be so at the end."""
    hub = Hub(Settings(), cast("Any", store))
    task = asyncio.create_task(hub.run())
    try:
        async with asyncio.timeout(5):
            await hub.wait_ready()
        yield hub
        assert not task.done(), "it goes on, whatever happens"
    finally:
        task.cancel()
        await asyncio.wait({task})


async def connect(hub: Hub, session_id: str) -> tuple[LiveSession, FakeConnection]:
    """Somebody listens to a session here."""
    live = await hub.open(LOCAL, session_id)
    connection = FakeConnection()
    live.connections.add(connection)
    return live, connection


async def make_here(hub: Hub, session_id: str) -> LiveSession:
    """A session whose answer is made here."""
    live, _ = await connect(hub, session_id)
    turn = Script().turn()
    turn.writer.session_id = session_id
    monkey = cast("Any", turn)
    monkey.leave = lambda: True
    live.turn = turn
    return live


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something that comes soon."""
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.001)


#: Sessions on three servers.
ALL = ("a1", "a2", "b1", "c1", "c2")
#: What may be wrong with one session's data: keys that are not ours, and what a newer replica wrote.
BROKEN = [StoreError("The store refused a command: WRONGTYPE"), ValueError("no such kind"), KeyError("kind")]
