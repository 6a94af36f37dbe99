"""Our server for tests: in this process with simulated engines and a real Valkey, or as the process a user starts."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import redis.asyncio

from chat_server.app import run_app
from chat_server.engine.simulated import SimulatedOptions, SimulatedServer, simulated_server
from chat_server.settings import EngineAddress, Secret, Settings
from chat_server.store.embedded import EmbeddedValkey
from chat_server.store.keys import session_keys
from tests.support import ws

#: Quick enough for a test, slow enough that an answer comes in many pieces.
QUICK = SimulatedOptions(tokens_per_s=2000.0, first_token_s=0.005, words=40, block_size=16)

#: Seconds in which a server must be ready; it takes a fraction of one.
READY_S = 10.0


class RunningServer:
    """Our server in this process. ``engines`` are the simulated ones, to give them faults and see what reached them."""

    def __init__(self, settings: Settings, redis_url: str, engines: Sequence[SimulatedServer] = ()) -> None:
        self.settings = settings
        self.redis_url = redis_url
        self.engines = engines
        self.url = ""
        self._app: asyncio.Task[None] | None = None
        self._told_to_stop = asyncio.Event()

    @property
    def ws_url(self) -> str:
        return self.url.replace("http", "ws", 1) + "/v1/realtime"

    @property
    def model(self) -> str:
        return self.engines[0].engine.options.model

    def connect(self, **query: Any) -> AbstractAsyncContextManager[ws.WsClient]:
        """A WebSocket client on ``/v1/realtime`` with this query; arguments as for ``ws.connect``."""
        return ws.connect(self.ws_url, **query)

    async def owner(self, session_id: str, other_than: str = "") -> str:
        """The replica that makes the session's answer, as the store has it; waits until somebody else does."""
        async with (
            asyncio.timeout(READY_S),
            redis.asyncio.Redis.from_url(self.redis_url, decode_responses=True) as store,
        ):
            key = next(key for key in session_keys(session_id) if key.endswith(":response"))
            while (replica := str(await store.hget(key, "replica") or "")) in ("", other_than):
                await asyncio.sleep(0.02)
            return replica

    async def start(self) -> None:
        """Start and wait until it is ready; after ``stop`` on the same port, with the same store and engines."""
        listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        ready = asyncio.Event()
        self._told_to_stop.clear()
        self._app = asyncio.create_task(
            run_app(
                self.settings,
                redis_url=self.redis_url,
                engines=self.settings.engines,
                startup=dict,
                on_listening=listening.set_result,
                on_ready=ready.set,
                stop=self._told_to_stop,
            )
        )
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({self._app, waiting}, timeout=READY_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not ready.is_set():
            await self.stop()
            raise AssertionError(f"the server was not ready within {READY_S} s")
        self.url = listening.result()
        self.settings = replace(self.settings, port=urlsplit(self.url).port or 0)

    async def ready(self) -> None:
        """Wait until it serves sessions, again."""
        async with asyncio.timeout(READY_S), aiohttp.ClientSession() as http:
            while True:
                async with http.get(f"{self.url}/readyz") as answer:
                    if answer.status == 200:
                        return
                await asyncio.sleep(0.02)

    async def drain(self) -> None:
        """Stop it in order, as a signal does; an error that ended it before is raised here."""
        assert self._app is not None
        self._told_to_stop.set()
        await asyncio.wait({self._app})
        await self.stop()

    async def stop(self) -> None:
        """Stop it at once; an error that ended it before is raised here."""
        if self._app is not None:
            app, self._app = self._app, None
            app.cancel()
            await asyncio.wait({app})
            if not app.cancelled():
                app.result()

    async def restart(self) -> None:
        await self.stop()
        await self.start()


@asynccontextmanager
async def running_server(
    folder: Path, *, engines: int = 2, simulated: SimulatedOptions = QUICK, **settings: Any
) -> AsyncIterator[RunningServer]:
    """Valkey with its data in ``folder``, simulated engines, and our server on a free port in front of them.

    ``settings`` replace fields of ``Settings``; with a ``redis_url`` that store is used, which the caller runs.
    """
    async with AsyncExitStack() as stack:
        simulators = [await stack.enter_async_context(simulated_server(simulated)) for _ in range(engines)]
        addresses = tuple(EngineAddress(engine.url, f"engine-{n}") for n, engine in enumerate(simulators, 1))
        yield await stack.enter_async_context(server_for(folder, addresses, simulators, **settings))


@asynccontextmanager
async def server_for(
    folder: Path, addresses: tuple[EngineAddress, ...], simulators: Sequence[SimulatedServer] = (), **settings: Any
) -> AsyncIterator[RunningServer]:
    """The same for engines that run already, of whatever kind."""
    async with AsyncExitStack() as stack:
        made = Settings(port=0, engines=addresses, data_dir=folder, **settings)
        if made.redis_url is None:
            valkey = EmbeddedValkey(folder)
            stack.push_async_callback(valkey.stop)
            redis_url = await valkey.start()
        else:
            redis_url = made.redis_url.reveal()
        server = RunningServer(made, redis_url, simulators)
        stack.push_async_callback(server.stop)
        await server.start()
        yield server


@asynccontextmanager
async def another(server: RunningServer, redis_url: str | None = None) -> AsyncIterator[RunningServer]:
    """A second replica beside ``server``, on the same engines and store, which it may reach on another way."""
    redis_url = redis_url or server.redis_url
    settings = replace(server.settings, port=0, redis_url=Secret(redis_url))
    replica = RunningServer(settings, redis_url, server.engines)
    await replica.start()
    try:
        yield replica
    finally:
        await replica.stop()


@asynccontextmanager
async def two_replicas(folder: Path, *, simulated: SimulatedOptions) -> AsyncIterator[list[RunningServer]]:
    """Two replicas on one store and the same engines."""
    async with running_server(folder, simulated=simulated) as one, another(one) as two:
        yield [one, two]


class ServerProcess:
    """``chat-server serve`` as a user starts it. Its log is in ``log``."""

    def __init__(self, url: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.url = url
        self.ws_url = url.replace("http", "ws", 1) + "/v1/realtime"
        self.process = process
        self.log = log

    async def ready(self, timeout_s: float = READY_S) -> dict[str, Any]:
        """Wait for 200 on ``/readyz`` and return its body. Fails, with the log, if the server ends before."""
        async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as http:
            while self.process.returncode is None:
                try:
                    async with http.get(f"{self.url}/readyz") as answer:
                        if answer.status == 200:
                            return await answer.json()  # type: ignore[no-any-return]
                except aiohttp.ClientConnectionError:
                    pass  # it does not listen yet
                await asyncio.sleep(0.02)
        raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log.read_text()}")

    async def end(self, signum: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; returns the exit status (negative after a signal)."""
        if self.process.returncode is None:
            self.process.send_signal(signum)
        async with asyncio.timeout(20):
            return await self.process.wait()


@asynccontextmanager
async def server_process(folder: Path, *arguments: str, port: int | None = None) -> AsyncIterator[ServerProcess]:
    """Run ``chat-server serve`` with its data in ``folder`` and these arguments; it is stopped at the end."""
    port = port or free_port()
    log = folder / "server.log"
    environment = {name: os.environ[name] for name in os.environ if not name.startswith(("CHAT_SERVER_", "REDIS_URL"))}
    environment["CHAT_SERVER_DRAIN_GRACE"] = "0"  # most tests do not wait for the answers that they left behind
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "chat_server", "serve", "--port", str(port), "--data-dir", str(folder)),
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
        )
    server = ServerProcess(f"http://127.0.0.1:{port}", process, log)
    try:
        yield server
    finally:
        try:
            await server.end()
        except TimeoutError:
            await server.end(signal.SIGKILL)


def free_port() -> int:
    """A port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
