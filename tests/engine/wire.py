"""A server of raw bytes: it says exactly what the test wrote, cut as the test wrote it."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import orjson

End = Literal["close", "reset", "hang"]

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(delta: dict[str, object] | None = None, **choice: object) -> bytes:
    """One event of an answer, as vLLM writes it."""
    value = {"id": "x", "choices": [{"index": 0, "delta": delta or {}, "finish_reason": None, **choice}]}
    return b"data: " + orjson.dumps(value) + b"\n\n"


def text(value: str) -> bytes:
    return event({"content": value})


DONE = b"data: [DONE]\n\n"
STOP = event({"content": ""}, finish_reason="stop")


def usage(**tokens: object) -> bytes:
    return b"data: " + orjson.dumps({"choices": [], "usage": tokens}) + b"\n\n"


def chunked(*pieces: bytes, whole: bool = True) -> list[bytes]:
    """``pieces`` as a streamed response, each written by itself; with its end, unless it is not ``whole``."""
    body = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces]
    return [STREAM_HEAD, *body, *([b"0\r\n\r\n"] if whole else [])]


def answer(status: int, body: bytes) -> list[bytes]:
    """A response that is no stream."""
    return [b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body)), body]


@dataclass
class Wire:
    """What a test sees of the server's side."""

    url: str
    #: head and body of each request
    requests: list[tuple[str, bytes]] = field(default_factory=list)
    #: set when the client has closed a connection
    left: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def saying(pieces: Sequence[bytes], end: End = "close") -> AsyncIterator[Wire]:
    """Answer each connection's request with ``pieces``, then close, reset, or keep silent."""
    tasks = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next((int(h[15:]) for h in head.split("\r\n") if h.lower().startswith("content-length:")), 0)
            wire.requests.append((head, await reader.readexactly(length)))
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.001)  # so that the kernel does not join what the test has cut
            if end == "reset":
                sock: socket.socket = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            elif end == "hang":
                await reader.read()
                wire.left.set()
        except (ConnectionError, asyncio.IncompleteReadError):
            wire.left.set()
        finally:
            writer.close()
            tasks.discard(task)

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    wire = Wire(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield wire
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
