"""Whatever bytes a peer sends: the close code of RFC 6455 or an ``error``, the session lives on, nobody else notices.

Beside each test a neighbour's answer streams on the same server, and is judged at the end.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import pytest
import pytest_asyncio
from wsproto.frame_protocol import Opcode

from tests.e2e.neighbour import Neighbour, no_traceback, talkative_server, undisturbed
from tests.support import raw
from tests.support.raw import RawClient, create, event, fragments, frame, text
from tests.support.server import RunningServer

pytestmark = [pytest.mark.server, pytest.mark.asyncio(loop_scope="module")]

BOUND = 1 << 20
PING = b'{"type":"ping","t":1}'
TEXT = 'Grüezi 👩🏽\u200d💻 "\\ \u2028 e\u0301'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    """One server for all tests here; each has a session of its own."""
    async with talkative_server(tmp_path_factory.mktemp("frames")) as running:
        yield running


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def neighbour(server: RunningServer) -> AsyncIterator[Neighbour]:
    async with undisturbed(server) as neighbour:
        yield neighbour


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with no_traceback(caplog):
        yield


@asynccontextmanager
async def peer(server: RunningServer) -> AsyncIterator[RawClient]:
    """A connection that said something before it does what the test is about; afterwards its session goes on."""
    async with raw.connect(server.ws_url, extensions=1) as client:
        await say(client, "Before")
        yield client
    await goes_on(server, client.session["id"], items=1)


async def goes_on(server: RunningServer, session_id: str, *, items: int) -> None:
    """Another connection finds the session with its items, and can use it."""
    async with server.connect(session_id=session_id) as client:
        assert client.events[0]["item_count"] == items
        await client.say("After")


async def said(client: RawClient, content: str) -> None:
    """The server has the message as it was sent."""
    await client.expect("conversation.item.added")
    done = await client.expect("conversation.item.done")
    assert done["item"]["content"] == [{"type": "input_text", "text": content}]


async def say(client: RawClient, content: str) -> None:
    await client.send(text(create(content)))
    await said(client, content)


async def answers(client: RawClient) -> None:
    """The connection still does what it is there for."""
    await client.send(event("ping", t=7))
    assert (await client.expect("pong"))["t"] == 7


# --- frames that end the connection


def close(code: int, reason: bytes = b"") -> bytes:
    return frame(Opcode.CLOSE, code.to_bytes(2, "big") + reason)


FATAL: dict[str, tuple[list[bytes], int]] = {
    "not masked": ([frame(Opcode.TEXT, PING, masked=False)], 1002),
    "a ping that is not masked": ([frame(Opcode.PING, masked=False)], 1002),
    **{f"reserved bit {rsv}": ([frame(Opcode.TEXT, PING, rsv=rsv)], 1002) for rsv in (1, 2, 4, 7)},
    "a ping with a reserved bit": ([frame(Opcode.PING, rsv=4)], 1002),
    **{f"reserved opcode {code}": ([frame(code, b"x")], 1002) for code in (3, 7, 11, 15)},
    "a ping of 126 bytes": ([frame(Opcode.PING, b"x" * 126)], 1002),
    "a pong of 126 bytes": ([frame(Opcode.PONG, b"x" * 126)], 1002),
    "a ping of 70 000 bytes": ([frame(Opcode.PING, b"x" * 70_000)], 1002),
    "a ping in fragments": ([frame(Opcode.PING, b"x", fin=False)], 1002),
    "a continuation of nothing": ([frame(Opcode.CONTINUATION, PING)], 1002),
    "a continuation after the end": ([text(PING), frame(Opcode.CONTINUATION, PING)], 1002),
    "a text inside a text": ([frame(Opcode.TEXT, b"{", fin=False), text(PING)], 1002),
    "bytes inside a text": ([frame(Opcode.TEXT, b"{", fin=False), frame(Opcode.BINARY, PING)], 1002),
    "no UTF-8": ([text(b'{"type":"\xff"}')], 1007),
    "UTF-8 of a surrogate": ([text(b'{"type":"\xed\xa0\x80"}')], 1007),
    "UTF-8 longer than it must be": ([text(b'{"type":"\xc0\xaf"}')], 1007),
    "half a character at the end": ([text('{"type":"é'.encode()[:-1])], 1007),
    "no UTF-8 in a fragment": (fragments(b'{"type":"ping","event_id":"\xc3\x28"}', 28), 1007),
    "no UTF-8 and a close behind it": ([text(b'{"type":"\xff"}') + frame(Opcode.PING) + close(1000)], 1007),
    "one byte over the bound": ([text(PING + b" " * (BOUND + 1 - len(PING)))], 1009),
    "far over the bound": ([text(b" " * (8 * BOUND))], 1009),
    "fragments over the bound": (fragments(b" " * (BOUND + 1), 100_000), 1009),
    "over the bound by the last fragment": (fragments(b" " * (BOUND + 1), BOUND), 1009),
    "over the bound, and as much again behind it": ([text(b" " * (BOUND + 1)) + text(PING) * 40_000], 1009),
    "bytes over the bound": ([frame(Opcode.BINARY, b" " * (BOUND + 1))], 1009),
    "a length of 2 to the 32": ([frame(Opcode.TEXT, PING, length=1 << 32)], 1009),
    "a length with its highest bit set": ([frame(Opcode.TEXT, PING, length=1 << 63)], 1009),
    "a plain HTTP request": ([b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"], 1002),
    "a TLS hello": ([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"], 1002),
}


@pytest.mark.parametrize("name", FATAL)
async def test_a_frame_that_is_none_closes_with_the_code_of_its_fault(server: RunningServer, name: str) -> None:
    """1002 for what breaks the protocol, 1007 for what is no text, 1009 for what is too much."""
    pieces, code = FATAL[name]
    async with peer(server) as client:
        sending = asyncio.create_task(client.send(*pieces))
        try:
            assert await client.closed() == code
        finally:
            with suppress(ConnectionError):
                await sending  # the server need not take what follows


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"", 1005),  # an empty one is answered with an empty one
        *[(code.to_bytes(2, "big"), code) for code in (1000, 1001, 1003, 1007, 1011, 3000, 4999)],
        (b"\x03\xe8" + "Tschüss".encode(), 1000),
        (b"\x03\xe8" + b"x" * 123, 1000),
        *[(code.to_bytes(2, "big"), 1002) for code in (0, 999, 1004, 1005, 1006, 1015, 1016, 2999, 5000, 65535)],
        (b"\x03", 1002),
        (b"\x03\xe8" + b"x" * 124, 1002),
        (b"\x03\xe8\xff", 1007),
        (b"\x03\xe8" + "Tschüss".encode()[:5], 1007),
    ],
    ids=lambda value: repr(value[:6]) if isinstance(value, bytes) else None,
)
async def test_a_close_is_answered_as_it_was_meant(server: RunningServer, payload: bytes, code: int) -> None:
    """A right one with its own code; one that may not be sent, is cut short or is no text, with that of the fault."""
    async with peer(server) as client:
        await client.send(frame(Opcode.CLOSE, payload) + text(create("behind it")))
        assert await client.closed() == code


async def test_a_close_in_mid_message_ends_it(server: RunningServer) -> None:
    """What came of the message is forgotten, and the peer is told that its end was missed."""
    async with peer(server) as client:
        await client.send(frame(Opcode.TEXT, create("half")[:20], fin=False), close(1000))
        assert await client.closed() == 1002


@pytest.mark.parametrize("how", ["half-closed", "reset"])
@pytest.mark.parametrize("cut", [1, 5, 40])
async def test_a_peer_that_goes_in_mid_frame_is_gone(server: RunningServer, how: str, cut: int) -> None:
    """In the head of a frame or in its payload: it is not waited for, and half a message is none."""
    async with peer(server) as client:
        await client.send(text(create("half a message"))[:cut])
        if how == "reset":
            client.reset()
        else:
            client.socket.shutdown(socket.SHUT_WR)
            assert await client.closed() is None


async def test_what_was_said_before_the_end_is_done(server: RunningServer) -> None:
    """A peer that sends, and then nothing more ever: its message is stored and its answer is made."""
    async with raw.connect(server.ws_url) as client:
        params = {"max_output_tokens": 5}
        await client.send(text(create("The last word")) + event("response.create", response=params))
        client.socket.shutdown(socket.SHUT_WR)
        await client.closed()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        async with server.connect(session_id=client.session["id"]) as other:
            if other.events[0]["item_count"] == 2 and other.events[0]["active_response"] is None:
                return
        await asyncio.sleep(0.05)
    raise AssertionError(f"it was not answered: {other.events[0]}")


# --- frames that are right


@pytest.mark.parametrize("size", [1, 2, 3, 100, 10_000])
async def test_a_message_in_fragments_is_one_message(server: RunningServer, size: int) -> None:
    """Of one byte each at the least: characters and escapes are cut where it happens."""
    async with raw.connect(server.ws_url) as client:
        await client.send(b"".join(fragments(create(TEXT), size)))
        await said(client, TEXT)


async def test_a_message_in_many_segments_is_one_message(server: RunningServer) -> None:
    """TCP has no messages: each byte of the frames may come by itself."""
    async with raw.connect(server.ws_url) as client:
        for byte in b"".join(fragments(create(TEXT), 150)):
            await client.send(bytes([byte]))
        await said(client, TEXT)


async def test_messages_in_one_segment_are_heard_in_their_order(server: RunningServer) -> None:
    """And those cut by a segment's end as well."""
    stream = b"".join(text(create(str(number))) for number in range(20))
    async with raw.connect(server.ws_url) as client:
        await client.send(stream[:1000], stream[1000:])
        for number in range(20):
            await said(client, str(number))


async def test_control_frames_inside_a_message_are_heard_at_once(server: RunningServer) -> None:
    """A ping does not wait for the end of a message, and is no part of it (RFC 6455, 5.4)."""
    first, *rest = fragments(create(TEXT), 30)
    async with raw.connect(server.ws_url) as client:
        await client.send(first)
        for number, part in enumerate(rest):
            await client.send(frame(Opcode.PING, b"%d" % number), frame(Opcode.PONG, b"nobody asked"))
            assert await client.next() == (Opcode.PONG, b"%d" % number)
            await client.send(part)
        await said(client, TEXT)


@pytest.mark.parametrize("payload", [b"", b"\x00\xff", b"x" * 125])
async def test_a_ping_is_answered_with_what_it_holds(server: RunningServer, payload: bytes) -> None:
    """Whatever that is, up to the most that a control frame may hold."""
    async with raw.connect(server.ws_url) as client:
        await client.send(frame(Opcode.PING, payload))
        assert await client.next() == (Opcode.PONG, payload)


async def test_a_message_of_just_the_bound_is_taken(server: RunningServer) -> None:
    """In one frame or in many; it is the message that is bounded."""
    payload = PING + b" " * (BOUND - len(PING))
    async with raw.connect(server.ws_url, extensions=1) as client:
        for pieces in ([text(payload)], fragments(payload, 100_000), fragments(payload, BOUND - 1)):
            await client.send(*pieces)
            assert (await client.expect("pong"))["t"] == 1


@pytest.mark.parametrize("size", [None, 5])
@pytest.mark.parametrize("payload", [PING, b"", b"\xff\x00"])
async def test_bytes_are_an_error_and_nothing_more(server: RunningServer, payload: bytes, size: int | None) -> None:
    """Events are text; the connection stays, whatever the bytes are and however they come."""
    pieces = fragments(payload, size, opcode=Opcode.BINARY) if size and payload else [frame(Opcode.BINARY, payload)]
    async with raw.connect(server.ws_url, extensions=1) as client:
        await client.send(*pieces)
        error = await client.error("invalid_frame")
        assert (error["event_id"], error["param"]) == (None, None)
        await answers(client)


# --- text that is no event


NESTED = '{"type":"session.update","event_id":"e","session":{"audio":%s}}'


@pytest.mark.parametrize(
    ("payload", "code", "param"),
    [
        ("", "invalid_json", None),
        (" \t\r\n ", "invalid_json", None),
        ("\ufeff" + PING.decode(), "invalid_json", None),
        (NESTED % ("[" * 2000 + "]" * 2000), "invalid_json", None),
        (NESTED % ('{"a":' * 2000 + "0" + "}" * 2000), "invalid_json", None),
        ("[" * 100_000 + "]" * 100_000, "invalid_json", None),
        ('{"type":' * 100_000, "invalid_json", None),
        ('{"type":"ping","event_id":"\\ud800"}', "invalid_json", None),
        ('{"type":"ping","event_id":"\\ude00\\ud83d"}', "invalid_json", None),
        ('{"type":"ping","event_id":"\x00"}', "invalid_json", None),
        (PING.decode() + "\x00", "invalid_json", None),
        ('{"type":"ping","t":NaN}', "invalid_json", None),
        ('{"type":"ping","t":-Infinity}', "invalid_json", None),
        ('{"type":"ping","t":1e999}', "invalid_json", None),
        (f'{{"type":"ping","t":{"9" * 100_000}}}', "invalid_json", None),
        ('{"type":"ping","t":1e300}', "invalid_value", "t"),
        ('{"type":"response.cancel","seen":99999999999999999999}', "invalid_value", "seen"),
        ('{"type":"response.cancel","seen":1e3}', "invalid_value", "seen"),
        ('{"type":"ping","type":"pong"}', "invalid_value", "type"),
        ('{"type":"ping\\u0000"}', "invalid_value", "type"),
        ('{"type":"conversation.item.retrieve","item_id":"a\\u0000b"}', "invalid_value", "item_id"),
        ('{"type":"ping","\\u0000":1}', "unknown_parameter", "\x00"),
        (f'{{"type":"ping","{"x" * 1_000_000}":1}}', "unknown_parameter", "x" * 64),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, str) else None,
)
async def test_text_that_is_no_event_is_an_error_and_nothing_more(
    server: RunningServer, payload: str, code: str, param: str | None
) -> None:
    """It says what is wrong and where; the connection stays."""
    async with raw.connect(server.ws_url, extensions=1) as client:
        await client.send(text(payload))
        error = await client.error(code)
        assert (error["param"], error["type"], error["retryable"]) == (param, "invalid_request_error", False)
        await answers(client)


async def test_strange_text_that_is_an_event_is_taken(server: RunningServer) -> None:
    """NUL as an escape, a pair of surrogates, of a doubled key the last, depth that JSON readers allow."""
    async with raw.connect(server.ws_url, extensions=1) as client:
        await client.send(text(create("!").replace(b'"!"', b'"\\u0000\\ud83d\\ude00"')))
        await said(client, "\x00😀")
        await client.send(text('{"type":"pong","t":1,"t":2,"type":"ping"}'))
        assert (await client.expect("pong"))["t"] == 2
        await client.send(text(NESTED % ("[" * 1000 + "]" * 1000)))
        await client.expect("session.updated")
