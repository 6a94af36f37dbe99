"""The head of a request is bounded in bytes and in time, before anybody's credential is known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from chat_server.app import WebServer
from chat_server.edge.head import MAX_HEAD_BYTES, HttpProtocol

pytestmark = pytest.mark.server

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def hello(_: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


class Hasty(HttpProtocol):
    head_s = 0.3


@asynccontextmanager
async def dialled() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A raw connection to a server with the protocol."""
    app = Starlette(routes=[Route("/", hello)])
    config = uvicorn.Config(
        app,
        port=0,
        http=Hasty,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_keep_alive=5,
    )
    server = WebServer(config)
    serving = asyncio.create_task(server.run_until_told())
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", (await server.address())[1])
        try:
            yield reader, writer
        finally:
            writer.close()
    finally:
        serving.cancel()
        await asyncio.wait([serving])


async def rest(reader: asyncio.StreamReader) -> bytes:
    """All until the peer closes."""
    async with asyncio.timeout(5):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize("start", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: "])
async def test_a_head_that_does_not_end_in_time_is_dropped(start: bytes) -> None:
    """Whoever says nothing, or says it byte by byte, holds no connection."""
    async with dialled() as (reader, writer):
        writer.write(start)
        assert await rest(reader) == b""


async def test_a_second_head_has_its_time_too() -> None:
    """On a connection that was kept alive."""
    async with dialled() as (reader, writer):
        writer.write(REQUEST)
        assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
        writer.write(b"GET / HTTP/1.1\r\n")
        assert await rest(reader) == b""


async def test_a_connection_that_is_kept_alive_is_no_late_head() -> None:
    """Between two requests a client may be silent for longer; uvicorn's own time is for that."""
    async with dialled() as (reader, writer):
        for _ in range(2):
            writer.write(REQUEST)
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(2 * Hasty.head_s)


@pytest.mark.parametrize("piece", [b"a" * 1000, b"x: y\r\n" * 200])
async def test_an_endless_head_is_refused(piece: bytes) -> None:
    """One header without end, or headers without end: 400, and the connection is closed."""
    async with dialled() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX: ")
        for _ in range(3 * MAX_HEAD_BYTES // len(piece)):
            writer.write(piece)
        answer = await rest(reader)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
