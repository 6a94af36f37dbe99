"""A TCP proxy before a Valkey, which does to the way there what networks do."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

_CHUNK = 65536


@dataclass(eq=False)
class _Way:
    """One connection through the proxy."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    swallows: bool = False
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def cut(self) -> None:
        """End it with a reset, both sides at once, with all that is under way."""
        for writer in (self.client, self.server):
            raw = writer.get_extra_info("socket")
            if raw is not None and raw.family != socket.AF_UNIX:
                with suppress(OSError, ValueError):  # it is closed already
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


class Proxy:
    """``url`` is where a server reaches its store through it.

    ``delay_s``: seconds that each reply takes longer. ``closed``: who connects is cut. ``swallowed``: how many replies
    were held back since ``swallow``.
    """

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target)
        self.port = 0
        self.delay_s = 0.0
        self.closed = False
        self.swallowed = 0
        self._pattern = b""
        self._times = 0
        self._flows = asyncio.Event()
        self._flows.set()
        self._ways: set[_Way] = set()
        self._served: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def swallow(self, pattern: bytes, times: int = 1) -> None:
        """Let the next so many requests with these bytes in them be done, and cut the connection before the reply."""
        self._pattern, self._times, self.swallowed = pattern, times, 0

    def hold(self) -> None:
        """Let no reply through, until ``release``."""
        self._flows.clear()

    def release(self) -> None:
        self._flows.set()

    def cut(self) -> None:
        """Cut all connections."""
        for way in list(self._ways):
            way.cut()

    async def end(self) -> None:
        """Cut all connections for good."""
        self.closed = True
        self.release()
        self.cut()
        if self._served:
            await asyncio.wait(self._served)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a new connection."""
        task = asyncio.create_task(self._serve(reader, writer))
        self._served.add(task)
        task.add_done_callback(self._served.discard)

    async def _serve(self, client_reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        if self.closed:
            client.transport.abort()
            return
        try:
            if self._target.scheme == "unix":
                server_reader, server = await asyncio.open_unix_connection(unquote(self._target.path))
            else:
                server_reader, server = await asyncio.open_connection(self._target.hostname, self._target.port)
        except OSError:
            client.transport.abort()
            return
        way = _Way(client, server)
        self._ways.add(way)
        way.tasks = [
            asyncio.create_task(self._requests(way, client_reader)),
            asyncio.create_task(self._replies(way, server_reader)),
        ]
        try:
            await asyncio.wait(way.tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in way.tasks:
                task.cancel()
            for writer in (client, server):
                writer.close()
            self._ways.discard(way)

    async def _requests(self, way: _Way, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK):
                if self._times and self._pattern in data:
                    self._times -= 1
                    way.swallows = True
                way.server.write(data)
                await way.server.drain()

    async def _replies(self, way: _Way, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK):
                if way.swallows:
                    self.swallowed += 1
                    way.cut()
                    return
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._flows.wait()
                way.client.write(data)
                await way.client.drain()


@asynccontextmanager
async def proxy_to(target: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[Proxy]:
    """A proxy before the Valkey at this URL (``redis://`` or ``unix://``), which itself may want TLS."""
    proxy = Proxy(target)
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0, ssl=tls)
    try:
        proxy.port = server.sockets[0].getsockname()[1]
        yield proxy
    finally:
        server.close()
        await proxy.end()
        await server.wait_closed()
