"""``serve --workers N``: so many processes, each a replica of its own, on one port.

The parent starts them again when they end, and stops them; it serves nothing itself. Each has a socket pair with it.
Down come first the settings (secrets never show in the list of processes), then how far the engines are; its end means:
stop at once. Up go the address where the worker listens, that it is ready, or why it can not start. SIGTERM asks a
worker to let running answers finish. A worker dies with its parent, however that went.

Each worker has listening sockets of its own, which the parent holds too: connections are dealt out evenly, and those
that wait for a worker that ended are taken by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self

import orjson
from rich.console import Console

from chat_server.drain import AFTER_GRACE_S
from chat_server.engine.launch import environment
from chat_server.engine.ports import listen
from chat_server.errors import ChatServerError, StartError
from chat_server.process import loop_factory, run_together, set_up_logging, stop_on_signals
from chat_server.settings import EngineAddress, Settings
from chat_server.tether import PR_SET_PDEATHSIG, prctl

logger = logging.getLogger(__name__)

#: this many ends of one worker within so many seconds are one too many.
_MAX_ENDS = 5
_ENDS_WINDOW_S = 120.0
#: seconds between two looks at how far the engines are.
_LOOK_S = 0.5
#: seconds that a worker gets to end when it was told to stop at once, and beyond its own time when it drains.
_STOP_S = 5.0
#: bytes of the length that stands before the settings
_LENGTH = 4


class Workers:
    """The worker processes. ``startup``, ``on_listening`` and ``on_ready`` as for ``app.run_app``, of all together."""

    def __init__(
        self,
        settings: Settings,
        *,
        log_level: str | None,
        redis_url: str,
        engines: Sequence[EngineAddress],
        startup: Callable[[], dict[str, str]],
        on_listening: Callable[[str], None],
        on_ready: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._start = (settings, log_level, redis_url, tuple(engines))
        self._startup = startup
        self._on_listening = on_listening
        self._on_ready = on_ready
        self._listening: set[str] = set()
        self._ready: set[str] = set()
        self._running: set[Worker] = set()

    async def run(self, stop: asyncio.Event) -> None:
        """Keep them running until ``stop`` is set and all let their answers finish; at once when cancelled.

        Raises StartError if one can not start, or ends too often.
        """
        settings = self._settings
        groups = await asyncio.to_thread(listen, settings.host, settings.port, settings.workers)
        try:
            async with asyncio.TaskGroup() as tasks:
                telling = tasks.create_task(self._tell_startup())
                numbered = enumerate(groups, 1)
                await asyncio.wait([tasks.create_task(self._keep(f"worker-{n}", group, stop)) for n, group in numbered])
                telling.cancel()
        finally:
            for group in groups:
                for one in group:
                    one.close()

    async def _keep(self, name: str, sockets: list[socket.socket], stop: asyncio.Event) -> None:
        """Run one worker, and run it again when it ends by itself."""
        ends: list[float] = []
        while True:
            async with await Worker.start(name, sockets, self._start) as worker:
                self._running.add(worker)
                try:
                    status = await self._attend(worker, stop)
                finally:
                    self._running.discard(worker)
            if stop.is_set():
                return
            if name not in self._listening:
                raise StartError(worker.failed or f"{name} ended with status {status} at its start; its log is above.")
            if status == 0:  # somebody asked it to, as one restarts them one by one
                logger.info("%s was stopped. It starts again.", name)
                continue
            now = time.monotonic()
            ends = [*(at for at in ends if now - at < _ENDS_WINDOW_S), now]
            reason = worker.failed or f"status {status}"
            if len(ends) > _MAX_ENDS:
                raise StartError(f"{name} ended {len(ends)} times in {now - ends[0]:.0f} s, the last time: {reason}")
            logger.error("%s ended: %s. It starts again.", name, reason)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), len(ends) - 1)  # at once after a single one
            if stop.is_set():
                return

    async def _attend(self, worker: Worker, stop: asyncio.Event) -> int:
        """Hear a worker until it has ended; when ``stop`` is set let it drain. Returns its exit status."""
        hearing = asyncio.create_task(self._hear(worker))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([hearing, stopping], return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                worker.drain()
                await asyncio.wait([hearing], timeout=self._settings.drain_grace_s + AFTER_GRACE_S + _STOP_S)
        finally:
            hearing.cancel()
            stopping.cancel()
        return await worker.stop()

    async def _hear(self, worker: Worker) -> None:
        """What a worker says, until it ends."""
        async for message in worker.messages():
            match message:
                case {"listening": url}:
                    if self._counts_last(self._listening, worker):
                        self._on_listening(url)
                case {"ready": _}:
                    if self._counts_last(self._ready, worker):
                        self._on_ready()
                case {"failed": reason}:
                    worker.failed = reason

    def _counts_last(self, names: set[str], worker: Worker) -> bool:
        """Count a worker in; whether it was the last of all that was missing."""
        before = len(names)
        names.add(worker.name)
        return before < len(names) == self._settings.workers

    async def _tell_startup(self) -> None:
        """Tell all workers how far the engines are, for people who ask them."""
        while True:
            lines = self._startup()
            for worker in self._running:
                worker.tell(lines)
            await asyncio.sleep(_LOOK_S)


class Worker:
    """One worker process, as its parent sees it. As a context manager it is stopped at the end, at once."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.name = name
        #: why it could not start or go on, if it said so
        self.failed = ""
        self._process = process
        self._reader = reader
        self._writer = writer
        self._told: dict[str, str] = {}

    @classmethod
    async def start(cls, name: str, sockets: Sequence[socket.socket], start: tuple[Any, ...]) -> Self:
        """Start one that listens on ``sockets``; ``start`` is what it has to know."""
        ours, theirs = socket.socketpair()
        fds = [one.fileno() for one in sockets]
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "chat_server.workers", name, str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                env=environment(),
                start_new_session=True,  # Ctrl-C in the terminal reaches only the parent
                pass_fds=(theirs.fileno(), *fds),
            )
        except BaseException:
            writer.close()
            raise
        finally:
            theirs.close()
        packed = pickle.dumps((*start, fds))
        writer.write(len(packed).to_bytes(_LENGTH) + packed)
        return cls(name, process, reader, writer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def messages(self) -> AsyncIterator[dict[str, Any]]:
        """What it says, until it ends."""
        with contextlib.suppress(ConnectionError):
            async for line in self._reader:
                yield orjson.loads(line)

    def tell(self, lines: dict[str, str]) -> None:
        """How far the engines are, if that is news; left out while it does not listen."""
        if lines != self._told and self._writer.transport.get_write_buffer_size() == 0:
            self._told = lines
            self._writer.write(orjson.dumps(lines) + b"\n")

    def drain(self) -> None:
        """Ask it to let running answers finish, and to end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    async def stop(self) -> int:
        """Stop it at once, and wait for its end. Returns the exit status, negative after a signal."""
        self._writer.close()
        try:
            async with asyncio.timeout(_STOP_S):
                return await self._process.wait()
        except TimeoutError:
            logger.error("%s did not end and is killed", self.name)
            self._process.kill()
            return await self._process.wait()


def main() -> None:
    """The worker process: ``python -m chat_server.workers NAME FD``, FD being its end of the socket pair."""
    name, fd = sys.argv[1:]
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        try:
            status = runner.run(work(name, socket.socket(fileno=int(fd))))
        except asyncio.IncompleteReadError:  # the parent died before it could say what to do
            status = 1
        except KeyboardInterrupt:  # the second signal
            status = 130
    sys.exit(status)


async def work(name: str, parent: socket.socket) -> int:
    """Serve until the parent wants it to end, or is gone. Returns the exit status."""
    from chat_server.app import run_app  # noqa: PLC0415 (the parent does without it)

    reader, writer = await asyncio.open_unix_connection(sock=parent)
    size = int.from_bytes(await reader.readexactly(_LENGTH))
    settings, log_level, redis_url, engines, fds = pickle.loads(await reader.readexactly(size))
    set_up_logging(Console(stderr=True, highlight=False), log_level, name)
    lines: dict[str, str] = {}

    async def follow() -> None:
        async for line in reader:
            lines.update(orjson.loads(line))

    def say(**message: object) -> None:
        writer.write(orjson.dumps(message) + b"\n")

    stop = asyncio.Event()
    app = run_app(
        settings,
        redis_url=redis_url,
        engines=engines,
        startup=lambda: lines,
        on_listening=lambda url: say(listening=url),
        on_ready=lambda: say(ready=True),
        stop=stop,
        sockets=[socket.socket(fileno=one) for one in fds],
    )
    status = 0
    with stop_on_signals(stop):
        try:
            await run_together([app, follow()], stop, lambda: None, drain_s=settings.drain_grace_s + AFTER_GRACE_S)
        except ChatServerError as error:
            say(failed=str(error))
            status = 1
    writer.close()
    with contextlib.suppress(ConnectionError):  # the parent is gone
        await writer.wait_closed()
    return status


if __name__ == "__main__":
    main()
