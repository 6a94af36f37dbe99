"""The line between a page and its server, in the hands of a test: it can be cut, stay down, or swallow what is sent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass
class _Wire:
    """One connection through the line."""

    writers: list[asyncio.StreamWriter]
    swallows_sent: bool = False
    swallows_told: bool = False


class Line:
    """Bytes in both directions between a port of its own and the server at ``target``."""

    def __init__(self, target: str) -> None:
        self._target = (urlsplit(target).hostname, urlsplit(target).port)
        self._wires: list[_Wire] = []
        self._is_down = False
        self.url = ""

    def swallow(self, *, sent: bool = True, told: bool = True) -> None:
        """Forward nothing any more of what is ``sent`` to the server, or ``told`` by it, on connections that are open.

        They stay open. New ones work.
        """
        for wire in self._wires:
            wire.swallows_sent |= sent
            wire.swallows_told |= told

    def cut(self, *, down: bool = False) -> None:
        """Reset all connections; while it is ``down`` no new one works."""
        self._is_down = down
        for wire in self._wires:
            for writer in wire.writers:
                writer.transport.abort()
        self._wires.clear()

    def up(self) -> None:
        self._is_down = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_down:
            writer.transport.abort()
            return
        up_reader, up_writer = await asyncio.open_connection(*self._target)
        wire = _Wire([writer, up_writer])
        self._wires.append(wire)

        async def forward(source: asyncio.StreamReader, target: asyncio.StreamWriter, *, is_sent: bool) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await source.read(65536):
                    if not (wire.swallows_sent if is_sent else wire.swallows_told):
                        target.write(data)
                        await target.drain()
            target.close()

        async with asyncio.TaskGroup() as both:
            both.create_task(forward(reader, up_writer, is_sent=True))
            both.create_task(forward(up_reader, writer, is_sent=False))


@asynccontextmanager
async def line_to(target: str) -> AsyncIterator[Line]:
    """A line to the server at ``target``; its own address is ``url``."""
    line = Line(target)
    listener = await asyncio.start_server(line.serve, "127.0.0.1", 0)
    line.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield line
    finally:
        listener.close()
        line.cut(down=True)
