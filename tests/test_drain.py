"""A replica that goes away: who leaves when, what they are told, and what becomes of the answers. With stand-ins for
connections; on real sockets it is in ``test_app.py``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from chat_server.connections import Connection
from chat_server.core.server_events import ServerDraining
from chat_server.drain import Leaving, drain

pytestmark = pytest.mark.server


class FakeConnection:
    """A connection that notes what is done to it; ``settled``: no answer is under way."""

    def __init__(self, replica: FakeReplica, *, settled: bool = True, extensions: bool = True) -> None:
        self.told: list[Any] = []
        self.codes: list[int] = []
        self.outbox = SimpleNamespace(settled=settled, extensions=extensions, push=self.told.append)
        self._replica = replica
        replica.open.append(self)

    def close(self, code: int, reason: str) -> None:
        self.codes.append(code)
        self._replica.open.remove(self)


class FakeReplica:
    """The sessions of one."""

    def __init__(self) -> None:
        self.open: list[FakeConnection] = []
        self.answers = 0
        self.handed_over: list[int] = []

    def connections(self) -> list[Connection]:
        return cast("list[Connection]", list(self.open))

    def statistics(self) -> dict[str, int]:
        return {"connections": len(self.open), "responses": self.answers}

    async def hand_over(self) -> None:
        self.handed_over.append(len(self.open))
        self.answers = 0


@pytest.fixture
def replica() -> FakeReplica:
    return FakeReplica()


def moments(count: int, *, grace_s: float, chances: Iterator[float]) -> list[float]:
    """When each of so many connections without an answer may go, in seconds from the start."""
    replica = FakeReplica()
    for _ in range(count):
        FakeConnection(replica)
    leaving = Leaving(grace_s=grace_s, chance=lambda: next(chances))
    connections = replica.connections()
    leaving.plan(connections, 100.0)
    steps = [step / 1000 for step in range(round(grace_s * 1000) + 1)]
    found = [next(at for at in steps if leaving.may_go(one, 100.0 + at + 1e-9)) for one in connections]
    assert all(leaving.may_go(one, 100.0 + grace_s) for one in connections)
    return found


def evenly() -> Iterator[float]:
    while True:
        yield from (0.0, 0.25, 0.5, 0.75, 0.999)


def test_a_few_leave_at_once() -> None:
    """At a terminal nobody waits for the jitter."""
    assert max(moments(5, grace_s=25.0, chances=evenly())) <= 0.01


def test_many_leave_over_a_while_and_well_within_the_grace_time() -> None:
    """Each of them is a handshake somewhere else."""
    found = moments(2000, grace_s=4.0, chances=evenly())
    assert min(found) == 0.0
    assert 1.9 < max(found) <= 2.0
    assert sum(at < 1.0 for at in found) == pytest.approx(1000, rel=0.3)


def test_each_is_asked_to_come_back_at_a_moment_of_its_own(replica: FakeReplica) -> None:
    """Within two seconds, and once: whoever comes late is told too."""
    leaving = Leaving(grace_s=25.0, chance=evenly().__next__)
    for _ in range(10):
        FakeConnection(replica)
    told = leaving.plan(replica.connections(), 0.0)
    assert [connection for connection, _ in told] == replica.connections()
    delays = [delay for _, delay in told]
    assert len(set(delays)) > 1
    assert 0 <= min(delays) <= max(delays) <= 2000
    assert leaving.plan(replica.connections(), 1.0) == []
    late = FakeConnection(replica)
    assert [connection for connection, _ in leaving.plan(replica.connections(), 2.0)] == [cast("Connection", late)]


async def test_nothing_to_end_takes_no_time(replica: FakeReplica) -> None:
    """A server without connections stops at once, whatever the grace time."""
    began = time.monotonic()
    await drain(replica, replica.hand_over, grace_s=25.0)
    assert time.monotonic() - began < 0.05
    assert replica.handed_over == []


async def test_only_connections_with_extensions_are_told_why(replica: FakeReplica) -> None:
    """The others would not understand the event; all are closed with 1012."""
    knows, strict = FakeConnection(replica), FakeConnection(replica, extensions=False)
    await drain(replica, replica.hand_over, grace_s=25.0)
    [event] = knows.told
    assert isinstance(event, ServerDraining)
    assert strict.told == []
    assert knows.codes == strict.codes == [1012]


async def test_who_reads_an_answer_stays_to_its_end(replica: FakeReplica) -> None:
    """It is told at once that the server goes, and closed when all was told to it; nothing is handed over."""
    idle, busy = FakeConnection(replica), FakeConnection(replica, settled=False)
    replica.answers = 1
    draining = asyncio.create_task(drain(replica, replica.hand_over, grace_s=25.0))
    await asyncio.sleep(0.15)
    assert (idle.codes, busy.codes, len(busy.told)) == ([1012], [], 1)
    replica.answers = 0
    busy.outbox.settled = True
    async with asyncio.timeout(1):
        await draining
    assert busy.codes == [1012]
    assert replica.handed_over == []


async def test_an_answer_that_nobody_reads_is_waited_for(replica: FakeReplica) -> None:
    """Its client will ask for it later."""
    replica.answers = 1
    draining = asyncio.create_task(drain(replica, replica.hand_over, grace_s=25.0))
    await asyncio.sleep(0.15)
    assert not draining.done()
    replica.answers = 0
    async with asyncio.timeout(1):
        await draining
    assert replica.handed_over == []


async def test_what_runs_after_the_grace_time_is_handed_over(replica: FakeReplica) -> None:
    """Within the grace time; its readers are closed before, for they could ask for more."""
    busy = FakeConnection(replica, settled=False)
    replica.answers = 1
    began = time.monotonic()
    await drain(replica, replica.hand_over, grace_s=0.2)
    assert 0.07 < time.monotonic() - began < 0.2
    assert replica.handed_over == [0]
    assert busy.codes == [1012]


@pytest.mark.parametrize("trouble", ["hangs", "fails"])
async def test_a_hand_over_that_does_not_work_does_not_keep_the_server(replica: FakeReplica, trouble: str) -> None:
    """It has a deadline within the grace time, and its failure is logged; the connections are closed all the same."""
    busy = FakeConnection(replica, settled=False)
    replica.answers = 1

    async def hand_over() -> None:
        if trouble == "fails":
            raise RuntimeError("the store is away")
        await asyncio.Event().wait()

    for grace_s in (0.0, 0.3):
        async with asyncio.timeout(grace_s + 0.2):
            await drain(replica, hand_over, grace_s=grace_s)
    assert busy.codes[0] == 1012


async def test_a_reader_that_takes_nothing_does_not_keep_the_server(replica: FakeReplica) -> None:
    """After the grace time it is closed like the others, and nothing is handed over for it."""
    stuck = FakeConnection(replica, settled=False)
    await drain(replica, replica.hand_over, grace_s=0.1)
    assert stuck.codes == [1012]
    assert replica.handed_over == []
