"""The server of the Redis protocol under the store: connections, deadlines, errors in our words, our functions.

Any server from version 7 on (the scripts are a function library). Every call has a deadline and raises
StoreUnavailable when the server can not be reached or takes no writes now; whether it was done is then not known.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from importlib import resources
from typing import Any

from redis.asyncio.client import PubSub
from redis.exceptions import RedisClusterException, RedisError, ResponseError

from chat_server.errors import StoreError, StoreUnavailable
from chat_server.store import keys
from chat_server.store.address import parse_address
from chat_server.store.nodes import LOST, connect

log = logging.getLogger(__name__)

#: seconds for one call: a server that takes longer is away. So much of it one answer may take: the rest is for finding
#: out who is there in place of a machine that does not answer.
_TIMEOUT_S = 5.0
_ANSWER_SHARE = 0.6
#: milliseconds that replicas have to follow a durable call.
_WAIT_MS = 1000
#: first words of the answers of a server that starts, fails over or is full: it will take the same call later.
_PASSING = frozenset(
    {
        *("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "MOVED", "ASK"),
        *("OOM", "MISCONF", "NOREPLICAS", "BUSY", "UNBLOCKED"),
    }
)


def library() -> tuple[str, str]:
    """The prefix of our functions' names, and the code of their library.

    The prefix is made of the code: old and new replicas run side by side, each with its own functions.
    """
    folder = resources.files("chat_server.store") / "lua"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".lua")), key=lambda f: f.name)
    body = "\n".join(f.read_text(encoding="utf-8") for f in files)
    prefix = f"chat_{hashlib.sha256(body.encode()).hexdigest()[:12]}_"
    head = (
        f"#!lua name={prefix}lib\nlocal function register(name, f, flags) redis.register_function("
        f"{{function_name = '{prefix}' .. name, callback = f, flags = flags or {{}}}}) end\n"
    )
    return prefix, head + body


class Server:
    """Our functions and plain commands at one address. ``open`` before anything else, ``close`` at the end.

    ``wait_replicas``: how many replicas of the server must have a durable call's write before it counts as done.
    """

    def __init__(self, url: str, *, max_connections: int = 64, wait_replicas: int = 0) -> None:
        self._prefix, self._code = library()
        self._wait_replicas = wait_replicas
        self._nodes = connect(parse_address(url), max_connections=max_connections, timeout_s=_TIMEOUT_S * _ANSWER_SHARE)
        self._loads = asyncio.Lock()
        #: servers with too few replicas that follow: it is said once.
        self._alone: set[str] = set()
        self._closed = False

    async def open(self) -> None:
        """Load the functions. Raises StoreUnavailable, or StoreError if the server is too old for them."""
        async with self._calling():
            try:
                await self._load()
            except ResponseError as error:
                if _passes(error):
                    raise
                raise StoreError(
                    f"The store does not take our functions ({error}). Redis or Valkey from version 7 on is needed."
                ) from error

    async def close(self) -> None:
        """Close all connections; a call that comes later finds the store away."""
        self._closed = True
        await self._nodes.aclose()

    def shard(self, key: str) -> str:
        """The server that holds a key, by name: what has the same one is away at the same time."""
        return self._nodes.shard(key)

    async def run(self, *command: Any) -> Any:
        """One plain command."""
        [reply] = await self.run_many(command)
        return reply

    async def run_many(self, *commands: Sequence[Any], durable: str | None = None) -> list[Any]:
        """Plain commands in one round trip, not in a transaction; they may be done twice.

        ``durable``: a key that lies with all theirs; as of ``call``.
        """
        waits = self._waits(durable) if durable is not None else []
        async with self._calling():
            replies = _raised(await self._nodes.pipeline([*commands, *waits], key=durable))
        if durable is not None and waits:
            self._check_followers(durable, replies[-1])
        return replies[: len(commands)]

    async def call(self, session_id: str, function: str, *args: Any, durable: bool = False) -> Any:
        """One function over one session's keys; it may be done twice.

        The library is loaded again if the server lost it. A durable call must outlive the loss of a machine: raises
        StoreUnavailable if too few replicas follow.
        """
        commands = [self._command(session_id, function, *args)]
        key = str(commands[0][3])
        waits = self._waits(key) if durable else []
        async with self._calling():
            replies = _raised(await self._with_library([*commands, *waits], key=key))
        if waits:
            self._check_followers(key, replies[-1])
        return replies[0]

    def _waits(self, key: str) -> list[Sequence[Any]]:
        if not self._wait_replicas:
            return []
        # Told twice, a function writes nothing, and a connection's wait is for what it wrote itself: the SET is.
        return [("SET", f"{key}:waited", 1, "PX", 1), ("WAIT", self._wait_replicas, _WAIT_MS)]

    def _check_followers(self, key: str, followers: int) -> None:
        server = self._nodes.shard(key)
        if followers >= self._wait_replicas:
            self._alone.discard(server)
            return
        if server not in self._alone:
            self._alone.add(server)
            log.warning("The store %s has too few replicas that follow (%d): answers wait for them", server, followers)
        raise StoreUnavailable(f"The store has too few replicas that follow ({followers}).")

    async def call_many(self, calls: Iterable[Sequence[Any]]) -> list[Any]:
        """Calls as of ``call``, in one round trip.

        One that failed is a StoreError among the replies: of several servers one may be away. Raises StoreUnavailable
        if none answered in time.
        """
        async with self._calling():
            replies = await self._with_library([self._command(*call) for call in calls])
        return [_ours(reply) if isinstance(reply, Exception) else reply for reply in replies]

    @asynccontextmanager
    async def subscribe(self, channel: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """Hear what is published in a channel, from the moment when the block is entered.

        Raises StoreUnavailable when the subscription breaks.
        """
        async with AsyncExitStack() as stack:
            async with self._calling():
                subscription = await self._nodes.pubsub()
                stack.push_async_callback(subscription.aclose)
                await subscription.subscribe(channel)
                await subscription.get_message(timeout=None)  # the server's word that it holds
            yield self._listen(subscription)

    async def _listen(self, subscription: PubSub) -> AsyncIterator[bytes]:
        asked = False
        with _translated():
            while True:
                message = await subscription.get_message(timeout=_TIMEOUT_S / 2)
                if message is not None and message["type"] == "message":
                    yield message["data"]
                elif message is None and asked:
                    raise StoreUnavailable("The subscription is silent.")
                elif message is None:
                    await subscription.ping()
                elif message["type"] != "pong":  # redis-py subscribed anew: what was said meanwhile is not known
                    raise StoreUnavailable("The subscription broke.")
                asked = message is None

    def _command(self, session_id: str, function: str, *args: Any) -> Sequence[Any]:
        names = keys.session_keys(session_id)
        return ("FCALL", f"{self._prefix}{function}", len(names), *names, session_id, *args)

    async def _with_library(self, commands: Sequence[Sequence[Any]], *, key: str | None = None) -> list[Any]:
        replies = await self._nodes.pipeline(commands, key=key)
        if any(_is_unknown_function(reply) for reply in replies):
            await self._load()
            replies = await self._nodes.pipeline(commands, key=key)
        return replies

    async def _load(self) -> None:
        async with self._loads:  # it takes connections beside those that calls have room for
            await self._nodes.load(self._code)

    @asynccontextmanager
    async def _calling(self) -> AsyncIterator[None]:
        """A deadline for all of one call, errors in our words."""
        if self._closed:
            raise StoreUnavailable("The store is closed.")
        with _translated():
            async with asyncio.timeout(_TIMEOUT_S):
                yield


@contextmanager
def _translated() -> Iterator[None]:
    """redis-py's errors -> ours."""
    try:
        yield
    except (*LOST, RedisError, RedisClusterException, OSError) as error:
        raise _ours(error) from error


def _ours(error: Exception) -> StoreError:
    """redis-py's error in our words: StoreUnavailable if the same call may be taken later."""
    if isinstance(error, (*LOST, RedisClusterException, OSError)):
        return StoreUnavailable(f"The store can not be reached ({type(error).__name__}).")
    if not isinstance(error, ResponseError):
        return StoreError(f"The store failed: {type(error).__name__}.")
    if _passes(error):
        return StoreUnavailable(f"The store can not take writes now ({str(error)[:80]}).")
    return StoreError(f"The store refused a command: {str(error)[:200]}")


def _passes(error: ResponseError) -> bool:
    """Whether the same call may be taken later."""
    code = error.status_code or str(error).split(" ", 1)[0]  # redis-py takes the codes that it knows off the message
    return code in _PASSING or _is_unknown_function(error)


def _is_unknown_function(error: object) -> bool:
    return isinstance(error, ResponseError) and "function not found" in str(error).lower()


def _raised(replies: list[Any]) -> list[Any]:
    """The replies, if none is an error; else the first that is one is raised."""
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies
