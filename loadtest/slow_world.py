"""The system before slow readers, as processes: simulated engines, and a server with a store of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from loadtest.processes import Process, chat_server, free_port


@dataclass(frozen=True)
class Part:
    """A process of the system, at its address without a path."""

    process: Process
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@asynccontextmanager
async def engine(folder: Path, model: str, **options: object) -> AsyncIterator[Part]:
    """A simulated engine; ``options`` are those of ``chat-server simulate-engine``, with underscores."""
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    async with _running(f"engine-{model}", folder, "/health", "simulate-engine", "--model", model, *flags) as part:
        yield part


@asynccontextmanager
async def server(folder: Path, engines: Sequence[Part], *flags: str) -> AsyncIterator[Part]:
    """``chat-server serve`` in front of these engines, with a Valkey of its own and its data in ``folder``."""
    named = [text for engine in engines for text in ("--engine", engine.url)]
    data = ("--data-dir", str(folder), "--log-level", "warning")
    async with _running("server", folder, "/readyz", "serve", *data, *named, *flags) as part:
        yield part


@asynccontextmanager
async def _running(name: str, folder: Path, ready: str, command: str, *flags: str) -> AsyncIterator[Part]:
    port = free_port()
    process = Process(name, chat_server(command, "--port", str(port), *flags), folder, grace_s=15.0)
    part = Part(process, f"http://127.0.0.1:{port}")
    try:
        await process.start()
        async with aiohttp.ClientSession() as http:
            await process.until_ready(http, part.url + ready)
        yield part
    finally:
        await process.stop()
