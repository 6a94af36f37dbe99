"""A real Valkey for the tests of a module, and stores on it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio

from chat_server.store.embedded import EmbeddedValkey
from chat_server.store.redis import Store
from tests.store.sessions import store_at


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """One Valkey for all tests of a module; each has sessions of its own."""
    valkey = EmbeddedValkey(tmp_path_factory.mktemp("store"))
    try:
        yield await valkey.start()
    finally:
        await valkey.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def stores(valkey_url: str) -> AsyncIterator[Callable[..., Store]]:
    """Makes stores, one for each replica that a test plays."""
    async with AsyncExitStack() as stack:

        def make(replica_id: str | None = None, **how: Any) -> Store:
            store = store_at(valkey_url, replica_id, **how)
            stack.push_async_callback(store.close)
            return store

        await make().open()
        yield make


@pytest_asyncio.fixture(loop_scope="module")
async def store(stores: Callable[..., Store]) -> Store:
    return stores()


@pytest_asyncio.fixture(loop_scope="module")
async def raw(valkey_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """A plain client, to look at what is really there."""
    client = redis.asyncio.Redis.from_url(valkey_url)
    yield client
    await client.aclose()
