"""A client that lost its connection comes back with what it holds, and goes on without a word lost or told twice."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio

from chat_server import joining
from chat_server.core.client_events import Flush
from chat_server.core.items import SessionSettings
from chat_server.core.principal import LOCAL
from chat_server.core.response import ResumePoint
from chat_server.edge.outbox import Outbox
from chat_server.edge.realtime import Connection
from chat_server.engine.simulated import answer_for
from chat_server.live import Gap, LiveSession
from chat_server.store.messages import Text
from chat_server.store.replies import RunningState, SessionState
from tests.core.answers import EPOCH, begun
from tests.edge.sockets import FakeSocket
from tests.support import ws
from tests.support.held import DELTA, Held
from tests.support.server import QUICK, RunningServer, two_replicas

pytestmark = [pytest.mark.server, pytest.mark.asyncio(loop_scope="module")]

LONG = "Tell me more, in 300 words."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replicas(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[RunningServer]]:
    """Two replicas on one store and the same engines."""
    slow = replace(QUICK, tokens_per_s=400.0)
    async with two_replicas(tmp_path_factory.mktemp("resume"), simulated=slow) as replicas:
        yield replicas


def whole(text: str = LONG) -> str:
    return answer_for([{"role": "user", "content": text}])


async def test_cut_at_any_moment_over_any_replica_any_number_of_times(replicas: list[RunningServer]) -> None:
    """A cut socket, without a word, between any two frames; each time it goes on from where it was."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    async with replicas[0].connect(extensions=1) as client:
        held = await Held.begin(client, LONG)
        await held.read(client, deltas=chance.randrange(20))
        client.connection.transport.abort()
    cuts = 0
    while held.done is None:
        cuts += 1
        async with held.back(chance.choice(replicas).ws_url) as client:
            active = client.events[0]["active_response"]
            if active is not None:
                assert active["offset"] == len(held.text), "it went on from where it was"
            before, had = len(client.events), len(held.text)
            await held.read(client, deltas=chance.randrange(1, 25))
            first = next((event for event in client.events[before:] if event["type"] == DELTA), None)
            assert first is None or first["offset"] == had, "nothing left out, nothing told again"
            client.connection.transport.abort()
    assert cuts > 5
    assert held.text == whole()
    assert held.done["status"] == "completed"
    assert held.done["output"][0]["content"][0]["text"] == held.text


@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize("replica", [0, 1])
async def test_an_answer_that_ended_meanwhile_is_told_to_its_end(
    replicas: list[RunningServer], replica: int, others: int
) -> None:
    """Also when other turns followed it: its rest, its end with usage and metadata, nothing of its beginning."""
    async with replicas[0].connect(extensions=1) as client:
        held = await Held.begin(client, LONG, metadata={"topic": "sea"})
        await held.read(client, deltas=3)
        so_far = held.text
        end = await client.until("response.done")
        for number in range(others):
            await client.turn(f"Next {number}")
    async with held.back(replicas[replica].ws_url) as client:
        assert client.events[0]["active_response"] is None
        await held.read(client)
        assert [event["type"] for event in client.events[1:]] == [
            DELTA,
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "conversation.item.done",
            "response.done",
        ]
        assert client.events[1]["offset"] == len(so_far)
    assert held.done == end["response"]
    assert held.text == end["response"]["output"][0]["content"][0]["text"]


async def test_with_history_the_answer_is_told_in_its_place(replicas: list[RunningServer]) -> None:
    """Items before it, its rest, items after it; each once."""
    async with replicas[0].connect(extensions=1) as client:
        first = await client.turn("The first")
        held = await Held.begin(client, LONG)
        await held.read(client, deltas=3)
        await client.until("response.done")
        last = await client.turn("The last")
    async with held.back(replicas[1].ws_url, history="all") as client:
        while client.events[-1].get("item", {}).get("id") != last.response["output"][0]["id"]:
            held.take(await client.next())
        await client.next()
        told = [event["item"]["id"] for event in client.events if event["type"] == "conversation.item.done"]
        items = [first.user_item["id"], first.response["output"][0]["id"]]
        assert told[:2] == items
        assert len(told) == len(set(told)) == 6
        types = [event["type"] for event in client.events]
        assert types.index("response.done") < len(types) - 4
    assert held.done is not None
    assert held.text == held.done["output"][0]["content"][0]["text"]


@pytest.mark.parametrize("epoch", ["", "epoch_unknown"])
async def test_text_of_an_unknown_making_starts_again(replicas: list[RunningServer], epoch: str) -> None:
    """Whole or from 0, never a mixture."""
    async with replicas[0].connect(extensions=1) as client:
        held = await Held.begin(client, LONG)
        await held.read(client, deltas=5)
    held.epoch, held.text = epoch, "x" * 20
    async with held.back(replicas[1].ws_url) as client:
        await held.read(client)
        first = next(event for event in client.events if event["type"] == DELTA)
        assert first["offset"] == 0
    assert held.text == whole()


async def test_who_holds_nothing_of_an_answer_is_let_in_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no epoch to name, and can not be ahead of a replica: nothing is waited for."""
    monkeypatch.setattr(joining, "_BEHIND_S", 3600)
    asked = begun()
    live = LiveSession("sess_1")
    running = RunningState(asked, "item_1", "token_1", "replica_1", "One")
    live.load(SessionState(LOCAL, 0, "m", SessionSettings(), 10, 1, running))
    held = ResumePoint(asked.id, "", 0)
    socket = FakeSocket()
    outbox = Outbox(socket, extensions=True, heartbeat_s=15, send_timeout_s=10, now=0.0)
    connection = Connection(cast("Any", socket), outbox, cast("Any", None), Flush())
    async with asyncio.timeout(5):
        await joining.wait_for_claimed(live, held, least_s=0)
    await joining.join(cast("Any", None), live, connection, resumed=True, history=None, held=held)
    assert connection in live.connections


async def test_text_whose_message_was_lost_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has it, and it does not come: the store is asked before it is told less than it has."""
    monkeypatch.setattr(joining, "_BEHIND_S", 0.02)
    live = LiveSession("sess_1")
    asked = begun()
    live.load(SessionState(LOCAL, 0, "m", SessionSettings(), 10, 1, RunningState(asked, "item_1", "t", "r", "One")))
    await joining.wait_for_claimed(live, ResumePoint(asked.id, EPOCH, 3), least_s=0)
    assert not live.doubted
    await joining.wait_for_claimed(live, ResumePoint(asked.id, EPOCH, 4), least_s=0)
    assert live.doubted


async def test_an_answer_that_left_nothing_is_ended_all_the_same(replicas: list[RunningServer]) -> None:
    """Cancelled before its first text: its place was given up, and the client hears so when it comes back."""
    async with replicas[0].connect(extensions=1) as client:
        held = await Held.begin(client, LONG)
        await client.send("response.cancel", seen=0)
        await client.until("response.done")
    async with held.back(replicas[1].ws_url) as client:
        await held.read(client)
        assert [event["type"] for event in client.events[1:]] == [
            "response.output_item.done",
            "conversation.item.deleted",
            "response.done",
        ]
    assert held.done is not None
    assert (held.done["status"], held.done["output"]) == ("cancelled", [])


async def test_a_cut_answer_takes_back_what_was_not_seen(replicas: list[RunningServer]) -> None:
    """Another tab stopped it at what it had seen; who comes back with more of it gives that up."""
    async with replicas[0].connect(extensions=1) as one:
        held = await Held.begin(one, LONG)
        await held.read(one, deltas=20)
        await one.send("response.cancel", seen=10)
        await one.until("response.done")
    assert len(held.text) > 10
    async with held.back(replicas[1].ws_url) as two:
        await held.read(two)
    assert held.done is not None
    assert held.text == held.done["output"][0]["content"][0]["text"] == whole()[:10]


async def test_an_answer_that_nobody_knows_is_not_told(replicas: list[RunningServer]) -> None:
    """The session goes on; what it was is not made up."""
    async with replicas[0].connect() as client:
        turn = await client.turn("Hello")
        assert turn.text
    query = {"session_id": client.session["id"], "response_id": "resp_" + "0" * 32, "epoch": "x", "offset": 5}
    async with replicas[1].connect(extensions=1, **query) as client:
        await client.send("ping", t=1)
        assert (await client.expect("pong"))["t"] == 1


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"response_id": "resp_" + "0" * 32}, "session_id"),
        ({"session_id": "", "response_id": "no id"}, "response_id"),
        ({"session_id": "", "response_id": "resp_" + "0" * 32, "offset": "-1"}, "offset"),
        ({"session_id": "", "response_id": "resp_" + "0" * 32, "offset": "9" * 11}, "offset"),
    ],
)
async def test_a_resume_point_that_is_none_is_refused(
    replicas: list[RunningServer], query: dict[str, Any], param: str
) -> None:
    """Before the upgrade, with what is wrong."""
    if "session_id" in query:
        async with replicas[0].connect() as client:
            query = {**query, "session_id": client.session["id"]}
    refusal = await ws.refused(replicas[0].ws_url, **query)
    assert (refusal.status, refusal.error["param"]) == (400, param)


@pytest.mark.parametrize("why", ["a message is missing", "it is to be compared", "it was dropped"])
async def test_nothing_is_taken_back_by_who_missed_something(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """The client has more of an answer than this replica, which waits for text that was lost: it is sent elsewhere."""
    monkeypatch.setattr(joining, "_BEHIND_S", 0.02)
    monkeypatch.setattr(joining, "_PATIENCE_S", 0.1)
    asked = begun()
    live = LiveSession("sess_1")
    running = RunningState(asked, "item_1", "token_1", "replica_1", "One")
    live.load(SessionState(LOCAL, 0, "m", SessionSettings(), 10, 1, running))
    match why:
        case "a message is missing":
            live.take(Text("sess_1", asked.id, EPOCH, 8, " three", 6))
        case "it is to be compared":
            live.doubted = True
        case _:
            live.doubted = True
            asyncio.get_running_loop().call_later(0.01, live.unload)
    socket = FakeSocket()
    connection = SimpleNamespace(outbox=Outbox(socket, extensions=True, heartbeat_s=15, send_timeout_s=10, now=0.0))
    held = ResumePoint(asked.id, EPOCH, 14)
    with pytest.raises(Gap):
        await joining.join(cast("Any", None), live, cast("Any", connection), resumed=True, history=None, held=held)
    assert not live.connections
    assert not socket.frames


async def test_who_claims_text_that_is_not_there_holds_up_nobody(replicas: list[RunningServer]) -> None:
    """Offsets counted in other units, say: each of them waits by itself, and a stop from elsewhere waits for none."""
    async with replicas[0].connect(extensions=1) as client, contextlib.AsyncExitStack() as stack:
        await client.say("Tell me more, in 600 words.")
        await client.send("response.create")
        created = await client.until("response.created")
        epoch = (await client.until("response.output_text.delta"))["epoch"]
        claim = {"response_id": created["response"]["id"], "epoch": epoch, "offset": 1_000_000}
        joins = [
            stack.enter_async_context(replicas[0].connect(session_id=client.session["id"], extensions=1, **claim))
            for _ in range(8)
        ]
        joining_ = asyncio.gather(*joins)
        await asyncio.sleep(0.1)
        started = time.monotonic()
        await client.send("response.cancel")
        await client.until("response.done")
        assert time.monotonic() - started < 2, "eight seconds if they held each other up"
        await joining_
        assert time.monotonic() - started < 5
