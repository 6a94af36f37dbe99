"""uvicorn's WebSocket protocol, with the four things that ASGI's ``send`` can not do.

Write a frame from a plain call; tell when the socket takes bytes again; tell how much waits; drop a peer that takes
nothing (uvicorn's own ping time-out and close wait behind the full buffer for ever). Given to uvicorn as ``ws=``; the
app finds it in ``scope["extensions"]["chat_server.socket"]``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request

log = logging.getLogger(__name__)

#: seconds that a peer has to answer a close.
_CLOSE_S = 5.0


class _Quiet(logging.Filter):
    """Leaves out uvicorn's lines per connection, which hold the query, and its complaint about a refused handshake."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.exc_info = None  # a traceback of what a peer sent would show what it sent
        return record.levelno >= logging.WARNING and "without completing handshake" not in record.getMessage()


_quiet = logging.getLogger(f"{__name__}.uvicorn")
_quiet.addFilter(_Quiet())

SCOPE_KEY = "chat_server.socket"


class SocketProtocol(WebSocketsSansIOProtocol):
    """One WebSocket. ``buffer_bytes`` is the write buffer's high-water mark; below a quarter of it we go on."""

    buffer_bytes = 64 << 10

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = self.conn.logger = _quiet
        #: called when the socket takes bytes again, and when it is lost.
        self.on_writable: Callable[[], None] | None = None
        self.bytes_written = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.set_write_buffer_limits(high=self.buffer_bytes, low=self.buffer_bytes // 4)

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        scope = getattr(self, "scope", None)  # absent when the handshake was refused
        if scope is not None:
            cast("dict[str, Any]", scope["extensions"])[SCOPE_KEY] = self

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except Exception as error:
            # Only its kind: the bytes are the peer's, and a header may hold a key.
            log.warning("Dropped a peer that sent something unreadable (%s)", type(error).__name__)
            self.transport.abort()

    def handle_ping(self) -> None:
        # A peer that pings but reads nothing would fill the buffer with our answers. The next ping gets one
        # (RFC 6455, 5.5.3: only the last needs an answer).
        output = b"".join(self.conn.data_to_send())
        if self.writable.is_set() and not self.transport.is_closing():
            self.transport.write(output)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._notify()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._notify()
        self.on_writable = None

    def keepalive_timeout(self) -> None:
        # The pong did not come: closing would wait for a buffer that the peer will never take.
        self.pong_timer = None
        self.abort()

    @property
    def is_open(self) -> bool:
        return self.handshake_complete and not self.close_sent and not self.disconnected

    @property
    def can_write(self) -> bool:
        """Whether the socket is open and its buffer below the mark."""
        return self.is_open and self.writable.is_set() and not self.transport.is_closing()

    @property
    def bytes_taken(self) -> int:
        """How much of what was written the kernel took."""
        return self.bytes_written - self.transport.get_write_buffer_size()

    def write_text(self, payload: bytes) -> None:
        """Write one text frame, unmasked (RFC 6455, 5.2). Only while ``can_write``."""
        size = len(payload)
        if size < 126:
            header = bytes((0x81, size))
        elif size < 1 << 16:
            header = b"\x81\x7e" + size.to_bytes(2, "big")
        else:
            header = b"\x81\x7f" + size.to_bytes(8, "big")
        self.bytes_written += len(header) + size
        self.transport.write(header + payload)

    def close(self, code: int, reason: str) -> None:
        """Say why and close (RFC 6455, 7.1.2), as uvicorn does it but from a plain call; the app's ``receive`` returns.

        A peer that does not take what waits for it gets no close frame: it would stand behind all that.
        """
        if not self.is_open:
            return
        if not self.can_write:
            self.abort()
            return
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.conn.send_close(code, reason)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self.close_timer = self.loop.call_later(_CLOSE_S, self.transport.abort)

    def abort(self) -> None:
        """Drop the connection at once, whatever waits in its buffer."""
        if not self.transport.is_closing():
            log.info("Dropped a peer that takes nothing (%d bytes waited)", self.transport.get_write_buffer_size())
        self.transport.abort()

    def _notify(self) -> None:
        if self.on_writable is not None:
            self.on_writable()


def socket_protocol(buffer_bytes: int) -> type[SocketProtocol]:
    """The protocol class for uvicorn, which makes the instances itself, with this high-water mark."""
    return type("ConfiguredSocketProtocol", (SocketProtocol,), {"buffer_bytes": buffer_bytes})
