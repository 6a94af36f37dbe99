"""Where the store is: one server, a cluster, or a server that Sentinel names; told by the URL's scheme.

redis-py has URLs for one server. For the others there is a convention among its users, which is taken here:

    redis://, rediss://, unix://                                              as redis-py has them
    redis+cluster://[user:password@]host[:port][,host[:port]...]
    redis+sentinel://[user:password@]host[:port][,host[:port]...]/service[/db]

``rediss+`` in place of ``redis+`` is TLS, with Sentinel for both its daemons and the server. Options of redis-py follow
behind a question mark; ``sentinel_username`` and ``sentinel_password`` are for the daemons.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from redis.asyncio.connection import SSLConnection, parse_url

from chat_server.errors import StartError

#: ports where a URL names none.
_PORTS = {"server": 6379, "cluster": 6379, "sentinel": 26379}

_SEVERAL = re.compile(
    r"(rediss?)\+(cluster|sentinel)://((?:[^/?#]*@)?)([^/?#@]*)/?([^/?#]*)((?:/[^?#]*)?(?:\?.*)?)", re.S
)


@dataclass(frozen=True, slots=True)
class Address:
    """``nodes`` are those to ask first. ``options`` are redis-py's, for a connection to a node that holds data,
    ``sentinel_options`` for one to a daemon of Sentinel; both may hold passwords. ``place`` is fit to be shown.
    """

    kind: Literal["server", "cluster", "sentinel"]
    place: str
    nodes: tuple[tuple[str, int], ...] = ()
    service: str = ""
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    sentinel_options: dict[str, Any] = field(default_factory=dict, repr=False)


def parse_address(url: str) -> Address:
    """What a URL names. Raises StartError, with an example of a right one; it does not show the URL."""
    try:
        return _one(url) if (found := _SEVERAL.fullmatch(url)) is None else _several(found)
    except ValueError:  # an unknown scheme, a port that is no number, a bracket that is not closed
        raise StartError(
            "--redis is no URL of a store. Examples: --redis redis://:PASSWORD@10.0.0.7:6379/0, "
            "redis+cluster://10.0.0.7:6379,10.0.0.8:6379, redis+sentinel://10.0.0.7:26379,10.0.0.8:26379/mymaster"
        ) from None


def _one(url: str) -> Address:
    parts = urlsplit(url)
    options: dict[str, Any] = {**parse_url(url)}
    if parts.scheme == "unix" and parts.path:
        return Address("server", f"unix://{parts.path}", options=options)
    if not parts.hostname or "," in parts.hostname:
        raise ValueError("one host")
    return Address(
        "server", f"{parts.scheme}://{_shown(parts.hostname, parts.port or _PORTS['server'])}", options=options
    )


def _several(found: re.Match[str]) -> Address:
    scheme, kind, user, members, service, rest = found.groups()
    assert kind in ("cluster", "sentinel")
    nodes = tuple(_member(member, _PORTS[kind]) for member in members.split(","))
    if bool(service) != (kind == "sentinel"):
        raise ValueError("a service is what Sentinel has, and what it needs")
    options: dict[str, Any] = {**parse_url(f"{scheme}://{user}host{rest}")}
    del options["host"]
    tls = options.pop("connection_class", None) is SSLConnection
    daemons = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    sentinel_options = {name: value for name, value in options.items() if name.startswith("ssl_")} | daemons
    if tls:
        options["ssl"] = sentinel_options["ssl"] = True
    place = f"{scheme}+{kind}://" + ",".join(_shown(*node) for node in nodes)
    return Address(
        "cluster" if kind == "cluster" else "sentinel",
        f"{place}/{service}" if service else place,
        nodes,
        unquote(service),
        options,
        sentinel_options,
    )


def _member(member: str, port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{member}")
    if not parts.hostname:
        raise ValueError("no host")
    return parts.hostname, parts.port or port


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
