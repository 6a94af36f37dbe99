"""The machines under the store, through redis-py: one that takes writes, or a cluster of them.

Both do the same things; what follows a failover is here. Deadlines, and errors in our words, are the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import redis.asyncio as redis_asyncio
from redis.asyncio.client import PubSub
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import ClusterDownError, ReadOnlyError, SlotNotCoveredError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from chat_server.store.address import Address

_CONNECT_TIMEOUT_S = 2.0
#: seconds that one daemon of Sentinel has for its answer; then the next is asked.
_SENTINEL_TIMEOUT_S = 1.0
#: seconds after which a connection to a node of a cluster is tried before it is used. (For others redis-py looks.)
_STALE_S = 10.0

#: replies that say that a command was not done, and those that leave it open.
_REFUSED = (ReadOnlyError, ClusterDownError)
_LOST = (RedisConnectionError, RedisTimeoutError)


class Nodes(Protocol):
    """What ``connect`` gives."""

    async def pipeline(self, commands: Sequence[Sequence[Any]], *, key: str | None = None) -> list[Any]:
        """Send commands in one round trip; the replies, an exception where one failed. Raises if none was answered.

        Each goes to the node that holds its first key; all, over one connection, to the one that holds ``key``.
        """

    def doubt(self) -> None:
        """A call had no answer in time: its machine may be gone without a word, and another one in its place."""

    async def load(self, code: str) -> None:
        """Load a library of functions wherever they may be called."""

    async def pubsub(self) -> PubSub:
        """A new subscription."""

    async def info(self) -> list[dict[str, Any]]:
        """What each server that takes writes says of itself."""

    async def aclose(self) -> None:
        """Close all connections."""


def connect(address: Address, *, max_connections: int) -> Nodes:
    """A client of the store at this address; it connects when first used.

    The caller has at most ``max_connections`` calls under way, and a few subscriptions. Raises TypeError for an option
    in the URL that redis-py does not know, at the latest on the first use.
    """
    options = {
        "max_connections": max_connections + 8,
        "socket_timeout": None,  # the caller has a deadline
        "socket_connect_timeout": _CONNECT_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),  # who did not get the answer may not ask again unseen: it may be done already
        **address.options,
    }
    if address.kind == "cluster":
        return Cluster(address.nodes, options)
    if address.kind == "server":
        return Single(redis_asyncio.Redis.from_pool(redis_asyncio.ConnectionPool(**options)))
    daemons = {
        "socket_timeout": _SENTINEL_TIMEOUT_S,
        "socket_connect_timeout": _SENTINEL_TIMEOUT_S,
        "retry": options["retry"],
        **address.sentinel_options,
    }
    sentinel = Sentinel(address.nodes, sentinel_kwargs=daemons)  # type: ignore[no-untyped-call]
    pool = SentinelConnectionPool(address.service, sentinel, **options)  # type: ignore[no-untyped-call]
    return Single(redis_asyncio.Redis.from_pool(pool), sentinel)


class Single:
    """One server that takes writes: the one at the address, or whichever Sentinel says is it."""

    def __init__(self, client: redis_asyncio.Redis, sentinel: Sentinel | None = None) -> None:
        self._client = client
        self._sentinel = sentinel
        self._doubted = False

    async def pipeline(self, commands: Sequence[Sequence[Any]], *, key: str | None = None) -> list[Any]:
        if self._doubted:
            self._doubted = False
            await self._client.connection_pool.disconnect(inuse_connections=False)
        pipe = self._client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        return await pipe.execute(raise_on_error=False)

    def doubt(self) -> None:
        self._doubted = True

    async def load(self, code: str) -> None:
        await self._client.function_load(code, replace=True)

    async def pubsub(self) -> PubSub:
        return self._client.pubsub()

    async def info(self) -> list[dict[str, Any]]:
        return [await self._client.info()]

    async def aclose(self) -> None:
        await self._client.aclose()
        if self._sentinel is not None:
            await self._sentinel.aclose()


class Cluster:
    """A cluster. Each command is sent to the node that holds its first key's slot.

    redis-py would find that key by asking a node, for each FCALL anew; so the node is named here.
    """

    def __init__(self, nodes: Sequence[tuple[str, int]], options: dict[str, Any]) -> None:
        self._client = RedisCluster(
            startup_nodes=[ClusterNode(*node) for node in nodes], health_check_interval=_STALE_S, **options
        )
        self._doubted = False

    async def pipeline(self, commands: Sequence[Sequence[Any]], *, key: str | None = None) -> list[Any]:
        await self._client.initialize()
        try:
            if self._doubted:
                self._doubted = False
                await self._look_again(commands, key)
            replies = await self._send(commands, key)
            refused = any(isinstance(reply, _REFUSED) for reply in replies)
        except RedisCluster.ERRORS_ALLOW_RETRY:  # a connection that could not be made, or went stale: nothing was sent
            refused, replies = True, []
        if refused or any(isinstance(reply, _LOST) for reply in replies):
            await self._look_again(commands, key)
        return await self._send(commands, key) if refused else replies

    async def _send(self, commands: Sequence[Sequence[Any]], key: str | None) -> list[Any]:
        pipe = self._client.pipeline()
        for command in commands:
            pipe.execute_command(*command, target_nodes=[self._node(key or first_key(command))])
        return await pipe.execute(raise_on_error=False)

    async def _look_again(self, commands: Sequence[Sequence[Any]], key: str | None) -> None:
        """Where the slots are now. Connections to where they were are not used again; one of those is asked last."""
        last = None
        with suppress(SlotNotCoveredError):
            for node in {self._node(key or first_key(command)) for command in commands}:
                last = node.name
                await node.disconnect_free_connections()
        await self._client.nodes_manager.initialize(last_failed_node_name=last)

    def doubt(self) -> None:
        self._doubted = True

    def _node(self, key: str | None) -> ClusterNode:
        if key is None:
            return self._client.get_default_node()
        return self._client.nodes_manager.get_node_from_slot(self._client.keyslot(key))

    async def load(self, code: str) -> None:
        await self._client.initialize()
        await self._client.function_load(code, replace=True)  # redis-py knows that it is for all primaries

    async def pubsub(self) -> PubSub:
        await self._client.initialize()
        # Nodes tell each other what is published, so any will do; another one next time.
        return self._client.pubsub(node=self._client.get_random_node())

    async def info(self) -> list[dict[str, Any]]:
        await self._client.initialize()
        primaries = self._client.get_primaries()
        return [await self._client.info(target_nodes=node) for node in primaries]

    async def aclose(self) -> None:
        await self._client.aclose()


def first_key(command: Sequence[Any]) -> str | None:
    """Of the commands that the store uses."""
    at = 3 if command[0] == "FCALL" else 1
    return str(command[at]) if len(command) > at else None
