"""The HTTP side, over the real server: the page and its files, health, models, and how errors look."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yarl

from chat_server.edge.http import error_response
from chat_server.errors import ClientError
from chat_server.settings import parse_api_keys
from tests.support import ws
from tests.support.server import RunningServer, running_server

pytestmark = [pytest.mark.server, pytest.mark.asyncio(loop_scope="module")]

KEY = "key-of-ann"
KEYS = parse_api_keys([f"ann:{KEY}"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    """One server with a key, behind a prefix, for all tests here."""
    folder = tmp_path_factory.mktemp("http")
    async with running_server(folder, engines=1, api_keys=KEYS, root_path="/chat") as running:
        yield running


async def get(
    server: RunningServer, path: str, *, method: str = "GET", headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], Any]:
    """Status, headers (names in lower case) and body (JSON decoded) of an answer."""
    url = yarl.URL(server.url + path, encoded=True)  # as it stands, dots and all
    async with aiohttp.ClientSession() as http, http.request(method, url, headers=headers) as answer:
        json = answer.content_type == "application/json"
        found = {name.lower(): value for name, value in answer.headers.items()}
        return answer.status, found, await answer.json() if json else await answer.text()


async def test_it_says_that_it_lives_and_is_ready(server: RunningServer) -> None:
    """Without a key, for load balancers; with a line for each engine, for people."""
    assert (await get(server, "/healthz"))[::2] == (200, {"ok": True})
    status, headers, body = await get(server, "/readyz")
    assert status == 200
    assert headers["cache-control"] == "no-store"
    assert (body["ready"], body["store"], body["simulated"]) == (True, "up", False)
    [engine] = body["engines"]
    assert (engine["name"], engine["state"], engine["models"]) == ("engine-1", "healthy", [server.model])
    assert engine["detail"]


async def test_the_models_are_listed_as_the_api_lists_them(server: RunningServer) -> None:
    """For who has a key."""
    status, _, body = await get(server, "/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    assert (status, body["object"]) == (200, "list")
    assert [(model["id"], model["object"]) for model in body["data"]] == [(server.model, "model")]
    status, _, body = await get(server, "/v1/models")
    assert (status, body["error"]["code"]) == (401, "missing_api_key")
    status, _, body = await get(
        server, "/v1/models", headers={"Authorization": f"Bearer {KEY}", "Origin": "https://evil.example"}
    )
    assert (status, body["error"]["code"]) == (403, "origin_not_allowed")


async def test_the_page_runs_our_files_only(server: RunningServer) -> None:
    """Its policy allows nothing inline and nothing of other hosts, and every file that it names is there."""
    status, headers, page = await get(server, "/")
    assert status == 200
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert not re.search(r"<script(?![^>]*\bsrc=)", page), "a script that is inline"
    files = re.findall(r"""(?:src|href)="([^":#]+)\"""", page)
    assert any(name.endswith(".js") for name in files)
    for name in files:
        assert (await get(server, "/" + name.removeprefix("./")))[0] == 200, name


@pytest.mark.parametrize("path", ["/", "/healthz", "/readyz", "/v1/models", "/v1/realtime", "/static/app.js", "/none"])
async def test_every_answer_has_the_headers_that_browsers_want(server: RunningServer, path: str) -> None:
    """No guessing of types, no referrer, no windows of others, and nothing old after an upgrade."""
    _, found, _ = await get(server, path)
    assert found["x-content-type-options"] == "nosniff"
    assert found["referrer-policy"] == "no-referrer"
    assert found["cross-origin-opener-policy"] == "same-origin"
    assert found["cache-control"] in ("no-cache", "no-store")
    assert "server" not in found


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/none", 404),
        ("GET", "/v1/none", 404),
        ("GET", "/static/none.js", 404),
        ("GET", "/static/../settings.py", 404),
        ("GET", "/static/%2e%2e/chat_server/settings.py", 404),
        ("POST", "/v1/realtime", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/", 405),
    ],
)
async def test_every_error_has_the_apis_shape(server: RunningServer, method: str, path: str, status: int) -> None:
    """Type, code and message, whatever was asked for."""
    found, _, body = await get(server, path, method=method)
    assert found == status
    assert body["error"].keys() == {"type", "code", "message", "param"}


@pytest.mark.parametrize(
    "query", ["model=%ff%fe", "session_id=%00", "session_id=%f0%9f%91%8b", "flush=%ff", "history=%ff"]
)
async def test_bytes_that_are_no_text_are_refused_in_order(server: RunningServer, query: str) -> None:
    """A query may hold anything; the refusal is JSON all the same."""
    status, _, body = await get(server, f"/v1/realtime?{query}", headers={"Authorization": f"Bearer {KEY}"})
    assert status in (400, 404)
    assert body["error"]["message"]


async def test_a_prefix_may_be_stripped_by_the_proxy_or_not(server: RunningServer) -> None:
    """Both ways lead to the page, the endpoints and the WebSocket."""
    assert server.url.endswith("/chat")
    bare = server.url.removesuffix("/chat")
    for base in (server.url, bare):
        async with aiohttp.ClientSession() as http:
            for path in ("/", "/healthz", "/static/app.js"):
                async with http.get(base + path) as answer:
                    assert answer.status == 200, base + path
        async with ws.connect(base.replace("http", "ws", 1) + "/v1/realtime", api_key=KEY) as client:
            await client.say("Hello")


async def test_a_refusal_says_when_to_try_again() -> None:
    """In whole seconds, never too early; where trying again does not help it says nothing."""

    def headers(**how: Any) -> dict[str, str]:
        return dict(error_response(ClientError("code", "message", **how)).headers)

    assert headers(status=429, retry_after_ms=1001)["retry-after"] == "2"
    assert headers(status=503)["retry-after"] == "1"
    assert "retry-after" not in headers(status=404)
    assert headers(status=401)["www-authenticate"] == "Bearer"
    assert headers(status=426)["upgrade"] == "websocket"


async def test_a_page_of_an_allowed_origin_may_ask_why_it_was_refused(tmp_path: Path) -> None:
    """With its key in a header, which a browser asks about first, and with the time to wait; others may not."""
    page = "https://app.example.org"
    asks = {"Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "authorization"}
    async with (
        running_server(tmp_path, engines=1, allow_origins=(page,), api_keys=KEYS) as server,
        aiohttp.ClientSession() as http,
    ):
        url = f"{server.url}/v1/realtime"
        async with http.options(url, headers={"Origin": page, **asks}) as answer:
            assert answer.status == 200
            assert answer.headers["Access-Control-Allow-Origin"] == page
            assert "authorization" in answer.headers["Access-Control-Allow-Headers"].lower()
        for given, status in ((KEY, 426), ("wrong", 401)):
            async with http.get(url, headers={"Origin": page, "Authorization": f"Bearer {given}"}) as answer:
                assert answer.status == status
                assert answer.headers["Access-Control-Allow-Origin"] == page
                assert answer.headers["Access-Control-Expose-Headers"] == "Retry-After"
        stranger = {"Origin": "https://other.example.org"}
        async with http.options(url, headers={**stranger, **asks}) as answer:
            assert "Access-Control-Allow-Origin" not in answer.headers
        async with http.get(url, headers={**stranger, "Authorization": f"Bearer {KEY}"}) as answer:
            assert answer.status == 403
            assert "Access-Control-Allow-Origin" not in answer.headers
