"""One WebSocket of a client, which can be cut without a word."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Any
from urllib.parse import urlencode, urlsplit

import orjson
import websockets.asyncio.client
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidStatus

#: seconds to connect.
OPEN_S = 10.0
#: bytes of the kernel's receive buffer of a reader that is to feel its slowness.
SMALL_BUFFER = 4096


class Unreachable(Exception):
    """Nobody took the connection, or it broke in the handshake."""


class Refused(Exception):
    """The handshake was answered with an HTTP status."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"HTTP {status} {code}")
        self.status = status
        self.code = code


class Lost(Exception):
    """The connection ended. ``code`` is the close code; None: it broke."""

    def __init__(self, code: int | None, reason: str = "") -> None:
        super().__init__(f"closed with {code} {reason}".strip() if code else "broken")
        self.code = code


class Line:
    """One connection, open."""

    def __init__(self, connection: websockets.asyncio.client.ClientConnection) -> None:
        self._connection = connection
        self._sent = 0
        #: we broke it ourselves.
        self.was_cut = False

    @classmethod
    async def open(cls, url: str, query: dict[str, Any], *, small_buffer: bool = False) -> Line:
        """Connect. Raises Unreachable, Refused."""
        parts = urlsplit(url)
        sock = socket.socket()
        try:
            if small_buffer:  # before the connect, else the window is large already
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
            sock.setblocking(False)
            async with asyncio.timeout(OPEN_S):
                await asyncio.get_running_loop().sock_connect(sock, (parts.hostname, parts.port))
                connection = await websockets.asyncio.client.connect(
                    f"{url}?{urlencode(query)}",
                    sock=sock,
                    max_size=None,
                    proxy=None,
                    close_timeout=1,
                    open_timeout=None,
                )
        except InvalidStatus as refusal:
            response = refusal.response
            try:
                code = str(orjson.loads(response.body or b"")["error"]["code"])
            except (ValueError, KeyError, TypeError):
                code = "without a reason"
            raise Refused(response.status_code, code) from None
        except (OSError, EOFError, ConnectionClosed, InvalidMessage, InvalidHandshake) as error:
            sock.close()
            raise Unreachable(type(error).__name__) from None
        return cls(connection)

    async def send(self, type: str, **fields: Any) -> None:
        """Send one event. One that can not be sent any more is lost, as with any broken socket."""
        self._sent += 1
        event = {"type": type, "event_id": f"{type}_{self._sent}", **fields}
        with suppress(ConnectionClosed):  # the next ``recv`` says so
            await self._connection.send(orjson.dumps(event).decode())

    async def recv(self, timeout_s: float) -> dict[str, Any]:
        """The next event. Raises Lost, TimeoutError."""
        try:
            async with asyncio.timeout(timeout_s):
                frame = await self._connection.recv()
        except ConnectionClosed as end:
            raise Lost(end.rcvd.code if end.rcvd else None, end.rcvd.reason if end.rcvd else "") from None
        event: dict[str, Any] = orjson.loads(frame)
        return event

    def cut(self) -> None:
        """Break the connection by a reset (RST): no close frame, and what is under way is lost."""
        self.was_cut = True
        transport = self._connection.transport
        sock = transport.get_extra_info("socket")
        if sock is not None and not transport.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()

    async def close(self) -> None:
        """Leave as clients should."""
        await self._connection.close()
