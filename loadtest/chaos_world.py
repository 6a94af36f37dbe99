"""The system under test, as processes: a Valkey, simulated engines, replicas of the server; and what befalls them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import redis.asyncio as redis_asyncio

from chat_server.store import keys
from chat_server.store.embedded import find_binary
from loadtest.processes import READY_S, NotTested, Process, chat_server, free_port

#: seconds of writes that a store loses, as one that syncs each second and whose host dies.
LOST_S = 1.0
#: seconds that a replica has to end when it is told to, if nothing else is said; most answers take longer.
GRACE_S = 2.0


@dataclass(slots=True)
class Replica:
    """One server. ``id`` is its name in the store, new with each start."""

    process: Process
    url: str
    id: str = ""
    up: bool = False
    #: the names of starts that were told to stop
    stopped: set[str] = field(default_factory=set)

    @property
    def ws_url(self) -> str:
        return self.url.replace("http", "ws", 1) + "/v1/realtime"


class Valkey:
    """The store. ``restart`` loses nothing; with ``lose_s`` it loses its last writes, as when its host dies."""

    def __init__(self, folder: Path, binary: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self._folder = folder
        self._sizes: list[tuple[float, int]] = []
        command = [
            *(str(binary), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)),
            # Every command reaches the file before its reply goes out. With everysec it waits while the disk is slow,
            # and a kill would lose it.
            *("--appendonly", "yes", "--appendfsync", "no", "--save", "", "--maxmemory-policy", "noeviction"),
            *("--auto-aof-rewrite-percentage", "0", "--protected-mode", "no"),
        ]
        self.process = Process("valkey", command, folder)
        self.up = asyncio.Event()

    async def start(self) -> None:
        folder = self._folder
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        await self.process.start()
        deadline = time.monotonic() + READY_S
        while not await self._answers():
            if time.monotonic() > deadline or not self.process.runs:
                raise NotTested(f"Valkey did not start:\n{await self.process.why()}")
            await asyncio.sleep(0.01)
        self.up.set()

    async def restart(self, *, down_s: float = 0.0, lose: bool = False) -> tuple[float, float]:
        """Kill it and start it again after ``down_s``. Returns when it went and when it was back."""
        self.up.clear()
        went = await self.process.kill()
        if lose:
            await asyncio.to_thread(self._lose, went - LOST_S)
        await asyncio.sleep(down_s)
        await self.start()
        return went, time.monotonic()

    async def watch_size(self) -> None:
        """Note how its file grows, so that a second of it can be lost; until cancelled."""
        while True:
            size = await asyncio.to_thread(lambda: self._file().stat().st_size)
            self._sizes = [*self._sizes[-100:], (time.monotonic(), size)]
            await asyncio.sleep(0.05)

    def _file(self) -> Path:
        return max((self._folder / "appendonlydir").glob("*.incr.aof"))

    def _lose(self, since: float) -> None:
        sizes = [size for at, size in self._sizes if at <= since]
        # A command that is cut in the middle is left out when the file is read, as after a real crash.
        os.truncate(self._file(), sizes[-1] if sizes else 0)

    async def _answers(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                writer.write(b"PING\r\n")
                async with asyncio.timeout(1.0):
                    return (await reader.readline()).startswith(b"+PONG")
            finally:
                writer.close()
        except (OSError, TimeoutError):
            return False


class World:
    """All of it, running."""

    def __init__(self, valkey: Valkey, engines: list[Process], engine_urls: list[str], replicas: list[Replica]) -> None:
        self.valkey = valkey
        self.engines = engines
        self.engine_urls = engine_urls
        self.replicas = replicas

    async def start_replica(self, replica: Replica, http: aiohttp.ClientSession) -> None:
        """Start a replica and wait until it is ready. Raises NotTested."""
        before = await self._replica_ids()
        await replica.process.start()
        await replica.process.until_ready(http, f"{replica.url}/readyz")
        new = await self._replica_ids() - before
        replica.id = new.pop() if len(new) == 1 else ""
        replica.up = True

    async def kill_replica(self, replica: Replica) -> float:
        """``kill -9`` a replica; returns when."""
        replica.up = False
        return await replica.process.kill()

    async def stop_replica(self, replica: Replica) -> float:
        """Tell a replica to stop; returns the seconds that it took."""
        replica.up = False
        replica.stopped.add(replica.id)
        return await replica.process.tell_to_stop()

    async def _replica_ids(self) -> set[str]:
        client = redis_asyncio.Redis.from_url(self.valkey.url, decode_responses=True)
        try:
            return {str(name) for name in await client.zrange(keys.REPLICAS, 0, -1)}
        finally:
            await client.aclose()


@asynccontextmanager
async def world(
    folder: Path,
    *,
    replicas: int,
    engines: int,
    engine_options: list[str],
    http: aiohttp.ClientSession,
    others: tuple[str, ...] = (),
    grace_s: float = GRACE_S,
) -> AsyncIterator[World]:
    """Start it, and stop all of it at the end; ``others`` are the URLs of engines that run already.

    Raises NotTested, with the log of what did not come up.
    """
    async with AsyncExitStack() as stack:
        valkey = Valkey(folder / "valkey", await asyncio.to_thread(find_binary))
        stack.push_async_callback(valkey.process.stop)
        await valkey.start()
        urls, processes = [], []
        for n in range(engines):
            port = free_port()
            command = chat_server("simulate-engine", "--port", str(port), *engine_options)
            processes.append(Process(f"engine-{n + 1}", command, folder))
            urls.append(f"http://127.0.0.1:{port}")
        servers = []
        for n in range(replicas):
            port = free_port()
            addresses = [
                part for m, url in enumerate((*urls, *others), 1) for part in ("--engine", f"engine-{m}={url}")
            ]
            command = chat_server(
                *("serve", "--port", str(port), "--redis", valkey.url, *addresses),
                *("--data-dir", str(folder), "--log-level", "info", "--drain-grace", str(grace_s)),
            )
            servers.append(Replica(Process(f"replica-{n + 1}", command, folder), f"http://127.0.0.1:{port}"))
        built = World(valkey, processes, urls, servers)
        for process in (*processes, *(server.process for server in servers)):
            stack.push_async_callback(process.stop)
        await asyncio.gather(*(process.start() for process in processes))
        for url, process in zip(urls, processes, strict=True):
            await process.until_ready(http, f"{url}/health")
        for server in servers:
            await built.start_replica(server, http)
        sizes = asyncio.create_task(valkey.watch_size())
        try:
            yield built
        finally:
            sizes.cancel()
            await asyncio.gather(*(process.stop() for process in (*processes, *(server.process for server in servers))))
