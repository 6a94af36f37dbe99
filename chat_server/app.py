"""Wires everything together, and nothing else does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles

from chat_server.answers import Answers
from chat_server.commands import Commands
from chat_server.core.ids import new_id
from chat_server.drain import close_s, drain
from chat_server.edge.auth import Keys
from chat_server.edge.gate import Gate
from chat_server.edge.head import MAX_HEAD_BYTES, HttpProtocol
from chat_server.edge.http import STATIC, Http, SecurityHeaders, WithoutPrefix, error_response
from chat_server.edge.realtime import Realtime
from chat_server.edge.sessions import Sessions
from chat_server.edge.socket import socket_protocol
from chat_server.engine.fleet import Fleet
from chat_server.engine.vllm import VllmClient, open_http
from chat_server.errors import ClientError, StartError, StoreError, StoreUnavailable
from chat_server.hub import Hub
from chat_server.restoring import Restorer
from chat_server.settings import EngineAddress, Settings
from chat_server.store.committer import Committer
from chat_server.store.redis import Store
from chat_server.store.server import Server
from chat_server.supervisor import Supervisor
from chat_server.turn import Conductor

log = logging.getLogger(__name__)

#: seconds that connections which can wait do so for store and engines; then they are told what is missing.
_READY_S = 2.0
#: seconds that a store which does not answer may hold up the end.
_LEASE_S = 0.5


async def run_app(
    settings: Settings,
    *,
    redis_url: str,
    engines: Sequence[EngineAddress],
    startup: Callable[[], dict[str, str]],
    on_listening: Callable[[str], None],
    on_ready: Callable[[], None],
    stop: asyncio.Event | None = None,
    sockets: list[socket.socket] | None = None,
) -> None:
    """Serve until ``stop`` is set and what runs has ended (see ``drain.py``), or at once when cancelled.

    Signals are the caller's. ``sockets`` listen already, else the settings say where to. ``startup`` gives each
    engine's line for people while it starts. ``on_listening`` is called with the URL when connections are taken,
    ``on_ready`` once when the store is up and an engine is healthy. A store that is away may come later. Raises
    StoreError if it is there and can not be used.
    """
    api_key = settings.engine_api_key.reveal() if settings.engine_api_key else None
    async with open_http() as http, _open_store(settings, redis_url) as store:
        client = VllmClient(http, api_key)
        replica = Replica(settings, store, Fleet(engines, client), client)
        gate = await _open_gate(settings, replica)
        server = WebServer(_uvicorn_config(settings, _routes(settings, gate, replica, startup)), sockets)

        async def announce() -> None:
            on_listening(_url(settings, await server.address()))
            await replica.wait_ready()
            on_ready()

        async def leave() -> None:
            if stop is not None:
                await stop.wait()
                gate.closed = True
                await drain(replica.hub, replica.answers.hand_over, grace_s=settings.drain_grace_s)
                server.should_exit = True

        try:
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(work) for work in (*replica.works(), announce(), leave())]
                if sockets:  # connections can wait in them for a while: longer than engines that run take to be seen
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(replica.wait_ready(), _READY_S)
                await server.run_until_told()
                for task in background:
                    task.cancel()
        finally:
            with contextlib.suppress(StoreError, TimeoutError):  # it would run out by itself
                await asyncio.wait_for(store.replicas.drop_lease(), _LEASE_S)


class Replica:
    """All of a server between the store and the engines on one side, and the sockets on the other.

    ``works`` must be running.
    """

    def __init__(self, settings: Settings, store: Store, fleet: Fleet, client: VllmClient) -> None:
        limits = settings.limits
        self.fleet = fleet
        self.hub = hub = Hub(settings, store)
        self._committer = committer = Committer(store)
        self.conductor = Conductor(store=store, committer=committer, fleet=fleet, client=client, limits=limits)
        restorer = Restorer(hub=hub, store=store, committer=committer)
        self.answers = Answers(hub=hub, store=store, committer=committer, restorer=restorer, conductor=self.conductor)
        self._supervisor = Supervisor(hub=hub, store=store, answers=self.answers, restorer=restorer, limits=limits)
        self.commands = Commands(hub=hub, store=store, answers=self.answers, restorer=restorer, limits=limits)

    def works(self) -> list[Coroutine[Any, Any, None]]:
        """What goes on until it is cancelled."""
        return [self.fleet.run(), self._committer.run(), self.hub.run(), self._supervisor.run()]

    async def wait_ready(self) -> None:
        """Until the store is up and an engine is healthy, for the first time. The caller sets the deadline."""
        await self.fleet.wait_healthy(None, None)
        await self.hub.wait_ready()


class WebServer(uvicorn.Server):
    """uvicorn's server, which says where it listens, and minds no signals, but ``should_exit`` and its task's end."""

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket] | None = None) -> None:
        super().__init__(config)
        self._sockets = sockets
        self._listening: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:  # uvicorn's way of saying that the port is taken; out of a task it ends the loop
            raise StartError(f"Can not listen on {self.config.host}:{self.config.port}.") from None
        if self.started:
            self._listening.set_result(self.servers[0].sockets[0].getsockname()[:2])

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # whoever runs us takes them: there is more to stop than a server

    async def address(self) -> tuple[str, int]:
        """Host and port, once connections are taken."""
        return await asyncio.shield(self._listening)

    async def run_until_told(self) -> None:
        """Serve until told to exit, or the end of the task. Raises StartError if it can not listen."""
        serving = asyncio.create_task(self.serve(self._sockets))
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:
            self.should_exit = True
            await serving
            raise


@asynccontextmanager
async def _open_store(settings: Settings, redis_url: str) -> AsyncIterator[Store]:
    store = Store(
        Server(redis_url, wait_replicas=settings.redis_wait_replicas),
        new_id("replica"),
        ttl_s=settings.session_ttl_s,
        empty_ttl_s=settings.empty_session_ttl_s,
        max_items=settings.limits.max_items,
        max_session_bytes=settings.limits.max_session_bytes,
    )
    try:
        try:
            await store.open()
        except StoreUnavailable as error:
            log.warning("%s Sessions are served when it is there.", error)
        yield store
    finally:
        await store.close()


async def _open_gate(settings: Settings, replica: Replica) -> Gate:
    local = not (settings.engines or settings.simulate)
    loading = await asyncio.to_thread(settings.model_name) if local else None
    return Gate(settings, Keys(settings.api_keys), replica.fleet, replica.hub, loading_model=loading)


def _routes(settings: Settings, gate: Gate, replica: Replica, startup: Callable[[], dict[str, str]]) -> Starlette:
    realtime = Realtime(settings, gate, replica.hub, replica.commands, replica.conductor)
    sessions = Sessions(gate, replica.hub, replica.commands)
    http = Http(settings, gate, replica.hub, replica.fleet, startup)
    return Starlette(
        routes=[
            WebSocketRoute("/v1/realtime", realtime.serve),
            Route("/v1/realtime", http.probe),
            Route("/v1/models", http.models),
            Route("/v1/sessions/{session_id}", sessions.delete, methods=["DELETE"]),
            Route("/healthz", http.healthz),
            Route("/readyz", http.readyz),
            Route("/", http.page),
            Mount("/static", StaticFiles(directory=STATIC, check_dir=False)),
        ],
        middleware=[
            Middleware(WithoutPrefix),
            Middleware(SecurityHeaders),
            Middleware(
                CORSMiddleware,
                allow_origins=settings.allow_origins,
                allow_methods=["GET", "DELETE"],
                allow_headers=["Authorization"],
                expose_headers=["Retry-After"],
            ),
        ],
        exception_handlers={HTTPException: _http_error, Exception: _fault},
    )


def _uvicorn_config(settings: Settings, app: Starlette) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=HttpProtocol,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        ws=socket_protocol(settings.limits.socket_buffer_bytes),
        ws_max_size=settings.limits.max_frame_bytes,
        ws_ping_interval=settings.ping_s,
        ws_ping_timeout=settings.ping_s,
        ws_per_message_deflate=False,  # three times the memory per connection
        root_path=settings.root_path,
        forwarded_allow_ips=settings.forwarded_allow_ips,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        access_log=False,
        server_header=False,
        log_config=None,
        lifespan="off",
        # Connections were told to go before; it is for those that do not. It may be a part of a second.
        timeout_graceful_shutdown=close_s(settings.drain_grace_s),  # type: ignore[arg-type]
    )


def _url(settings: Settings, address: tuple[str, int]) -> str:
    host, port = address
    scheme = "https" if settings.tls_cert else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{settings.root_path}"


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = "not_found" if error.status_code == 404 else "invalid_request"
    return error_response(ClientError(code, str(error.detail), status=error.status_code))


async def _fault(_: Request, error: Exception) -> Response:
    return error_response(ClientError("internal_error", "The server failed.", type="server_error", status=500))
