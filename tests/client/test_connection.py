"""The small client of the terminal chat, against the real server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from chat_server.client import connection as client
from chat_server.client.connection import ChatError, Connection, ConnectionLost, SessionGone, realtime_url
from chat_server.engine.simulated import Fault, answer_for
from tests.support.line import line_to
from tests.support.server import QUICK, RunningServer, free_port, running_server

pytestmark = pytest.mark.server


@pytest_asyncio.fixture
async def slow_server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    """Slow enough to be cut in mid-answer; told to stop, it does not wait for answers."""
    slow = replace(QUICK, tokens_per_s=400.0)
    async with running_server(tmp_path, simulated=slow, drain_grace_s=0.0) as running:
        yield running


@asynccontextmanager
async def connected_by(url: str, session_id: str | None = None) -> AsyncIterator[Connection]:
    connection = await Connection.open(url, session_id=session_id)
    try:
        yield connection
    finally:
        await connection.close()


def connected(server: RunningServer, session_id: str | None = None) -> AbstractAsyncContextManager[Connection]:
    return connected_by(server.url, session_id)


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
    """It is waited for; when that was in vain, whoever asks is told that the connection is gone."""
    connection = await Connection.open(server.url, patience_s=0.5)
    try:
        await server.stop()
        for _ in range(2):
            with pytest.raises(ConnectionLost, match=r"connection was lost.*did not come back within"):
                await connection.ask("Hello", lambda _: None)
    finally:
        await connection.close()


async def test_an_answer_goes_on_over_cut_connections(slow_server: RunningServer) -> None:
    """Each piece is passed on once, whenever the line is cut: also before the first one, or while nobody asks."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    async with line_to(slow_server.url) as line:
        connection = await Connection.open(line.url)
        try:
            said: list[dict[str, str]] = []
            for number in range(3):
                text = f"👩🏽‍💻 {number}: tell me more, in 200 words."
                pieces: list[str] = []
                cuts = sorted(chance.sample(range(1, 60), 3))

                def passed_on(piece: str, pieces: list[str] = pieces, cuts: list[int] = cuts) -> None:
                    pieces.append(piece)
                    if cuts and len(pieces) >= cuts[0]:
                        cuts.pop(0)
                        line.cut()

                asking = asyncio.ensure_future(connection.ask(text, passed_on))
                await asyncio.sleep(chance.choice([0, 0.001, 0.01]))
                line.cut()
                answer = await asking
                said.append({"role": "user", "content": text})
                assert "".join(pieces) == answer.text == answer_for(said)
                assert (answer.status, cuts) == ("completed", [])
                said.append({"role": "assistant", "content": answer.text})
                line.cut()
        finally:
            await connection.close()


async def test_a_restart_of_the_server_is_survived(slow_server: RunningServer) -> None:
    """1012, in the middle of an answer and before the next one: both answers are whole."""
    async with connected(slow_server) as connection:
        pieces: list[str] = []
        restarting: list[asyncio.Future[None]] = []

        async def restart() -> None:
            await slow_server.drain()
            await slow_server.start()

        def passed_on(piece: str) -> None:
            if len(pieces) == 3:
                restarting.append(asyncio.ensure_future(restart()))
            pieces.append(piece)

        text = "Tell me more, in 400 words."
        answer = await connection.ask(text, passed_on)
        assert "".join(pieces) == answer.text == answer_for([{"role": "user", "content": text}])
        [task] = restarting
        await task
        await slow_server.drain()
        asking = asyncio.ensure_future(connection.ask("And now?", lambda _: None))
        await slow_server.start()
        assert "Before it came 2 messages" in (await asking).text


async def test_a_stop_outlives_the_cut(slow_server: RunningServer) -> None:
    """Asked for while the line is down, it is told to the next connection; no text follows."""
    async with line_to(slow_server.url) as line:
        connection = await Connection.open(line.url)
        try:
            pieces: list[str] = []
            stopping: list[asyncio.Future[None]] = []

            def passed_on(piece: str) -> None:
                pieces.append(piece)
                if len(pieces) == 5:
                    line.cut(down=True)
                    stopping.append(asyncio.ensure_future(connection.cancel()))
                    asyncio.get_running_loop().call_later(0.5, line.up)

            answer = await connection.ask("Tell me more, in 5000 words.", passed_on)
            assert answer.status == "cancelled"
            assert answer.text == "".join(pieces)
            assert len(pieces) == 5
            assert "Before it came 2 messages" in (await connection.ask("And now?", lambda _: None)).text
        finally:
            await connection.close()


@pytest.mark.parametrize("long", [True, False])
async def test_a_connection_that_stays_away_is_told_once(
    slow_server: RunningServer, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    """Whoever waits for an answer learns of it, before the rest comes; not if it is back in a moment."""
    monkeypatch.setattr(client, "NOTICE_S", 0.1 if long else 5.0)
    async with line_to(slow_server.url) as line, connected_by(line.url) as connection:
        told: list[str | None] = []

        def passed_on(piece: str) -> None:
            told.append(piece)
            if len(told) == 5:
                line.cut(down=True)
                asyncio.get_running_loop().call_later(0.5, line.up)

        text = "Tell me more, in 100 words."
        answer = await connection.ask(text, passed_on, lambda: told.append(None))
        assert [place for place, piece in enumerate(told) if piece is None] == ([5] if long else [])
        assert "".join(filter(None, told)) == answer.text == answer_for([{"role": "user", "content": text}])


async def test_who_asks_while_the_connection_is_away_is_told(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, if it has been away for long. What the caller does wrong then comes back to it, as with its text."""
    monkeypatch.setattr(client, "NOTICE_S", 0.05)

    def broken() -> None:
        raise BrokenPipeError

    async with line_to(server.url) as line, connected_by(line.url) as connection:
        line.cut(down=True)
        for _ in range(2):  # before it is noticed, and after
            with pytest.raises(BrokenPipeError):
                await connection.ask("Hello", lambda _: None, broken)
        line.up()
        assert (await connection.ask("Hello", lambda _: None)).status == "completed"


async def test_an_answer_that_ended_unheard_is_told(server: RunningServer) -> None:
    """Nothing of it had arrived when the line went: all of it comes with the next connection."""
    async with line_to(server.url) as line:
        connection = await Connection.open(line.url)
        try:
            line.swallow(sent=False)
            pieces: list[str] = []
            asking = asyncio.ensure_future(connection.ask("Hello", pieces.append))
            async with server.connect(session_id=connection.session_id) as client:
                await client.until("response.done")
            assert pieces == []
            line.cut()
            answer = await asking
            assert "".join(pieces) == answer.text == answer_for([{"role": "user", "content": "Hello"}], QUICK.words)
        finally:
            await connection.close()


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


async def test_a_session_that_is_gone_ends_the_connection(server: RunningServer) -> None:
    """Coming back would not help: it says why at once, and does not wait."""
    async with line_to(server.url) as line:
        connection = await Connection.open(line.url)
        try:
            line.cut(down=True)
            session = f"{server.url}/v1/sessions/{connection.session_id}"
            async with aiohttp.ClientSession() as http, http.delete(session) as told:
                assert told.status < 300
            line.up()
            with pytest.raises(SessionGone, match=f"{connection.session_id}.*HTTP 404"):
                await connection.ask("Hello", lambda _: None)
        finally:
            await connection.close()
