"""The machines under the store, through redis-py: one that takes writes, or a cluster of them.

Both do the same things; what follows a failover is here. Deadlines, and errors in our words, are the caller's.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import redis.asyncio as redis_asyncio
from redis.asyncio.client import PubSub
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import ClusterDownError, ReadOnlyError, RedisClusterException, SlotNotCoveredError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from chat_server.store.address import Address

_CONNECT_TIMEOUT_S = 2.0
#: seconds that one daemon of Sentinel has for its answer; then the next is asked.
_SENTINEL_TIMEOUT_S = 1.0
#: seconds after which a connection to a node of a cluster is tried before it is used. (For others redis-py looks.)
_STALE_S = 10.0

#: errors that leave open whether a command was done; those of a cluster that say that it was not. A RuntimeError is
#: what uvloop raises on a connection that the other side has reset.
LOST = (RedisConnectionError, RedisTimeoutError, TimeoutError, RuntimeError)


class _NotSent(RedisConnectionError):
    """A connection could not be made, or had gone stale."""


_REFUSED = (_NotSent, ReadOnlyError, ClusterDownError, SlotNotCoveredError)


class Nodes(Protocol):
    """What ``connect`` gives."""

    async def pipeline(self, commands: Sequence[Sequence[Any]], *, key: str | None = None) -> list[Any]:
        """Send commands in one round trip; the replies, an exception where one failed. Raises if none was answered.

        Each goes to the node that holds its first key; all, over one connection, to the one that holds ``key``.
        """

    def shard(self, key: str) -> str:
        """The name of the server that holds a key: what has the same one is away at the same time."""

    async def load(self, code: str) -> None:
        """Load a library of functions wherever they may be called."""

    async def pubsub(self) -> PubSub:
        """A new subscription."""

    async def info(self) -> list[dict[str, Any]]:
        """What each server that takes writes says of itself."""

    async def aclose(self) -> None:
        """Close all connections."""


def connect(address: Address, *, max_connections: int, timeout_s: float) -> Nodes:
    """A client of the store at this address; it connects when first used. ``timeout_s``: for one answer.

    The caller has at most ``max_connections`` calls under way, and a few subscriptions. Raises TypeError for an option
    in the URL that redis-py does not know, at the latest on the first use.
    """
    options = {
        "max_connections": max_connections + 8,
        "socket_timeout": None,  # it goes by `asyncio.wait_for`, which in Python 3.11 may swallow a cancellation
        "socket_connect_timeout": _CONNECT_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),  # who did not get the answer may not ask again unseen: it may be done already
        **address.options,
    }
    if address.kind == "cluster":
        return Cluster(address.nodes, options, max_connections, timeout_s)
    if address.kind == "server":
        client = redis_asyncio.Redis.from_pool(redis_asyncio.ConnectionPool(**options))
        return Single(client, max_connections, timeout_s)
    daemons = {
        "socket_timeout": _SENTINEL_TIMEOUT_S,
        "socket_connect_timeout": _SENTINEL_TIMEOUT_S,
        "retry": options["retry"],
        **address.sentinel_options,
    }
    sentinel = Daemons(address.nodes, sentinel_kwargs=daemons)  # type: ignore[no-untyped-call]
    pool = SentinelConnectionPool(address.service, sentinel, **options)  # type: ignore[no-untyped-call]
    return Single(redis_asyncio.Redis.from_pool(pool), max_connections, timeout_s, sentinel)


class Daemons(Sentinel):
    """The daemons of Sentinel.

    redis-py puts the one that answered in front, by a place that it found before it asked: of two calls at once one
    would lose a daemon that way. So each works on a list of its own.
    """

    async def discover_master(self, service_name: str) -> Any:
        call = copy.copy(self)
        call.sentinels = list(self.sentinels)
        found = await Sentinel.discover_master(call, service_name)
        self.sentinels = call.sentinels
        return found


class Single:
    """One server that takes writes: the one at the address, or whichever Sentinel says is it."""

    def __init__(
        self, client: redis_asyncio.Redis, room: int, timeout_s: float, sentinel: Sentinel | None = None
    ) -> None:
        self._client = client
        self._room = asyncio.Semaphore(room)
        self._timeout_s = timeout_s
        self._sentinel = sentinel

    async def pipeline(self, commands: Sequence[Sequence[Any]], *, key: str | None = None) -> list[Any]:
        pipe = self._client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        try:
            async with asyncio.timeout(self._timeout_s), self._room:
                return await pipe.execute(raise_on_error=False)
        except LOST:
            await self._drop_idle()
            raise

    async def _drop_idle(self) -> None:
        """Close idle connections: their machine may be gone without a word, and only new ones ask where it is now.

        Not by the pool's ``disconnect``: while that waits, a call may take a connection, which is closed under it.
        """
        for connection in list(self._client.connection_pool._get_free_connections()):
            await connection.disconnect(nowait=True)  # it waits for nothing

    def shard(self, key: str) -> str:
        return ""

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

    def __init__(self, nodes: Sequence[tuple[str, int]], options: dict[str, Any], room: int, timeout_s: float) -> None:
        self._client = RedisCluster(
            startup_nodes=[ClusterNode(*node) for node in nodes],
            health_check_interval=_STALE_S,
            require_full_coverage=False,  # who lies elsewhere goes on
            **options,
        )
        self._timeout_s = timeout_s
        #: room for calls at each node: those that wait for one that is silent take no other's.
        self._room: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(room))
        #: the node that left a call without an answer last: it is the last to be asked where the slots are, or to be
        #: listened to.
        self._silent: str | None = None

    async def pipeline(self, commands: Sequence[Sequence[Any]], *, key: str | None = None) -> list[Any]:
        await self._client.initialize()
        replies = await self._ask(commands, key)
        if any(isinstance(reply, (*LOST, *_REFUSED)) for reply in replies):
            failed = [c for c, r in zip(commands, replies, strict=True) if isinstance(r, Exception)]
            with suppress(*LOST, RedisClusterException):  # nobody knows more: the other replies are good all the same
                async with asyncio.timeout(self._timeout_s / 2):
                    await self._look_again(failed, key)
            refused = [at for at, reply in enumerate(replies) if isinstance(reply, _REFUSED)]
            for at, reply in zip(refused, await self._ask([commands[at] for at in refused], key), strict=True):
                replies[at] = reply
        return replies

    async def _ask(self, commands: Sequence[Sequence[Any]], key: str | None) -> list[Any]:
        """One round trip to each node side by side, so that one that is silent takes no other's answer away."""
        replies: list[Any] = [None] * len(commands)
        places: dict[ClusterNode, list[int]] = {}
        for at, command in enumerate(commands):
            try:
                places.setdefault(self._node(key or first_key(command)), []).append(at)
            except SlotNotCoveredError as error:
                replies[at] = error

        async def ask(node: ClusterNode, part: list[int]) -> None:
            for at, reply in zip(part, await self._ask_node(node, [commands[at] for at in part]), strict=True):
                replies[at] = reply

        await asyncio.gather(*(ask(node, part) for node, part in places.items()))
        return replies

    async def _ask_node(self, node: ClusterNode, commands: Sequence[Sequence[Any]]) -> list[Any]:
        pipe = self._client.pipeline()
        for command in commands:
            pipe.execute_command(*command, target_nodes=[node])
        try:
            async with asyncio.timeout(self._timeout_s), self._room[node.name]:
                return await pipe.execute(raise_on_error=False)
        except (RedisConnectionError, RuntimeError) as error:
            return [_NotSent(*error.args)] * len(commands)
        except (RedisTimeoutError, TimeoutError) as error:
            self._silent = node.name
            return [error] * len(commands)
        except ClusterDownError as error:
            return [error] * len(commands)

    async def _look_again(self, commands: Sequence[Sequence[Any]], key: str | None) -> None:
        """Where the slots are now; connections to where they were are not used again."""
        with suppress(SlotNotCoveredError):
            for node in {self._node(key or first_key(command)) for command in commands}:
                await node.disconnect_free_connections()
        await self._client.nodes_manager.initialize(last_failed_node_name=self._silent)

    def _node(self, key: str | None) -> ClusterNode:
        if key is None:
            return self._client.get_default_node()
        return self._client.nodes_manager.get_node_from_slot(self._client.keyslot(key))

    def shard(self, key: str) -> str:
        try:
            return str(self._node(key).name)
        except SlotNotCoveredError:
            return ""

    async def load(self, code: str) -> None:
        await self._client.initialize()
        await self._client.function_load(code, replace=True)  # redis-py knows that it is for all primaries

    async def pubsub(self) -> PubSub:
        await self._client.initialize()
        # Nodes tell each other what is published, so any will do that answers; another one next time.
        nodes = self._client.get_nodes()
        return self._client.pubsub(node=random.choice([node for node in nodes if node.name != self._silent] or nodes))

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
