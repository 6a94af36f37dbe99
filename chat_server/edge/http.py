"""The HTTP side: the page, its files, health, models, and the probe of the WebSocket's handshake."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import orjson
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chat_server.edge.gate import Gate
from chat_server.engine.fleet import Fleet
from chat_server.errors import ClientError
from chat_server.hub import Hub
from chat_server.settings import Settings

#: The page runs our own files only, shows no picture of other hosts (a model could be made to leak by one), and is in
#: no frame.
_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

_PACKAGE = Path(__file__).parent.parent
#: The page's files: inside the package when installed, beside it in a checkout.
STATIC = _PACKAGE / "static" if (_PACKAGE / "static").is_dir() else _PACKAGE.parent / "static"


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers=headers, media_type="application/json")


def error_response(error: ClientError) -> Response:
    """A refusal, as the API writes it; ``Retry-After`` (seconds) where trying again helps."""
    body = {"error": {"type": error.type, "code": error.code, "message": error.message, "param": error.param}}
    headers = {}
    if error.retry_after_ms is not None or error.status in (429, 503):
        headers["Retry-After"] = str(math.ceil((error.retry_after_ms or 1000) / 1000))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 426:
        headers["Upgrade"] = "websocket"
    return json_response(body, error.status, headers)


class Http:
    """The endpoints that are no WebSocket. ``startup`` gives each engine's line for people while it starts."""

    def __init__(
        self, settings: Settings, gate: Gate, hub: Hub, fleet: Fleet, startup: Callable[[], dict[str, str]]
    ) -> None:
        self._settings = settings
        self._gate = gate
        self._hub = hub
        self._fleet = fleet
        self._startup = startup

    async def page(self, _: Request) -> Response:
        return FileResponse(STATIC / "index.html", headers={"Content-Security-Policy": _PAGE_POLICY})

    async def healthz(self, _: Request) -> Response:
        """The process runs."""
        return json_response({"ok": True})

    async def readyz(self, _: Request) -> Response:
        """Whether sessions can be served and answered: the store is up, an engine is healthy, and we do not stop."""
        lines = self._startup()
        engines = [
            {
                "name": engine.id,
                "state": engine.state,
                "detail": engine.detail if engine.state == "healthy" else lines.get(engine.id) or engine.detail,
                "models": list(engine.models),
            }
            for engine in self._fleet.engines
        ]
        draining = self._gate.closed
        healthy = any(engine.state == "healthy" for engine in self._fleet.engines)
        ready = self._hub.ready and healthy and not draining
        body = {
            "ready": ready,
            "store": "up" if self._hub.ready else "down",
            "draining": draining,
            "engines": engines,
            "simulated": self._settings.simulate > 0,
        }
        return json_response(body, 200 if ready else 503, {"Cache-Control": "no-store"})

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``, as the API has it."""
        try:
            self._gate.identify(request, [])
        except ClientError as error:
            return error_response(error)
        data = [{"id": id, "object": "model", "created": 0, "owned_by": "chat-server"} for id in self._gate.models()]
        return json_response({"object": "list", "data": data})

    async def probe(self, request: Request) -> Response:
        """``GET /v1/realtime`` without ``Upgrade``: why a handshake is refused, for browsers can not see it."""
        protocols = [p.strip() for p in request.headers.get("sec-websocket-protocol", "").split(",") if p.strip()]
        try:
            await self._gate.probe(self._gate.check(request, protocols))
            raise AssertionError("a probe always raises")
        except ClientError as error:
            response = error_response(error)
        response.headers["Cache-Control"] = "no-store"
        return response


class SecurityHeaders:
    """ASGI middleware: the headers that every HTTP answer of ours has, where it does not say otherwise."""

    _HEADERS = (
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cross-origin-opener-policy", b"same-origin"),
        # Ask each time, by ETag: after an upgrade no page runs with modules of two versions.
        (b"cache-control", b"no-cache"),
    )

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                given = {name.lower() for name, _ in headers}
                message["headers"] = [*headers, *(pair for pair in self._HEADERS if pair[0] not in given)]
            await send(message)

        await self._app(scope, receive, send_with_headers)


class WithoutPrefix:
    """ASGI middleware: takes ``--root-path`` off a path that still has it.

    uvicorn expects a proxy that strips the prefix; many do not, and who asks us directly does not either.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        root = scope.get("root_path", "")
        if root and f"{scope['path']}/".startswith(f"{root}{root}/"):
            scope = {**scope, "path": scope["path"].removeprefix(root)}
        await self._app(scope, receive, send)
