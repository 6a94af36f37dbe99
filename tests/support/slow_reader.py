"""A WebSocket client that reads only what it is told to, and so can be slow, or freeze.

Its receive buffer is the smallest that there is: else the kernel reads megabytes for it, and a test of slow readers
passes without touching anything of ours.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.uri import parse_uri

#: As the kernel numbers the states of a connection.
_ESTABLISHED = 1

#: Seconds in which something must come for a reader that reads.
PATIENCE_S = 10.0


class SlowReader:
    """One connection. What it has read is in ``events``; pings are answered when it comes to them."""

    def __init__(self, url: str, receive_buffer: int = 1) -> None:
        self._url = url
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._socket.setblocking(False)
        self._protocol = ClientProtocol(parse_uri(url), max_size=None)
        self.events: list[dict[str, Any]] = []
        #: whether it answers pings and closes
        self.answers = True
        self.pings = 0
        self.ended = False
        #: the connection ended by a reset
        self.reset = False

    @property
    def close_code(self) -> int | None:
        """Why the server closed; None if it did not say."""
        return self._protocol.close_rcvd.code if self._protocol.close_rcvd else None

    @property
    def connected(self) -> bool:
        """Whether the kernel still has the connection: a reset is seen without reading (tcp(7), TCP_INFO)."""
        return self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED

    @property
    def text(self) -> str:
        """The text of the answer so far, by the offset rule."""
        text = ""
        for event in self.deltas:
            assert event["offset"] <= len(text), f"a gap: {len(text)} code points are here, next is {event}"
            text = text[: event["offset"]] + event["delta"]
        return text

    @property
    def deltas(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == "response.output_text.delta"]

    async def connect(self) -> None:
        """Connect and do the handshake; nothing after it is read."""
        address = urlsplit(self._url)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._socket, (address.hostname, address.port))
        self._protocol.send_request(self._protocol.connect())
        await self._flush()
        while self._protocol.state is State.CONNECTING:
            assert await self.read(1), "closed in the handshake"

    async def send(self, type: str, **fields: Any) -> None:
        """Send one event."""
        self._protocol.send_text(json.dumps({"type": type, **fields}).encode())
        await self._flush()

    async def send_raw(self, frames: bytes) -> None:
        """Send bytes as they are."""
        await asyncio.get_running_loop().sock_sendall(self._socket, frames)

    def send_eof(self) -> None:
        """Send nothing more: the other direction stays open."""
        self._socket.shutdown(socket.SHUT_WR)

    async def until(self, type: str) -> dict[str, Any]:
        """Read on until an event of this type, which may have been read already."""
        seen = 0
        while True:
            for event in self.events[seen:]:
                seen += 1
                if event["type"] == type:
                    return event
            assert not self.ended, f"closed ({self.close_code}) while waiting for {type}"
            await self.read(1 << 10)

    async def read_to_the_end(self) -> None:
        """Read until the server closes or resets the connection."""
        while not self.ended:
            await self.read(1 << 16)

    async def read(self, size: int) -> int:
        """Read what is there, ``size`` bytes at most, or wait for some; how many came (0: it is over)."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                data = await asyncio.get_running_loop().sock_recv(self._socket, size)
        except ConnectionResetError:
            self.ended = self.reset = True
            return 0
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
            self.ended = True
        for frame in self._protocol.events_received():
            if isinstance(frame, Response):
                assert frame.status_code == 101, frame
                continue
            assert isinstance(frame, Frame)
            if frame.opcode is Opcode.TEXT:
                self.events.append(json.loads(bytes(frame.data)))
            elif frame.opcode is Opcode.PING:
                self.pings += 1
        if self.answers and not self.ended:
            try:
                await self._flush()
            except ConnectionError:  # what was sent before it can be read all the same
                self.reset = True
        return len(data)

    async def _flush(self) -> None:
        if output := b"".join(self._protocol.data_to_send()):
            await self.send_raw(output)

    def close(self) -> None:
        """Leave without a word."""
        self._socket.close()


@asynccontextmanager
async def slow_reader(url: str, receive_buffer: int = 1) -> AsyncIterator[SlowReader]:
    """A connection to ``url`` (``ws://...``) of which nothing was read yet but the handshake."""
    reader = SlowReader(url, receive_buffer)
    try:
        await reader.connect()
        yield reader
    finally:
        reader.close()
