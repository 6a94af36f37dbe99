"""Copies of a session in the store, to be put back: what a store does that lost its last moments."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import redis.asyncio

from chat_server.store.keys import session_keys

#: ms that the keys live when they are put back
_TTL_MS = 100_000


class Copies:
    """Takes and puts back all of one session at once."""

    def __init__(self, raw: redis.asyncio.Redis, session_id: str) -> None:
        self._raw = raw
        self._keys = session_keys(session_id)

    async def take(self) -> dict[str, bytes | None]:
        async with self._raw.pipeline(transaction=True) as pipe:
            for key in self._keys:
                pipe.dump(key)
            return dict(zip(self._keys, await pipe.execute(), strict=True))

    async def cut_subscriptions(self) -> None:
        """As a store does that was away."""
        await self._raw.client_kill_filter(_type="pubsub")

    async def put_back(self, copy: dict[str, bytes | None]) -> None:
        """Nothing, for a session of which nothing is left."""
        async with self._raw.pipeline(transaction=True) as pipe:
            pipe.delete(*self._keys)
            for key, value in copy.items():
                if value is not None:
                    pipe.restore(key, _TTL_MS, value)
            await pipe.execute()


@asynccontextmanager
async def copies_of(redis_url: str, session_id: str) -> AsyncIterator[Copies]:
    async with redis.asyncio.Redis.from_url(redis_url) as raw:
        yield Copies(raw, session_id)
