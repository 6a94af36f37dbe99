"""The parts of the system under test as processes of their own, none of which outlives the caller."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import aiohttp

from chat_server.children import Child

#: seconds in which a process must be ready; it takes a second or two.
READY_S = 30.0


class NotTested(Exception):
    """The system did not come up, or not to where the test begins: nothing was tested."""


class Process:
    """One process under a tether, so that it never outlives us; ``kill`` gives it no chance to say a word.

    Told to ``stop`` it has ``grace_s`` seconds.
    """

    def __init__(self, name: str, command: list[str], folder: Path, *, grace_s: float = 2.0) -> None:
        self.name = name
        self._command = command
        self._folder = folder
        self._grace_s = grace_s
        self._child: Child | None = None
        self._starts = 0

    async def start(self) -> None:
        self._starts += 1
        log = self._folder / f"{self.name}.{self._starts}.log"
        # What a person has set for their own server is not for this one.
        ours = ("CHAT_SERVER_", "REDIS_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        self._child = await Child.start(self._command, log=log, env=environment, grace_s=self._grace_s)

    async def until_ready(self, http: aiohttp.ClientSession, url: str) -> None:
        """Wait until it answers 200 there. Raises NotTested, with the end of its log."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline and self.runs:
            try:
                async with http.get(url) as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass  # it does not listen yet
            await asyncio.sleep(0.02)
        raise NotTested(f"{self.name} did not become ready:\n{await self.why()}")

    async def kill(self) -> float:
        """``kill -9``, and wait until it is gone. Returns the moment."""
        return await self._end_by(signal.SIGKILL)

    async def tell_to_stop(self) -> float:
        """SIGTERM, and wait until it has ended by itself. Returns the seconds that it took."""
        told_at = await self._end_by(signal.SIGTERM)
        return time.monotonic() - told_at

    async def _end_by(self, signum: int) -> float:
        assert self._child is not None, "it was started"
        pids = await asyncio.to_thread(self._pids)
        at = time.monotonic()
        for pid in pids:
            os.kill(pid, signum)
        await self._child.wait()
        return at

    async def stop(self) -> None:
        if self._child is not None:
            await self._child.stop()

    async def why(self) -> str:
        """The end of its log, for people."""
        return "\n".join(await self._child.last_lines(15)) if self._child is not None else ""

    @property
    def runs(self) -> bool:
        return self._child is not None and self._child.running

    def memory(self) -> int:
        """Bytes of memory of its own (resident set; children not counted)."""
        [pid] = self._pids()
        status = Path(f"/proc/{pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None, "it has ended"
        return int(found.group(1)) << 10

    def cpu_s(self) -> float:
        """Seconds of CPU that it has used so far."""
        [pid] = self._pids()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _pids(self) -> list[int]:
        """Itself, while it lives: the tether, which started it on our behalf, has no other child."""
        assert self._child is not None, "it was started"
        return [
            int(pid) for pid in Path(f"/proc/{self._child.pid}/task/{self._child.pid}/children").read_text().split()
        ]


def chat_server(*arguments: str) -> list[str]:
    """The command line of our program, in this Python."""
    return [sys.executable, "-m", "chat_server", *arguments]


def free_port() -> int:
    """A port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
