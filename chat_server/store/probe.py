"""A first look at a store that somebody else runs: is it there, may we in, is it new enough?"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    InvalidResponse,
    RedisClusterException,
    RedisError,
    ResponseError,
)

from chat_server.errors import StartError, StoreUnavailable
from chat_server.store.address import Address, parse_address
from chat_server.store.nodes import connect

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


async def probe_store(url: Secret) -> StoreFacts:
    """Ask the store who it is.

    Raises StartError if waiting will not help (wrong URL, wrong password, too old), StoreUnavailable if it may.
    """
    address = parse_address(url.reveal())
    place = address.place
    try:
        nodes = connect(address, max_connections=1, timeout_s=DEADLINE_S)
        try:
            async with asyncio.timeout(DEADLINE_S):
                infos = await nodes.info()
        finally:
            await nodes.aclose()
    except TypeError:  # redis-py hands what stands behind the question mark on to its connection
        raise StartError("--redis has an option behind its question mark that is not known.") from None
    except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
        raise _in_words(error, place) from None
    return _facts(address, infos)


def _in_words(error: Exception, place: str) -> StartError | StoreUnavailable:
    """Why the store did not answer; redis-py wraps what went wrong while connecting, some of it twice."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    for cause in causes:
        match cause:
            case InvalidResponse():
                return StartError(f"What answers at {place} is no Redis or Valkey.")
            case BusyLoadingError():
                return StoreUnavailable(f"The store at {place} is still reading its data.")
            case MasterNotFoundError():
                return StoreUnavailable(
                    f"Sentinel at {place} can not be reached, or names no server for this service; look at its name."
                )
            case AuthenticationError() | ResponseError():
                return StartError(f"The store at {place} refuses us; look at user and password in --redis: {cause}")
            case RedisClusterException() if "not enabled" in str(cause):
                return StartError(f"The store at {place} is no cluster: write redis:// in place of redis+cluster://.")
    return StoreUnavailable(f"The store at {place} can not be reached: {str(causes[-1]) or 'no answer'}")


def _facts(address: Address, infos: list[dict[str, Any]]) -> StoreFacts:
    """What the servers said, of all of them together. Raises StartError or StoreUnavailable if they can not be used."""
    info = infos[0]
    server = "Valkey" if "valkey_version" in info else "Redis"
    versions = [str(each.get("valkey_version") or each.get("redis_version", "?")) for each in infos]
    for version in versions:
        major = version.partition(".")[0]
        if major.isdigit() and int(major) < LEAST_MAJOR:
            raise StartError(
                f"The store at {address.place} is {server} {version}; version {LEAST_MAJOR} or later is needed."
            )
    mode = info.get("redis_mode") or info.get("server_mode")
    if mode == "sentinel":
        raise StartError(f"At {address.place} is Sentinel: write redis+sentinel://HOST:PORT/SERVICE, with its service.")
    if mode == "cluster" and address.kind != "cluster":
        raise StartError(f"The store at {address.place} is a node of a cluster: write redis+cluster://HOST:PORT.")
    if info.get("role") == "slave":
        raise StoreUnavailable(f"The store at {address.place} is a replica of another: it takes no writes.")
    return StoreFacts(address.place, server, versions[0], all(each.get("aof_enabled") for each in infos))
