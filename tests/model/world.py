"""A world of replicas, engines, clients and one store, in which a seed decides all that happens."""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

from chat_server.store.messages import ResponseEnded, decode
from tests.model.client import Answer, Client
from tests.model.engines import URLS, Engines
from tests.model.network import Copy, Link, Network, Valkey, Weather
from tests.model.oracle import Broken, Oracle, Session, Witness
from tests.model.replica import Replica
from tests.model.scheduler import Clock, step

#: seconds of faults, and in which all must have come to rest after them.
_STORM_S = 15.0
_REST_S = 90.0
#: seconds in which a replica must have written again what the store lost: a call without an answer takes five of them,
#: and where calls are lost there may be many.
_WRITE_AGAIN_S = 8.0
_WRITE_AGAIN_IN_STORM_S = 25.0
#: seconds for which an end is kept at least.
_KEPT_S = 5.0
#: steps of the driver in one world: more means that something turns in a circle.
_MAX_STEPS = 200_000


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
        self.clients: list[Client] = []
        self.replicas: list[Replica] = []
        self.graves: list[Replica] = []
        #: (replica, session) -> when it heard of an end that it wrote, and that one's version
        self._ends: dict[tuple[str, str], tuple[float, int]] = {}
        self._copying = False
        self.oracle = Oracle(
            valkey.wire,
            self.engines,
            self.clock,
            is_there=lambda name: self._there(name) is not None,
            leased_s=lambda name: self.network.leased_s(name),  # noqa: PLW0108 - it is made later
        )
        self.counts = self.oracle.counts
        self.network = Network(valkey, self.clock, self.random, self.trace, self.oracle.on_done, self._on_answered)

    @property
    def weather(self) -> Weather:
        return self.network.weather

    def fail(self, why: str) -> None:
        """Something does not hold; said where the server's own care for exceptions does not hide it."""
        self.trace(f"!!! {why}")
        self.broken.append(why)

    def _there(self, name: str) -> Replica | None:
        """A replica that is neither killed nor stopped nor cut off."""
        found = [r for r in self.replicas if r.id == name and not r.loop.stopped and r.link.up]
        return found[0] if found else None

    def _on_answered(self, link: Link, function: str, args: Sequence[Any], reply: Any) -> None:
        """A replica knows the end that it wrote, and all before it: it has to keep that for a while."""
        if function != "finish" or reply[0] != b"ok" or (replica := self._there(link.name)) is None:
            return
        ended, live = decode(reply[1]), replica.hub.find(args[0])
        assert isinstance(ended, ResponseEnded)
        if live is not None and live.known == ended.before and live.turn is not None and live.conversation is not None:
            self._ends[link.name, live.id] = (self.clock.now, ended.version)

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
        self._now_and_then(self._lose_writes, draw.choice((2.0, 5.0, 1000.0, 1000.0)))

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
        self.counts["kills"] += 1
        self.kill(replica)

    def kill(self, replica: Replica) -> None:
        """It is gone, and another one comes in its place."""
        replica.kill()
        self.replicas.remove(replica)
        self.graves.append(replica)
        self.oracle.look_at_losses()
        self.clock.after(0.1 + self.random.random() * 6, self.start_replica)

    def _pause(self) -> None:
        replica = self.random.choice(self.replicas) if self.replicas else None
        if replica is None or replica.loop.stopped:
            return
        self.trace(f"{replica.id} is stopped")
        self.counts["pauses"] += 1
        replica.loop.stopped = True
        self.oracle.look_at_losses()

        def go_on() -> None:
            if not replica.dead:
                self.trace(f"{replica.id} goes on")
                replica.loop.stopped = False

        self.clock.after(self.random.random() * self.random.choice((0.2, 3.0, 9.0)), go_on)

    def _drain(self) -> None:
        replica = self.some_replica(self.random)
        if replica is not None:
            self.trace(f"{replica.id} is told to stop")
            self.counts["drains"] += 1
            replica.drain()

    def _cut_off(self) -> None:
        self.counts["cuts from the store"] += 1
        self._cut(self.random.sample(self.replicas, min(1, len(self.replicas))))

    def _store_away(self) -> None:
        self.counts["outages"] += 1
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
        self.oracle.look_at_losses()

    def _reconnect(self, replica: Replica) -> None:
        if not replica.dead:
            self.trace(f"{replica.id} reaches the store again")
            replica.link.up = True

    def _break_inbox(self) -> None:
        if self.replicas:
            self.counts["subscriptions broken"] += 1
            self.network.break_subscription(self.random.choice(self.replicas).link)

    def _engine_dies(self) -> None:
        url = self.random.choice(URLS)
        self.trace(f"{url} dies")
        self.counts["engines gone"] += 1
        self.engines.stop(url)
        self.clock.after(self.random.random() * 5, lambda: self.engines.start(url))

    def _lose_writes(self) -> None:
        """The store fails, and comes back after a while without the last of what was written."""
        if self._copying or self.clients[0].session_id is None or self.oracle.losses or self.network.away:
            return
        self._copying = True
        self._copy_store()

    def _copy_store(self) -> None:
        self.trace("the store is copied")
        fail = partial(self._fail_store, self.network.copy(), dict(self.oracle.sessions))
        self.clock.after(self.random.random() * self.random.choice((0.1, 1.0)), fail)

    def _fail_store(self, copy: Copy, copied: dict[str, Session]) -> None:
        lost_nothing = self.oracle.sessions == copied and self.clock.now < 1000 + _STORM_S
        if lost_nothing or self.oracle.sessions.keys() != copied.keys():  # of a session that is new nobody knows all
            self._copy_store()
            return
        self.trace("the store fails")
        self.counts["outages with a loss"] += 1
        self.network.away = True
        for replica in self.replicas:
            self.network.break_subscription(replica.link)
        seconds = self.random.choice((0.0, self.random.random() * 2, self.random.random() * 12))
        self.clock.after(seconds, partial(self._put_back, copy, self.clock.now))

    def _put_back(self, copy: Copy, failed_at: float) -> None:
        self.trace("the store is back, as it was when it was copied")
        self.network.away = self._copying = False
        self.network.put_back(copy)
        deadline = self.clock.now + (_WRITE_AGAIN_S if self.weather == Weather() else _WRITE_AGAIN_IN_STORM_S)
        for session_id in list(self.oracle.sessions):
            witnesses = self._witnesses(session_id, failed_at)
            self.trace(f"{session_id} is known by {witnesses}")
            self.oracle.put_back(session_id, witnesses, deadline)

    def _witnesses(self, session_id: str, failed_at: float) -> list[Witness]:
        """Who has to write again what a session lost: who makes its answer, and who ended one a moment ago."""
        found, token = [], self.oracle.sessions[session_id].response.get("token")
        for replica in self.replicas:
            if self._there(replica.id) is None:
                continue
            live = replica.hub.find(session_id)
            turn = live.turn if live is not None else None
            if live is not None and turn is not None:
                if turn.writer.token == token and not turn.writer.lost and not turn.left:
                    # An end on its way may have been sent before the wish, and come to a store that lost that.
                    knows_wish = turn.stopped and not self.network.asks(replica.link, "finish", session_id)
                    found.append(Witness(replica.id, live.known, is_owner=True, knows_wish=knows_wish))
                continue
            ended_at, version = self._ends.get((replica.id, session_id), (0.0, 0))
            if failed_at - ended_at < _KEPT_S:
                found.append(Witness(replica.id, version, is_owner=False))
        return found

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
        if self._copying:
            return "the store is away"
        if oracle.losses:
            return f"to be written again: {oracle.losses}"
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
                if waits and not oracle.has_no_end(answer.id):
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
        for client in self.clients:
            for answer in client.answers.values():
                ended = self.oracle.ended(answer.id)
                if answer.status in (None, "from history") or answer.id in self.oracle.unended:
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
        """Whether text may be taken back: by a cut, or as the store lost it with all who knew it.

        Then it is the same up to there, and what follows is told in a new epoch.
        """
        oracle, facts = self.oracle, self.oracle.facts(answer.id)
        # Who was stopped may tell later of an end that was lost meanwhile.
        if answer.id in facts.ended or answer.id in facts.wishes or answer.id in oracle.unended:
            self.counts["texts cut"] += 1
            return True
        if answer.id not in oracle.older_texts or (event["epoch"] == answer.epoch and event["delta"]):
            return False
        self.counts["texts taken back"] += 1
        return oracle.text(answer.id).startswith(answer.text[: event["offset"]])

    def may_follow(self, answer: Answer, event: dict[str, Any]) -> bool:
        """Whether a text that was taken back grows again: to what it was, if not in a new epoch."""
        whole = answer.text[: event["offset"]] + event["delta"]
        return event["epoch"] not in answer.gone or any(
            text.startswith(whole) for text in (self.oracle.text(answer.id), *self.oracle.older_texts[answer.id])
        )
