"""Between the replicas and a real Valkey: calls are done now, later or never, answers and messages come or do not.

The scripts are the real ones; only their clock is the model's, and so is the life of leases.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import hiredis

from chat_server.errors import StoreError, StoreUnavailable
from chat_server.store import keys
from chat_server.store.server import Server, library
from tests.model.scheduler import Clock, Loop

#: seconds that a call waits for its answer, as in the real one.
_TIMEOUT_S = 5.0
#: where the scripts find the time.
_NOW = "model:now"
#: functions that publish nothing.
_SILENT = frozenset({"watch", "unwatch", "renew", "unwatched", "bind", "answer", "items_last", "session_create"})

_MISSING = object()


class Wire:
    """One blocking connection to the store."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._reader = hiredis.Reader(notEnoughData=_MISSING)

    def ask(self, *commands: Sequence[Any]) -> list[Any]:
        self.say(*commands)
        return [self.read() for _ in commands]

    def say(self, *commands: Sequence[Any]) -> None:
        self._socket.sendall(b"".join(hiredis.pack_command(tuple(command)) for command in commands))

    def read(self) -> Any:
        while (reply := self._reader.gets()) is _MISSING:
            data = self._socket.recv(1 << 16)
            assert data, "the store is gone"
            self._reader.feed(data)
        return reply

    def close(self) -> None:
        self._socket.close()


class Valkey:
    """The real store as the model uses it: commands one by one, and what each of them published."""

    def __init__(self, path: str, edit: Callable[[str], str] = str) -> None:
        """``edit``: what becomes of the scripts before they are loaded."""
        self.wire = Wire(path)
        self._messages = Wire(path)
        self._messages.ask(("PSUBSCRIBE", "chat:replica:*:inbox"))
        self.prefix, code = library()
        code, count = re.subn(
            r"local t = redis\.call\('TIME'\)\n.*", f"return tonumber(redis.call('GET', '{_NOW}'))", code
        )
        assert count == 1, "the scripts read the clock in one place"
        [reply] = self.wire.ask(("FUNCTION", "LOAD", "REPLACE", edit(code)))
        assert isinstance(reply, bytes), reply

    def do(self, now_ms: int, command: Sequence[Any]) -> tuple[Any, list[tuple[bytes, bytes]]]:
        """The reply, and (channel, message) of what was published."""
        _, reply = self.wire.ask(("SET", _NOW, now_ms), command)
        if command[0] == "PUBLISH" or (command[0] == "FCALL" and self.function(command) not in _SILENT):
            return reply, list(self._published())
        return reply, []

    def function(self, command: Sequence[Any]) -> str:
        return str(command[1]).removeprefix(self.prefix)

    def _published(self) -> Iterable[tuple[bytes, bytes]]:
        self._messages.say(("PING",))
        while (message := self._messages.read())[0] != b"pong":
            yield message[2], message[3]

    def copy(self) -> dict[bytes, bytes]:
        """All that is stored: sessions, leases, what runs."""
        [names] = self.wire.ask(("KEYS", "*"))
        return dict(zip(names, self.wire.ask(*(("DUMP", name) for name in names)), strict=True))

    def put_back(self, copy: dict[bytes, bytes]) -> None:
        """Make all what it was."""
        self.wire.ask(("FLUSHALL",), *(("RESTORE", name, 10**9, dump) for name, dump in sorted(copy.items())))

    def clear(self) -> None:
        self.wire.ask(("FLUSHALL",))
        list(self._published())

    def close(self) -> None:
        self.wire.close()
        self._messages.close()


@dataclass
class Weather:
    """What may become of a call or a message: shares of all, and seconds."""

    slow: float = 0.0
    lost_request: float = 0.0
    lost_reply: float = 0.0
    stray: float = 0.0  # no answer, and done some seconds later
    lost_message: float = 0.0
    slow_message: float = 0.0
    reordered: bool = False

    def delay(self, random: random.Random, slow: float) -> float:
        if random.random() < slow:
            return random.choice((0.03, 0.3, 3.0)) * random.random()
        return 0.002 * random.random()


class Subscription:
    """A replica's inbox, as far as it arrived."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.broken = False
        self.last = 0.0  # when the last message arrives

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        message = await self.queue.get()
        if message is None:
            raise StoreUnavailable("The subscription broke.")
        return message


@dataclass
class Link:
    """One replica's way to the store."""

    name: str
    loop: Loop
    up: bool = True
    dead: bool = False
    subscription: Subscription | None = None
    #: calls that are not answered yet
    under_way: list[Sequence[Sequence[Any]]] = field(default_factory=list)


Watcher = Callable[[Link, str, Sequence[Any], Any], None]


@dataclass(frozen=True)
class Copy:
    """The store as it was, and when the leases in it run out."""

    stored: dict[bytes, bytes]
    expires: dict[str, float]


@dataclass
class Network:
    """All links. ``on_done`` is told each function that was carried out, with its arguments and its reply.

    ``on_answered`` is told the same when the reply is there.
    """

    valkey: Valkey
    clock: Clock
    random: random.Random
    trace: Callable[[str], None]
    on_done: Watcher
    on_answered: Watcher
    #: the store carries nothing out, for anybody.
    away: bool = False
    weather: Weather = field(default_factory=Weather)
    links: dict[str, Link] = field(default_factory=dict)
    #: when leases run out
    _expires: dict[str, float] = field(default_factory=dict)
    #: since when each of them holds without a gap
    _held_since: dict[str, float] = field(default_factory=dict)

    def leased_s(self, replica_id: str) -> float:
        """For how long a replica's lease has held now, without a gap."""
        key = keys.replica(replica_id)
        return self.clock.now - self._held_since[key] if self._expires.get(key, 0) > self.clock.now else 0.0

    def send(self, link: Link, commands: Sequence[Sequence[Any]], answer: asyncio.Future[list[Any]]) -> None:
        """Take a call on its way, whatever becomes of it."""
        draw, weather = self.random.random(), self.weather
        delay = weather.delay(self.random, weather.slow)
        if self.away or not link.up or draw < weather.lost_request:
            self._fail(link, commands, answer, "never got there", delay)
        elif draw < (lost := weather.lost_request + weather.lost_reply):
            some = commands[: self.random.randint(1, len(commands))]
            self.clock.after(delay, lambda: self._do(link, some, None))
            self._fail(link, commands, answer, "was done without an answer", delay)
        elif draw < lost + weather.stray:
            self._fail(link, commands, answer, "is late", delay)
            self.clock.after(delay + 6 * self.random.random(), lambda: self._do(link, commands, None))
        else:
            self.clock.after(delay, lambda: self._do(link, commands, answer))

    def _fail(
        self, link: Link, commands: Sequence[Sequence[Any]], answer: asyncio.Future[list[Any]], why: str, delay: float
    ) -> None:
        silent = self.random.random() < 0.2  # then the caller's deadline tells it
        self.trace(f"{link.name} -> {self.describe(commands[0])} {why}{', silence' if silent else ''}")
        if not silent:
            self.clock.after(delay, lambda: self._refuse(answer))

    @staticmethod
    def _grant(answer: asyncio.Future[Any], subscription: Subscription) -> None:
        if not answer.done():
            answer.set_result(subscription)

    @staticmethod
    def _refuse(answer: asyncio.Future[list[Any]]) -> None:
        if not answer.done():
            answer.set_exception(StoreUnavailable("The store can not be reached (model)."))

    def _do(self, link: Link, commands: Sequence[Sequence[Any]], answer: asyncio.Future[list[Any]] | None) -> None:
        if self.away or ((link.dead or not link.up) and self.random.random() < 0.5):
            if answer is not None and not link.dead:
                self._refuse(answer)
            return
        replies = [self.do(link, command) for command in commands]
        if answer is None:
            return
        delay = self.weather.delay(self.random, self.weather.slow)
        self.clock.after(delay, lambda: self._answer(link, commands, answer, replies))

    def _answer(
        self, link: Link, commands: Sequence[Sequence[Any]], answer: asyncio.Future[list[Any]], replies: list[Any]
    ) -> None:
        if link.dead or answer.done():
            return
        if self.away or not link.up:
            self._refuse(answer)
            return
        answer.set_result(replies)
        for command, reply in zip(commands, replies, strict=True):
            if command[0] == "FCALL":
                self.on_answered(link, *self._called(command), reply)

    def asks(self, link: Link, function: str, session_id: str) -> bool:
        """Whether a replica waits for a function's answer."""
        called = [self._called(one) for commands in link.under_way for one in commands if one[0] == "FCALL"]
        return any(name == function and args[0] == session_id for name, args in called)

    def _called(self, command: Sequence[Any]) -> tuple[str, Sequence[Any]]:
        return self.valkey.function(command), command[3 + int(command[2]) :]

    def copy(self) -> Copy:
        """The store as it is now."""
        return Copy(self.valkey.copy(), dict(self._expires))

    def put_back(self, copy: Copy) -> None:
        """Make the store what it was."""
        self.valkey.put_back(copy.stored)
        self._expires = dict(copy.expires)
        self._held_since = dict.fromkeys(self._expires, self.clock.now)

    def do(self, link: Link, command: Sequence[Any]) -> Any:
        """Carry one command out."""
        now = self.clock.now
        for key in [key for key, at in self._expires.items() if at <= now]:
            del self._expires[key]
            self.valkey.do(0, ("DEL", key))
        if command[0] == "DEL":
            self._expires.pop(str(command[1]), None)
        if command[0] == "SET" and "PX" in command:
            if str(command[1]) not in self._expires:
                self._held_since[str(command[1])] = now
            self._expires[str(command[1])] = now + float(command[4]) / 1000
            command = command[:3]
        reply, published = self.valkey.do(self.clock.time_ns() // 1_000_000, command)
        if command[0] == "FCALL":
            function, args = self._called(command)
            if function not in ("renew", "unwatched"):
                self.trace(f"{link.name} {self.describe(command)} = {short(reply)}")
            self.on_done(link, function, args, reply)
        for channel, message in published:
            self._publish(channel.decode(), message)
        return reply

    def describe(self, command: Sequence[Any]) -> str:
        if command[0] != "FCALL":
            return " ".join(short(part) for part in command[:4])
        args = [short(arg) for arg in command[3 + int(command[2]) :] if not (isinstance(arg, int) and arg > 10**6)]
        return f"{self.valkey.function(command)}({', '.join(args)})"

    # --- messages

    def _publish(self, channel: str, message: bytes) -> None:
        link = self.links.get(channel.removeprefix("chat:replica:").removesuffix(":inbox"))
        subscription = link.subscription if link is not None else None
        if link is None or subscription is None or subscription.broken or link.dead or not link.up:
            return
        if self.random.random() < self.weather.lost_message:
            self.trace(f"{link.name} <- {short(message)} is lost")
            return
        at = self.clock.now + self.weather.delay(self.random, self.weather.slow_message)
        if not self.weather.reordered:
            at = subscription.last = max(at, subscription.last)
        self.clock.at(at, lambda: self._deliver(link, subscription, message))

    def _deliver(self, link: Link, subscription: Subscription, message: bytes) -> None:
        if not subscription.broken and not link.dead:
            self.trace(f"{link.name} <- {short(message)}")
            subscription.queue.put_nowait(message)

    def break_subscription(self, link: Link) -> None:
        subscription = link.subscription
        if subscription is None or subscription.broken:
            return
        self.trace(f"{link.name}'s subscription breaks")
        subscription.broken = True
        delay = self.random.random() * 0.5
        self.clock.after(delay, lambda: subscription.queue.put_nowait(None))

    def subscribe(self, link: Link, answer: asyncio.Future[Any]) -> None:
        def subscribed() -> None:
            if self.away or link.dead or not link.up:
                self._refuse(answer)
                return
            link.subscription = subscription = Subscription()
            delay = self.weather.delay(self.random, self.weather.slow)
            self.clock.after(delay, lambda: self._grant(answer, subscription))

        self.clock.after(self.weather.delay(self.random, self.weather.slow), subscribed)


class ModelServer(Server):
    """A replica's server of the store, in the model."""

    def __init__(self, network: Network, link: Link) -> None:
        self._prefix = network.valkey.prefix
        self._network = network
        self._link = link

    async def open(self) -> None:
        """It is there."""

    async def close(self) -> None:
        """It stays."""

    def shard(self, key: str) -> str:
        return ""

    async def run(self, *command: Any) -> Any:
        return (await self.run_many(command))[0]

    async def run_many(self, *commands: Sequence[Any], durable: str | None = None) -> list[Any]:
        replies = await self._ask(commands)
        for reply in replies:
            if isinstance(reply, StoreError):
                raise reply
        return replies

    async def call(self, session_id: str, function: str, *args: Any, durable: bool = False) -> Any:
        return await self.run(*self._command(session_id, function, *args))

    async def call_many(self, calls: Iterable[Sequence[Any]]) -> list[Any]:
        return await self._ask([self._command(*call) for call in calls])

    @asynccontextmanager
    async def subscribe(self, channel: str) -> AsyncIterator[AsyncIterator[bytes]]:
        subscription = await self._wait(lambda answer: self._network.subscribe(self._link, answer))
        try:
            yield subscription
        finally:
            subscription.broken = True

    async def _ask(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        self._link.under_way.append(commands)
        try:
            replies = await self._wait(lambda answer: self._network.send(self._link, commands, answer))
        finally:
            self._link.under_way.remove(commands)
        return [
            StoreError(f"The store refused a command: {reply}") if isinstance(reply, Exception) else reply
            for reply in replies
        ]

    async def _wait(self, start: Callable[[asyncio.Future[Any]], None]) -> Any:
        if self._link.dead:
            raise StoreUnavailable("The world is over.")
        answer = self._link.loop.create_future()
        start(answer)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise StoreUnavailable("The store can not be reached (TimeoutError).") from None


def short(value: Any) -> str:
    """A value in a line of the trace."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 160 else f"{text[:157]}..."
