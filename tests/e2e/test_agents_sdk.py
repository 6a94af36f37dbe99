"""The Python agents SDK, unmodified, holds a text conversation with the server.

It turns every event that it can not validate into an error of the session, so no error is a strong statement.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from agents.realtime import RealtimeAgent, RealtimeRunner, RealtimeSession

from tests.support.server import RunningServer

pytestmark = pytest.mark.server

INSTRUCTIONS = "You answer in one short sentence. " * 20


class Conversation:
    """A session of the SDK with what it told: the server's events, and its own copy of the history."""

    def __init__(self, session: RealtimeSession) -> None:
        self._session = session
        self.events: list[dict[str, Any]] = []
        self.history: list[tuple[str, str]] = []

    @property
    def session_id(self) -> str:
        created = next(event for event in self.events if event["type"] == "session.created")
        session_id: str = created["session"]["id"]
        return session_id

    async def say(self, text: str) -> dict[str, Any]:
        """One turn; returns the response as ``response.done`` has it. Fails on any error event."""
        await self._session.send_message(text)
        async with asyncio.timeout(10):
            async for event in self._session:
                assert event.type != "error", event
                if event.type == "history_updated":
                    self.history = [(item.role, text_of(item)) for item in event.history if item.type == "message"]
                if event.type == "raw_model_event" and event.data.type == "raw_server_event":
                    self.events.append(event.data.data)
                    if event.data.data["type"] == "response.done":
                        return event.data.data["response"]  # type: ignore[no-any-return]
        raise AssertionError("the session ended before the answer")


def text_of(item: Any) -> str:
    return "".join(part.text or "" for part in item.content)


@asynccontextmanager
async def conversation(server: RunningServer, query: str = "") -> AsyncIterator[Conversation]:
    """A session as in the SDK's documentation, with the URL pointing at our server."""
    runner = RealtimeRunner(RealtimeAgent(name="assistant", instructions=INSTRUCTIONS))
    session = await runner.run(
        model_config={
            "url": f"{server.ws_url}?model={server.model}{query}",
            "api_key": "local",
            "initial_model_settings": {"output_modalities": ["text"]},
        }
    )
    async with session:
        yield Conversation(session)


async def test_two_turns_and_a_right_history(server: RunningServer) -> None:
    """The SDK ends up with the four messages, the answers as the server ended them, and no error on the way."""
    async with conversation(server) as chat:
        first = await chat.say("What is a lighthouse?")
        second = await chat.say("Who lives in one?")
    assert [first["status"], second["status"]] == ["completed", "completed"]
    assert chat.history == [
        ("user", "What is a lighthouse?"),
        ("assistant", first["output"][0]["content"][0]["text"]),
        ("user", "Who lives in one?"),
        ("assistant", second["output"][0]["content"][0]["text"]),
    ]
    assert second["usage"]["input_token_details"]["cached_tokens"] > 0


async def test_a_conversation_goes_on_in_a_new_session_object(server: RunningServer) -> None:
    """The session's id in the URL brings the conversation back: the prompt holds the turn before."""
    async with conversation(server) as chat:
        first = await chat.say("Remember the number 17.")
    async with conversation(server, f"&session_id={chat.session_id}") as again:
        second = await again.say("Which number was it?")
    assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"]
