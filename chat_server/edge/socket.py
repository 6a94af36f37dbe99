"""uvicorn's WebSocket protocol, with the four things that ASGI's ``send`` can not do.

Write a frame from a plain call; tell when the socket takes bytes again; tell how much waits; drop a peer that takes
nothing (uvicorn's own ping time-out and close wait behind the full buffer for ever). Given to uvicorn as ``ws=``; the
app finds it in ``scope["extensions"]["chat_server.socket"]``.

The kernel hides a slow reader: left alone it takes 4 MB for one. So its part is bounded too, and when we drop a
peer it throws away at once what it holds for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState
from websockets.frames import Close, Frame, Opcode
from websockets.http11 import Request

from chat_server.core import close_codes

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveEvent

log = logging.getLogger(__name__)

#: seconds from the beginning of a close, by whichever side, to its end: then the connection is dropped.
_CLOSE_S = 3.0
#: bytes that are parsed in one go: a read may hold tens of thousands of frames.
_SLICE = 16 << 10
#: socket(7): a close throws away what was not sent and resets the connection.
_RESET = struct.pack("ii", 1, 0)


class _Quiet(logging.Filter):
    """Leaves out uvicorn's lines per connection, which hold the query, and its complaint about a refused handshake."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.exc_info = None  # a traceback of what a peer sent would show what it sent
        return record.levelno >= logging.WARNING and "without completing handshake" not in record.getMessage()


_quiet = logging.getLogger(f"{__name__}.uvicorn")
_quiet.addFilter(_Quiet())

SCOPE_KEY = "chat_server.socket"


class SocketProtocol(WebSocketsSansIOProtocol):
    """One WebSocket. About ``buffer_bytes`` wait for it at most, as the kernel counts, which adds as much for itself.

    A quarter of that, and one frame, may wait here: hundreds of small writes cost the event loop several times
    their bytes.
    """

    buffer_bytes = 64 << 10

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = self.conn.logger = _quiet
        #: called when the socket takes bytes again, and when it is lost.
        self.on_writable: Callable[[], None] | None = None
        self.bytes_written = 0
        #: what was taken when a ping was put behind what waits; None if it went out at once.
        self._taken_at_ping: int | None = None
        #: what was read and not parsed yet, and the call that parses the next slice of it.
        self._unread = b""
        self._next_slice: asyncio.Handle | None = None
        #: the peer broke the protocol: whatever else it sends is thrown away.
        self._failed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # One mark, not two: above it nothing is written, below it one frame more.
        mark = max(self.buffer_bytes // 4, 1)
        self.transport.set_write_buffer_limits(high=mark, low=mark)
        # The second is what a frozen reader costs, whose window is closed; the first what one costs that vanished.
        self._set_option(socket.SOL_SOCKET, socket.SO_SNDBUF, self.buffer_bytes)
        self._set_option(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, mark)

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        scope = getattr(self, "scope", None)  # absent when the handshake was refused
        if scope is not None:
            cast("dict[str, Any]", scope["extensions"])[SCOPE_KEY] = self

    def data_received(self, data: bytes) -> None:
        self._unread += data
        if self._next_slice is None:
            self._parse_slice()

    def _parse_slice(self) -> None:
        self._next_slice = None
        part, self._unread = self._unread[:_SLICE], self._unread[_SLICE:]
        try:
            if not self._failed:
                super().data_received(part)
        except Exception as error:
            # Only its kind: the bytes are the peer's, and a header may hold a key.
            log.warning("Dropped a peer that sent something unreadable (%s)", type(error).__name__)
            self.transport.abort()
        self._go_on_reading()

    def _go_on_reading(self) -> None:
        """Let others have their turn and the app take what the last slice gave; then the next, then the socket."""
        if self.transport.is_closing():
            self._unread = b""
        elif self._unread:
            self.transport.pause_reading()
            if self._next_slice is None and not self.read_paused:
                self._next_slice = self.loop.call_soon(self._parse_slice)
        elif not self.read_paused:
            self.transport.resume_reading()

    async def receive(self) -> ASGIReceiveEvent:
        message = await super().receive()
        self._go_on_reading()
        return message

    def handle_cont(self, event: Frame) -> None:
        # One buffer, not a list: a fragment may be a byte, or nothing, and there is no bound on their number.
        if not isinstance(self.frames[0], bytearray):
            self.frames = [bytearray(self.frames[0])]  # type: ignore[list-item]
        self.frames[0] += event.data
        if event.fin:
            self.send_receive_event_to_app()

    def send_receive_event_to_app(self) -> None:
        try:
            super().send_receive_event_to_app()
        except InvalidState:  # no UTF-8, and its close came with it, which was answered in kind
            self.conn.writes.clear()
            self.conn.close_sent = Close(close_codes.INVALID_TEXT, "")
            self.conn.send_frame(Frame(Opcode.CLOSE, self.conn.close_sent.serialize()))
            self.handle_parser_exception()

    def handle_ping(self) -> None:
        # A peer that pings but reads nothing would fill the buffer with our answers. The next ping gets one
        # (RFC 6455, 5.5.3: only the last needs an answer).
        output = b"".join(self.conn.data_to_send())
        if output and self.writable.is_set() and not self.transport.is_closing():
            self.transport.write(output)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._notify()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unread = b""
        if self._next_slice is not None:
            self._next_slice.cancel()
        self._notify()
        self.on_writable = None

    def send_keepalive_ping(self) -> None:
        self._mark_ping()
        super().send_keepalive_ping()

    def keepalive_timeout(self) -> None:
        self.pong_timer = None
        if self._taken_at_ping is not None and self.bytes_taken > self._taken_at_ping:
            # It is slow, not dead: the ping stood behind what it took meanwhile.
            self._mark_ping()
            self.pong_timer = self.loop.call_later(cast("float", self.ping_timeout), self.keepalive_timeout)
        else:
            self.close(close_codes.OVERLOADED, "no answer to a ping")

    def _mark_ping(self) -> None:
        self._taken_at_ping = None if self.writable.is_set() else self.bytes_taken

    def eof_received(self) -> None:
        super().eof_received()
        self._drop_later()

    def handle_close(self, event: Frame) -> None:
        super().handle_close(event)
        self._drop_later()

    def handle_parser_exception(self) -> None:
        """Say what is wrong (RFC 6455, 7.1.7), and read on until the peer has seen it.

        Closed at once, as uvicorn does it, with something unread, the kernel would reset the connection, and the close
        frame might be lost.
        """
        closing = self.conn.close_sent
        assert closing is not None, "that is what failed"
        self._failed = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": closing.code, "reason": closing.reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.read_paused = False
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()
        self._drop_later()

    def shutdown(self) -> None:
        super().shutdown()
        self._drop_later()

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

        The close frame stands behind what waits; a peer that does not come so far in time is dropped without it.
        """
        if not self.is_open or self.transport.is_closing():
            return
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.conn.send_close(code, reason)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.read_paused = False
        self._go_on_reading()
        self._drop_later()

    def abort(self) -> None:
        """Drop the connection at once, whatever waits, here and in the kernel: the peer sees a reset."""
        if self.disconnected:
            return
        log.info(
            "Dropped a peer that takes or answers nothing (%d bytes waited)", self.transport.get_write_buffer_size()
        )
        self._set_option(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    def _drop_later(self) -> None:
        """However a close began, it ends: else what waits for a peer that reads nothing would keep the connection."""
        if self.close_timer is None and not self.disconnected:
            self.close_timer = self.loop.call_later(_CLOSE_S, self.abort)

    def _set_option(self, level: int, option: int, value: int | bytes) -> None:
        with contextlib.suppress(OSError):  # the peer is gone already, which some systems answer so
            self.transport.get_extra_info("socket").setsockopt(level, option, value)

    def _notify(self) -> None:
        if self.on_writable is not None:
            self.on_writable()


def socket_protocol(buffer_bytes: int) -> type[SocketProtocol]:
    """The protocol class for uvicorn, which makes the instances itself, with this bound."""
    return type("ConfiguredSocketProtocol", (SocketProtocol,), {"buffer_bytes": buffer_bytes})
