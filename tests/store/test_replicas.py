"""What replicas know of each other, on a real Valkey: who lives, who makes which answers, and what they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import redis.asyncio

from chat_server.errors import StoreUnavailable
from chat_server.store import keys, messages
from chat_server.store.messages import Wake
from chat_server.store.redis import Store
from chat_server.store.replicas import LEASE_MS

pytestmark = [pytest.mark.valkey, pytest.mark.asyncio(loop_scope="module")]


# --- who lives


async def test_a_replica_lives_as_long_as_it_says(stores: Callable[..., Store], raw: redis.asyncio.Redis) -> None:
    """Its lease ends by itself, at its own end, or when another knows that it is gone."""
    one, two, three = (stores(f"replica_{name}").replicas for name in "abc")
    assert not await two.is_alive("replica_a")
    for replicas in (one, two):
        await replicas.renew_lease(1_000_000)
    assert await two.is_alive("replica_a")
    assert 0 < await raw.pttl(keys.replica("replica_a")) <= LEASE_MS
    await one.drop_lease()
    assert not await two.is_alive("replica_a")
    assert await one.is_alive("replica_b")
    await three.forget_all()
    assert not await one.is_alive("replica_b")
    await three.renew_lease(1_000_000 + 60_001)
    assert await raw.zrange(keys.REPLICAS, 0, -1) == [b"replica_c"]


# --- which answers somebody makes


async def test_an_answer_that_nobody_confirms_is_found(store: Store) -> None:
    """Those for the longest time first, so many as were asked for, until somebody confirms or forgets them."""
    replicas = store.replicas
    await replicas.confirm_running([], 1)
    for at, session_ids in enumerate((["sess_a", "sess_b"], ["sess_c"])):
        await replicas.confirm_running(session_ids, 1000 + at)
    assert await replicas.unconfirmed(1000, 9) == ["sess_a", "sess_b"]
    assert await replicas.unconfirmed(1001, 9) == ["sess_a", "sess_b", "sess_c"]
    assert await replicas.unconfirmed(1001, 1) == ["sess_a"]
    await replicas.confirm_running(["sess_a"], 2000)
    await replicas.forget_running("sess_b")
    assert await replicas.unconfirmed(1999, 9) == ["sess_c"]


# --- what they are told


async def test_another_replica_is_asked_to_look_never_oneself(stores: Callable[..., Store]) -> None:
    """One whose lease may hold; nobody is asked if there is none."""
    one, two, gone = (stores(f"replica_{name}").replicas for name in ("one", "two", "gone"))
    await gone.renew_lease(2_000_000 - LEASE_MS - 1)
    for replicas in (one, two):
        await replicas.renew_lease(2_000_000)
    async with one.inbox() as ours, two.inbox() as theirs, gone.inbox() as its:
        for number in range(10):
            await one.wake(f"sess_{number}", 2_000_000)
            async with asyncio.timeout(5):
                assert messages.decode(await anext(theirs)) == Wake(f"sess_{number}")
        await two.drop_lease()
        await one.wake("sess_10", 2_000_000)
        for inbox in (ours, its):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(inbox), 0.05)


async def test_an_inbox_listens_from_the_moment_it_is_there(
    stores: Callable[..., Store], raw: redis.asyncio.Redis
) -> None:
    """What is told right after it was opened is heard."""
    for _ in range(20):
        store = stores()
        async with store.replicas.inbox() as inbox:
            assert await raw.publish(keys.inbox(store.replica_id), b"hello") == 1
            assert await anext(inbox) == b"hello"


async def test_an_inbox_that_lost_its_connection_says_so(
    stores: Callable[..., Store], raw: redis.asyncio.Redis
) -> None:
    """It is not renewed without a word: what was said meanwhile is not known."""
    store = stores()
    async with store.replicas.inbox() as inbox:
        waiting = asyncio.ensure_future(anext(inbox))
        await asyncio.sleep(0)
        pipe = raw.pipeline(transaction=False)
        pipe.client_kill_filter(_type="pubsub")
        pipe.publish(keys.inbox(store.replica_id), b"missed")
        await pipe.execute()
        with pytest.raises(StoreUnavailable):
            async with asyncio.timeout(5):
                await waiting
    async with store.replicas.inbox() as inbox:
        await raw.publish(keys.inbox(store.replica_id), b"heard")
        assert await anext(inbox) == b"heard"
