"""Child processes that never outlive us, whatever happens to us.

Each child is started by a tether (``tether.py``), a small process that watches a pipe whose other end only we hold. We
stop the child by closing it; the kernel closes it when we die. Children have sessions of their own, so Ctrl-C in the
terminal reaches only us, and we stop them in order.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

from chat_server import tether

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: bytes of a child's log file; one older file of the same size is kept beside it.
LOG_BYTES = 4 << 20
#: seconds after the grace time in which a tether must have ended; then it hangs
HANG_S = 10.0


class Child:
    """A process and all that it starts. As a context manager it is stopped at the end.

    ``log`` is the file that holds its output; the one of the run before is kept beside it with ``.1`` in the name.
    """

    def __init__(self, process: asyncio.subprocess.Process, lifeline: int, log: Path, grace_s: float) -> None:
        self.log = log
        self._process = process
        self._lifeline: int | None = lifeline
        self._grace_s = grace_s

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        grace_s: float = 5.0,
        keep_open: Sequence[int] = (),
    ) -> Self:
        """Start ``command``. A program that is not there shows as exit status 127 and a line in the log.

        ``env`` replaces our environment; ``grace_s`` seconds lie between SIGTERM and SIGKILL; the file descriptors in
        ``keep_open`` stay open in the child, so a lock on one is held until the last process of the tree is gone.
        """
        log = await asyncio.to_thread(make_room, log)
        held, lifeline = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", tether.__file__, str(grace_s), str(log), str(LOG_BYTES)),
                *command,
                stdin=held,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                env=env,
                cwd=cwd,
                start_new_session=True,
                pass_fds=keep_open,
            )
        except BaseException:
            os.close(lifeline)
            raise
        finally:
            os.close(held)
        return cls(process, lifeline, log, grace_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def pid(self) -> int:
        """Of the tether; the child itself is its child."""
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> int:
        """Wait for the end of the whole tree. Returns the exit status, 128 + N after signal N."""
        status = await self._process.wait()
        return status if status >= 0 else 128 - status  # the latter: somebody killed the tether

    async def stop(self) -> int:
        """Stop the tree and wait for its end: SIGTERM, and SIGKILL after the grace time. Returns the exit status."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        try:
            async with asyncio.timeout(self._grace_s + HANG_S):
                return await self.wait()
        except TimeoutError:  # the tether itself hangs; the kernel takes the child with it
            self._process.kill()
            return await self.wait()

    async def last_lines(self, count: int) -> list[str]:
        """The end of the output so far: at most ``count`` lines, blank ones left out."""
        return await asyncio.to_thread(tail, self.log, count)


def make_room(log: Path) -> Path:
    """Move the last log file to ``.1``, if there is one. Returns the absolute path."""
    log = log.absolute()
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if log.exists():
        log.replace(f"{log}.1")
    return log


def tail(path: Path, count: int, max_bytes: int = 64 << 10) -> list[str]:
    """The last ``count`` lines that are not blank, from the last ``max_bytes`` of a file; none if it is not there."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - max_bytes))
            text = file.read(max_bytes).decode("utf-8", "replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]
