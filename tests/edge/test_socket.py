"""The socket itself, on a real loopback connection: frames, buffers, readers that freeze, and ways to end."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import websockets.asyncio.client
from starlette.types import Receive, Scope, Send
from websockets.exceptions import ConnectionClosed

from chat_server.app import Server
from chat_server.edge import realtime
from chat_server.edge import socket as socket_module
from chat_server.edge.outbox import Outbox
from chat_server.edge.socket import SCOPE_KEY, SocketProtocol, socket_protocol
from chat_server.engine.simulated import SimulatedOptions, answer_for
from chat_server.settings import Limits
from tests.support.server import running_server

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
    server = Server(config)
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


class FrozenReader:
    """A client with the smallest receive buffer, which does the handshake and then reads nothing until it is told."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        self._socket.setblocking(False)

    async def connect(self, port: int, path: str = "/") -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._socket, ("127.0.0.1", port))
        key = b64encode(os.urandom(16)).decode()
        lines = [
            *(f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Upgrade: websocket", "Connection: Upgrade"),
            *("Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {key}", "", ""),
        ]
        await loop.sock_sendall(self._socket, "\r\n".join(lines).encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += await loop.sock_recv(self._socket, 1)
        assert head.startswith(b"HTTP/1.1 101 "), head

    async def read_to_the_end(self) -> int:
        """Read on until the connection is closed or reset; how many bytes came."""
        loop = asyncio.get_running_loop()
        count = 0
        try:
            async with asyncio.timeout(10):
                while data := await loop.sock_recv(self._socket, 1 << 20):
                    count += len(data)
        except ConnectionResetError:
            pass
        return count

    def close(self) -> None:
        self._socket.close()


@asynccontextmanager
async def frozen_reader(port: int, path: str = "/") -> AsyncIterator[FrozenReader]:
    reader = FrozenReader()
    try:
        await reader.connect(port, path)
        yield reader
    finally:
        reader.close()


async def fill(ours: SocketProtocol, frame: bytes = b"x" * 8000) -> int:
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
    """Above the high-water mark nothing is written; below a quarter of it the socket says that it takes bytes again."""
    app = App()
    async with listening(app) as port, connected(app, port) as (ours, client):
        assert ours.transport.get_write_buffer_limits() == (BUFFER // 4, BUFFER)
        assert ours.can_write
        writable = asyncio.Event()
        ours.on_writable = writable.set
        client.transport.pause_reading()
        count = await fill(ours)
        waiting = ours.bytes_written - ours.bytes_taken
        assert BUFFER < waiting == ours.transport.get_write_buffer_size() <= BUFFER + 8004
        assert not writable.is_set()
        client.transport.resume_reading()
        async with asyncio.timeout(5):
            for _ in range(count):
                assert len(await client.recv()) == 8000
            await writable.wait()
            while ours.bytes_taken < ours.bytes_written:
                await asyncio.sleep(0.01)
        assert ours.can_write


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


async def test_a_peer_that_takes_nothing_is_not_asked_to_close() -> None:
    """The close frame would stand behind what it does not take: it is dropped at once."""
    app = App()
    async with listening(app) as port, frozen_reader(port):
        ours = await app.accepted.get()
        await fill(ours)
        ours.close(1013, "too slow")
        async with asyncio.timeout(5):
            assert (await app.received.get())["type"] == "websocket.disconnect"
        assert not ours.is_open


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


async def test_a_peer_that_does_not_answer_a_close_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a deadline, so that a dead peer does not hold its place."""
    monkeypatch.setattr(socket_module, "_CLOSE_S", 0.1)
    app = App()
    async with listening(app) as port, frozen_reader(port) as reader:
        ours = await app.accepted.get()
        ours.close(1000, "bye")
        assert not ours.transport.is_closing()
        assert await reader.read_to_the_end() > 0
        assert ours.transport.is_closing()


async def test_a_peer_that_answers_no_ping_is_dropped() -> None:
    """Also when its buffer is full, where uvicorn's own time-out would wait for ever."""
    app = App()
    async with listening(app, ws_ping_interval=0.1, ws_ping_timeout=0.1) as port, frozen_reader(port):
        ours = await app.accepted.get()
        await fill(ours)
        async with asyncio.timeout(5):
            assert (await app.received.get())["type"] == "websocket.disconnect"


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


# --- a frozen reader of the real server


async def test_a_frozen_reader_costs_little_and_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for it stays within the buffer, after ``send_timeout_s`` it is gone, and nobody else notices."""
    sockets: list[SocketProtocol] = []
    outboxes: list[Outbox] = []

    class Recorded(Outbox):
        def __init__(self, socket: SocketProtocol, **how: Any) -> None:
            super().__init__(socket, **how)
            sockets.append(socket)
            outboxes.append(self)

    monkeypatch.setattr(realtime, "Outbox", Recorded)
    wish = "Tell me more, in 500 words."
    fast = SimulatedOptions(tokens_per_s=400.0, first_token_s=0.0)
    limits = Limits(send_timeout_s=0.5, socket_buffer_bytes=16 << 10)
    async with running_server(tmp_path, engines=1, simulated=fast, limits=limits) as server, server.connect() as client:
        session_id, port = client.session["id"], server.settings.port
        async with frozen_reader(port, f"/v1/realtime?session_id={session_id}") as reader:
            _, ours = sockets
            # The kernel would take megabytes for it, which is not what is tested here.
            ours.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            most = 0
            await client.say(wish)
            await client.send("response.create")
            while ours.is_open:
                event = await client.next()
                assert event["type"] != "response.done", "the frozen reader was never dropped"
                most = max(most, ours.transport.get_write_buffer_size())
            assert outboxes[1].statistics() == {"events": 0, "event_bytes": 0, "views": 0}
            await client.until("response.done")
            assert 16 << 10 < most < 32 << 10
            assert await reader.read_to_the_end() < 1 << 20
        [text] = client.texts.values()
        assert text == answer_for([{"role": "user", "content": wish}])
        deltas = [len(event["delta"]) for event in client.events if event["type"] == "response.output_text.delta"]
        assert len(deltas) > 300, "the other reader kept up all the time"
        async with server.connect(session_id=session_id, history=1) as again:
            assert (await again.until("conversation.item.done"))["item"]["content"][0]["text"] == text
