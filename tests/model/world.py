"""A world of replicas, engines, clients and one store, in which a seed decides all that happens."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any
from unittest import mock

from chat_server.answers import Answers
from chat_server.commands import Commands
from chat_server.core import close_codes
from chat_server.edge.auth import Keys
from chat_server.edge.gate import Gate
from chat_server.edge.realtime import Realtime
from chat_server.engine.fleet import Fleet
from chat_server.errors import StoreError
from chat_server.hub import Hub
from chat_server.settings import EngineAddress, Limits, Secret, Settings
from chat_server.store.committer import Committer
from chat_server.store.redis import Store
from chat_server.turn import Conductor
from tests.model.client import Answer, Client
from tests.model.engines import URLS, EngineClient, Engines
from tests.model.network import Link, ModelServer, Network, Valkey, Weather
from tests.model.oracle import Broken, Oracle
from tests.model.scheduler import Clock, Loop, step

#: seconds of faults, and in which all must have come to rest after them.
_STORM_S = 15.0
_REST_S = 90.0
#: steps of the driver in one world: more means that something turns in a circle.
_MAX_STEPS = 200_000
_SETTINGS = Settings(redis_url=Secret("redis://model"), limits=Limits(max_queue_s=20.0, resume_window_s=60.0))


@contextmanager
def _heard(hear: Callable[[logging.LogRecord], None]) -> Iterator[None]:
    """Hear what the server logs."""
    logger = logging.getLogger("chat_server")
    handler = logging.Handler(logging.INFO)
    handler.emit = hear  # type: ignore[method-assign, assignment]
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


class _Store(Store):
    """The real one, on the model's server."""

    def __init__(self, server: ModelServer, replica_id: str) -> None:
        super().__init__(
            "unix:///nowhere", replica_id, ttl_s=10**6, empty_ttl_s=10**6, max_items=10_000, max_session_bytes=1 << 30
        )
        self._server = server


class Replica:
    """One server process: all of it that is above the sockets and below the store's connections is the real one."""

    def __init__(self, world: World, number: int) -> None:
        self.id = f"replica_{number}"
        self.world = world
        self.draining = False
        self.loop = Loop(world.clock, self._on_error)
        self.link = Link(self.id, self.loop)
        world.network.links[self.id] = self.link
        client = EngineClient(world.engines, self.id)
        self.store = _Store(ModelServer(world.network, self.link), self.id)
        self.fleet = Fleet([EngineAddress(url) for url in URLS], client)
        self.hub = Hub(_SETTINGS, self.store)
        self.committer = Committer(self.store)
        conductor = Conductor(
            store=self.store, committer=self.committer, fleet=self.fleet, client=client, limits=_SETTINGS.limits
        )
        self.answers = Answers(
            hub=self.hub, store=self.store, committer=self.committer, conductor=conductor, limits=_SETTINGS.limits
        )
        commands = Commands(hub=self.hub, store=self.store, answers=self.answers, limits=_SETTINGS.limits)
        gate = Gate(_SETTINGS, Keys(()), self.fleet, self.hub)
        self.realtime = Realtime(_SETTINGS, gate, self.hub, commands, conductor)
        self.connections: set[asyncio.Task[None]] = set()
        self._main = self.loop.create_task(self._run(), name=self.id)

    @property
    def dead(self) -> bool:
        return self.link.dead

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for work in (self.fleet.run(), self.committer.run(), self.hub.run(), self.answers.run()):
                tasks.create_task(work)

    def serve(self, connection: Coroutine[Any, Any, None], name: str) -> None:
        """Let a connection run here."""
        task = self.loop.create_task(connection, name=name)
        self.connections.add(task)
        task.add_done_callback(self.connections.discard)

    def _on_error(self, context: dict[str, Any]) -> None:
        if not self.dead:
            self.world.fail(f"{self.id}: {context.get('message')}: {context.get('exception')!r}")

    def kill(self) -> None:
        """As ``kill -9``: nothing of it runs any more, its sockets break."""
        self.link.dead = True
        self.loop.stopped = True
        self.world.engines.hang_up(self.id)
        self._hang_up()

    def _hang_up(self) -> None:
        for client in self.world.clients:
            socket = client.socket
            if socket is not None and socket._replica is self:
                self.world.clock.after(client.delay(), partial(client.closed, socket, 1006))

    def drain(self) -> None:
        """As SIGTERM: answers are handed over, then it is gone in order."""
        self.draining = True
        self.loop.create_task(self._drain(), name=f"drain of {self.id}")

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(5.0):
                await self.answers.hand_over()
        except TimeoutError:
            pass
        for live in self.hub.sessions:
            live.close_connections(close_codes.RESTART, "this replica goes away")
        if self.connections:
            await asyncio.wait(self.connections, timeout=5.0)
        for connection in self.connections:
            connection.cancel()
        self._main.cancel()
        await asyncio.wait([self._main])
        with suppress(StoreError):
            await self.store.drop_lease()
        self.world.trace(f"{self.id} is gone in order")
        self.world.kill(self)


class World:
    """One run. ``run`` raises Broken when something does not hold; ``lines`` tell what happened until then."""

    def __init__(self, seed: int, valkey: Valkey) -> None:
        self.random = random.Random(seed)
        self.clock = Clock()
        self.lines: list[str] = []
        #: what was found where an exception would be caught
        self.broken: list[str] = []
        self._ids = 0
        self._replicas = 0
        valkey.clear()
        self.valkey = valkey
        self.engines = Engines(random.Random(seed + 1), self.fail)
        self.oracle = Oracle(valkey.wire, self.engines)
        self.network = Network(valkey, self.clock, self.random, self.trace, self.oracle.on_done)
        self.clients: list[Client] = []
        self.replicas: list[Replica] = []
        self.graves: list[Replica] = []

    @property
    def weather(self) -> Weather:
        return self.network.weather

    def fail(self, why: str) -> None:
        """Something does not hold; said where the server's own care for exceptions does not hide it."""
        self.trace(f"!!! {why}")
        self.broken.append(why)

    def trace(self, line: str) -> None:
        self.lines.append(f"{len(self.lines):5} {self.clock.now - 1000:8.4f}  {line}")

    # --- the run

    def run(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(time, "monotonic", self.clock.monotonic))
            stack.enter_context(mock.patch.object(time, "time_ns", self.clock.time_ns))
            stack.enter_context(mock.patch.object(secrets, "token_hex", self._token))
            stack.enter_context(_heard(self._on_log))
            random.seed(self.random.random())
            stack.callback(self._clear)
            self._set_up()
            self._steps_until(lambda: self.clock.now > 1000 + _STORM_S, "the storm ends")
            self._calm()
            self._steps_until(self._at_rest, "all comes to rest", self._unrest)
            self._check_rest()
            for client in self.clients:
                client.leave(for_good=True)
            self._steps_until(lambda: not any(r.hub.sessions for r in self.replicas), "sessions are left", self._unrest)

    def _on_log(self, record: logging.LogRecord) -> None:
        self.trace(f"log: {record.getMessage()}")
        if record.exc_info:
            self.fail(f"{record.getMessage()}: {record.exc_info[1]!r}")

    def _token(self, size: int = 16) -> str:
        self._ids += 1
        return f"{self._ids:x}"

    def _steps_until(self, done: Callable[[], bool], what: str, why: Callable[[], str] = lambda: "") -> None:
        deadline = self.clock.now + max(_REST_S, _STORM_S + 1)
        for number in range(_MAX_STEPS):
            if number % 16 == 0 and done():
                return
            if self.clock.now > deadline:
                raise Broken(f"stuck before {what}: {why()}")
            step(self.clock, [replica.loop for replica in self.replicas], self.random)
            if self.broken:
                raise Broken(self.broken[0])
        raise Broken(f"in a circle before {what}: {why()}")

    def _clear(self) -> None:
        for replica in [*self.replicas, *self.graves]:
            replica.link.dead = True
            replica.loop.clear()

    # --- its beginning

    def _set_up(self) -> None:
        draw = self.random

        def share(most: float) -> float:
            return draw.choice((0.0, 0.0, most * draw.random()))

        self.network.weather = Weather(
            slow=share(0.2),
            lost_request=share(0.05),
            lost_reply=share(0.05),
            stray=share(0.03),
            lost_message=share(0.1),
            slow_message=share(0.2),
            reordered=draw.random() < 0.3,
        )
        self.engines.breaks = share(0.05)
        self.engines.pace_s = draw.choice((0.02, 0.05, 0.2))
        for _ in range(draw.choice((1, 2, 2, 3))):
            self.start_replica()
        first = Client(self, "ann", random.Random(draw.random()))
        self.clients.append(first)
        self.clock.after(0.5, first.connect)
        for name in ("bob", "cyd")[: draw.choice((0, 1, 1, 2))]:
            self.clock.after(0.5, partial(self._join, name))
        for action, every in (
            (self._someone_says, draw.choice((0.5, 1.5, 3.0))),
            (self._someone_stops, draw.choice((1.0, 4.0, 1000.0))),
            (self._someone_meddles, draw.choice((2.0, 1000.0))),
            (self._someone_leaves, draw.choice((1.0, 5.0, 1000.0))),
        ):
            self._now_and_then(action, every)
        for fault in (
            self._kill,
            self._pause,
            self._drain,
            self._cut_off,
            self._store_away,
            self._break_inbox,
            self._engine_dies,
        ):
            self._now_and_then(fault, draw.choice((2.0, 6.0, 1000.0, 1000.0)))
        if draw.random() < 0.2:
            self._now_and_then(self._copy_store, 5.0)

    def start_replica(self) -> None:
        self._replicas += 1
        replica = Replica(self, self._replicas)
        self.replicas.append(replica)
        self.trace(f"{replica.id} starts")

    def _join(self, name: str) -> None:
        """The others come into the first one's session."""
        [first, *_] = self.clients
        if self.clock.now > 1000 + _STORM_S:
            return
        if first.session_id is None:
            self.clock.after(0.5, lambda: self._join(name))
            return
        seed = self.random.random()
        client = Client(self, name, random.Random(seed), first.session_id, extensions=self.random.random() < 0.8)
        self.clients.append(client)
        client.connect()

    def _now_and_then(self, action: Callable[[], None], every_s: float) -> None:
        def again() -> None:
            if self.clock.now < 1000 + _STORM_S:
                action()
                self.clock.after(self.random.expovariate(1 / every_s), again)

        self.clock.after(self.random.expovariate(1 / every_s), again)

    # --- what people do

    def _someone(self) -> Client:
        return self.random.choice(self.clients)

    def _someone_says(self) -> None:
        client = self._someone()
        if client.session_id is not None and client.said < 5:
            client.say()

    def _someone_stops(self) -> None:
        self._someone().stop()

    def _someone_meddles(self) -> None:
        self._someone().meddle()

    def _someone_leaves(self) -> None:
        client = self._someone()
        if client.session_id is not None:
            client.leave(for_good=False)

    # --- faults

    def some_replica(self, draw: random.Random) -> Replica | None:
        """One that a balancer would choose."""
        there = [replica for replica in self.replicas if not replica.draining]
        return draw.choice(there) if there else None

    def _kill(self) -> None:
        replica = self.random.choice(self.replicas) if self.replicas else None
        if replica is None:
            return
        self.trace(f"{replica.id} is killed")
        self.kill(replica)

    def kill(self, replica: Replica) -> None:
        """It is gone, and another one comes in its place."""
        replica.kill()
        self.replicas.remove(replica)
        self.graves.append(replica)
        self.clock.after(0.1 + self.random.random() * 6, self.start_replica)

    def _pause(self) -> None:
        replica = self.random.choice(self.replicas) if self.replicas else None
        if replica is None or replica.loop.stopped:
            return
        self.trace(f"{replica.id} is stopped")
        replica.loop.stopped = True

        def go_on() -> None:
            if not replica.dead:
                self.trace(f"{replica.id} goes on")
                replica.loop.stopped = False

        self.clock.after(self.random.random() * self.random.choice((0.2, 3.0, 9.0)), go_on)

    def _drain(self) -> None:
        replica = self.some_replica(self.random)
        if replica is not None:
            self.trace(f"{replica.id} is told to stop")
            replica.drain()

    def _cut_off(self) -> None:
        self._cut(self.random.sample(self.replicas, min(1, len(self.replicas))))

    def _store_away(self) -> None:
        self._cut(list(self.replicas))

    def _cut(self, replicas: list[Replica]) -> None:
        seconds = self.random.random() * self.random.choice((0.5, 3.0, 12.0))
        for replica in replicas:
            if not replica.link.up:
                continue
            self.trace(f"{replica.id} is cut off from the store")
            replica.link.up = False
            self.network.break_subscription(replica.link)
            self.clock.after(seconds, partial(self._reconnect, replica))

    def _reconnect(self, replica: Replica) -> None:
        if not replica.dead:
            self.trace(f"{replica.id} reaches the store again")
            replica.link.up = True

    def _break_inbox(self) -> None:
        if self.replicas:
            self.network.break_subscription(self.random.choice(self.replicas).link)

    def _engine_dies(self) -> None:
        url = self.random.choice(URLS)
        self.trace(f"{url} dies")
        self.engines.stop(url)
        self.clock.after(self.random.random() * 5, lambda: self.engines.start(url))

    def _copy_store(self) -> None:
        """The store fails over to a machine that lacks the last of what was written."""
        session_id = self.clients[0].session_id
        if session_id is None or not (copy := self.valkey.copy(session_id)):
            return
        self.clock.after(
            self.random.random() * self.random.choice((0.1, 1.0)), lambda: self._put_back(session_id, copy)
        )

    def _put_back(self, session_id: str, copy: dict[str, bytes]) -> None:
        if self.clock.now > 1000 + _STORM_S:
            return
        self.trace(f"{session_id} is put back to an older copy")
        self.valkey.put_back(session_id, copy)
        self.oracle.on_other_store(session_id)
        for replica in self.replicas:
            self.network.break_subscription(replica.link)

    # --- its end

    def _calm(self) -> None:
        """No more faults; those that are on go on to their own end."""
        self.trace("--- no more faults")
        self.network.weather = Weather()
        self.engines.breaks = 0.0

    def _at_rest(self) -> bool:
        return not self._unrest()

    def _unrest(self) -> str:
        """What is still going on."""
        oracle = self.oracle
        for session_id, known in oracle.sessions.items():
            if known.running or known.queued:
                return f"{session_id} makes {known.running}, queued {known.queued}"
        if self.engines.streams:
            return f"engines work: {self.engines.streams}"
        for client in self.clients:
            if client.session_id is None or not client.stays:
                continue
            if not client.joined:
                return f"{client.name} is not connected"
            if client.wishes:
                return f"{client.name} waits for {list(client.wishes)}"
            for answer in client.answers.values():
                waits = answer.stage >= 0 and answer.status is None
                # The end of one of which the store knows nothing any more is told to nobody.
                gone = answer.id in oracle.deleted or oracle.is_forgotten(answer.id) or oracle.lost
                if waits and not gone:
                    return f"{client.name} was not told the end of {answer.id}"
        for replica in self.replicas:
            if replica.loop.stopped or not replica.link.up or replica.draining or not replica.hub.ready:
                return f"{replica.id} is not there"
            for live in replica.hub.sessions:
                known = oracle.sessions[live.id]
                if live.lock.locked() or live.held or live.doubted or live.turn is not None:
                    return f"{replica.id} is at work"
                if live.loaded and (live.version, live.item_count) != (known.version, len(known.order)):
                    return f"{replica.id} knows {live.version}, {live.item_count} items; {known.version} is stored"
        return "" if self.replicas else "there is no replica"

    def _check_rest(self) -> None:
        """At rest: what clients were told is what is stored."""
        if self.oracle.lost:
            return  # ends that were told may be gone with their owner
        for client in self.clients:
            for answer in client.answers.values():
                ended = self.oracle.ended.get(answer.id)
                if answer.status in (None, "from history"):
                    continue
                if ended is None or ended.outcome.status != answer.status:
                    raise Broken(f"{client.name} knows {answer} and {ended} is stored")

    # --- for the clients

    def told(self, client: Client, event: dict[str, Any]) -> None:
        try:
            self.oracle.on_told(event)
        except Broken as broken:
            self.fail(f"{client.name}: {broken}")

    def takes_back(self, answer: Answer, event: dict[str, Any]) -> bool:
        """Whether text may be taken back: told from the start again, or by a cut."""
        oracle = self.oracle
        return event["offset"] == 0 or oracle.lost or answer.id in oracle.ended or answer.id in oracle.wishes
