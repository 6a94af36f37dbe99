"""The server of the Redis protocol under the store: connections, deadlines, errors in our words, our functions.

Any server from version 7 on (the scripts are a function library). Every call has a deadline and raises
StoreUnavailable when the server can not be reached or takes no writes now; whether it was done is then not known.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

import redis.asyncio as redis_asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from chat_server.errors import StoreError, StoreUnavailable
from chat_server.store import keys

#: seconds for one command, and for a connect: a server that takes longer is away.
_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 2.0


def library() -> tuple[str, str]:
    """The prefix of our functions' names, and the code of their library.

    The prefix is made of the code: old and new replicas run side by side, each with its own functions.
    """
    folder = resources.files("chat_server.store") / "lua"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".lua")), key=lambda f: f.name)
    body = "\n".join(f.read_text(encoding="utf-8") for f in files)
    prefix = f"chat_{hashlib.sha256(body.encode()).hexdigest()[:12]}_"
    head = (
        f"#!lua name={prefix}lib\nlocal function register(name, f) redis.register_function('{prefix}' .. name, f) end\n"
    )
    return prefix, head + body


class Server:
    """Our functions and plain commands on one server. ``open`` before anything else, ``close`` at the end."""

    def __init__(self, url: str, *, max_connections: int = 64) -> None:
        self._prefix, self._code = library()
        self._redis: redis_asyncio.Redis = redis_asyncio.Redis.from_pool(
            redis_asyncio.BlockingConnectionPool.from_url(
                url,
                max_connections=max_connections,
                timeout=_TIMEOUT_S,
                socket_timeout=None,  # see _translated
                socket_connect_timeout=_CONNECT_TIMEOUT_S,
                retry=Retry(NoBackoff(), 1),  # a connection that went stale is replaced without a word
                retry_on_error=[RedisConnectionError],
            )
        )

    async def open(self) -> None:
        """Load the functions. Raises StoreUnavailable, or StoreError if the server is too old for them."""
        async with _translated():
            try:
                await self._load()
            except ResponseError as error:
                raise StoreError(
                    f"The store does not take our functions ({error}). Redis or Valkey from version 7 on is needed."
                ) from error

    async def close(self) -> None:
        await self._redis.aclose()

    async def run(self, *command: Any) -> Any:
        """One plain command."""
        async with _translated():
            return await self._redis.execute_command(*command)  # type: ignore[no-untyped-call]

    async def run_many(self, *commands: Sequence[Any]) -> list[Any]:
        """Plain commands in one round trip, without a transaction."""
        async with _translated():
            return await self._pipeline(commands, raise_on_error=True)

    async def call(self, session_id: str, function: str, *args: Any) -> Any:
        """One function over one session's keys; the library is loaded again if the server lost it."""
        command = self._command(session_id, function, *args)
        async with _translated():
            try:
                return await self._redis.execute_command(*command)  # type: ignore[no-untyped-call]
            except ResponseError as error:
                if not _is_unknown_function(error):
                    raise
                await self._load()
                return await self._redis.execute_command(*command)  # type: ignore[no-untyped-call]

    async def call_many(self, calls: Iterable[Sequence[Any]]) -> list[Any]:
        """Calls as of ``call``, in one round trip; they may be done twice.

        One that the server refused is a StoreError among the replies. Raises StoreUnavailable if one of them is to be
        tried again; the others may be done by then.
        """
        commands = [self._command(*call) for call in calls]
        async with _translated():
            replies = await self._pipeline(commands, raise_on_error=False)
            if any(_is_unknown_function(reply) for reply in replies):
                await self._load()
                replies = await self._pipeline(commands, raise_on_error=False)
        ours = [_ours(reply) if isinstance(reply, Exception) else reply for reply in replies]
        for reply in ours:
            if isinstance(reply, StoreUnavailable):
                raise reply
        return ours

    @asynccontextmanager
    async def subscribe(self, channel: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """Hear what is published in a channel, from the moment when the block is entered.

        Raises StoreUnavailable when the subscription breaks.
        """
        subscription = self._redis.pubsub()
        try:
            async with _translated():
                await subscription.subscribe(channel)
                await subscription.get_message(timeout=None)  # the server's word that it holds
            yield self._listen(subscription)
        finally:
            await subscription.aclose()  # type: ignore[no-untyped-call]

    @staticmethod
    async def _listen(subscription: Any) -> AsyncIterator[bytes]:
        async with _translated(deadline=False):
            while True:
                message = await subscription.get_message(timeout=_TIMEOUT_S / 2)
                if message is None:
                    continue
                if message["type"] != "message":  # redis-py subscribed anew: what was said meanwhile is not known
                    raise StoreUnavailable("The subscription broke.")
                yield message["data"]

    def _command(self, session_id: str, function: str, *args: Any) -> Sequence[Any]:
        names = keys.session_keys(session_id)
        return ("FCALL", f"{self._prefix}{function}", len(names), *names, session_id, *args)

    async def _pipeline(self, commands: Iterable[Sequence[Any]], *, raise_on_error: bool) -> list[Any]:
        pipe = self._redis.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        return await pipe.execute(raise_on_error=raise_on_error)

    async def _load(self) -> None:
        await self._redis.function_load(self._code, replace=True)


@asynccontextmanager
async def _translated(*, deadline: bool = True) -> AsyncIterator[None]:
    """redis-py's errors -> ours, and a deadline.

    Not redis-py's own deadline: that one uses ``asyncio.wait_for``, which in Python 3.11 may swallow a cancellation.
    """
    try:
        async with asyncio.timeout(_TIMEOUT_S if deadline else None):
            yield
    except (RedisError, OSError, TimeoutError) as error:
        raise _ours(error) from error


def _ours(error: Exception) -> StoreError:
    """redis-py's error in our words: StoreUnavailable if the same call may be taken later."""
    match error:
        case RedisConnectionError() | RedisTimeoutError() | OSError() | TimeoutError():
            return StoreUnavailable(f"The store can not be reached ({type(error).__name__}).")
        case ResponseError() if _passes(error):
            return StoreUnavailable(f"The store can not take writes now ({str(error)[:80]}).")
        case ResponseError():
            return StoreError(f"The store refused a command: {str(error)[:200]}")
        case _:
            return StoreError(f"The store failed: {type(error).__name__}.")


def _passes(error: ResponseError) -> bool:
    """Whether this is the answer of a server that starts, fails over or is full: it will take the same call later."""
    passing = ("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "OOM", "BUSY")
    return str(error).split(" ", 1)[0] in passing or _is_unknown_function(error)


def _is_unknown_function(error: object) -> bool:
    return isinstance(error, ResponseError) and "function not found" in str(error).lower()
