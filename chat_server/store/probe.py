"""A first look at a store that somebody else runs: is it there, may we in, is it new enough?"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import redis.asyncio
import redis.exceptions

from chat_server.errors import StartError, StoreUnavailable

if TYPE_CHECKING:
    from chat_server.settings import Secret

#: our scripts need functions and keys of this version
LEAST_MAJOR = 7
DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """``place`` is the address without credentials."""

    place: str
    server: str
    version: str
    append_only: bool


def place_of(url: Secret) -> str:
    """The address without user, password and query, fit to be shown. Raises StartError if it is none."""
    try:
        parts = urlsplit(url.reveal())
        if parts.scheme == "unix" and parts.path:
            return f"unix://{parts.path}"
        if parts.scheme in ("redis", "rediss") and parts.hostname:
            return f"{parts.scheme}://{parts.hostname}:{parts.port or 6379}"
    except ValueError:  # a port that is no number, a bracket that is not closed
        pass
    raise StartError("--redis is no URL of a store. Example: --redis redis://:PASSWORD@10.0.0.7:6379/0")


async def probe_store(url: Secret) -> StoreFacts:
    """Ask the store who it is.

    Raises StartError if waiting will not help (wrong URL, wrong password, too old), StoreUnavailable if it may.
    """
    place = place_of(url)
    try:
        client = redis.asyncio.Redis.from_url(url.reveal(), decode_responses=True)
    except ValueError as error:
        raise StartError(f"--redis is no URL of a store: {error}") from None
    try:
        async with asyncio.timeout(DEADLINE_S):
            info = await client.info()
    except TypeError:  # redis-py hands what stands behind the question mark on to its connection
        raise StartError("--redis has an option behind its question mark that is not known.") from None
    except redis.exceptions.InvalidResponse:
        raise StartError(f"What answers at {place} is no Redis or Valkey.") from None
    except redis.exceptions.BusyLoadingError:
        raise StoreUnavailable(f"The store at {place} is still reading its data.") from None
    except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
        # redis-py wraps what went wrong while connecting into a ConnectionError
        cause = error.__cause__ or error
        if isinstance(cause, redis.exceptions.AuthenticationError | redis.exceptions.ResponseError):
            raise StartError(
                f"The store at {place} refuses us; look at user and password in --redis: {cause}"
            ) from None
        raise StoreUnavailable(f"The store at {place} can not be reached: {str(error) or 'no answer'}") from None
    finally:
        await client.aclose()
    server = "Valkey" if "valkey_version" in info else "Redis"
    version = str(info.get("valkey_version") or info.get("redis_version", "?"))
    major = version.partition(".")[0]
    if major.isdigit() and int(major) < LEAST_MAJOR:
        raise StartError(f"The store at {place} is {server} {version}; version {LEAST_MAJOR} or later is needed.")
    return StoreFacts(place, server, version, bool(info.get("aof_enabled")))
