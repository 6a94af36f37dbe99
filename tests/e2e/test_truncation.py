"""An answer is truncated to what was seen."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from chat_server.engine.simulated import answer_for
from tests.support.prompts import prompt
from tests.support.server import QUICK, RunningServer, two_replicas

pytestmark = [pytest.mark.server, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replicas(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[RunningServer]]:
    """Two replicas on one store and the same engines."""
    slow = replace(QUICK, tokens_per_s=600.0)
    async with two_replicas(tmp_path_factory.mktemp("talk"), simulated=slow) as replicas:
        yield replicas


@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize("text_end", [0, 7])
async def test_an_answer_is_truncated_to_what_was_seen(
    replicas: list[RunningServer], replica: int, text_end: int
) -> None:
    """For all tabs, in the store, and in the next prompt."""
    async with (
        replicas[0].connect() as one,
        replicas[1].connect(session_id=one.session["id"]) as two,
    ):
        turn = await one.turn("Hello")
        [item] = turn.response["output"]
        client = (one, two)[replica]
        await client.send(
            "conversation.item.truncate", item_id=item["id"], content_index=0, audio_end_ms=0, text_end=text_end
        )
        for tab in (one, two):
            told = await tab.until("conversation.item.truncated")
            assert (told["item_id"], told["text_end"]) == (item["id"], text_end)
        await two.send("conversation.item.retrieve", item_id=item["id"])
        stored = (await two.until("conversation.item.retrieved"))["item"]
        assert (stored["content"][0]["text"], stored["status"]) == (turn.text[:text_end], "incomplete")
        assert stored["epochs"][-1][1] == text_end
        seen = [("assistant", turn.text[:text_end])] if text_end else []
        asked = prompt(("user", "Hello"), *seen, ("user", "And now?"))
        assert (await two.turn("And now?")).text == answer_for(asked, QUICK.words)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({}, "missing_required_parameter", "text_end"),
        ({"audio_end_ms": 1500}, "missing_required_parameter", "text_end"),
        ({"text_end": 100_000}, "invalid_value", "text_end"),
        ({"text_end": -1}, "invalid_value", "text_end"),
        ({"text_end": 0, "content_index": 1}, "invalid_value", "content_index"),
        ({"text_end": 0, "item_id": "item_none"}, "item_not_found", "item_id"),
        ({"text_end": 0, "item_id": "question"}, "invalid_value", "item_id"),
    ],
)
async def test_a_truncation_that_can_not_be_is_refused(
    replicas: list[RunningServer], fields: dict[str, Any], code: str, param: str
) -> None:
    """With the field that is wrong; nothing is changed."""
    async with replicas[0].connect() as client:
        await client.say("Hello", id="question")
        await client.send("response.create")
        [item] = (await client.until("response.done"))["response"]["output"]
        await client.send("conversation.item.truncate", **{"item_id": item["id"], **fields})
        assert (await client.error(code))["param"] == param
        await client.send("conversation.item.retrieve", item_id=item["id"])
        assert (await client.until("conversation.item.retrieved"))["item"]["content"] == item["content"]
