"""The ``openai`` package, unmodified and used as its users use it, holds a conversation with the server.

Each event that it receives is judged against the package's own types, with nothing but the fields that we document.
"""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI, NotFoundError
from openai.resources.realtime.realtime import AsyncRealtimeConnection
from websockets.exceptions import InvalidStatus

from tests.support import events
from tests.support.server import RunningServer

pytestmark = pytest.mark.server

#: Long enough for some blocks of the prefix cache.
INSTRUCTIONS = "You answer in one short sentence. " * 20


def openai_client(server: RunningServer) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key="local")


async def receive(connection: AsyncRealtimeConnection, until: str) -> list[Any]:
    """Events as the package parsed them, up to one of this type; each is judged."""
    seen = []
    async for event in connection:
        events.check(event.to_dict(), extensions=False)
        seen.append(event)
        if event.type == until:
            return seen
    raise AssertionError(f"the connection ended before {until}")


async def ask(connection: AsyncRealtimeConnection, text: str) -> list[Any]:
    """One turn, as in the documentation of the API. Returns its events up to ``response.done``."""
    await connection.conversation.item.create(
        item={"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    )
    await connection.response.create()
    return await receive(connection, "response.done")


def answer_of(turn: list[Any]) -> str:
    text: str = next(event.text for event in turn if event.type == "response.output_text.done")
    return text


async def test_two_turns_the_second_from_the_cache(server: RunningServer) -> None:
    """Deltas joined are the text, the answer ends completed, and turn two finds its prefix on the same engine."""
    async with openai_client(server).realtime.connect(model=server.model) as connection:
        await connection.session.update(session={"type": "realtime", "instructions": INSTRUCTIONS})
        updated = (await receive(connection, "session.updated"))[-1]
        assert updated.session.instructions == INSTRUCTIONS
        first = await ask(connection, "What is a lighthouse?")
        second = await ask(connection, "Who lives in one?")
    for turn in (first, second):
        deltas = [event.delta for event in turn if event.type == "response.output_text.delta"]
        assert len(deltas) > 1
        assert "".join(deltas) == answer_of(turn) == turn[-1].response.output[0].content[0].text
        assert turn[-1].response.status == "completed"
    usage = second[-1].response.usage
    assert 0 < usage.input_token_details.cached_tokens < usage.input_tokens
    assert first[-1].response.engine == second[-1].response.engine


async def test_the_events_of_a_turn_come_in_the_order_of_the_api(server: RunningServer) -> None:
    """Item, response, output item, part, deltas, and the same backwards; programs rely on it."""
    async with openai_client(server).realtime.connect(model=server.model) as connection:
        turn = await ask(connection, "Hello")
    types = [event.type for event in turn if event.type != "response.output_text.delta"]
    assert types == [
        "session.created",
        "conversation.item.added",
        "conversation.item.done",
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
    ]


async def test_items_are_retrieved_and_deleted(server: RunningServer) -> None:
    """``conversation.item.retrieve`` gives what was said; after ``delete`` it is an error, and the session lives on."""
    async with openai_client(server).realtime.connect(model=server.model) as connection:
        turn = await ask(connection, "Hello")
        item_id = turn[-1].response.output[0].id
        await connection.conversation.item.retrieve(item_id=item_id)
        retrieved = (await receive(connection, "conversation.item.retrieved"))[-1]
        assert retrieved.item.content[0].text == answer_of(turn)
        await connection.conversation.item.delete(item_id=item_id)
        assert (await receive(connection, "conversation.item.deleted"))[-1].item_id == item_id
        await connection.conversation.item.retrieve(item_id=item_id, event_id="again")
        error = (await receive(connection, "error"))[-1].error
        assert (error.event_id, error.param) == ("again", "item_id")
        assert answer_of(await ask(connection, "Still there?"))


async def test_an_unknown_event_is_answered_with_an_error_event(server: RunningServer) -> None:
    """A newer client's event does not end the session."""
    async with openai_client(server).realtime.connect(model=server.model) as connection:
        await connection.send({"type": "response.dance", "event_id": "new"})  # type: ignore[arg-type]
        error = (await receive(connection, "error"))[-1].error
        assert (error.type, error.event_id) == ("invalid_request_error", "new")
        assert "response.dance" in error.message
        assert answer_of(await ask(connection, "Hello"))


async def test_a_session_goes_on_after_a_reconnect(server: RunningServer) -> None:
    """With ``extra_query`` naming the session, a new connection finds the history, and the next turn its cache."""
    client = openai_client(server)
    async with client.realtime.connect(model=server.model) as connection:
        first = await ask(connection, "Tell me of the sea. " * 20)
        session_id = first[0].session.id
    async with client.realtime.connect(model=server.model, extra_query={"session_id": session_id}) as connection:
        second = await ask(connection, "And of its shore?")
    assert second[0].session.id == session_id
    assert second[0].item_count == 2
    assert second[-1].response.usage.input_token_details.cached_tokens > 0


async def test_a_refused_handshake_says_why(server: RunningServer) -> None:
    """An unknown model or session is an HTTP 404 with a body that programs and people can read."""
    client = openai_client(server)
    for query, code in (({"model": "no-such-model"}, "model_not_found"), ({"session_id": "s"}, "session_not_found")):
        with pytest.raises((InvalidStatus, NotFoundError)) as refusal:
            async with client.realtime.connect(extra_query=query):
                pass
        assert isinstance(refusal.value, InvalidStatus)
        assert refusal.value.response.status_code == 404
        assert code.encode() in (refusal.value.response.body or b"")
