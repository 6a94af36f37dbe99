"""The small client of the terminal chat, against the real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from chat_server.client.connection import ChatError, Connection, ConnectionLost, realtime_url
from chat_server.engine.simulated import Fault, answer_for
from tests.support.server import QUICK, RunningServer, free_port

pytestmark = pytest.mark.server


@asynccontextmanager
async def connected(server: RunningServer, session_id: str | None = None) -> AsyncIterator[Connection]:
    connection = await Connection.open(server.url, session_id=session_id)
    try:
        yield connection
    finally:
        await connection.close()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://127.0.0.1:8000", "ws://127.0.0.1:8000/v1/realtime"),
        ("127.0.0.1:8000", "ws://127.0.0.1:8000/v1/realtime"),
        ("https://example.com/chat/", "wss://example.com/chat/v1/realtime"),
        ("https://example.com/v1", "wss://example.com/v1/realtime"),
        ("wss://example.com/v1/realtime", "wss://example.com/v1/realtime"),
    ],
)
def test_any_usual_form_of_the_address_will_do(given: str, expected: str) -> None:
    """People paste what they have at hand: the page's address, the API's base URL, or the socket's."""
    assert realtime_url(given) == expected


def test_an_address_of_another_kind_is_refused() -> None:
    """The message shows what an address looks like."""
    with pytest.raises(ChatError, match="Example: http"):
        realtime_url("ftp://example.com")


async def test_an_answer_comes_in_pieces_and_whole(server: RunningServer) -> None:
    """The pieces joined are the answer that the engine gave, and the end says who gave it."""
    pieces: list[str] = []
    async with connected(server) as connection:
        answer = await connection.ask("Hello", pieces.append)
    expected = answer_for([{"role": "user", "content": "Hello"}], QUICK.words)
    assert len(pieces) > 1
    assert "".join(pieces) == answer.text == expected
    assert (answer.status, answer.problem) == ("completed", None)
    assert answer.engine in ("engine-1", "engine-2")
    assert answer.ttft_ms is not None
    assert answer.output_tokens > 0


async def test_a_conversation_goes_on_by_its_session_id(server: RunningServer) -> None:
    """A second connection finds the messages, and its prompt their prefix in the engine's cache."""
    async with connected(server) as connection:
        await connection.ask("Hello, this is the beginning. " * 10, lambda _: None)
        session_id = connection.session_id
    async with connected(server, session_id) as connection:
        assert connection.item_count == 2
        answer = await connection.ask("And this goes on.", lambda _: None)
    assert "Before it came 2 messages" in answer.text
    assert 0 < answer.cached_tokens < answer.input_tokens


async def test_cancel_ends_the_answer(server: RunningServer) -> None:
    """What was told until then is returned, and the next question is answered."""
    async with connected(server) as connection:
        pieces: list[str] = []

        def stop_at_once(piece: str) -> None:
            if not pieces:
                stopping.append(asyncio.ensure_future(connection.cancel()))
            pieces.append(piece)

        stopping: list[asyncio.Future[None]] = []
        answer = await connection.ask("Tell me more, in 3000 words.", stop_at_once)
        assert answer.status == "cancelled"
        assert answer.text == "".join(pieces)
        assert (await connection.ask("Hello", lambda _: None)).status == "completed"


async def test_a_failed_answer_says_why(server: RunningServer) -> None:
    """The engine's failure is in ``problem``, in words."""
    for engine in server.engines:
        engine.engine.add_fault(Fault("status", status=400, message="no such thing", times=None))
    async with connected(server) as connection:
        answer = await connection.ask("Hello", lambda _: None)
    assert answer.status == "failed"
    assert answer.problem


async def test_a_callers_own_fault_comes_back_to_it(server: RunningServer) -> None:
    """An exception of ``on_text`` is raised by ``ask``; the connection lives on."""

    def broken(_piece: str) -> None:
        raise BrokenPipeError

    async with connected(server) as connection:
        with pytest.raises(BrokenPipeError):
            await connection.ask("Hello", broken)


async def test_a_server_that_stops_ends_the_question(server: RunningServer) -> None:
    """Whoever waits for an answer is told that the connection is gone."""
    async with connected(server) as connection:
        await server.stop()
        with pytest.raises(ConnectionLost, match="connection was lost"):
            await connection.ask("Hello", lambda _: None)


async def test_where_nothing_listens_it_says_how_to_start_the_server() -> None:
    """The commonest mistake, with its remedy."""
    with pytest.raises(ChatError, match="chat-server serve"):
        await Connection.open(f"http://127.0.0.1:{free_port()}")


async def test_a_refusal_is_told_in_the_servers_words(server: RunningServer) -> None:
    """The body of the HTTP answer says more than its status."""
    with pytest.raises(ChatError, match=r"no-such-model.*HTTP 404"):
        await Connection.open(server.url, model="no-such-model")


async def test_another_kind_of_server_is_told_apart() -> None:
    """A web server that is not ours, at the address that was given."""
    runner = web.AppRunner(web.Application())
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port := free_port())
        await site.start()
        with pytest.raises(ChatError, match="no chat server seems to be there"):
            await Connection.open(f"http://127.0.0.1:{port}")
    finally:
        await runner.cleanup()
