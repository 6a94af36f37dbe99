"""A client that writes bytes of a test's own making, and reads by ``wsproto``'s frame layer, which takes no nonsense.

``ws.py`` is for what clients do right; this one for what they do wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlencode, urlsplit

from wsproto.frame_protocol import Frame, FrameProtocol, Opcode

#: Seconds in which the next frame, or the end, must come.
PATIENCE_S = 10.0


def frame(
    opcode: int,
    payload: bytes = b"",
    *,
    fin: bool = True,
    rsv: int = 0,
    masked: bool = True,
    length: int | None = None,
) -> bytes:
    """One frame, right or wrong (RFC 6455, 5.2). ``length``: what its header says, if not what it holds."""
    size = len(payload) if length is None else length
    mask = masked << 7
    head = bytes([fin << 7 | rsv << 4 | opcode])
    if size < 126:
        head += bytes([mask | size])
    elif size < 1 << 16:
        head += struct.pack("!BH", mask | 126, size)
    else:
        head += struct.pack("!BQ", mask | 127, size)
    if not masked:
        return head + payload
    key = os.urandom(4)
    stream = (key * (len(payload) // 4 + 1))[: len(payload)]
    hidden = int.from_bytes(payload, "big") ^ int.from_bytes(stream, "big")
    return head + key + hidden.to_bytes(len(payload), "big")


def text(payload: bytes | str) -> bytes:
    """A text message in one frame."""
    return frame(Opcode.TEXT, payload.encode() if isinstance(payload, str) else payload)


def event(type: str, **fields: Any) -> bytes:
    """An event in one frame."""
    return text(json.dumps({"type": type, **fields}))


def create(content: str) -> bytes:
    """An event that puts a message into the conversation, as the payload of a frame."""
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": content}]}
    return json.dumps({"type": "conversation.item.create", "item": item}, ensure_ascii=False).encode()


def fragments(payload: bytes, size: int, *, opcode: int = Opcode.TEXT) -> list[bytes]:
    """A message in frames that hold ``size`` bytes each."""
    parts = [payload[at : at + size] for at in range(0, len(payload), size)]
    last = len(parts) - 1
    return [frame(Opcode.CONTINUATION if n else opcode, part, fin=n == last) for n, part in enumerate(parts)]


class RawClient:
    """One connection, from its handshake on. What was sent is what goes out; what comes in must be right."""

    def __init__(self) -> None:
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.session: dict[str, Any] = {}
        self._frames = FrameProtocol(client=True, extensions=[])
        self._whole: list[tuple[Opcode, Any]] = []
        self._parts: list[Frame] = []

    async def handshake(self, url: str, query: dict[str, Any], behind: bytes) -> None:
        """``behind``: what is sent with the head, before its answer is there."""
        parts = urlsplit(url)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self.socket, (parts.hostname, parts.port))
        lines = [
            *(f"GET {parts.path}?{urlencode(query)} HTTP/1.1", f"Host: {parts.netloc}", "Upgrade: websocket"),
            *("Connection: Upgrade", "Sec-WebSocket-Version: 13", "Authorization: Bearer local"),
            *(f"Sec-WebSocket-Key: {b64encode(os.urandom(16)).decode()}", "", ""),
        ]
        await self.send("\r\n".join(lines).encode() + behind)
        head = b""
        async with asyncio.timeout(PATIENCE_S):
            while not head.endswith(b"\r\n\r\n"):
                byte = await loop.sock_recv(self.socket, 1)
                assert byte, f"no handshake: {head!r}"
                head += byte
        assert head.startswith(b"HTTP/1.1 101 "), head

    async def send(self, *pieces: bytes) -> None:
        """Write bytes, each piece in a segment of its own as far as the kernel goes along with it."""
        loop = asyncio.get_running_loop()
        for piece in pieces:
            await loop.sock_sendall(self.socket, piece)
            await asyncio.sleep(0)  # to the server, if it runs in this loop

    async def next(self) -> tuple[Opcode, Any]:
        """The next message or control frame. Raises EOFError at the end, ConnectionResetError after a reset."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(PATIENCE_S):
            while not self._whole:
                data = await loop.sock_recv(self.socket, 1 << 16)
                if not data:
                    raise EOFError
                self._frames.receive_bytes(data)
                for part in self._frames.received_frames():
                    self._take(part)
        return self._whole.pop(0)

    def _take(self, part: Frame) -> None:
        if part.opcode.iscontrol():
            self._whole.append((part.opcode, part.payload))
            return
        self._parts.append(part)
        if part.message_finished:
            payloads: list[Any] = [one.payload for one in self._parts]
            self._whole.append((self._parts[0].opcode, payloads[0][:0].join(payloads)))
            self._parts.clear()

    async def event(self) -> dict[str, Any]:
        """The next event; a pong on the way is left out."""
        while True:
            opcode, payload = await self.next()
            if opcode is not Opcode.PONG:
                break
        assert opcode is Opcode.TEXT, (opcode, payload)
        decoded: dict[str, Any] = json.loads(payload)
        return decoded

    async def expect(self, type: str) -> dict[str, Any]:
        """The next event must be of this type."""
        told = await self.event()
        assert told["type"] == type, told
        return told

    async def error(self, code: str) -> dict[str, Any]:
        """The next event must be an error with this code; returns its ``error`` object."""
        error: dict[str, Any] = (await self.expect("error"))["error"]
        assert error["code"] == code, error
        return error

    async def closed(self) -> int | None:
        """Read on to the end of the connection: the close frame's code, 1005 for an empty one, None without one."""
        code = None
        while True:
            try:
                opcode, payload = await self.next()
            except (EOFError, ConnectionResetError):
                return code
            assert code is None, "nothing follows a close frame"
            if opcode is Opcode.CLOSE:
                code = int(payload[0])

    def reset(self) -> None:
        """End the connection with a RST, as a peer that crashed does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


@asynccontextmanager
async def connect(url: str, *, behind: bytes = b"", **query: Any) -> AsyncIterator[RawClient]:
    """Connect to ``url`` (``ws://.../v1/realtime``) with this query and read ``session.created``."""
    client = RawClient()
    try:
        await client.handshake(url, query, behind)
        client.session = (await client.expect("session.created"))["session"]
        yield client
    finally:
        client.socket.close()
