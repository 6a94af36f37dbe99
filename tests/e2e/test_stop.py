"""Stop that stops: from any tab on any replica, at any moment, and the engine is idle before anybody hears the end."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from chat_server.engine.simulated import Fault, SimulatedOptions, answer_for
from chat_server.hub import Hub
from chat_server.store.redis import Store
from tests.support.server import QUICK, RunningServer, another, running_server, two_replicas
from tests.support.ws import WsClient

pytestmark = [pytest.mark.server, pytest.mark.asyncio(loop_scope="module")]

DELTA = "response.output_text.delta"
LONG = "Tell me more, in 600 words."
WHOLE = answer_for([{"role": "user", "content": LONG}])

hear = Hub._hear


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replicas(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[RunningServer]]:
    """Two replicas on one store and the same engines, which take a moment to the first text."""
    slow = replace(QUICK, tokens_per_s=300.0, first_token_s=0.1)
    async with two_replicas(tmp_path_factory.mktemp("stop"), simulated=slow) as replicas:
        yield replicas


def at_rest(server: RunningServer) -> bool:
    return all(engine.engine.running == 0 for engine in server.engines)


async def ended(server: RunningServer, client: WsClient) -> dict[str, Any]:
    """Read to the end of the answer; at that moment no engine works on it."""
    while (event := await client.next())["type"] != "response.done":
        assert event["type"] != "error", event
    assert at_rest(server), "the engine's stream was closed before the end was told"
    response: dict[str, Any] = event["response"]
    return response


async def read(client: WsClient, points: int) -> None:
    """Read until the client has at least so many code points of the answer: nobody has seen more than was sent."""
    while sum(map(len, client.texts.values())) < points:
        await client.until(DELTA)


@pytest.mark.parametrize("stopper", [0, 1])
@pytest.mark.parametrize("deltas", [0, 1, 30])
async def test_any_tab_on_any_replica_stops_it(replicas: list[RunningServer], stopper: int, deltas: int) -> None:
    """In prefill and in mid-text: cut to what the person saw, for all tabs and in the store; the next turn goes on."""
    async with (
        replicas[0].connect(extensions=1) as one,
        replicas[1].connect(session_id=one.session["id"], extensions=1) as two,
    ):
        client = (one, two)[stopper]
        await one.say(LONG)
        await one.send("response.create")
        created = await client.until("response.created")
        for _ in range(deltas):
            await client.until(DELTA)
        seen = sum(len(event["delta"]) for event in client.events if event["type"] == DELTA) // 2
        await client.send("response.cancel", response_id=created["response"]["id"], seen=seen)
        for tab in (one, two):
            response = await ended(replicas[0], tab)
            assert response["status"] == "cancelled"
            if seen:
                [item] = response["output"]
                assert item["content"][0]["text"] == tab.texts[item["id"]] == WHOLE[:seen]
                assert item["status"] == "incomplete"
            else:
                assert response["output"] == []
        assert (await client.turn("And now?")).response["status"] == "completed"


async def test_a_stop_from_another_replica_without_seen_keeps_what_was_told_there(
    replicas: list[RunningServer],
) -> None:
    """The connection that cancels decides for all."""
    async with (
        replicas[0].connect() as one,
        replicas[1].connect(session_id=one.session["id"], extensions=1) as two,
    ):
        await one.say(LONG)
        await one.send("response.create")
        for _ in range(20):
            await two.until(DELTA)
        await two.send("response.cancel")
        response = await ended(replicas[0], two)
        [item] = response["output"]
        assert item["content"][0]["text"] == two.texts[item["id"]]
        assert WHOLE.startswith(item["content"][0]["text"])


async def test_a_stop_followed_at_once_by_a_new_question(replicas: list[RunningServer]) -> None:
    """The old answer ends, the new one begins; nobody waits in between."""
    async with replicas[0].connect(extensions=1) as client:
        await client.say(LONG)
        await client.send("response.create")
        await read(client, 4)
        await client.send("response.cancel", seen=4)
        while client.events[-1]["type"] != "response.done":
            await client.next()
        turn = await client.turn("Something else")
        asked = [("user", LONG), ("assistant", WHOLE[:4]), ("user", "Something else")]
        prompt = [{"role": role, "content": content} for role, content in asked]
        assert turn.text == answer_for(prompt, QUICK.words)


async def test_a_second_stop_changes_nothing(replicas: list[RunningServer]) -> None:
    """Two tabs on two replicas at once: one cut, the same for both; the loser hears of the end, or that it is over."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(5):
        async with (
            replicas[0].connect(extensions=1) as one,
            replicas[1].connect(session_id=one.session["id"], extensions=1) as two,
        ):
            await one.say(LONG)
            await one.send("response.create")
            for client in (one, two):
                await read(client, chance.randrange(9, 40))
            await asyncio.gather(one.send("response.cancel", seen=5), two.send("response.cancel", seen=9))
            texts = set()
            for client in (one, two):
                while client.events[-1]["type"] != "response.done":
                    event = await client.next()
                    assert event["type"] != "error" or event["error"]["code"] == "response_cancel_not_active"
                [item] = client.events[-1]["response"]["output"]
                texts.add(item["content"][0]["text"])
                assert client.texts[item["id"]] == item["content"][0]["text"]
            assert texts in ({WHOLE[:5]}, {WHOLE[:9]})


async def test_a_tab_that_was_reloaded_stops_it(replicas: list[RunningServer]) -> None:
    """By its id or without one, on the other replica, with the first connection gone."""
    for named in (True, False):
        async with replicas[0].connect() as client:
            await client.say(LONG)
            await client.send("response.create")
            created = await client.until("response.created")
            await client.until(DELTA)
            session_id = client.session["id"]
        async with replicas[1].connect(session_id=session_id, extensions=1) as client:
            await read(client, 7)
            which = {"response_id": created["response"]["id"]} if named else {}
            await client.send("response.cancel", seen=7, **which)
            response = await ended(replicas[0], client)
            assert response["output"][0]["content"][0]["text"] == WHOLE[:7]


async def test_a_stop_whose_message_is_lost_is_found_in_the_store(
    replicas: list[RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message only hurries: the owner finds the wish with its next commit."""

    def deaf(hub: Hub, raw: bytes) -> None:
        if not raw.startswith(b"cancel "):
            hear(hub, raw)

    monkeypatch.setattr(Hub, "_hear", deaf)
    async with (
        replicas[0].connect(extensions=1) as one,
        replicas[1].connect(session_id=one.session["id"], extensions=1) as two,
    ):
        await one.say(LONG)
        await one.send("response.create")
        await read(two, 6)
        await two.send("response.cancel", seen=6)
        for tab in (one, two):
            response = await ended(replicas[0], tab)
            assert response["output"][0]["content"][0]["text"] == WHOLE[:6]


@pytest.mark.parametrize("why", ["the answer to begin is late", "the message is lost"])
async def test_a_stop_in_prefill_that_the_owner_does_not_hear_is_carried_out_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """It came before the owner was at work, or never; and there is no text whose commit would find it."""
    begin = Store.begin

    async def late(self: Store, *args: Any, **fields: Any) -> Any:
        reply = await begin(self, *args, **fields)
        await asyncio.sleep(0.3)
        return reply

    def deaf(hub: Hub, raw: bytes) -> None:
        if not raw.startswith(b"cancel "):
            hear(hub, raw)

    if why == "the message is lost":
        monkeypatch.setattr(Hub, "_hear", deaf)
    else:
        monkeypatch.setattr(Store, "begin", late)
    async with (
        two_replicas(tmp_path, simulated=replace(QUICK, first_token_s=30.0)) as (first, second),
        first.connect(extensions=1) as one,
        second.connect(session_id=one.session["id"], extensions=1) as two,
    ):
        await one.say(LONG)
        await one.send("response.create")
        await two.until("response.created")
        async with asyncio.timeout(5):
            await two.send("response.cancel")
            for tab in (two, one):
                assert (await ended(first, tab))["status"] == "cancelled"


async def test_what_runs_and_what_waits_are_stopped_in_one_go(replicas: list[RunningServer]) -> None:
    """Two ends, and nobody's connection is closed: one write does not wait for the message of the other."""
    async with (
        replicas[0].connect(extensions=1) as one,
        replicas[1].connect(session_id=one.session["id"], extensions=1) as two,
    ):
        for client in (one, two) * 4:
            runs = await asked_for(client)
            waits = await asked_for(client, if_active="queue")
            started = time.monotonic()
            for response_id in (runs, waits):
                await client.send("response.cancel", response_id=response_id)
            for tab in (one, two):
                ends = {(await tab.until("response.done"))["response"]["id"] for _ in range(2)}
                assert ends == {runs, waits}
            assert time.monotonic() - started < 5


async def asked_for(client: WsClient, **fields: Any) -> str:
    """Ask for an answer; the id of its response."""
    await client.say(LONG)
    await client.send("response.create", **fields)
    return str((await client.until("response.created"))["response"]["id"])


@pytest.mark.parametrize("stopper", [0, 1])
async def test_a_stop_followed_at_once_by_the_same_question(tmp_path: Path, stopper: int) -> None:
    """It had no text yet, so it is no answer: another one is made to the same item, from any replica."""
    slow = replace(QUICK, tokens_per_s=300.0, first_token_s=0.2)
    async with (
        two_replicas(tmp_path, simulated=slow) as replicas,
        replicas[0].connect(extensions=1) as one,
        replicas[1].connect(session_id=one.session["id"], extensions=1) as two,
    ):
        client = (one, two)[stopper]
        for _ in range(5):
            item = await one.say("Tell me more, in 20 words.")
            await one.send("response.create", in_reply_to=item["id"])
            first = (await client.until("response.created"))["response"]["id"]
            await client.send("response.cancel", response_id=first)
            await client.send("response.create", in_reply_to=item["id"])
            for tab in (one, two):
                ends = [(await tab.until("response.done"))["response"] for _ in range(2)]
                assert [response["status"] for response in ends] == ["cancelled", "completed"]
                assert ends[0]["id"] == first


async def no_engine(server: RunningServer) -> None:
    """None is healthy, and the server knows."""
    for engine in server.engines:
        engine.engine.add_fault(Fault("health", times=None))
    async with asyncio.timeout(10), aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"{server.url}/readyz") as answer:
                if all(engine["state"] == "unhealthy" for engine in (await answer.json())["engines"]):
                    return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("busy", [False, True], ids=["none is healthy", "all are busy"])
@pytest.mark.parametrize("stopper", [0, 1])
async def test_an_answer_that_waits_for_an_engine_is_stopped(tmp_path: Path, busy: bool, stopper: int) -> None:
    """From its own replica or another one: it ends at once, no engine ever makes it, and the next one is made."""
    simulated = SimulatedOptions(tokens_per_s=300.0, max_running=1)
    async with (
        running_server(tmp_path, engines=1, simulated=simulated) as first,
        another(first) as second,
        first.connect(extensions=1) as one,
        second.connect(session_id=one.session["id"], extensions=1) as two,
        first.connect(extensions=1) as other,
    ):
        [engine] = [server.engine for server in first.engines]
        if busy:
            await other.say(LONG)
            await other.send("response.create")
            await other.until(DELTA)
        else:
            await no_engine(first)
        await one.say(LONG)
        await one.send("response.create")
        client = (one, two)[stopper]
        created = await client.until("response.created")
        if busy:
            async with asyncio.timeout(5):
                while not engine.waiting:
                    await asyncio.sleep(0.01)
        await client.send("response.cancel", response_id=created["response"]["id"])
        for tab in (one, two):
            response = (await tab.until("response.done"))["response"]
            assert (response["status"], response["output"]) == ("cancelled", [])
        assert (engine.waiting, engine.running) == (0, int(busy))
        engine.clear_faults()
        if busy:
            await other.send("response.cancel")
            await other.until("response.done")
        written = engine.counters.generated_tokens
        turn = await client.turn("Something else, in 5 words.")
        assert turn.response["status"] == "completed"
        assert engine.counters.generated_tokens - written == turn.response["usage"]["output_tokens"] - 1
