"""The socket itself, on a real loopback connection: frames, buffers, readers that freeze, and ways to end."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import struct
import time
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvicorn
import websockets.asyncio.client
from starlette.types import Receive, Scope, Send
from websockets.exceptions import ConnectionClosed

from chat_server.app import WebServer
from chat_server.edge import socket as socket_module
from chat_server.edge.socket import SCOPE_KEY, SocketProtocol, socket_protocol
from tests.support.slow_reader import SlowReader, slow_reader

pytestmark = pytest.mark.server

BUFFER = 64 << 10


class App:
    """Accepts WebSockets, and keeps each with the messages that came for it."""

    def __init__(self) -> None:
        self.accepted: asyncio.Queue[SocketProtocol] = asyncio.Queue()
        self.received: asyncio.Queue[Any] = asyncio.Queue()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept"})
        await self.accepted.put(scope["extensions"][SCOPE_KEY])
        while (message := await receive())["type"] != "websocket.disconnect":
            await self.received.put(message)
        await self.received.put(message)


@asynccontextmanager
async def listening(app: App, **settings: Any) -> AsyncIterator[int]:
    """uvicorn with our protocol, on a free port."""
    options: dict[str, Any] = {"ws": socket_protocol(BUFFER), "ws_per_message_deflate": False, **settings}
    config = uvicorn.Config(app, port=0, lifespan="off", log_config=None, access_log=False, **options)
    server = WebServer(config)
    serving = asyncio.create_task(server.run_until_told())
    try:
        yield (await server.address())[1]
    finally:
        serving.cancel()
        await asyncio.wait({serving})


@asynccontextmanager
async def connected(
    app: App, port: int
) -> AsyncIterator[tuple[SocketProtocol, websockets.asyncio.client.ClientConnection]]:
    """Both ends of a connection: ours, and the ``websockets`` library's."""
    async with websockets.asyncio.client.connect(
        f"ws://127.0.0.1:{port}/?secret=in-the-query", max_size=None, proxy=None, close_timeout=1
    ) as client:
        yield await app.accepted.get(), client


@asynccontextmanager
async def frozen(app: App, port: int, receive_buffer: int = 1) -> AsyncIterator[tuple[SocketProtocol, SlowReader]]:
    """Both ends of a connection whose client reads only what a test says."""
    async with slow_reader(f"ws://127.0.0.1:{port}/", receive_buffer) as reader:
        yield await app.accepted.get(), reader


async def gone(app: App) -> dict[str, Any]:
    """Wait until the app hears that the connection is over."""
    async with asyncio.timeout(5):
        message: dict[str, Any] = await app.received.get()
    assert message["type"] == "websocket.disconnect"
    return message


async def lost(ours: SocketProtocol) -> None:
    """Wait until nothing is left of a connection: the transport is closed, the server has forgotten it."""
    async with asyncio.timeout(5):
        while not ours.disconnected or ours in ours.connections:
            await asyncio.sleep(0.01)


def kernel_bytes(ours: SocketProtocol) -> int:
    """What the kernel holds for what we sent, with its overhead (SO_MEMINFO of socket(7), sk_wmem_queued)."""
    answer = ours.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, 55, 36)
    queued: int = struct.unpack("9I", answer)[5]
    return queued


@pytest.fixture
def short_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer has little time to answer a close."""
    monkeypatch.setattr(socket_module, "_CLOSE_S", 0.1)


async def fill(ours: SocketProtocol, frame: bytes = b'{"type":"x"}'.ljust(8000)) -> int:
    """Write until the socket takes no more; the number of frames."""
    count = 0
    while ours.can_write:
        ours.write_text(frame)
        count += 1
        await asyncio.sleep(0)  # the kernel takes what it can
        assert count < 10_000, "the socket takes everything"
    return count


# --- frames


async def test_frames_of_every_size_are_read_as_they_were_written() -> None:
    """At and round the borders of the three lengths of a header (RFC 6455, 5.2)."""
    app = App()
    sizes = [0, 1, 125, 126, 127, 65_534, 65_535, 65_536, 65_537, 1_000_000]
    async with listening(app) as port, connected(app, port) as (ours, client):
        written = 0
        for size in sizes:
            text = ("Grüezi 👋" * (size // 8 + 1)).encode()[:size].decode(errors="ignore")
            payload = text.encode() + b"." * (size - len(text.encode()))
            ours.write_text(payload)
            frame = await client.recv()
            assert isinstance(frame, str)
            assert frame.encode() == payload
            written += size + (2 if size < 126 else 4 if size < 65_536 else 10)
            assert ours.bytes_written == written


async def test_frames_written_in_a_row_come_in_a_row() -> None:
    """Also with pings of either side between them."""
    app = App()
    async with (
        listening(app, ws_ping_interval=0.01, ws_ping_timeout=5.0) as port,
        connected(app, port) as (ours, client),
    ):
        for number in range(300):
            ours.write_text(b"%d" % number)
            if number % 50 == 0:
                await client.ping()
                await asyncio.sleep(0.01)
        assert [await client.recv() for _ in range(300)] == [str(number) for number in range(300)]
        await client.send("and back")
        assert (await app.received.get())["text"] == "and back"


# --- buffers


async def test_the_buffer_has_its_bounds() -> None:
    """Above a quarter of the bound nothing is written; below it the socket says that it takes bytes again."""
    app = App()
    async with listening(app) as port, frozen(app, port) as (ours, reader):
        assert ours.can_write
        writable = asyncio.Event()
        ours.on_writable = writable.set
        await fill(ours)
        waiting = ours.bytes_written - ours.bytes_taken
        assert BUFFER // 4 < waiting == ours.transport.get_write_buffer_size() <= BUFFER // 4 + 8004
        assert not writable.is_set()
        while not writable.is_set():
            await reader.read(1 << 10)
        assert ours.can_write
        assert ours.bytes_written - ours.bytes_taken <= BUFFER // 4
        while ours.bytes_taken < ours.bytes_written:
            await reader.read(1 << 10)


@pytest.mark.parametrize("receive_buffer", [1, 1 << 20])
async def test_the_kernel_hides_no_slow_reader(receive_buffer: int) -> None:
    """Left alone it takes megabytes for one that reads nothing; so it gets a bound, and uses up to twice of it."""
    app = App()
    async with listening(app) as port, frozen(app, port, receive_buffer) as (ours, _):
        await fill(ours)
        await asyncio.sleep(0.1)
        await fill(ours)
        assert 0 < kernel_bytes(ours) <= 2 * BUFFER + 4096
    unbounded = socket_protocol(8 << 20)
    async with listening(app, ws=unbounded) as port, frozen(app, port, receive_buffer) as (ours, _):
        ours.transport.set_write_buffer_limits(BUFFER)
        await fill(ours)
        assert kernel_bytes(ours) > 4 * BUFFER, "without a bound there is none: what is measured is the bound"


async def test_pings_of_a_peer_that_reads_nothing_do_not_fill_the_buffer() -> None:
    """Our answers stop at the high-water mark; when it reads again the last ping is answered."""
    app = App()
    async with listening(app) as port, connected(app, port) as (ours, client):
        client.transport.pause_reading()
        await fill(ours)
        full = ours.transport.get_write_buffer_size()
        for _ in range(2000):
            client.transport.write(b"\x89\xfd" + bytes(4) + bytes(125))  # a masked ping with the largest payload
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)
        assert ours.transport.get_write_buffer_size() <= full
        client.transport.resume_reading()
        async with asyncio.timeout(5):
            while ours.bytes_taken < ours.bytes_written:
                await client.recv()
        assert ours.is_open


@pytest.mark.parametrize("subprotocols", [b"realtime, openai-insecure-api-key.s3cret, x\xff"])
async def test_a_handshake_that_can_not_be_read_shows_nothing_of_itself(
    subprotocols: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A header may hold a key; the connection is dropped with a line that has nothing of it."""
    app = App()
    async with listening(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        )
        key = b64encode(os.urandom(16))
        writer.write(head + b"Sec-WebSocket-Key: " + key + b"\r\nSec-WebSocket-Protocol: " + subprotocols + b"\r\n\r\n")
        async with asyncio.timeout(5):
            assert b"101" not in await reader.read()
        writer.close()
    assert "s3cret" not in caplog.text
    assert "Traceback" not in caplog.text


async def test_a_lost_connection_is_told() -> None:
    """Whoever waits to write hears of it, finds the socket closed, and is not called again."""
    app = App()
    async with listening(app) as port, connected(app, port) as (ours, client):
        calls: list[bool] = []
        lost = asyncio.Event()

        def on_writable() -> None:
            calls.append(ours.can_write)
            lost.set()

        ours.on_writable = on_writable
        client.transport.abort()
        async with asyncio.timeout(5):
            await lost.wait()
            assert (await app.received.get())["type"] == "websocket.disconnect"
        assert calls == [False]
        assert not ours.is_open
        assert ours.on_writable is None


# --- ends


@pytest.mark.parametrize("code", [1000, 1008, 1011, 1012, 1013])
async def test_we_close_with_a_code_and_a_reason(code: int) -> None:
    """The client reads what was written before and why it is over; the app's ``receive`` returns."""
    app = App()
    async with listening(app) as port, connected(app, port) as (ours, client):
        ours.write_text(b"the last word")
        ours.close(code, "why, in ümläuts")
        assert not ours.is_open
        assert not ours.can_write
        ours.close(1011, "twice")
        assert await client.recv() == "the last word"
        with pytest.raises(ConnectionClosed):
            await client.recv()
        assert (client.close_code, client.close_reason) == (code, "why, in ümläuts")
        message = await app.received.get()
        assert (message["type"], message["code"]) == ("websocket.disconnect", code)


async def test_a_slow_reader_is_told_why_it_is_closed() -> None:
    """The close frame stands behind what waits: who takes that in time gets it."""
    app = App()
    async with listening(app) as port, frozen(app, port) as (ours, reader):
        count = await fill(ours)
        ours.close(1013, "too slow")
        assert not ours.is_open
        assert (await gone(app))["code"] == 1013
        await reader.read_to_the_end()
        assert (reader.close_code, len(reader.events), reader.reset) == (1013, count, False)
        await lost(ours)


async def test_a_frozen_reader_is_reset(short_close: None) -> None:
    """It does not come so far as to the close frame: both ends of the connection are free, and it sees a reset."""
    app = App()
    async with listening(app) as port, frozen(app, port) as (ours, reader):
        await fill(ours)
        ours.close(1013, "too slow")
        await lost(ours)
        await reader.read_to_the_end()
        assert (reader.close_code, reader.reset) == (None, True)


async def test_an_abort_drops_the_connection_at_once() -> None:
    """Whatever waits; the client sees no close frame."""
    app = App()
    async with listening(app) as port, connected(app, port) as (ours, client):
        ours.abort()
        ours.abort()
        with pytest.raises(ConnectionClosed):
            await client.recv()
        assert client.close_code == 1006
        assert (await app.received.get())["type"] == "websocket.disconnect"


async def test_a_frozen_reader_behind_tls_is_dropped_too(short_close: None, tmp_path: Path) -> None:
    """There is a buffer more on the way, with its own bound, and a shutdown of its own that would wait too."""
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    key, chain = tmp_path / "key.pem", tmp_path / "chain.pem"
    certificate.private_key_pem.write_to_path(key)
    certificate.cert_chain_pems[0].write_to_path(chain)
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    app = App()
    async with listening(app, ssl_certfile=chain, ssl_keyfile=key) as port:
        connecting = websockets.asyncio.client.connect(f"wss://127.0.0.1:{port}/", ssl=trust, proxy=None)
        async with connecting as client:
            ours = await app.accepted.get()
            client.transport.pause_reading()
            count = await fill(ours)
            assert count * 8000 < 1 << 20
            ours.close(1013, "too slow")
            await lost(ours)
            client.transport.abort()


async def test_a_peer_that_does_not_answer_a_close_is_dropped(short_close: None) -> None:
    """After a deadline, so that a dead peer does not hold its place."""
    app = App()
    async with listening(app) as port, frozen(app, port) as (ours, reader):
        reader.answers = False
        ours.close(1000, "bye")
        assert not ours.transport.is_closing()
        await lost(ours)
        await reader.read_to_the_end()
        assert (reader.close_code, reader.reset) == (1000, True)


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(b"\x88\x82" + bytes(4) + b"\x03\xe8", id="a close"),
        pytest.param(b"\xff\x80" + bytes(4), id="no frame"),
        pytest.param(b"", id="the end of the stream"),
    ],
)
async def test_a_peer_that_ends_it_and_reads_nothing_is_dropped(frame: bytes, short_close: None) -> None:
    """Its connection would stay as long as it likes, with all that waits: no ping looks after it any more."""
    app = App()
    async with listening(app) as port, frozen(app, port) as (ours, reader):
        await fill(ours)
        if frame:
            await reader.send_raw(frame)
        else:
            reader.send_eof()
        await gone(app)
        await lost(ours)


async def test_a_frozen_reader_does_not_hold_up_the_end_of_the_server(short_close: None) -> None:
    """It stops without waiting for what nobody takes."""
    app = App()
    async with asyncio.timeout(5):
        async with listening(app) as port, slow_reader(f"ws://127.0.0.1:{port}/"):
            await fill(await app.accepted.get())


# --- pings


async def test_a_peer_that_answers_no_ping_is_told_and_dropped(short_close: None) -> None:
    """One that reads, but whose program is stuck, learns why when it wakes up."""
    app = App()
    async with (
        listening(app, ws_ping_interval=0.1, ws_ping_timeout=0.1) as port,
        frozen(app, port) as (ours, reader),
    ):
        reader.answers = False
        assert (await gone(app))["code"] == 1013
        await lost(ours)
        await reader.read_to_the_end()
        assert (reader.pings, reader.close_code, reader.reset) == (1, 1013, True)


async def test_a_peer_that_takes_nothing_and_answers_no_ping_is_dropped(short_close: None) -> None:
    """Also when its buffer is full, where uvicorn's own time-out would wait for ever."""
    app = App()
    async with (
        listening(app, ws_ping_interval=0.1, ws_ping_timeout=0.1) as port,
        frozen(app, port) as (ours, _),
    ):
        await fill(ours)
        await lost(ours)


async def test_a_peer_that_is_slow_to_come_to_the_ping_is_not_dropped() -> None:
    """The ping stands behind what it still takes, and as long as it takes that it lives."""
    app = App()
    async with (
        listening(app, ws_ping_interval=0.1, ws_ping_timeout=0.7) as port,
        frozen(app, port, 8 << 10) as (ours, reader),
    ):
        await fill(ours)
        began = time.monotonic()
        while not reader.pings:
            assert await reader.read(4 << 10), "it was dropped"
            await asyncio.sleep(0.08)
        assert time.monotonic() - began > 0.9, "it was slow enough to be taken for dead"
        assert ours.is_open


# --- what is no handshake, and what is logged


async def test_a_handshake_that_is_none_is_refused() -> None:
    """What is no WebSocket key never becomes a connection, and nothing fails over it."""
    app = App()
    async with listening(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 4")
        writer.close()
        await writer.wait_closed()
        async with connected(app, port):
            pass


async def test_no_log_line_holds_the_query(caplog: pytest.LogCaptureFixture) -> None:
    """It names sessions; uvicorn would log it with each connection."""
    caplog.set_level(logging.DEBUG)
    app = App()
    async with listening(app) as port, connected(app, port) as (ours, client):
        ours.write_text(b"hello")
        await client.recv()
    assert "in-the-query" not in "".join(
        record.getMessage() for record in caplog.records if not record.name.startswith("websockets.client")
    )
