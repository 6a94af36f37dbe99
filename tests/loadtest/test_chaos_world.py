"""The system under test comes up, and loses what it is told to lose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio as redis_asyncio

from chat_server.store.embedded import find_binary
from loadtest.chaos_world import LOST_S, Valkey
from loadtest.processes import NotTested, Process

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


async def test_a_store_that_does_not_start_says_why(tmp_path: Path) -> None:
    """Nothing was tested then."""
    valkey = Valkey(tmp_path, await asyncio.to_thread(find_binary))
    valkey.process = Process("valkey", ["sh", "-c", "echo no memory; exit 1"], tmp_path)
    with pytest.raises(NotTested, match="no memory"):
        await valkey.start()
