"""The server and simulated engines as processes of their own, none of which outlives the caller."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from chat_server.children import Child

#: seconds in which a process must be ready; it takes a second or two.
READY_S = 30.0


class NotReady(Exception):
    """A process ended, or was not ready in time; says what it wrote last."""


class Process:
    """One that runs and is ready. ``url`` is its address without a path."""

    def __init__(self, child: Child, url: str) -> None:
        self.url = url
        # Who started it on our behalf has no other child.
        self.pid = int(Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text())

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def memory(self) -> int:
        """Bytes of memory of its own (resident set; children not counted)."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None, "it has ended"
        return int(found.group(1)) << 10

    def cpu_s(self) -> float:
        """Seconds of CPU that it has used so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def engine(folder: Path, model: str, **options: object) -> AsyncIterator[Process]:
    """A simulated engine; ``options`` are those of ``chat-server simulate-engine``, with underscores."""
    port = free_port()
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    command = ("simulate-engine", "--port", str(port), "--model", model, *flags)
    async with _started(command, port, folder / f"engine-{model}.log", "/health") as process:
        yield process


@asynccontextmanager
async def server(folder: Path, engines: Sequence[Process], *flags: str) -> AsyncIterator[Process]:
    """``chat-server serve`` in front of these engines, with a Valkey of its own and its data in ``folder``."""
    port = free_port()
    named = [text for engine in engines for text in ("--engine", engine.url)]
    command = ("serve", "--port", str(port), "--data-dir", str(folder), "--log-level", "warning", *named, *flags)
    async with _started(command, port, folder / "server.log", "/readyz") as process:
        yield process


@asynccontextmanager
async def _started(command: Sequence[str], port: int, log: Path, ready: str) -> AsyncIterator[Process]:
    # What a person has set for their own server is not for this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("CHAT_SERVER_", "REDIS_"))}
    url = f"http://127.0.0.1:{port}"
    whole = (sys.executable, "-m", "chat_server", *command)
    async with await Child.start(whole, log=log, env=environment, grace_s=15.0) as child:
        await _wait_ready(child, url + ready)
        yield Process(child, url)


async def _wait_ready(child: Child, url: str) -> None:
    async with aiohttp.ClientSession() as http:
        for _ in range(round(READY_S / 0.05)):
            try:
                async with http.get(url) as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass  # it does not listen yet
            if not child.running:
                break
            await asyncio.sleep(0.05)
    raise NotReady("\n".join([f"Nothing is ready at {url}. Its last lines:", *await child.last_lines(10)]))


def free_port() -> int:
    """A port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
