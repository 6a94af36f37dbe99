"""Credentials and origins, as functions over headers."""

from __future__ import annotations

import pytest

from chat_server.core.principal import LOCAL, Principal
from chat_server.edge.auth import Keys, check_origin, credential
from chat_server.errors import ClientError
from chat_server.settings import parse_api_keys

pytestmark = pytest.mark.pure

KEYS = Keys(parse_api_keys(["acme/ann:key-1", "bob:key-2", "key-3"]))


@pytest.mark.parametrize(
    ("key", "owner"),
    [
        ("key-1", Principal("acme", "ann")),
        ("key-2", Principal("default", "bob")),
        ("key-3", Principal("default", "key-3")),
    ],
)
def test_a_key_is_somebodys(key: str, owner: Principal) -> None:
    """Each key has its own user of its own tenant."""
    assert KEYS.required
    assert KEYS.principal(key) == owner


@pytest.mark.parametrize(
    ("key", "code"),
    [(None, "missing_api_key"), ("", "invalid_api_key"), ("key-", "invalid_api_key"), ("KEY-1", "invalid_api_key")],
)
def test_any_other_key_is_nobodys(key: str | None, code: str) -> None:
    """401, with a message that does not repeat what was sent."""
    with pytest.raises(ClientError) as refusal:
        KEYS.principal(key)
    assert (refusal.value.status, refusal.value.code) == (401, code)
    assert refusal.value.type == "authentication_error"
    assert not key or key not in refusal.value.message


def test_keys_are_not_kept_as_they_are() -> None:
    """Only digests are, so that neither a dump nor the timing of a look-up tells one."""
    assert "key-1" not in repr(vars(KEYS))


@pytest.mark.parametrize("key", [None, "anything"])
def test_without_keys_everybody_is_local(key: str | None) -> None:
    """Whatever a client sends: the SDKs always want some key."""
    keys = Keys([])
    assert not keys.required
    assert keys.principal(key) == LOCAL


@pytest.mark.parametrize(
    ("headers", "subprotocols", "found"),
    [
        ({}, [], None),
        ({"authorization": "Bearer abc"}, [], "abc"),
        ({"authorization": "bearer  abc "}, [], "abc"),
        ({"authorization": "Bearer "}, [], None),
        ({"authorization": "Basic abc"}, [], None),
        ({"authorization": "abc"}, [], None),
        ({}, ["realtime", "openai-insecure-api-key.abc"], "abc"),
        ({}, ["openai-insecure-api-key.a.b-c_d~"], "a.b-c_d~"),
        ({}, ["openai-insecure-api-key.abc", "openai-insecure-api-key.def"], "abc"),
        ({}, ["realtime", "openai-organization.x"], None),
        ({"authorization": "Bearer abc"}, ["openai-insecure-api-key.def"], "abc"),
        ({"authorization": "Basic abc"}, ["openai-insecure-api-key.def"], "def"),
    ],
)
def test_a_credential_is_in_the_header_or_among_the_subprotocols(
    headers: dict[str, str], subprotocols: list[str], found: str | None
) -> None:
    """Programs send a header; browsers can not, and use the API's convention."""
    assert credential(headers, subprotocols) == found


@pytest.mark.parametrize(
    ("origin", "host", "scheme"),
    [
        (None, "anything", "ws"),
        ("https://app.example", "chat.example", "wss"),
        ("http://localhost:8000", "localhost:8000", "ws"),
        ("http://127.0.0.1:8000", "127.0.0.1:8000", "http"),
        ("http://[::1]:8000", "[::1]:8000", "ws"),
        ("https://localhost:8000", "localhost:8000", "wss"),
    ],
)
@pytest.mark.parametrize("keys_required", [True, False])
def test_these_pages_may_connect(origin: str | None, host: str, scheme: str, keys_required: bool) -> None:
    """No page at all, one that the operator allowed, and our own on a loopback name, with keys or without."""
    headers = {"host": host, **({} if origin is None else {"origin": origin})}
    check_origin(headers, scheme, ("https://app.example",), keys_required=keys_required)


@pytest.mark.parametrize(
    ("origin", "host", "scheme"),
    [
        ("https://evil.example", "localhost:8000", "ws"),
        ("http://localhost:8001", "localhost:8000", "ws"),
        ("https://localhost:8000", "localhost:8000", "ws"),
        ("http://localhost:8000", "localhost:8000", "wss"),
        ("null", "localhost:8000", "ws"),
        ("", "localhost:8000", "ws"),
        ("https://app.example:8443", "chat.example", "wss"),
        ("http://app.example", "chat.example", "ws"),
        ("https://app.example.evil.example", "chat.example", "wss"),
    ],
)
@pytest.mark.parametrize("keys_required", [True, False])
def test_these_pages_may_not(origin: str, host: str, scheme: str, keys_required: bool) -> None:
    """Scheme, host and port must all be right."""
    with pytest.raises(ClientError) as refusal:
        check_origin({"host": host, "origin": origin}, scheme, ("https://app.example",), keys_required=keys_required)
    assert (refusal.value.status, refusal.value.code) == (403, "origin_not_allowed")


@pytest.mark.parametrize("host", ["chat.example", "10.0.0.7:8000", "localhost.evil.example"])
def test_without_keys_our_own_name_must_be_a_loopback_one(host: str) -> None:
    """A name of somebody else's can be made to point here (DNS rebinding); with keys its page would have none."""
    headers = {"host": host, "origin": f"http://{host}"}
    check_origin(headers, "ws", (), keys_required=True)
    with pytest.raises(ClientError):
        check_origin(headers, "ws", (), keys_required=False)
