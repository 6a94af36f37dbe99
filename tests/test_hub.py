"""The sessions of a replica: who joins, what is told to whom, and what happens between replicas and with the store."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import pytest_asyncio
import redis.asyncio
from websockets.exceptions import ConnectionClosed

from chat_server import comparing
from chat_server import hub as hub_module
from chat_server.core import close_codes
from chat_server.engine.simulated import answer_for
from chat_server.store.replicas import Replicas
from tests.hubs import AWAY, BROKEN, PlayedStore, connect, running_hub, until
from tests.support.server import QUICK, RunningServer, another, running_server
from tests.support.ws import WsClient

pytestmark = [pytest.mark.server, pytest.mark.asyncio(loop_scope="module")]

LONG = "Tell me more, in 300 words."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    """One server for the tests that break nothing; each has a session of its own."""
    async with running_server(tmp_path_factory.mktemp("hub")) as running:
        yield running


def story(client: WsClient) -> list[dict[str, Any]]:
    """What a connection was told since ``session.created``: without event ids, heartbeats and the cuts of deltas."""
    told: list[dict[str, Any]] = []
    for sent in client.events[1:]:
        event = {name: value for name, value in sent.items() if name != "event_id"}
        if event["type"] == "heartbeat":
            continue
        if event["type"] == "response.output_text.delta" and told and told[-1]["type"] == event["type"]:
            told[-1] = {**told[-1], "delta": told[-1]["delta"] + event["delta"]}
        else:
            told.append(event)
    return told


# --- several connections


async def test_all_connections_are_told_the_same_in_the_same_order(server: RunningServer) -> None:
    """Tabs with and without extensions see items, answers and settings alike, whoever asked for them."""
    async with (
        server.connect() as one,
        server.connect(session_id=one.session["id"], extensions=1) as two,
        server.connect(session_id=one.session["id"], history="all") as three,
    ):
        first = await one.turn("The first")
        for client in (two, three):
            await client.until("response.done")
        await two.send("session.update", session={"instructions": "Be kind."})
        second = await three.turn("The second")
        for client in (one, two):
            await client.until("response.done")
        await one.send("conversation.item.delete", item_id=first.user_item["id"])
        for client in (one, two, three):
            await client.until("conversation.item.deleted")
        assert second.text
        assert story(one) == story(two) == story(three)


async def test_errors_are_told_to_who_made_them_only(server: RunningServer) -> None:
    """Nobody else can do anything with them."""
    async with server.connect() as one, server.connect(session_id=one.session["id"]) as two:
        await one.send("conversation.item.delete", item_id="item_none")
        await one.error("item_not_found")
        item = await one.say("Hello")
        added = await two.expect("conversation.item.added")
        assert added["item"] == item


async def test_an_answer_is_told_in_the_order_of_the_protocol(server: RunningServer) -> None:
    """The table of the protocol, event by event, with the ids and places that belong together."""
    async with server.connect() as client:
        question = await client.say("What is the order?")
        await client.send("response.create")
        await client.until("response.done")
        told = story(client)[2:]
        assert [event["type"] for event in told] == [
            "response.created",
            "response.output_item.added",
            "conversation.item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "conversation.item.done",
            "response.done",
        ]
        created, output_item, added, part, delta, text, part_done, item_done, done, end = told
        assert created["response"]["status"] == "in_progress"
        assert {e.get("response_id") for e in (output_item, part, delta, text, part_done, item_done)} == {
            created["response"]["id"]
        }
        item = output_item["item"]
        assert (item["role"], item["status"], item["content"]) == ("assistant", "in_progress", [])
        assert {e["item_id"] for e in (part, delta, text, part_done)} == {item["id"]}
        assert added["item"] == item
        assert added["previous_item_id"] == done["previous_item_id"] == question["id"]
        assert part["part"] == {"type": "text", "text": ""}
        assert delta["offset"] == 0
        assert delta["delta"] == text["text"] == part_done["part"]["text"]
        assert text["text"] == answer_for([{"role": "user", "content": "What is the order?"}], QUICK.words)
        whole = item_done["item"]
        assert whole["content"] == [{"type": "output_text", "text": text["text"]}]
        assert whole["status"] == "completed"
        assert done["item"] == whole
        assert end["response"]["output"] == [whole]


async def test_a_tab_that_joins_gets_the_text_so_far_at_once(server: RunningServer) -> None:
    """A running answer is told from its beginning, its text so far as one delta from 0; then it goes live."""
    async with server.connect() as one:
        await one.say(LONG)
        await one.send("response.create")
        for _ in range(10):
            await one.until("response.output_text.delta")
        async with server.connect(session_id=one.session["id"]) as two:
            active = two.events[0]["active_response"]
            created = await two.expect("response.created")
            assert active["id"] == created["response"]["id"]
            assert (active["state"], active["offset"]) == ("streaming", 0)
            assert active["item_id"] == (await two.expect("response.output_item.added"))["item"]["id"]
            assert (await two.expect("conversation.item.added"))["item"]["id"] == active["item_id"]
            await two.expect("response.content_part.added")
            delta = await two.expect("response.output_text.delta")
            assert (delta["offset"], delta["epoch"]) == (0, active["epoch"])
            assert len(delta["delta"]) > 20
            assert (await two.expect("response.output_text.delta"))["offset"] == len(delta["delta"])
            await two.until("response.done")
            await one.until("response.done")
            assert two.texts == one.texts
            assert story(two) == story(one)[2:]


async def test_a_tab_that_joins_with_history_gets_each_item_once(server: RunningServer) -> None:
    """First the items before, then the running answer; what was said while it ran is there too, in its place."""
    async with server.connect() as one:
        first = await one.turn("The first")
        question = await one.say(LONG)
        await one.send("response.create")
        await one.until("response.output_text.delta")
        later = await one.say("By the way")
        async with server.connect(session_id=one.session["id"], history="all", extensions=1) as two:
            assert two.events[0]["item_count"] == 5
            answer_id = two.events[0]["active_response"]["item_id"]
            await two.until("response.done")
            await one.until("response.done")
            for kind in ("conversation.item.added", "conversation.item.done"):
                told = [event["item"]["id"] for event in two.events if event["type"] == kind]
                output = first.response["output"][0]["id"]
                assert told == [first.user_item["id"], output, question["id"], later["id"], answer_id]
                before = [event["previous_item_id"] for event in two.events if event["type"] == kind]
                assert before == [None, first.user_item["id"], output, answer_id, question["id"]]
            assert two.texts[answer_id] == one.texts[answer_id]
            assert first.text not in two.texts.values()  # stored answers are items, not deltas


@pytest.mark.parametrize("history", [1, 3, 4, 100])
async def test_history_is_the_last_items_in_their_order(server: RunningServer, history: int) -> None:
    """Each item as it is stored, whole, with the one before it; more than there are is all."""
    async with server.connect() as client:
        items = [await client.say(f"Number {number}") for number in range(3)]
        await client.send("response.create")
        items.append((await client.until("response.done"))["response"]["output"][0])
    chain = [None, *(item["id"] for item in items)]
    async with server.connect(session_id=client.session["id"], history=history) as client:
        for place in range(max(0, len(items) - history), len(items)):
            for kind in ("conversation.item.added", "conversation.item.done"):
                event = await client.expect(kind)
                assert (event["previous_item_id"], event["item"]) == (chain[place], items[place])
        await client.send("ping")
        await client.send("conversation.item.retrieve", item_id="item_none")
        await client.error("item_not_found")


async def test_without_history_nothing_of_it_is_told(server: RunningServer) -> None:
    """A client that kept the conversation itself does not get it again."""
    async with server.connect() as client:
        await client.say("Hello")
    async with server.connect(session_id=client.session["id"]) as client:
        await client.send("conversation.item.retrieve", item_id="item_none")
        await client.error("item_not_found")


async def test_an_answer_goes_on_without_its_only_socket(server: RunningServer) -> None:
    """It is whole in the history of who comes back, as if nobody had left."""
    async with server.connect() as client:
        await client.say(LONG)
        await client.send("response.create")
        await client.until("response.output_text.delta")
    async with server.connect(session_id=client.session["id"], history=1, extensions=1) as client:
        if client.events[0]["active_response"]:
            await client.until("response.done")
            item = client.events[-1]["response"]["output"][0]
        else:
            item = (await client.expect("conversation.item.added"))["item"]
    assert item["status"] == "completed"
    assert item["content"][0]["text"] == answer_for([{"role": "user", "content": LONG}])


async def test_a_client_that_vanishes_leaves_the_others_alone(server: RunningServer) -> None:
    """A cut connection, without a word, in mid-answer: the other tab is told on as if nothing had been."""
    async with server.connect() as one:
        async with server.connect(session_id=one.session["id"]) as two:
            await one.say(LONG)
            await one.send("response.create")
            await two.until("response.output_text.delta")
            two.connection.transport.abort()
            with pytest.raises(ConnectionClosed):
                await two.until("response.done")
        assert (await one.until("response.done"))["response"]["status"] == "completed"
        await one.say("Still here")


# --- a store that does not answer


@asynccontextmanager
async def frozen_store(server: RunningServer) -> AsyncIterator[None]:
    """The store does nothing meanwhile; what reached it is done afterwards, whoever waits for the answer or not."""
    async with redis.asyncio.Redis.from_url(server.redis_url) as admin:
        pid = (await admin.info("server"))["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("response.create", {}),
        ("session.update", {"session": {"instructions": "Be brief."}}),
    ],
)
async def test_a_write_whose_answer_is_lost_blocks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, fields: dict[str, Any]
) -> None:
    """It may have been done all the same: the session is compared with the store, and goes on as that says."""
    monkeypatch.setattr("chat_server.store.server._TIMEOUT_S", 0.3)
    monkeypatch.setattr(Replicas, "confirm_running", AsyncMock())  # that would fail first, with nothing begun
    async with running_server(tmp_path) as server, server.connect() as client:
        await client.say("Hello")
        async with frozen_store(server):
            await client.send(kind, **fields)
            assert (await client.error("store_unavailable"))["retryable"]
        if kind == "response.create":  # it was begun: this replica finds it in its own name, and makes it
            assert (await client.until("response.done"))["response"]["status"] == "completed"
        else:
            assert (await client.until("session.updated"))["session"]["instructions"] == "Be brief."
        async with server.connect(session_id=client.session["id"]) as again:
            assert (await again.turn("Are you there?")).response["status"] == "completed"


async def test_a_running_answer_is_not_ended_by_a_replica_that_could_not_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the store was away for longer than a lease, its owner gets to renew first, and the answer goes on."""
    monkeypatch.setattr("chat_server.store.server._TIMEOUT_S", 0.3)
    monkeypatch.setattr("chat_server.store.replicas.LEASE_MS", 400)
    slow = replace(QUICK, tokens_per_s=60.0)
    async with (
        running_server(tmp_path, simulated=slow) as server,
        another(server) as replica,
        server.connect() as one,
        replica.connect(session_id=one.session["id"]) as two,
    ):
        question = "Tell me more, in 120 words."
        await one.say(question)
        await one.send("response.create")
        await two.until("response.output_text.delta")
        async with frozen_store(server):
            await asyncio.sleep(1.5)
        for client in (one, two):
            response = (await client.until("response.done"))["response"]
            assert response["status"] == "completed"
            text = response["output"][0]["content"][0]["text"]
            assert text == answer_for([{"role": "user", "content": question}])


# --- sessions in trouble, and servers of the store that are away


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub whose ticks follow at once."""
    monkeypatch.setattr(hub_module, "_TICK_S", 0.002)
    monkeypatch.setattr(hub_module, "_RETRY_S", 0.002)
    monkeypatch.setattr(hub_module, "_SETTLE_S", 0.0)


@pytest.mark.parametrize("trouble", BROKEN)
async def test_one_session_that_can_not_be_read_stops_nothing_else(quick: None, trouble: Exception) -> None:
    """Its clients are to come back; the others are compared with the store, and the inbox is heard on."""
    store = PlayedStore()
    async with running_hub(store) as hub:
        sessions = {session_id: await connect(hub, session_id) for session_id in ("a1", "a2", "a3")}
        store.troubles["a2"] = trouble
        store.replicas.break_inbox()
        await until(lambda: store.asked_for("compare") == set(sessions))
        for session_id, (_, connection) in sessions.items():
            assert connection.closed == ([close_codes.RESTART] if session_id == "a2" else [])
        subscriptions = store.replicas.subscriptions
        await asyncio.sleep(0.02)
        assert (hub.ready, store.replicas.subscriptions) == (True, subscriptions)


async def test_one_server_of_the_store_that_is_away_stops_nothing_on_the_others(quick: None) -> None:
    """The inbox is heard again: what lies elsewhere is compared at once, what lies there as soon as it is back."""
    store = PlayedStore()
    async with running_hub(store) as hub:
        sessions = {session_id: await connect(hub, session_id) for session_id in ("a1", "a2", "b1", "c1")}
        store.troubles = {"a1": AWAY, "a2": AWAY}
        store.silent = {"c"}
        store.replicas.break_inbox()
        await until(lambda: {"a1", "b1", "c1"} <= store.asked_for("compare"))
        assert hub.ready, "who comes now is let in"
        store.silent = set()
        store.troubles = {}
        await until(lambda: store.asked_for("compare") == set(sessions))
        assert not any(connection.closed for _, connection in sessions.values())


async def test_who_waits_for_the_store_is_sent_away_after_thirty_seconds(quick: None) -> None:
    """To try another replica; not before that, and no more once the store is there again."""
    store = PlayedStore()
    async with running_hub(store) as hub:
        _, connection = await connect(hub, "a1")

        async def away_for(seconds: float | None) -> None:
            store.troubles = {"lease": AWAY}
            await until(lambda: not hub.lease.holds)
            if seconds is not None:
                hub.lease.lost_at = time.monotonic() - seconds
            ticks = len(told)
            await until(lambda: len(told) > ticks + 2)

        told: list[str] = []
        connection.outbox.tick = lambda *args: told.append(args[2])  # type: ignore[method-assign]
        await away_for(hub_module._AWAY_S - 5)
        assert hub_module._AWAY_S == 30
        assert connection.closed == []
        store.troubles = {}
        await until(lambda: hub.ready)
        hub.lease.lost_at -= 100
        await away_for(None)
        assert connection.closed == [], "that it was away before does not count"
        await away_for(hub_module._AWAY_S + 1)
        await until(lambda: close_codes.OVERLOADED in connection.closed)


@pytest.mark.parametrize("trouble", BROKEN)
async def test_work_that_fails_ends_nothing_else(quick: None, trouble: Exception) -> None:
    """Neither the hub, nor other work; also when it is the last thing that happens."""

    async def fail() -> None:
        raise trouble

    async with running_hub(PlayedStore()) as hub:
        done = asyncio.Event()

        async def go_on() -> None:
            await asyncio.sleep(0.01)
            done.set()

        hub.spawn(go_on(), name="other work")
        hub.spawn(fail(), name="work")
        async with asyncio.timeout(5):
            await done.wait()
        hub.spawn(go_on(), name="work that never begins")


async def test_after_an_outage_sessions_are_asked_for_in_parts(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are due at once; those that wait longest come first, so that all have their turn."""
    store = PlayedStore()
    async with running_hub(store) as hub:
        for number in range(1200):
            await connect(hub, f"a{number}")
        assert store.rounds.count([]) == len(store.rounds)
        monkeypatch.setattr(comparing, "_ASK_S", -1.0)
        await until(lambda: len([asked for asked in store.rounds if asked]) > 6)
        rounds = [asked for asked in store.rounds if asked]
        assert {len(asked) for asked in rounds} == {500}
        for first in range(4):
            assert len(set().union(*rounds[first : first + 3])) == 1200


async def test_mirrors_say_that_they_wait_for_the_store(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose server of it is away, or all while nothing is heard; only as long as that is so."""
    monkeypatch.setattr(comparing, "_SILENCE_S", 0.0)
    store = PlayedStore()
    async with running_hub(store) as hub:
        said: dict[str, str] = {}
        for session_id in ("a1", "b1"):
            _, connection = await connect(hub, session_id)
            monkeypatch.setattr(connection.outbox, "tick", lambda *args, id=session_id: said.update({id: args[2]}))
        for troubles, states in (
            ([], {"a1": "queued", "b1": "queued"}),
            (["a1"], {"a1": "waiting", "b1": "queued"}),
            (["b1"], {"a1": "queued", "b1": "waiting"}),
            (["lease"], {"a1": "waiting", "b1": "waiting"}),
            ([], {"a1": "queued", "b1": "queued"}),
        ):
            store.troubles = dict.fromkeys(troubles, AWAY)
            await until(lambda states=states: said == states)  # type: ignore[misc]


async def test_a_connection_that_fails_keeps_no_heartbeat_from_the_others(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is closed, whichever it is."""
    async with running_hub(PlayedStore()) as hub:
        ticked = set()

        def fail(*_: Any) -> None:
            raise RuntimeError("broken")

        connections = [(await connect(hub, session_id))[1] for session_id in ("a1", "a2", "a2", "a3", "b1")]
        for at, connection in enumerate(connections):
            tick = fail if at < 2 else lambda *_, at=at: ticked.add(at)
            monkeypatch.setattr(connection.outbox, "tick", tick)
        await until(lambda: ticked == {2, 3, 4})
        assert [bool(connection.closed) for connection in connections] == [True, True, False, False, False]
        assert connections[0].closed[0] == close_codes.FAULT
