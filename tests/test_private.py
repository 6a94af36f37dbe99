"""Answers outside of the conversation, and those that bring a prompt of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from chat_server.engine.simulated import answer_for
from tests.support.prompts import prompt
from tests.support.server import QUICK, RunningServer, two_replicas

pytestmark = [pytest.mark.server, pytest.mark.asyncio(loop_scope="module")]

DELTA = "response.output_text.delta"
LONG = "Tell me more, in 300 words."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replicas(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[RunningServer]]:
    """Two replicas on one store and the same engines."""
    slow = replace(QUICK, tokens_per_s=600.0)
    async with two_replicas(tmp_path_factory.mktemp("talk"), simulated=slow) as replicas:
        yield replicas


async def test_a_response_outside_of_the_conversation_belongs_to_who_asked(replicas: list[RunningServer]) -> None:
    """Nobody else sees it, nothing of it is stored, and the conversation goes on beside it."""
    async with (
        replicas[0].connect(extensions=1) as one,
        replicas[0].connect(session_id=one.session["id"]) as two,
    ):
        first = await one.turn("Hello")
        await two.until("response.done")
        await one.send("response.create", response={"conversation": "none", "metadata": {"topic": "title"}})
        done = await one.until("response.done")
        text = done["response"]["output"][0]["content"][0]["text"]
        assert text == answer_for(prompt(("user", "Hello"), ("assistant", first.text)), QUICK.words)
        assert done["response"]["metadata"] == {"topic": "title"}
        told = one.types[one.types.index("response.done") + 1 :]
        assert "conversation.item.added" not in told
        assert "conversation.item.done" not in told
        second = await one.turn("And now?")
        asked = prompt(("user", "Hello"), ("assistant", first.text), ("user", "And now?"))
        assert second.text == answer_for(asked, QUICK.words)
        await two.until("response.done")
        assert two.types.count("response.created") == 2


async def test_it_runs_beside_an_answer_of_the_conversation(replicas: list[RunningServer]) -> None:
    """Each is whole; a cancel by id stops the one it names."""
    async with replicas[0].connect(extensions=1) as client:
        await client.say(LONG)
        await client.send("response.create")
        running = await client.until("response.created")
        await client.until(DELTA)
        asked = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": LONG}]}]
        await client.send("response.create", response={"conversation": "none", "input": asked})
        private = await client.until("response.created")
        await client.until("response.content_part.added")
        await client.send("response.cancel", response_id=private["response"]["id"], seen=0)
        ended = [(await client.until("response.done"))["response"] for _ in range(2)]
        assert {response["id"]: response["status"] for response in ended} == {
            private["response"]["id"]: "cancelled",
            running["response"]["id"]: "completed",
        }


async def test_it_ends_with_its_connection(replicas: list[RunningServer]) -> None:
    """The engine is idle as soon as the socket is gone."""
    async with replicas[0].connect(extensions=1) as client:
        asked = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": LONG}]}]
        await client.send("response.create", response={"conversation": "none", "input": asked})
        await client.until(DELTA)
        client.connection.transport.abort()
    async with asyncio.timeout(2):
        while any(engine.engine.running for engine in replicas[0].engines):
            await asyncio.sleep(0.01)


async def test_one_connection_has_some_of_them_at_once(replicas: list[RunningServer]) -> None:
    """One more is refused, and the others come to their end."""
    async with replicas[0].connect() as client:
        asked = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": LONG}]}]
        for _ in range(5):
            await client.send("response.create", response={"conversation": "none", "input": asked})
        while (event := await client.next())["type"] != "error":
            pass
        assert event["error"]["code"] == "too_many_responses"
        while client.types.count("response.done") < 4:
            await client.next()


async def test_a_response_may_bring_its_own_prompt(replicas: list[RunningServer]) -> None:
    """Messages and references to items; the answer enters the conversation unless it is asked to stay outside."""
    async with replicas[0].connect() as client:
        await client.say("Not this", id="other")
        await client.say("The sea", id="topic")
        asked = [
            {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "Rhyme."}]},
            {"type": "item_reference", "id": "topic"},
        ]
        await client.send("response.create", response={"input": asked})
        [item] = (await client.until("response.done"))["response"]["output"]
        text = item["content"][0]["text"]
        assert text == answer_for(prompt(("system", "Rhyme."), ("user", "The sea")), QUICK.words)
        await client.send("conversation.item.retrieve", item_id=item["id"])
        await client.until("conversation.item.retrieved")
        await client.send("response.create", response={"input": [{"type": "item_reference", "id": "nothing"}]})
        error = await client.error("item_not_found")
        assert error["param"] == "response.input[0]"
