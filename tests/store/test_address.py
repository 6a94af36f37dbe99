"""URLs of stores: what each form means, and what is none."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio.connection import SSLConnection

from chat_server.errors import StartError
from chat_server.store.address import parse_address

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://store", "redis://store:6379"),
        ("rediss://user:pass@store:7000/2?x=y", "rediss://store:7000"),
        ("unix:///run/valkey.sock?db=1", "unix:///run/valkey.sock"),
        ("redis+cluster://:pass@a,b:7001", "redis+cluster://a:6379,b:7001"),
        ("rediss+sentinel://:pass@[::1]:7000,b/main/2", "rediss+sentinel://[::1]:7000,b:26379/main"),
    ],
)
def test_a_place_shows_no_secret(url: str, place: str) -> None:
    """What is shown of a URL has neither user nor password."""
    address = parse_address(url)
    assert address.place == place
    assert "pass" not in repr(address)


@pytest.mark.parametrize(
    "url",
    [
        *("store:6379", "http://store", "redis://", "redis://store:many", "redis://[::1", "", "redis://a,b:1"),
        *("redis+cluster://", "redis+cluster://a,,b", "redis+cluster://a/main", "redis+cluster://a:x,b"),
        *("redis+sentinel://a", "redis+sentinel:///main", "redis+other://a", "unix+sentinel://a/main"),
    ],
)
def test_what_is_no_store_is_said_so(url: str) -> None:
    """A wrong URL gives examples of right ones, and is not shown: it may hold a password."""
    with pytest.raises(StartError, match="Examples: --redis") as error:
        parse_address(url)
    assert len(url) < 17 or url not in str(error.value)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("redis+cluster://ann:p%40ss@a:1,b", {"username": "ann", "password": "p@ss"}),
        ("rediss+cluster://a:1,b?ssl_ca_certs=/ca.pem", {"ssl": True, "ssl_ca_certs": "/ca.pem"}),
    ],
)
def test_a_cluster_has_several_nodes(url: str, options: dict[str, Any]) -> None:
    """Any of them will do to find the others; credentials and TLS hold for all."""
    address = parse_address(url)
    assert (address.kind, address.nodes, address.options) == ("cluster", (("a", 1), ("b", 6379)), options)


def test_sentinel_has_a_service() -> None:
    """The daemons, with credentials of their own; the server that they name, with its database."""
    address = parse_address(
        "rediss+sentinel://ann:pass@a:1,[::1]/my%20main/3?ssl_ca_certs=/ca.pem&sentinel_password=other"
    )
    assert (address.kind, address.service, address.nodes) == ("sentinel", "my main", (("a", 1), ("::1", 26379)))
    tls = {"ssl": True, "ssl_ca_certs": "/ca.pem"}
    assert address.options == {"username": "ann", "password": "pass", "db": 3, **tls}
    assert address.sentinel_options == {"username": None, "password": "other", **tls}


def test_one_server_is_as_redis_py_has_it() -> None:
    """All of its URLs and options."""
    address = parse_address("rediss://ann:pass@a/2?ssl_ca_certs=/ca.pem")
    assert address.kind == "server"
    assert address.options == {
        "host": "a",
        "db": 2,
        "username": "ann",
        "password": "pass",
        "connection_class": SSLConnection,
        "ssl_ca_certs": "/ca.pem",
    }
