"""Who lives: a lease permits, and trouble with the store gives others time to come back."""

from __future__ import annotations

from typing import cast

import pytest

from chat_server import lease as lease_module
from chat_server.errors import StoreUnavailable
from chat_server.lease import Lease
from chat_server.store.replicas import Replicas
from tests.support.clock import Clock

pytestmark = pytest.mark.pure


class FakeReplicas:
    """Answers as it is told to; each answer takes ``takes_s`` on the fake clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.takes_s = 0.0
        self.away = False
        self.alive = False

    async def renew_lease(self, now_ms: int) -> None:
        await self._answer()

    async def is_alive(self, replica_id: str) -> bool:
        await self._answer()
        return self.alive

    async def _answer(self) -> None:
        self.clock.now += self.takes_s
        if self.away:
            raise StoreUnavailable("away")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lease_module, "time", clock)
    return clock


@pytest.fixture
def store(clock: Clock) -> FakeReplicas:
    return FakeReplicas(clock)


def lease(store: FakeReplicas, *, alone: bool = False) -> Lease:
    return Lease(cast("Replicas", store), alone=alone)


async def test_a_replica_without_a_lease_is_dead_once_the_others_had_time(clock: Clock, store: FakeReplicas) -> None:
    """Not within a lease's length of our own start: they may have been kept from renewing."""
    ours = lease(store)
    assert await ours.lives("other")
    clock.now += 4.1
    assert not await ours.lives("other")


async def test_where_no_other_can_be_at_work_nobody_is_waited_for(store: FakeReplicas) -> None:
    """The embedded store has one replica at a time: what an earlier one left is taken over at once."""
    assert not await lease(store, alone=True).lives("other")


@pytest.mark.parametrize("trouble", ["away", "slow", "told"])
async def test_after_trouble_with_the_store_the_others_get_time(
    clock: Clock, store: FakeReplicas, trouble: str
) -> None:
    """Away or slow, in any call, or told by who listens: for a lease's length nobody is taken for dead."""
    ours = lease(store, alone=True)
    if trouble == "away":
        store.away = True
        with pytest.raises(StoreUnavailable):
            await ours.renew(0)
        store.away = False
    elif trouble == "slow":
        store.takes_s = 0.6
        await ours.renew(0)
        store.takes_s = 0.0
    else:
        ours.trouble()
    clock.now += 3.9
    assert await ours.lives("other")
    clock.now += 0.2
    assert not await ours.lives("other")


async def test_a_lease_that_can_not_be_read_is_not_gone(store: FakeReplicas) -> None:
    """The caller hears of it instead."""
    store.away = True
    with pytest.raises(StoreUnavailable):
        await lease(store, alone=True).lives("other")


async def test_it_knows_since_when_the_store_is_away(clock: Clock, store: FakeReplicas) -> None:
    """From the first renewal that failed, not from the last."""
    ours = lease(store)
    await ours.renew(0)
    assert ours.holds
    store.away = True
    for _ in range(3):
        clock.now += 1
        with pytest.raises(StoreUnavailable):
            await ours.renew(0)
    assert not ours.holds
    assert ours.lost_at == 1001.0
    store.away = False
    await ours.renew(0)
    assert ours.holds
