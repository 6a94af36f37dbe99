"""The way to the store breaks, drags, or loses replies: everything is done once and told once, and no word is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from websockets.exceptions import ConnectionClosed

from chat_server import hub
from chat_server.core import close_codes
from chat_server.core.ids import new_id
from chat_server.engine.simulated import SimulatedOptions, answer_for
from chat_server.settings import Secret
from chat_server.store.embedded import EmbeddedValkey
from tests.support.held import Held
from tests.support.proxy import Proxy, proxy_to
from tests.support.server import QUICK, RunningServer, another, running_server
from tests.support.ws import WsClient, refused

pytestmark = [pytest.mark.server, pytest.mark.timeout(60)]

QUESTION = "Tell me more, in 100 words."
#: an answer takes a second, or some: it still runs when the store is back
BRISK, SLOW = (replace(QUICK, tokens_per_s=speed) for speed in (150.0, 45.0))
WHOLE = answer_for([{"role": "user", "content": QUESTION}])
DELTA = "response.output_text.delta"


@dataclass
class Setup:
    """Two replicas on one Valkey: the first reaches it through ``proxy``, the second through ``other``."""

    server: RunningServer
    replica: RunningServer
    proxy: Proxy
    other: Proxy
    url: str


@asynccontextmanager
async def setup(folder: Path, simulated: SimulatedOptions = QUICK) -> AsyncIterator[Setup]:
    valkey = EmbeddedValkey(folder)
    try:
        url = await valkey.start()
        async with (
            proxy_to(url) as proxy,
            proxy_to(url) as other,
            running_server(folder, simulated=simulated, redis_url=Secret(proxy.url), heartbeat_s=0.3) as server,
            another(server, other.url) as replica,
        ):
            yield Setup(server, replica, proxy, other, url)
    finally:
        await valkey.stop()


async def ask(client: WsClient, deltas: int = 5) -> None:
    """Ask the question and read the first of the answer."""
    await client.say(QUESTION)
    await client.send("response.create")
    for _ in range(deltas):
        await client.until(DELTA)


async def whole(client: WsClient) -> None:
    """Read the answer to its end: all of it."""
    response = (await client.until("response.done"))["response"]
    assert response["status"] == "completed"
    assert response["output"][0]["content"][0]["text"] == WHOLE
    assert list(client.texts.values()) == [WHOLE]


async def stored(s: Setup, session_id: str) -> list[dict[str, Any]]:
    """The conversation as somebody finds it who comes later."""
    async with s.replica.connect(session_id=session_id, history="all") as client:
        count = client.events[0]["item_count"]
        return [(await client.until("conversation.item.done"))["item"] for _ in range(count)]


async def test_text_whose_reply_was_lost_is_stored_once(tmp_path: Path) -> None:
    """Often, in one answer: each commit says where it is written."""
    async with (
        setup(tmp_path, BRISK) as s,
        s.server.connect(extensions=1) as one,
        s.replica.connect(session_id=one.session["id"], extensions=1) as two,
    ):
        await ask(one, 1)
        for _ in range(4):
            s.proxy.swallow(b"_commit\r\n")
            await one.until(DELTA)
            await asyncio.sleep(0.2)
            assert s.proxy.swallowed == 1
        for client in (one, two):
            await whole(client)
        _, answer = await stored(s, one.session["id"])
        assert answer["content"][0]["text"] == WHOLE


async def test_an_end_whose_reply_was_lost_is_told_once(tmp_path: Path) -> None:
    """It is told again with the same token, and answered as the first time; the conversation goes on."""
    async with (
        setup(tmp_path, BRISK) as s,
        s.server.connect(extensions=1) as one,
        s.replica.connect(session_id=one.session["id"], extensions=1) as two,
    ):
        await ask(one)
        s.proxy.swallow(b"_finish\r\n", 3)
        for client in (one, two):
            await whole(client)
        assert s.proxy.swallowed == 3
        assert (await one.turn("And then? In 5 words.")).response["status"] == "completed"
        assert len(await stored(s, one.session["id"])) == 4


async def test_an_item_whose_reply_was_lost_is_there_once(tmp_path: Path) -> None:
    """The client hears that the store is away, and says it again under the same id; nobody sees it twice."""
    async with (
        setup(tmp_path) as s,
        s.server.connect() as one,
        s.replica.connect(session_id=one.session["id"]) as two,
    ):
        s.proxy.swallow(b"_item_add\r\n")
        content = [{"type": "input_text", "text": "Hello"}]
        item = {"id": new_id("item"), "type": "message", "role": "user", "content": content}
        await one.send("conversation.item.create", item=item)
        assert (await one.error("store_unavailable"))["retryable"]
        assert (await two.until("conversation.item.done"))["item"]["id"] == item["id"]
        assert s.proxy.swallowed == 1
        assert (await one.until("conversation.item.done"))["item"]["id"] == item["id"]
        await one.send("conversation.item.create", item=item)
        assert (await one.until("conversation.item.done"))["duplicate"]
        assert (await one.turn("And then? In 5 words.")).response["status"] == "completed"
        await two.until("response.done")
        assert [item["content"][0]["text"] for item in await stored(s, one.session["id"])][:2] == [
            "Hello",
            "And then? In 5 words.",
        ]


async def test_a_begin_whose_reply_was_lost_is_one_answer(tmp_path: Path) -> None:
    """The client hears that the store is away, and asks again: it is the same answer, told once to everybody."""
    async with (
        setup(tmp_path, BRISK) as s,
        s.server.connect(extensions=1) as one,
        s.replica.connect(session_id=one.session["id"], extensions=1) as two,
    ):
        item = await one.say(QUESTION)
        s.proxy.swallow(b"_begin\r\n")
        await one.send("response.create", in_reply_to=item["id"])
        assert (await one.error("store_unavailable"))["retryable"]
        assert s.proxy.swallowed == 1
        await one.send("response.create", in_reply_to=item["id"])
        for client in (one, two):
            await whole(client)
        assert len(await stored(s, one.session["id"])) == 2


async def test_a_slow_store_slows_and_loses_nothing(tmp_path: Path) -> None:
    """A second for each reply: the text comes in larger pieces."""
    async with (
        setup(tmp_path, SLOW) as s,
        s.server.connect(extensions=1) as one,
        s.replica.connect(session_id=one.session["id"], extensions=1) as two,
    ):
        await ask(one)
        s.proxy.delay_s = s.other.delay_s = 1.0
        for client in (one, two):
            await whole(client)
        s.proxy.delay_s = s.other.delay_s = 0.0
        assert (await two.turn("And then? In 5 words.")).response["status"] == "completed"


@pytest.mark.parametrize("how", ["cut", "silent"])
async def test_a_store_that_is_away_in_mid_answer(tmp_path: Path, how: str) -> None:
    """Three seconds, for both replicas: the text pauses, the heartbeat says so, new turns are refused, all goes on."""
    async with (
        setup(tmp_path, SLOW) as s,
        s.server.connect(extensions=1) as one,
        s.replica.connect(session_id=one.session["id"], extensions=1) as two,
        s.server.connect(extensions=1) as bystander,
    ):
        await ask(one)
        for proxy in (s.proxy, s.other):
            if how == "cut":
                proxy.closed = True
                proxy.cut()
            else:
                proxy.hold()
        began = time.monotonic()
        while (await one.until("heartbeat"))["state"] != "waiting":
            pass
        if how == "cut":
            await bystander.send("response.create")
            assert (await bystander.error("store_unavailable"))["retryable"]
        await asyncio.sleep(3 - (time.monotonic() - began))
        for proxy in (s.proxy, s.other):
            proxy.closed = False
            proxy.release()
        for client in (one, two):
            await whole(client)
        assert (await two.turn("And then? In 5 words.")).response["status"] == "completed"


async def test_a_subscriber_that_is_cut_misses_nothing(tmp_path: Path) -> None:
    """The store ends all subscriptions, twice: what was said meanwhile is read up, and nobody notices."""
    async with (
        setup(tmp_path, SLOW) as s,
        s.server.connect(extensions=1) as one,
        s.replica.connect(session_id=one.session["id"], extensions=1) as two,
        redis.asyncio.Redis.from_url(s.url) as admin,
    ):
        await ask(one)
        for _ in range(2):
            while await admin.client_kill_filter(_type="pubsub") < 2:  # both replicas are subscribed, or will be
                await asyncio.sleep(0.05)
        for client in (one, two):
            await whole(client)


async def test_a_subscriber_that_is_cut_by_its_buffer_limit_misses_nothing(tmp_path: Path) -> None:
    """A large message ends the subscription, and is lost with it: it is read from the store, and told all the same."""
    async with (
        setup(tmp_path, SLOW) as s,
        s.server.connect(extensions=1) as one,
        s.replica.connect(session_id=one.session["id"], extensions=1) as two,
        redis.asyncio.Redis.from_url(s.url) as admin,
    ):
        await ask(one)
        await two.until(DELTA)
        await admin.config_set("client-output-buffer-limit", "pubsub 1 0 0")  # what does not go out at once is too much
        large = await one.say("large " * 20_000)
        assert (await admin.info("stats"))["client_output_buffer_limit_disconnections"] == 1
        for client in (one, two):
            await whole(client)
        [item_id] = two.texts
        told = [event["item"]["id"] for event in two.events if event["type"] == "conversation.item.done"]
        assert sorted(told[1:]) == sorted([large["id"], item_id])
        assert [item["id"] for item in await stored(s, one.session["id"])][1:] == [item_id, large["id"]]


async def test_one_replica_that_is_cut_off_harms_nobody(tmp_path: Path) -> None:
    """The other goes on with its answers after its lease; when it is back, its clients have to come back too."""
    async with (
        setup(tmp_path, SLOW) as s,
        s.server.connect(extensions=1) as one,
        s.replica.connect(session_id=one.session["id"], extensions=1) as two,
    ):
        await ask(one)
        s.proxy.closed = True
        s.proxy.cut()
        while (await one.until("heartbeat"))["state"] != "waiting":
            pass
        await whole(two)
        assert (await two.turn("And then? In 5 words.")).response["status"] == "completed"
        s.proxy.closed = False
        assert await one.closed() == close_codes.RESTART
        [heard] = one.texts.values()
        assert WHOLE.startswith(heard), "nothing was told that is not stored"
        conversation = await stored(s, one.session["id"])
        assert len(conversation) == 4
        await s.server.ready()
        async with s.server.connect(session_id=one.session["id"], history="all") as client:
            assert [(await client.until("conversation.item.done"))["item"] for _ in range(4)] == conversation


def take_away(s: Setup) -> None:
    """The store is away for both replicas."""
    for proxy in (s.proxy, s.other):
        proxy.closed = True
        proxy.cut()


async def give_back(s: Setup) -> None:
    """It is there again, and both replicas have seen it."""
    for proxy in (s.proxy, s.other):
        proxy.closed = False
    for server in (s.server, s.replica):
        await server.ready()


def at_work(s: Setup) -> int:
    return sum(engine.engine.running for engine in s.server.engines)


async def test_who_waits_too_long_for_the_store_is_sent_away_and_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed as overloaded, refused so long, and then the answer goes on from where each of them was, to its end."""
    monkeypatch.setattr(hub, "_AWAY_S", 1.0)
    async with setup(tmp_path, SLOW) as s:
        async with (
            s.server.connect(extensions=1) as one,
            s.replica.connect(session_id=one.session["id"], extensions=1) as two,
            s.server.connect() as idle,
        ):
            held = await Held.begin(one, QUESTION)
            await held.read(one, deltas=5)
            there = replace(held, epoch="", text="")
            await there.read(two, deltas=5)
            take_away(s)
            for client, reader in ((one, held), (two, there), (idle, None)):
                with pytest.raises(ConnectionClosed):
                    while True:
                        event = await client.next()
                        if reader is not None:
                            reader.take(event)
                assert client.connection.close_code == close_codes.OVERLOADED
        for server in (s.server, s.replica):
            refusal = await refused(server.ws_url, session_id=held.session_id)
            assert (refusal.status, refusal.error["code"]) == (503, "store_unavailable")
            assert "retry-after" in refusal.headers
        await give_back(s)
        for server, reader in ((s.server, held), (s.replica, there)):
            async with reader.back(server.ws_url) as client:
                active = client.events[0]["active_response"]
                assert active is None or active["offset"] == len(reader.text), "nothing is told again"
                await reader.read(client)
            assert reader.done is not None
            assert (reader.done["status"], reader.text) == ("completed", WHOLE)


async def test_a_stop_while_the_store_is_away_stops_the_engine_at_once(tmp_path: Path) -> None:
    """Where the answer is made nobody waits for the store; its end does, and says the same to all as ever."""
    async with (
        setup(tmp_path, SLOW) as s,
        s.server.connect(extensions=1) as one,
        s.replica.connect(session_id=one.session["id"], extensions=1) as two,
    ):
        await ask(one)
        await two.until(DELTA)
        take_away(s)
        while (await one.until("heartbeat"))["state"] != "waiting":
            pass
        await one.send("response.cancel", seen=4)
        async with asyncio.timeout(5):
            while at_work(s):
                await asyncio.sleep(0.01)
        assert s.proxy.closed, "the store is still away"
        await give_back(s)
        for client in (one, two):
            response = (await client.until("response.done"))["response"]
            assert response["status"] == "cancelled"
            assert list(client.texts.values()) == [WHOLE[:4]]
        assert (await two.turn("And then? In 5 words.")).response["status"] == "completed"
        assert len(await stored(s, one.session["id"])) == 4


@pytest.mark.parametrize("which", ["of another replica", "that waits"])
async def test_a_stop_that_can_not_be_stored_is_not_lost_in_silence(tmp_path: Path, which: str) -> None:
    """Who asked for it hears that it can be sent again, and then it holds."""
    async with (
        setup(tmp_path, SLOW) as s,
        s.server.connect(extensions=1) as one,
        s.replica.connect(session_id=one.session["id"], extensions=1) as two,
    ):
        await ask(one)
        running = (await two.until(DELTA))["response_id"]
        client, wanted = two, running
        if which == "that waits":
            await one.send("response.create", if_active="queue")
            wanted = (await one.until("response.queued"))["response_id"]
            client = one
        take_away(s)
        cancel = {"response_id": wanted, "seen": 1}
        event_id = await client.send("response.cancel", **cancel)
        while (event := await client.next())["type"] != "error":
            pass
        assert (event["error"]["code"], event["error"]["event_id"]) == ("store_unavailable", event_id)
        assert event["error"]["retryable"]
        await give_back(s)
        await client.send("response.cancel", **cancel)
        ends = {}
        while wanted not in ends:
            response = (await client.until("response.done"))["response"]
            ends[response["id"]] = response["status"]
        assert ends == {wanted: "cancelled"}
