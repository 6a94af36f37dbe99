"""The system under test comes up, and loses what it is told to lose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio as redis_asyncio

from chat_server.store.embedded import find_binary
from loadtest.chaos_world import LOST_S, Process, Valkey, WorldError
from tests.support.processes import wait_until_gone

pytestmark = pytest.mark.valkey


@pytest.fixture
async def valkey(tmp_path: Path) -> AsyncIterator[Valkey]:
    store = Valkey(tmp_path, await asyncio.to_thread(find_binary))
    await store.start()
    sizes = asyncio.create_task(store.watch_size())
    try:
        yield store
    finally:
        sizes.cancel()
        await store.process.stop()


async def keys_after(valkey: Valkey, *, lose: bool) -> set[bytes]:
    """What is there after a restart: ``old`` was written before the last second, ``new`` just now."""
    client = redis_asyncio.Redis.from_url(valkey.url)
    try:
        await client.set("old", "1")
        await asyncio.sleep(LOST_S + 0.3)
        await client.set("new", "1")
        await client.aclose()
        went, back = await valkey.restart(lose=lose)
        assert 0 < back - went < 5
        return {bytes(key) for key in await client.keys() if isinstance(key, bytes)}
    finally:
        await client.aclose()


async def test_a_restart_loses_nothing(valkey: Valkey) -> None:
    """As ``kill -9`` of Valkey does: the page cache lives on."""
    assert await keys_after(valkey, lose=False) == {b"old", b"new"}


async def test_a_loss_is_that_of_the_last_second(valkey: Valkey) -> None:
    """As the death of its host does."""
    assert await keys_after(valkey, lose=True) == {b"old"}


async def test_a_kill_leaves_nothing(tmp_path: Path) -> None:
    """The process is gone when ``kill`` returns, and can be started again."""
    process = Process("sleeper", ["sh", "-c", "echo $$; exec sleep 60"], tmp_path)
    pids = set()
    for n in (1, 2):
        await process.start()
        log = tmp_path / f"sleeper.{n}.log"
        while not log.exists() or not log.read_text():
            await asyncio.sleep(0.01)
        pids.add(int(log.read_text()))
        await process.kill()
        assert not process.runs
    assert len(pids) == 2
    assert wait_until_gone(pids) == set()


async def test_a_stop_takes_its_time(tmp_path: Path) -> None:
    """SIGTERM, and how long the process took to end by itself."""
    process = Process(
        "stopper", ["sh", "-c", "trap 'sleep 0.3; exit' TERM; echo on; while :; do sleep 0.02; done"], tmp_path
    )
    await process.start()
    log = tmp_path / "stopper.1.log"
    while not log.exists() or not log.read_text():
        await asyncio.sleep(0.01)
    assert 0.3 <= await process.tell_to_stop() < 2.0
    assert not process.runs


async def test_a_store_that_does_not_start_says_why(tmp_path: Path) -> None:
    """Nothing was tested then."""
    valkey = Valkey(tmp_path, await asyncio.to_thread(find_binary))
    valkey.process = Process("valkey", ["sh", "-c", "echo no memory; exit 1"], tmp_path)
    with pytest.raises(WorldError, match="no memory"):
        await valkey.start()
