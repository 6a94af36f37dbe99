"""Who is let in, who is refused and how: over the real server, by the handshake and by the probe alike."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import aiohttp
import pytest
import pytest_asyncio
import redis.asyncio
import websockets.asyncio.client
from starlette.requests import HTTPConnection
from websockets.exceptions import InvalidStatus

from chat_server.edge.auth import Keys
from chat_server.edge.gate import Gate
from chat_server.engine.fleet import Fleet
from chat_server.engine.vllm import VllmClient, open_http
from chat_server.errors import ClientError
from chat_server.hub import Hub
from chat_server.settings import Limits, Settings, parse_api_keys
from chat_server.store.redis import Store
from chat_server.store.server import Server
from tests.support.server import RunningServer, running_server
from tests.support.ws import WsClient

pytestmark = [pytest.mark.server, pytest.mark.asyncio(loop_scope="module")]

ANN, BOB, CARL, DORA = "key-of-ann", "key-of-bob", "key-of-carl", "key-of-dora"
PAGE = "https://app.example:8443"
LIMITS = Limits(max_connections=4, max_connections_per_user=2, max_sessions_per_user=2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    """One server with keys for all tests here; each user is of one test or harmless to others."""
    keys = parse_api_keys([f"ann:{ANN}", f"bob:{BOB}", f"other/carl:{CARL}", f"dora:{DORA}"])
    folder = tmp_path_factory.mktemp("gate")
    async with running_server(folder, engines=1, api_keys=keys, allow_origins=(PAGE,), limits=LIMITS) as running:
        yield running


@dataclass(frozen=True)
class Refusal:
    """An HTTP answer in place of the upgrade."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        error = json.loads(self.body)["error"]
        assert {"type", "code", "message", "param"} == error.keys()
        assert isinstance(error, dict)
        return error


async def handshake(
    server: RunningServer, query: dict[str, Any], headers: dict[str, str], subprotocols: Sequence[str]
) -> Refusal:
    """The answer to a handshake that has to be refused."""
    try:
        async with websockets.asyncio.client.connect(
            f"{server.ws_url}?{urlencode(query)}",
            additional_headers=headers,
            subprotocols=[websockets.Subprotocol(name) for name in subprotocols] or None,
            proxy=None,
        ):
            raise AssertionError("the handshake was accepted")
    except InvalidStatus as refusal:
        response = refusal.response
        return Refusal(response.status_code, _lower(response.headers.raw_items()), bytes(response.body or b""))


async def probe(
    server: RunningServer, query: dict[str, Any], headers: dict[str, str], subprotocols: Sequence[str] = ()
) -> Refusal:
    """The answer to the same URL without ``Upgrade``."""
    if subprotocols:
        headers = {**headers, "Sec-WebSocket-Protocol": ", ".join(subprotocols)}
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{server.url}/v1/realtime?{urlencode(query)}", headers=headers) as answer,
    ):
        return Refusal(answer.status, _lower(answer.headers.items()), await answer.read())


async def refused(
    server: RunningServer,
    *,
    key: str | None = ANN,
    headers: dict[str, str] | None = None,
    subprotocols: Sequence[str] = (),
    **query: Any,
) -> Refusal:
    """How a handshake is refused; the probe must answer the very same."""
    headers = dict(headers or {})
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    by_handshake = await handshake(server, query, headers, subprotocols)
    by_probe = await probe(server, query, headers, subprotocols)
    assert (by_handshake.status, by_handshake.body) == (by_probe.status, by_probe.body)
    for name in ("retry-after", "www-authenticate", "content-type"):
        assert by_handshake.headers.get(name) == by_probe.headers.get(name), name
    return by_handshake


@asynccontextmanager
async def let_in_soon(server: RunningServer, key: str) -> AsyncIterator[WsClient]:
    """Connect when there is room: a place is free as soon as the server has noticed that a connection is gone."""
    async with asyncio.timeout(5):
        while (await probe(server, {}, {"Authorization": f"Bearer {key}"})).status != 426:
            await asyncio.sleep(0.01)
    async with server.connect(api_key=key) as client:
        yield client


def _lower(items: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in items}


# --- who


async def test_a_caller_without_a_key_is_refused(server: RunningServer) -> None:
    """401 says which scheme is wanted, so that a person knows what to send."""
    refusal = await refused(server, key=None)
    assert (refusal.status, refusal.error["code"]) == (401, "missing_api_key")
    assert refusal.headers["www-authenticate"] == "Bearer"


async def test_a_wrong_key_is_refused_wherever_it_stands(server: RunningServer) -> None:
    """Header and subprotocol give the same answer, and a wrong header is not rescued by a right subprotocol."""
    by_header = await refused(server, key="wrong")
    by_protocol = await refused(server, key=None, subprotocols=["realtime", "openai-insecure-api-key.wrong"])
    both = await refused(server, key="wrong", subprotocols=["realtime", f"openai-insecure-api-key.{ANN}"])
    assert (by_header.status, by_header.error["code"]) == (401, "invalid_api_key")
    assert by_header.body == by_protocol.body == both.body


async def test_a_key_in_the_query_does_not_count(server: RunningServer) -> None:
    """Queries stand in logs and histories, so a credential there is as good as none."""
    refusal = await refused(server, key=None, api_key=ANN, token=ANN, authorization=f"Bearer {ANN}")
    assert (refusal.status, refusal.error["code"]) == (401, "missing_api_key")


@pytest.mark.parametrize(
    ("offered", "selected"),
    [
        (["realtime", f"openai-insecure-api-key.{ANN}"], "realtime"),
        ([f"openai-insecure-api-key.{ANN}", "openai-beta.realtime-v1", "realtime"], "realtime"),
        ([f"openai-insecure-api-key.{ANN}"], None),
    ],
)
async def test_a_browser_brings_its_key_as_a_subprotocol(
    server: RunningServer, offered: list[str], selected: str | None
) -> None:
    """Of what is offered the server selects ``realtime`` and never says the key back."""
    async with server.connect(api_key=None, subprotocols=offered) as client:
        assert client.connection.subprotocol == selected


async def test_no_subprotocol_is_selected_that_was_not_offered(server: RunningServer) -> None:
    """A client that offers none would have to fail the connection (RFC 6455, 4.1)."""
    async with server.connect(api_key=ANN) as client:
        assert client.connection.subprotocol is None


# --- from where


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://app.example:8443", "https://app.example", "null", "https://app.example."]
)
async def test_a_page_of_another_origin_is_refused(server: RunningServer, origin: str) -> None:
    """Scheme, host and port must all be as allowed, whatever key the page has."""
    refusal = await refused(server, headers={"Origin": origin})
    assert (refusal.status, refusal.error["code"]) == (403, "origin_not_allowed")
    assert "access-control-allow-origin" not in refusal.headers


async def test_allowed_origins_and_our_own_are_let_in(server: RunningServer) -> None:
    """The operator's pages, and the page that this server serves."""
    for origin in (PAGE, server.url):
        async with server.connect(api_key=ANN, origin=origin):
            pass


async def test_an_allowed_page_may_read_the_probe(server: RunningServer) -> None:
    """Else its script would see a refusal as an opaque network error, which is what the probe is for."""
    answer = await probe(server, {}, {"Origin": PAGE, "Authorization": "Bearer wrong"})
    assert answer.status == 401
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["cache-control"] == "no-store"


# --- what


async def test_an_unknown_model_is_not_found(server: RunningServer) -> None:
    """The answer names what is served."""
    refusal = await refused(server, model="gpt-unknown")
    assert (refusal.status, refusal.error["code"], refusal.error["param"]) == (404, "model_not_found", "model")
    assert server.model in refusal.error["message"]


async def test_a_session_of_somebody_else_is_as_one_that_is_not_there(server: RunningServer) -> None:
    """Byte for byte the same but the id, so that knowing an id tells nothing; other tenants and users alike."""
    async with server.connect(api_key=ANN) as client:
        theirs = client.session["id"]
        nobodys = "sess_" + "0" * 32
        answers = [await refused(server, key=BOB, session_id=id) for id in (theirs, nobodys)]
        answers += [await refused(server, key=CARL, session_id=id) for id in (theirs, nobodys)]
        assert {(a.status, a.error["code"]) for a in answers} == {(404, "session_not_found")}
        assert len({a.body.replace(theirs.encode(), nobodys.encode()) for a in answers}) == 1
        # The owner is not disturbed by those who tried.
        await client.say("Still here?")
    async with server.connect(api_key=ANN, session_id=theirs) as client:
        assert client.events[0]["item_count"] == 1


@pytest.mark.parametrize("session_id", ["", "a b", "x" * 65, "{}", "sess\n", "ü", "*"])
async def test_a_session_id_of_no_kind_is_not_found(server: RunningServer, session_id: str) -> None:
    """What can be no id never reaches the store's keys."""
    refusal = await refused(server, session_id=session_id)
    assert (refusal.status, refusal.error["code"]) == (404, "session_not_found")


@pytest.mark.parametrize(
    ("headers", "query", "param"),
    [
        ({}, {"call_id": "rtc_1"}, None),
        ({}, {"intent": "transcription"}, None),
        ({"OpenAI-Beta": "realtime=v1"}, {}, "OpenAI-Beta"),
        ({"OpenAI-Beta": "Realtime = v1"}, {}, "OpenAI-Beta"),
        ({}, {"flush": "sentence"}, "flush.mode"),
        ({}, {"flush": "word"}, "flush.mode"),
    ],
)
async def test_what_this_server_does_not_speak_is_refused_with_a_reason(
    server: RunningServer, headers: dict[str, str], query: dict[str, str], param: str | None
) -> None:
    """Calls, transcription, the beta's event names, and flush modes that are not there yet."""
    refusal = await refused(server, headers=headers, **query)
    assert (refusal.status, refusal.error["code"], refusal.error["param"]) == (400, "unsupported", param)


@pytest.mark.parametrize("flush", ["", "tokens", "TOKEN"])
async def test_a_flush_mode_of_no_kind_is_refused(server: RunningServer, flush: str) -> None:
    """A misspelt mode must not pass as the default."""
    refusal = await refused(server, flush=flush)
    assert (refusal.status, refusal.error["code"], refusal.error["param"]) == (400, "invalid_value", "flush")


@pytest.mark.parametrize("history", ["0", "-1", "", "ALL", "1.5", "1e3", "10000000000", "٣"])
async def test_a_history_of_no_kind_is_refused(server: RunningServer, history: str) -> None:
    """``history`` is a number from 1 on or ``all``."""
    refusal = await refused(server, history=history)
    assert (refusal.status, refusal.error["code"], refusal.error["param"]) == (400, "invalid_value", "history")


# --- how many


async def test_a_user_has_so_many_connections(server: RunningServer) -> None:
    """One more is 429 with ``Retry-After``; others are let in; a place that gets free can be taken."""
    async with let_in_soon(server, BOB), let_in_soon(server, BOB) as second:
        refusal = await refused(server, key=BOB)
        assert (refusal.status, refusal.error["code"]) == (429, "too_many_connections")
        assert int(refusal.headers["retry-after"]) > 0
        async with server.connect(api_key=ANN):
            pass
        await second.connection.close()
        async with let_in_soon(server, BOB):
            pass


async def test_the_server_has_so_many_connections(server: RunningServer) -> None:
    """One more of anybody is 503 with ``Retry-After``."""
    async with AsyncExitStack() as stack:
        for key in (ANN, ANN, BOB, CARL):
            await stack.enter_async_context(let_in_soon(server, key))
        refusal = await refused(server, key=DORA)
        assert (refusal.status, refusal.error["code"]) == (503, "too_many_connections")
        assert int(refusal.headers["retry-after"]) > 0
    async with let_in_soon(server, DORA):
        pass


async def test_a_user_has_so_many_conversations(server: RunningServer) -> None:
    """One more is 429 with ``Retry-After``, by the probe too; those that are there can be opened."""
    sessions = []
    for _ in range(LIMITS.max_sessions_per_user):
        async with server.connect(api_key=CARL) as client:
            await client.say("Keep this.")
            sessions.append(client.session["id"])
    refusal = await refused(server, key=CARL)
    assert (refusal.status, refusal.error["code"]) == (429, "too_many_sessions")
    assert int(refusal.headers["retry-after"]) > 0
    for session_id in sessions:
        async with server.connect(api_key=CARL, session_id=session_id) as client:
            assert client.events[0]["resumed"] is True


# --- the probe


async def test_the_probe_of_a_handshake_that_would_be_let_in(server: RunningServer) -> None:
    """426 says that all is well but the method; nothing is left behind, neither a session nor a listener."""
    headers = {"Authorization": f"Bearer {DORA}"}
    async with server.connect(api_key=DORA) as client:
        await client.say("Hello")
        session_id = client.session["id"]
    store = redis.asyncio.Redis.from_url(server.redis_url)
    before = {key async for key in store.scan_iter("chat:{*")}
    for query in ({}, {"session_id": session_id}):
        answer = await probe(server, query, headers)
        assert (answer.status, answer.error["code"]) == (426, "upgrade_required")
        assert answer.headers["upgrade"] == "websocket"
    assert {key async for key in store.scan_iter("chat:{*")} == before
    await store.aclose()


async def test_there_is_nothing_to_say_before_an_engine_told_its_models() -> None:
    """503 while no engine was reached yet; with a model that is being loaded, its name is enough."""
    settings = Settings()
    store = Store(Server("redis://127.0.0.1:1"), "replica_1", ttl_s=1, empty_ttl_s=1, max_items=1, max_session_bytes=1)
    hub = Hub(settings, store)
    scope = {"type": "websocket", "scheme": "ws", "path": "/v1/realtime", "query_string": b"", "headers": []}
    async with open_http() as http:
        fleet = Fleet([], VllmClient(http))
        with pytest.raises(ClientError) as refusal:
            Gate(settings, Keys([]), fleet, hub).check(HTTPConnection(scope), [])
        assert (refusal.value.status, refusal.value.code) == (503, "engines_unavailable")
        assert refusal.value.retry_after_ms
        loading = Gate(settings, Keys([]), fleet, hub, loading_model="tiny")
        assert loading.check(HTTPConnection(scope), []).model == "tiny"
    await store.close()
