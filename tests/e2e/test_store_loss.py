"""The store forgets its last moments in the middle of answers: who makes them writes again what is missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
import redis.asyncio

from chat_server.engine.simulated import answer_for
from chat_server.store import keys
from tests.support.copies import Copies, copies_of
from tests.support.server import QUICK, RunningServer, two_replicas
from tests.support.ws import WsClient

pytestmark = [pytest.mark.server, pytest.mark.asyncio(loop_scope="module")]

DELTA = "response.output_text.delta"
LONG = "Tell me more, in 300 words."
WHOLE = answer_for([{"role": "user", "content": LONG}])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replicas(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[RunningServer]]:
    """Two replicas on one store and the same engines."""
    slow = replace(QUICK, tokens_per_s=100.0)
    async with two_replicas(tmp_path_factory.mktemp("loss"), simulated=slow) as replicas:
        yield replicas


@pytest_asyncio.fixture(loop_scope="module")
async def tabs(replicas: list[RunningServer]) -> AsyncIterator[tuple[WsClient, WsClient, Copies]]:
    """Two connections on two replicas; the first one's makes the answers."""
    async with (
        replicas[0].connect(extensions=1) as one,
        replicas[1].connect(session_id=one.session["id"], extensions=1) as two,
        copies_of(replicas[0].redis_url, one.session["id"]) as copies,
    ):
        yield one, two, copies


async def whole(client: WsClient) -> None:
    """Read to the end: the text is right, and nothing of it was taken back."""
    before = len(client.events)
    response = (await client.until("response.done"))["response"]
    assert response["status"] == "completed"
    assert response["output"][0]["content"][0]["text"] == WHOLE
    assert client.texts[response["output"][0]["id"]] == WHOLE
    have = sum(len(event["delta"]) for event in client.events[:before] if event["type"] == DELTA)
    for event in client.events[before:]:
        if event["type"] == DELTA:
            assert event["offset"] == have, "no text is told again"
            have += len(event["delta"])


async def start(client: WsClient) -> None:
    await client.say(LONG)
    await client.send("response.create")


def finished(server: RunningServer) -> int:
    """Answers that the engines have made to their end."""
    return sum(engine.engine.counters.finished for engine in server.engines)


async def read(client: WsClient, deltas: int) -> None:
    for _ in range(deltas):
        await client.until(DELTA)


async def test_text_that_was_lost_is_written_again(
    replicas: list[RunningServer], tabs: tuple[WsClient, WsClient, Copies]
) -> None:
    """Readers on all replicas notice nothing."""
    one, two, copies = tabs
    await start(one)
    await read(two, 10)
    copy = await copies.take()
    await read(two, 10)
    await copies.put_back(copy)
    await asyncio.gather(whole(one), whole(two))


async def test_an_answer_that_was_lost_whole_is_written_again(
    replicas: list[RunningServer], tabs: tuple[WsClient, WsClient, Copies]
) -> None:
    """With the question before it, and all that the session had."""
    one, two, copies = tabs
    copy = await copies.take()
    await start(one)
    await read(two, 20)
    await copies.put_back(copy)
    await asyncio.gather(whole(one), whole(two))
    async with replicas[1].connect(session_id=one.session["id"]) as again:
        assert again.events[0]["item_count"] == 2
        assert (await again.turn("And now?")).response["status"] == "completed"


async def test_a_session_that_was_lost_whole_is_written_again(
    replicas: list[RunningServer], tabs: tuple[WsClient, WsClient, Copies]
) -> None:
    """A store that comes back empty."""
    one, two, copies = tabs
    await start(one)
    await read(two, 20)
    await copies.put_back({})
    await asyncio.gather(whole(one), whole(two))


async def test_an_end_that_was_lost_is_written_again(
    replicas: list[RunningServer], tabs: tuple[WsClient, WsClient, Copies]
) -> None:
    """Nobody makes the answer a second time, and it is in the history."""
    one, two, copies = tabs
    await start(one)
    await read(two, 20)
    copy = await copies.take()
    await asyncio.gather(whole(one), whole(two))
    made = finished(replicas[0])
    await copies.put_back(copy)
    response = keys.session_keys(one.session["id"])[3]
    async with redis.asyncio.Redis.from_url(replicas[0].redis_url) as raw, asyncio.timeout(10):
        while await raw.exists(response):
            await asyncio.sleep(0.02)
    assert finished(replicas[0]) == made
    async with replicas[1].connect(session_id=one.session["id"], history="all") as again:
        assert again.events[0]["active_response"] is None
        assert again.events[0]["item_count"] == 2
        for _ in range(2):
            item = (await again.until("conversation.item.done"))["item"]
        assert item["content"][0]["text"] == WHOLE
    for tab in (one, two):
        assert tab.types.count("response.done") == 1
    assert not any(engine.engine.running for engine in replicas[0].engines)


async def test_a_deleted_session_does_not_come_back(
    replicas: list[RunningServer], tabs: tuple[WsClient, WsClient, Copies]
) -> None:
    """Its answer was still being made when all of it went: nobody writes it again."""
    one, two, _copies = tabs
    await start(one)
    await read(two, 10)
    names = keys.session_keys(one.session["id"])
    raw = redis.asyncio.Redis.from_url(replicas[0].redis_url)
    try:
        # As the script does it, but nobody is told.
        await raw.eval("redis.call('DEL', unpack(KEYS)); redis.call('SET', KEYS[9], '1')", len(names), *names)
        for tab in (one, two):
            assert await tab.closed() in (1000, 1012)
        async with asyncio.timeout(10):
            while any(engine.engine.running for engine in replicas[0].engines):
                await asyncio.sleep(0.02)
        assert not await raw.exists(*names[:3])
    finally:
        await raw.aclose()
