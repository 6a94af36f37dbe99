"""One WebSocket of ``/v1/realtime`` over the real server: what comes in, what is told, and to whom."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.server import RunningServer, running_server
from tests.support.ws import WsClient

pytestmark = [pytest.mark.server, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    """One server for all tests here; each has a session of its own."""
    async with running_server(tmp_path_factory.mktemp("realtime"), heartbeat_s=1.0) as running:
        yield running


async def alive(client: WsClient) -> None:
    """The connection and its session still work."""
    await client.say("Are you there?")


# --- frames


async def test_a_binary_frame_is_an_error_and_nothing_more(server: RunningServer) -> None:
    """Clients that send bytes are told so; the connection stays."""
    async with server.connect() as client:
        await client.connection.send(b'{"type":"response.create"}')
        error = (await client.expect("error"))["error"]
        assert (error["code"], error["event_id"]) == ("invalid_frame", None)
        await alive(client)


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ("", "invalid_json"),
        ("{", "invalid_json"),
        ('{"type":"ping"} {"type":"ping"}', "invalid_json"),
        ('{"type":"ping","t":NaN}', "invalid_json"),
        ("[" * 100_000, "invalid_json"),
        ('{"type":"ping","t":' + "[" * 5000 + "]" * 5000 + "}", "invalid_json"),
        ('{"type":"conversation.item.create","item":"\\ud800"}', "invalid_json"),
        ("[]", "invalid_value"),
        ("null", "invalid_value"),
        ('"ping"', "invalid_value"),
        ("{}", "missing_required_parameter"),
        ('{"type":null}', "invalid_value"),
        ('{"type":["ping"]}', "invalid_value"),
        ('{"type":"response.destroy"}', "invalid_value"),
        ('{"type":"session.update","session":{"tools":' + "[" * 900 + "1" + "]" * 900 + "}}", "unsupported"),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_a_frame_that_is_no_event_is_an_error_and_nothing_more(
    server: RunningServer, frame: str, code: str
) -> None:
    """Bad JSON, nesting, lone surrogates, unknown types: an error with a code, and the connection stays."""
    async with server.connect() as client:
        await client.connection.send(frame)
        error = (await client.expect("error"))["error"]
        assert (error["code"], error["retryable"]) == (code, False)
        assert "Traceback" not in error["message"]
        assert len(error["message"]) < 500
        await alive(client)


@pytest.mark.parametrize("event_id", [None, 7, "x" * 513, ["a"]])
async def test_an_error_carries_the_event_id_only_if_it_is_one(server: RunningServer, event_id: Any) -> None:
    """What the client can not use as an id is not thrown back at it."""
    async with server.connect() as client:
        await client.connection.send(json.dumps({"type": "conversation.item.retrieve", "event_id": event_id}))
        assert (await client.expect("error"))["error"]["event_id"] is None
        await client.send("conversation.item.retrieve", item_id="item_none")
        await client.error("item_not_found")


async def test_a_message_in_fragments_is_one_message(server: RunningServer) -> None:
    """Proxies and clients may cut a frame where they like (RFC 6455, 5.4)."""
    content = [{"type": "input_text", "text": "in fragments"}]
    item = {"type": "message", "role": "user", "content": content}
    frame = json.dumps({"type": "conversation.item.create", "item": item})
    async with server.connect() as client:
        await client.connection.send(frame[at : at + 10] for at in range(0, len(frame), 10))
        assert (await client.until("conversation.item.done"))["item"]["content"] == content


async def test_text_that_is_no_utf8_closes_with_1007(server: RunningServer) -> None:
    """As RFC 6455, 8.1 wants it; the session lives on."""
    async with server.connect() as client:
        await client.connection.send(b'{"type":"\xff"}', text=True)
        assert await client.closed() == 1007
    async with server.connect(session_id=client.session["id"]) as client:
        await alive(client)


async def test_a_frame_too_large_closes_with_1009(server: RunningServer) -> None:
    """The bound of a frame; what is below it but too long for a message is an error only. The session lives on."""
    bound = server.settings.limits.max_frame_bytes
    async with server.connect() as client:
        frame = json.dumps({"type": "ping", "event_id": "x"})
        await client.connection.send(frame + " " * (bound - len(frame)))
        await alive(client)
        await client.connection.send(frame + " " * (bound + 1 - len(frame)))
        assert await client.closed() == 1009
    async with server.connect(session_id=client.session["id"]) as client:
        await alive(client)


async def test_streamed_audio_is_complained_of_once_a_second(server: RunningServer) -> None:
    """A client that streams audio sends fifty events a second; other mistakes are told all the same."""
    async with server.connect() as client:
        first = await client.send("input_audio_buffer.append", audio="AAAA")
        for _ in range(5):
            await client.send("input_audio_buffer.append", audio="AAAA")
        error = await client.error("unsupported", event_id=first)
        assert error["param"] == "type"
        await client.send("conversation.item.retrieve", item_id="item_none")
        await client.error("item_not_found")
        await asyncio.sleep(1.0)
        await client.send("input_audio_buffer.append", audio="AAAA")
        await client.error("unsupported")


# --- the session


async def test_the_first_frame_tells_the_session(server: RunningServer) -> None:
    """A new session has its defaults; resumed, it says so and how many items it has."""
    async with server.connect() as client:
        created = client.events[0]
        assert (created["resumed"], created["item_count"], created["active_response"]) == (False, 0, None)
        session = created["session"]
        assert session["model"] == server.model
        assert (session["instructions"], session["max_output_tokens"]) == ("", "inf")
        assert (session["temperature"], session["top_p"], session["stop"]) == (None, None, [])
        assert session["flush"]["mode"] == "token"
        assert session["heartbeat_interval_ms"] == 1000
        await client.say("One")
    async with server.connect(session_id=session["id"]) as client:
        created = client.events[0]
        assert (created["resumed"], created["item_count"]) == (True, 1)
        assert created["session"] == session


async def test_settings_are_told_whole_to_all_and_are_kept(server: RunningServer) -> None:
    """``session.updated`` is the whole effective session; unset fields stay, null ones go back to the default."""
    changes = {
        "instructions": "Be brief. 👍",
        "max_output_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["END"],
    }
    async with server.connect() as one, server.connect(session_id=one.session["id"]) as two:
        await one.send("session.update", session={"type": "realtime", **changes})
        for client in (one, two):
            session = (await client.expect("session.updated"))["session"]
            assert changes.items() <= session.items()
        await two.send("session.update", session={"stop": None, "max_output_tokens": None})
        for client in (one, two):
            session = (await client.expect("session.updated"))["session"]
            assert session["instructions"] == changes["instructions"]
            assert (session["stop"], session["max_output_tokens"]) == ([], "inf")
    async with server.connect(session_id=one.session["id"]) as client:
        assert client.session == session


async def test_what_the_sdks_always_send_is_accepted_and_not_echoed(server: RunningServer) -> None:
    """Fields of the API without a meaning for text change nothing and are not said back."""
    ignored = {
        "audio": {"input": {"format": {"type": "audio/pcm"}}},
        "include": None,
        "model": "gpt-realtime",
        "output_modalities": ["audio"],
        "prompt": None,
        "tool_choice": "auto",
        "tools": [],
        "tracing": "auto",
        "truncation": "auto",
    }
    async with server.connect() as client:
        before = client.session
        await client.send("session.update", session=ignored)
        assert (await client.expect("session.updated"))["session"] == before


@pytest.mark.parametrize(
    ("session", "code", "param"),
    [
        ({"voice": "alloy"}, "unknown_parameter", "session.voice"),
        ({"flush": {"mode": "token", "speed": 1}}, "unknown_parameter", "session.flush.speed"),
        ({"instructions": 5}, "invalid_value", "session.instructions"),
        ({"temperature": "warm"}, "invalid_value", "session.temperature"),
        ({"temperature": 3}, "invalid_value", "session.temperature"),
        ({"top_p": 0}, "invalid_value", "session.top_p"),
        ({"max_output_tokens": 0}, "invalid_value", "session.max_output_tokens"),
        ({"stop": [""]}, "invalid_value", "session.stop[0]"),
        ({"type": "transcription"}, "invalid_value", "session.type"),
        ({"flush": {"mode": "letter"}}, "invalid_value", "session.flush.mode"),
        ({"flush": {"mode": "sentence"}}, "unsupported", "session.flush.mode"),
        ({"tools": [{"type": "function", "name": "f"}]}, "unsupported", "session.tools"),
        (None, "invalid_value", "session"),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_a_wrong_setting_changes_nothing(server: RunningServer, session: Any, code: str, param: str) -> None:
    """The error names the field; what stood beside it in the same event is not taken either."""
    async with server.connect() as client:
        before = client.session
        patch = {"instructions": "Changed", **session} if session is not None else session
        await client.send("session.update", session=patch)
        assert (await client.error(code))["param"] == param
        await client.send("session.update", session={})
        assert (await client.expect("session.updated"))["session"] == before


async def test_flush_belongs_to_the_connection(server: RunningServer) -> None:
    """One tab's wish for its deltas is told back to it and does not change the other tab's."""
    wish = {"mode": "token", "max_delay_ms": 250, "max_chars": 400}
    async with server.connect(extensions=1) as one, server.connect(session_id=one.session["id"]) as two:
        await one.send("session.update", session={"flush": wish})
        assert (await one.expect("session.updated"))["session"]["flush"] == wish
        assert (await two.expect("session.updated"))["session"]["flush"] != wish
        # A wish that is refused leaves the one before.
        await one.send("session.update", session={"flush": {"mode": "token"}, "tools": [{}]})
        await one.error("unsupported")
        await one.send("session.update", session={"instructions": "Be brief."})
        assert (await one.expect("session.updated"))["session"]["flush"] == wish


async def test_settings_hold_from_the_next_answer_on(server: RunningServer) -> None:
    """Instructions reach the engine, a stop string and a bound end the answer; an answer's own come first."""
    async with server.connect() as client:
        await client.send("session.update", session={"instructions": "Speak like a pirate.", "max_output_tokens": 20})
        turn = await client.turn("Hello")
        assert turn.response["status"] == "incomplete"
        assert turn.response["status_details"]["reason"] == "max_output_tokens"
        assert turn.response["usage"]["output_tokens"] == 20
        turn = await client.turn("Once more", instructions="Speak like a judge.", max_output_tokens="inf")
        assert turn.response["status"] == "completed"
        assert "Speak like a judge." in turn.text
        turn = await client.turn("And now", max_output_tokens=400, stop=["pirate"])
        assert turn.text.endswith("Speak like a ")
        assert turn.response["status"] == "completed"


# --- extensions


@pytest.mark.parametrize("t", [0, 1.5, None, 2**53])
async def test_ping_is_answered_with_the_same_t(server: RunningServer, t: float | None) -> None:
    """A client measures its way to the server and back by it."""
    async with server.connect(extensions=1) as client:
        await client.send("ping", t=t)
        pong = await client.expect("pong")
        assert pong["t"] == t
        assert pong["now_ms"] > 1_700_000_000_000


async def test_a_strict_client_gets_no_event_of_ours(server: RunningServer) -> None:
    """Not even when it asks for one, nor a heartbeat while nothing happens; one with extensions hears those."""
    async with (
        server.connect() as strict,
        server.connect(session_id=strict.session["id"], extensions=1) as extended,
    ):
        await strict.send("ping", t=1)
        beat = await extended.expect("heartbeat")
        assert (beat["state"], beat["response_id"]) == ("idle", None)
        await strict.send("conversation.item.retrieve", item_id="item_none")
        await strict.error("item_not_found")  # the very next event: nothing came before it


@pytest.mark.parametrize("value", ["0", "", "true", "2"])
async def test_extensions_are_on_only_by_1(server: RunningServer, value: str) -> None:
    """A client that did not ask exactly for them must not be surprised."""
    async with server.connect(extensions=value) as client:
        await client.send("ping", t=1)
        await client.send("conversation.item.retrieve", item_id="item_none")
        await client.error("item_not_found")


# --- the end


async def test_a_client_that_says_goodbye_is_answered_with_1000(server: RunningServer) -> None:
    """The closing handshake is whole, also in mid-answer."""
    async with server.connect() as client:
        await client.say("Tell me more, in 300 words.")
        await client.send("response.create")
        await client.until("response.output_text.delta")
        await client.connection.close(1000, "bye")
        assert client.connection.close_code == 1000
