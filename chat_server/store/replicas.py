"""What replicas know of each other: who lives, of which sessions somebody makes an answer, and what they are told.

None of it belongs to one session. All calls raise StoreUnavailable, as those of ``redis.py``.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager

from chat_server.store import keys, messages
from chat_server.store.server import Server

#: milliseconds that a replica is believed to live after its last sign.
LEASE_MS = 4000
#: milliseconds after which one is not even asked any more.
_FORGET_MS = 60_000


class Replicas:
    """The replicas on one store, as one of them sees the others."""

    def __init__(self, server: Server, replica_id: str) -> None:
        self._server = server
        self._id = replica_id

    # --- who lives

    async def renew_lease(self, now_ms: int) -> None:
        """Say that this replica lives. Raises StoreUnavailable, as a durable call, if too few replicas follow."""
        await self._server.run_many(
            ("SET", keys.replica(self._id), now_ms, "PX", LEASE_MS),
            ("ZADD", keys.REPLICAS, now_ms, self._id),
            ("ZREMRANGEBYSCORE", keys.REPLICAS, "-inf", now_ms - _FORGET_MS),
            durable=keys.REPLICAS,
        )

    async def drop_lease(self) -> None:
        """Say that this replica is gone, so that others need not wait for the lease to run out."""
        await self._server.run_many(("DEL", keys.replica(self._id)), ("ZREM", keys.REPLICAS, self._id))

    async def forget_all(self) -> None:
        """Every other replica is gone for sure, lease or not: the store is ours alone."""
        gone = [member.decode() for member in await self._server.run("ZRANGE", keys.REPLICAS, 0, -1)]
        if gone:
            await self._server.run_many(
                *(("DEL", keys.replica(replica_id)) for replica_id in gone), ("ZREM", keys.REPLICAS, *gone)
            )

    async def is_alive(self, replica_id: str) -> bool:
        """Whether a replica's lease holds."""
        return bool(await self._server.run("EXISTS", keys.replica(replica_id)))

    # --- which answers somebody makes

    async def confirm_running(self, session_ids: Sequence[str], now_ms: int) -> None:
        """Say that this replica makes, or is about to make, an answer of each of these sessions."""
        if session_ids:
            await self._server.run("ZADD", keys.RUNNING, *(x for id in session_ids for x in (now_ms, id)))

    async def unconfirmed(self, before_ms: float, most: int) -> list[str]:
        """Sessions that may have a running answer whose owner last said so before then."""
        found = await self._server.run("ZRANGEBYSCORE", keys.RUNNING, "-inf", before_ms, "LIMIT", 0, most)
        return [member.decode() for member in found]

    async def forget_running(self, session_id: str) -> None:
        """Nothing runs in this session. Harmless if that has changed meanwhile: an owner says it again."""
        await self._server.run("ZREM", keys.RUNNING, session_id)

    # --- what they are told

    async def wake(self, session_id: str, now_ms: int) -> None:
        """Ask another replica that lives to look at a session, whose answer nobody makes."""
        found = await self._server.run("ZRANGEBYSCORE", keys.REPLICAS, now_ms - LEASE_MS, "+inf")
        others = [member.decode() for member in found if member.decode() != self._id]
        if others:
            await self._server.run("PUBLISH", keys.inbox(random.choice(others)), messages.wake(session_id))

    def inbox(self) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Hear what other replicas tell this one, from the moment when the block is entered.

        Raises StoreUnavailable when the subscription breaks.
        """
        return self._server.subscribe(keys.inbox(self._id))
