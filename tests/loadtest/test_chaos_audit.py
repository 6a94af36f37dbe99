"""What the store and the engines say is read from them, and compared with what was told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import orjson
import pytest
import redis.asyncio as redis_asyncio

from chat_server.engine.simulated import SimulatedOptions, SimulatedServer, simulated_server
from chat_server.store import keys
from chat_server.store.embedded import find_binary
from loadtest import chaos_audit
from loadtest.chaos_audit import Audit
from loadtest.chaos_model import Answer, Asked
from loadtest.chaos_texts import Violation
from loadtest.chaos_world import Valkey

pytestmark = pytest.mark.valkey

SESSION = "sess_1"
CHAT = {"model": "simulated", "messages": [{"role": "user", "content": "Hello"}], "stream": True}


@pytest.fixture
async def engines() -> AsyncIterator[list[SimulatedServer]]:
    options = SimulatedOptions(tokens_per_s=5)
    async with simulated_server(options) as one, simulated_server(options) as two:
        yield [one, two]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Valkey]:
    valkey = Valkey(tmp_path, await asyncio.to_thread(find_binary))
    await valkey.start()
    try:
        yield valkey
    finally:
        await valkey.process.stop()


@pytest.fixture
async def audit(store: Valkey, engines: list[SimulatedServer]) -> AsyncIterator[Audit]:
    async with aiohttp.ClientSession() as http:
        audit = Audit(store.url, [engine.url for engine in engines], http)
        try:
            yield audit
        finally:
            await audit.close()


async def write(store: Valkey, text: str, *, items: dict[str, dict[str, object]]) -> None:
    """A session with these items and a running answer, as the store keeps it."""
    _, item_key, order, response, text_key = keys.session_keys(SESSION)[:5]
    client = redis_asyncio.Redis.from_url(store.url)
    for item_id, item in items.items():
        await client.hset(item_key, item_id, orjson.dumps(item).decode())
        await client.rpush(order, item_id)
    await client.hset(response, mapping={"id": "resp_1", "replica": "replica_1"})
    await client.set(text_key, text)
    await client.aclose()


def answer(text: str, response_id: str = "resp_1") -> Answer:
    return Answer(Asked("item_1", "Hello"), response_id, text=text)


async def test_what_was_told_must_be_stored(store: Valkey, audit: Audit) -> None:
    """Of a running answer in its text, of an ended one in its item; not one code point may be ahead."""
    ended: dict[str, object] = {"id": "item_2", "response_id": "resp_0", "content": [{"text": "Done"}]}
    await write(store, "Hé 👋", items={"item_2": ended})
    assert await audit.owner(SESSION, "resp_1") == "replica_1"
    assert await audit.owner(SESSION, "resp_9") == ""
    for right in (answer("Hé 👋"), answer("Hé"), answer("Done", "resp_0")):
        await audit.check_stored(SESSION, right)
    for wrong in (answer("Hé 👋!"), answer("He"), answer("Done!", "resp_0"), answer("?", "resp_9")):
        with pytest.raises(Violation) as violation:
            await audit.check_stored(SESSION, wrong)
        assert violation.value.kind == "told first"


async def test_an_answer_without_its_end_is_found(store: Valkey, audit: Audit) -> None:
    """In the store, when nothing is to be under way any more: running, queued, or left in the list of what runs."""
    client = redis_asyncio.Redis.from_url(store.url)
    response = keys.session_keys(SESSION)[3]
    try:
        await audit.check_idle()
        for left in ("id", "q_id"):
            await client.hset(response, left, "resp_1")
            with pytest.raises(Violation, match=f"no end .*{SESSION}.:response"):
                await audit.check_idle(within_s=0.0)
            await client.delete(response)
        await client.zadd(keys.RUNNING, {SESSION: 1})
        with pytest.raises(Violation, match=SESSION):
            await audit.check_idle(within_s=0.0)
        await client.zrem(keys.RUNNING, SESSION)
        await audit.check_idle()
    finally:
        await client.aclose()


async def test_a_store_that_is_away_is_waited_for(store: Valkey, audit: Audit) -> None:
    """A restart is no violation."""
    await write(store, "Hello", items={})
    restart = asyncio.create_task(store.restart(down_s=0.3))
    await asyncio.sleep(0.1)
    assert (await audit.stored(SESSION)).text == "Hello"
    await restart


async def test_an_orphan_is_seen_and_told_once(
    audit: Audit, engines: list[SimulatedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request whose answer has ended, and one that two engines work on."""
    monkeypatch.setattr(chaos_audit, "LOOK_S", 0.02)
    monkeypatch.setattr(chaos_audit, "NOTICE_S", 0.05)
    found: list[str] = []
    watch = asyncio.create_task(audit.watch_engines(lambda violation: found.append(str(violation))))
    async with aiohttp.ClientSession() as http, AsyncExitStack() as open_requests:
        for engine, name in ((0, "resp_1"), (0, "resp_2"), (1, "resp_2"), (1, "resp_3")):
            url = engines[engine].url + "/v1/chat/completions"
            response = await http.post(url, json=CHAT, headers={"X-Request-Id": name})
            open_requests.callback(response.close)
            await response.content.readline()
        audit.ended["resp_1"] = time.monotonic()
        await asyncio.sleep(0.5)
        with pytest.raises(Violation, match="resp_1"):
            await audit.check_idle(within_s=0.1)
        assert await audit.until_gone("resp_1", 0.1) is None
    watch.cancel()
    assert sorted(found) == ["1 engines work on resp_1, which has ended", "2 engines work on resp_2, at the same time"]
    await audit.check_idle()
    audit.ended["resp_3"] = 0.0
    assert await audit.until_gone("resp_3", 1.0) is not None
