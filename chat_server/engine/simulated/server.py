"""vLLM's HTTP API (0.32) over a ``SimulatedEngine``, and a way to make it fail.

``POST /simulate/faults`` takes a fault or a list of them, ``DELETE`` clears all; ``GET /simulate`` tells what was
counted, and in ``unfinished`` the ``X-Request-Id`` of each request that is here.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
import uuid
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from chat_server.engine.simulated import text
from chat_server.engine.simulated.engine import BadRequest, EngineDied, Plan, Run, SimulatedEngine
from chat_server.engine.simulated.options import Fault, SimulatedOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

MAX_BODY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class SimulatedServer:
    """A simulated engine that listens. ``die()`` ends it as a killed process ends, which sets ``died``."""

    url: str
    engine: SimulatedEngine
    die: Callable[[], None]
    died: asyncio.Event


@asynccontextmanager
async def simulated_server(
    options: SimulatedOptions, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[SimulatedServer]:
    """A simulated engine in this process, while the block runs; port 0 takes a free one. Raises OSError."""
    handlers = _Handlers(SimulatedEngine(options))
    # handler_cancellation: a client that leaves ends its handler at once, as it aborts the request on vLLM.
    runner = web.AppRunner(handlers.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        connections = runner.server
        assert connections is not None  # setup() made it
        # Not a TCPSite: the fault ``die`` has to close the listening socket without a word to the connections.
        listener = await asyncio.get_running_loop().create_server(connections, host, port, backlog=1024)
        handlers.on_death = lambda: _cut_off(listener, connections)
        try:
            name = f"[{host}]" if ":" in host else host
            url = f"http://{name}:{listener.sockets[0].getsockname()[1]}"
            yield SimulatedServer(url, handlers.engine, handlers.die, handlers.died)
        finally:
            _cut_off(listener, connections)
    finally:
        await runner.cleanup()


async def serve_simulated(
    options: SimulatedOptions, host: str, port: int, *, on_listening: Callable[[str], None] = lambda url: None
) -> None:
    """Serve until cancelled. ``on_listening`` gets the URL. Raises EngineDied on the fault ``die``, OSError."""
    async with simulated_server(options, host, port) as server:
        on_listening(server.url)
        await server.died.wait()
        raise EngineDied("the simulated engine died, as it was told to")


class _Handlers:
    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine
        self.died = asyncio.Event()
        self.on_death: Callable[[], None] = lambda: None

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._errors])
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/simulate", self.simulate)
        app.router.add_post("/simulate/faults", self.set_faults)
        app.router.add_delete("/simulate/faults", self.clear_faults)
        return app

    @web.middleware
    async def _errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        key = self.engine.options.api_key
        if key and request.path.startswith("/v1") and request.headers.get("Authorization") != f"Bearer {key}":
            return _json({"error": "Unauthorized"}, 401)
        try:
            return await handler(request)
        except BadRequest as error:
            return _json(error.body, error.status)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        if fault := self.engine.fault("status"):
            raise BadRequest(fault.message, status=fault.status, type="SimulatedFault")
        plan = self.engine.plan(body)
        answer = _Answer(self, request, body, plan)
        with self.engine.admit(plan, request.headers.get("X-Request-Id", "")) as run:
            if body.get("stream"):
                return await answer.stream(run)
            return await answer.whole(run)

    async def models(self, _request: web.Request) -> web.StreamResponse:
        options = self.engine.options
        card = {
            "id": options.model,
            "object": "model",
            "created": int(self.engine.started),
            "owned_by": "simulated",
            "root": options.model,
            "parent": None,
            "max_model_len": options.max_model_len,
        }
        return _json({"object": "list", "data": [card]})

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        if isinstance(prompt := body.get("prompt"), str):
            tokens = text.tokens(prompt)
        else:
            tokens = text.prompt_tokens(
                self.engine.messages(body),
                continue_final=body.get("continue_final_message") is True,
                generate=body.get("add_generation_prompt", True) is True,
            )
        ids = [text.token_id(token) for token in tokens]
        window = self.engine.options.max_model_len
        return _json({"count": len(ids), "max_model_len": window, "tokens": ids, "token_strs": None})

    async def health(self, _request: web.Request) -> web.StreamResponse:
        fault = self.engine.fault("health")
        return web.Response(status=fault.status if fault else 200)

    async def metrics(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(text=metrics_text(self.engine), content_type="text/plain")

    async def simulate(self, _request: web.Request) -> web.StreamResponse:
        engine = self.engine
        now = {"running": engine.running, "waiting": engine.waiting, "unfinished": engine.unfinished}
        return _json(now | asdict(engine.counters))

    async def set_faults(self, request: web.Request) -> web.StreamResponse:
        try:
            values = orjson.loads(await request.read())
            faults = [Fault.parse(value) for value in (values if isinstance(values, list) else [values])]
        except ValueError as error:
            raise BadRequest(str(error)) from None
        for fault in faults:
            self.engine.add_fault(fault)
        return _json({"faults": len(faults)})

    async def clear_faults(self, _request: web.Request) -> web.StreamResponse:
        self.engine.clear_faults()
        return _json({})

    def die(self) -> None:
        self.on_death()
        self.died.set()


class _Answer:
    """One chat completion on its way to the client."""

    def __init__(self, handlers: _Handlers, request: web.Request, body: dict[str, Any], plan: Plan) -> None:
        self._handlers = handlers
        self._engine = handlers.engine
        self._request = request
        self._plan = plan
        self._id = "chatcmpl-" + (request.headers.get("X-Request-Id") or uuid.uuid4().hex)
        self._created = int(time.time())
        options = body.get("stream_options")
        self._wants_usage = isinstance(options, dict) and options.get("include_usage") is True
        self._fault = self._engine.fault("die", "hang", "cut", "end", "abort", "error")
        # The part of an event that stays the same, so that a token costs one dumps() of its text.
        head = orjson.dumps(self._head("chat.completion.chunk"))[:-1]
        self._before = b"data: " + head + b',"choices":[{"index":0,"delta":{"'
        self._after = b'},"logprobs":null,"finish_reason":null}]}\n\n'

    async def stream(self, run: Run) -> web.StreamResponse:
        """Write the answer as it comes. Cancelled when the client leaves."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(self._request)
        with suppress(ConnectionResetError):  # written a moment after the client left, before we are cancelled
            await self._write(response, run)
        return response

    async def _write(self, response: web.StreamResponse, run: Run) -> None:
        field = self._engine.options.reasoning_field
        async with aclosing(self._engine.write(self._plan, run)) as pieces:
            async for kind, piece in pieces:
                if piece:
                    name = field if kind == "reasoning" else kind
                    delta = name.encode() + b'":' + orjson.dumps("".join(piece))
                else:  # the prompt is computed: only now, as on vLLM
                    delta = b'role":"assistant","content":""'
                await response.write(self._before + delta + self._after)
                if self._fault is not None and run.sent >= self._fault.after_tokens:
                    return await self._fail(self._fault, response, run)
        if self._fault is not None:
            return await self._fail(self._fault, response, run)
        await response.write(self._end(run))
        return await response.write_eof()

    async def whole(self, run: Run) -> web.StreamResponse:
        """The answer in one piece. A fault comes instead of it."""
        plan, fault = self._plan, self._fault
        async with aclosing(self._engine.write(plan, run)) as pieces:
            async for _ in pieces:
                if fault is not None and run.sent >= fault.after_tokens:
                    break
        if fault is not None:
            if fault.kind == "error":
                raise BadRequest(fault.message, status=fault.status, type="SimulatedFault")
            await self._fail(fault, None, run)
        message = {"role": "assistant", "content": "".join(plan.answer)}
        message[self._engine.options.reasoning_field] = "".join(plan.reasoning)
        choice = {"index": 0, "message": message, "logprobs": None, **self._finish()}
        return _json({**self._head("chat.completion"), "choices": [choice], "usage": self._usage(run)})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._engine.options.model}

    def _finish(self) -> dict[str, Any]:
        return {"finish_reason": self._plan.finish_reason, "stop_reason": self._plan.stop_reason}

    def _usage(self, run: Run) -> dict[str, Any]:
        prompt = len(self._plan.prompt)
        # The token that ends an answer counts, as on vLLM, unless a stop string or the bound ended it before.
        ended = self._plan.finish_reason == "stop" and self._plan.stop_reason is None
        written = run.sent + ended
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + written,
            "completion_tokens": written,
            "prompt_tokens_details": {"cached_tokens": run.cached_tokens},
        }

    def _end(self, run: Run, **finish: str) -> bytes:
        head = self._head("chat.completion.chunk")
        choice = {"index": 0, "delta": {"content": ""}, "logprobs": None, **self._finish(), **finish}
        events = [{**head, "choices": [choice]}]
        if self._wants_usage:
            events.append({**head, "choices": [], "usage": self._usage(run)})
        return b"".join(b"data: %s\n\n" % orjson.dumps(event) for event in events) + b"data: [DONE]\n\n"

    async def _fail(self, fault: Fault, response: web.StreamResponse | None, run: Run) -> None:
        """Show ``fault`` on the connection; ``response`` is the stream, if it is one."""
        if fault.kind == "hang":
            await asyncio.Event().wait()  # until the client leaves
        elif fault.kind == "die":
            self._handlers.die()
        elif fault.kind == "cut" or response is None:
            _reset(self._request.transport)
        else:
            if fault.kind == "error":
                error = {"message": fault.message, "type": "SimulatedFault", "param": None, "code": fault.status}
                await response.write(b"data: %s\n\ndata: [DONE]\n\n" % orjson.dumps({"error": error}))
            elif fault.kind == "abort":
                await response.write(self._end(run, finish_reason="abort"))
            await response.write_eof()


def metrics_text(engine: SimulatedEngine) -> str:
    """Prometheus text with vLLM's names, and ``simulated:`` ones of our own."""
    label = f'{{engine="0",model_name="{engine.options.model}"}}'
    counters = engine.counters
    rows = (
        ("gauge", "vllm:num_requests_running", engine.running),
        ("gauge", "vllm:num_requests_waiting", engine.waiting),
        ("gauge", "vllm:kv_cache_usage_perc", engine.cache.usage),
        ("counter", "vllm:prefix_cache_queries_total", counters.cache_queries),
        ("counter", "vllm:prefix_cache_hits_total", counters.cache_hits),
        ("counter", "vllm:generation_tokens_total", counters.generated_tokens),
        ("counter", "simulated:requests_total", counters.requests),
        ("counter", "simulated:finished_total", counters.finished),
        ("counter", "simulated:aborted_total", counters.aborted),
        ("counter", "simulated:refused_total", counters.refused),
    )
    lines = [
        "# TYPE process_start_time_seconds gauge",
        f"process_start_time_seconds {engine.started}",
    ]
    for kind, name, value in rows:
        lines += (f"# TYPE {name.removesuffix('_total')} {kind}", f"{name}{label} {float(value)}")
    return "\n".join(lines) + "\n"


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"1 validation error:\n  {{'type': 'json_invalid', 'msg': '{error}'}}") from None
    if not isinstance(body, dict):
        raise BadRequest("1 validation error:\n  {'type': 'model_attributes_type', 'loc': 'body'}")
    return body


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def _reset(transport: asyncio.BaseTransport | None) -> None:
    """Close a connection by a reset (RST), as a dying host does: no end of the stream, and at once."""
    if not isinstance(transport, asyncio.WriteTransport):
        return
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _cut_off(listener: asyncio.Server, connections: web.Server) -> None:
    """What a killed process leaves: nothing listens, all connections are reset."""
    listener.close()
    for connection in list(connections.connections):
        _reset(connection.transport)
