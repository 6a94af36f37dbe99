"""The answers of one replica: made here, and handed over to another one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from chat_server.answers import Answers
from chat_server.core.items import Item, Part, encode_item
from chat_server.engine.simulated import Fault, answer_for
from chat_server.live import LiveSession
from chat_server.store.keys import session_keys
from chat_server.store.replies import Snapshot, TakenOver
from tests.hubs import (
    ALL,
    PlayedCommitter,
    PlayedStore,
    answers_of,
    connect,
    make_here,
    restorer_of,
    running_hub,
    until,
)
from tests.support.server import QUICK, another, running_server
from tests.support.ws import WsClient

pytestmark = pytest.mark.server

DELTA = "response.output_text.delta"
LONG = "Tell me more, in 400 words."
WHOLE = answer_for([{"role": "user", "content": LONG}])
SLOW = replace(QUICK, tokens_per_s=150.0)


async def done(client: WsClient) -> dict[str, Any]:
    response: dict[str, Any] = (await client.until("response.done"))["response"]
    return response


@pytest.fixture
def all_answers(monkeypatch: pytest.MonkeyPatch) -> list[Answers]:
    """The ``Answers`` of each replica, in the order of their start."""
    found: list[Answers] = []
    make = Answers.__init__

    def noted(self: Answers, **parts: Any) -> None:
        make(self, **parts)
        found.append(self)

    monkeypatch.setattr(Answers, "__init__", noted)
    return found


@pytest.mark.parametrize("watched", [True, False])
async def test_an_answer_that_is_handed_over_goes_on_elsewhere(
    tmp_path: Path, all_answers: list[Answers], watched: bool
) -> None:
    """At once, from where it was, whether somebody is connected to the other replica or not."""
    async with (
        running_server(tmp_path, simulated=SLOW) as server,
        another(server) as replica,
        server.connect(extensions=1) as one,
    ):
        await one.say(LONG)
        await one.send("response.create")
        for _ in range(20):
            await one.until(DELTA)
        owner = await server.owner(one.session["id"])
        if watched:
            async with replica.connect(session_id=one.session["id"], extensions=1) as two:
                async with asyncio.timeout(5):
                    await all_answers[0].hand_over()
                assert (await two.until("response.migrated"))["reason"] == "replica_drained"
                assert (await done(two))["output"][0]["content"][0]["text"] == WHOLE
        else:
            async with asyncio.timeout(5):
                await all_answers[0].hand_over()
            # Not taken back, which would look the same from here.
            assert await server.owner(one.session["id"]) != owner
        # Who stays at the first one hears the rest all the same.
        response = await done(one)
        [item] = response["output"]
        assert response["status"] == "completed"
        assert one.texts[item["id"]] == item["content"][0]["text"] == WHOLE
        assert "response.migrated" in one.types


@pytest.mark.parametrize("lost", ["text", "session"])
async def test_what_the_store_loses_just_before_a_hand_over_is_written_again(
    tmp_path: Path, all_answers: list[Answers], lost: str
) -> None:
    """Of the text alone, or all of the session: the other replica goes on from what was told."""
    async with (
        running_server(tmp_path, simulated=SLOW) as server,
        another(server),
        server.connect(extensions=1) as one,
    ):
        await one.say(LONG)
        await one.send("response.create")
        for _ in range(20):
            await one.until(DELTA)
        gone = [key for key in session_keys(one.session["id"]) if lost == "session" or key.endswith(":text")]
        leave = Answers._leave

        async def lose_and_leave(self: Answers, live: LiveSession) -> None:
            async with redis.asyncio.Redis.from_url(server.redis_url) as admin:
                await admin.delete(*gone)
            await leave(self, live)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Answers, "_leave", lose_and_leave)
            async with asyncio.timeout(5):
                await all_answers[0].hand_over()
        response = await done(one)
        assert response["output"][0]["content"][0]["text"] == WHOLE
        assert one.texts[response["output"][0]["id"]] == WHOLE
        assert [event["offset"] for event in one.events if event["type"] == DELTA].count(0) == 1, (
            "nothing was taken back"
        )


async def test_an_answer_that_nobody_takes_is_taken_back(tmp_path: Path, all_answers: list[Answers]) -> None:
    """There is no other replica: it goes on here."""
    async with running_server(tmp_path, simulated=SLOW) as server, server.connect(extensions=1) as client:
        await client.say(LONG)
        await client.send("response.create")
        for _ in range(20):
            await client.until(DELTA)
        async with asyncio.timeout(1):
            await all_answers[0].hand_over()
        response = await done(client)
        assert response["output"][0]["content"][0]["text"] == WHOLE


async def test_a_request_that_kills_what_it_touches_ends(tmp_path: Path, all_answers: list[Answers]) -> None:
    """Three owners that died of it without new text are enough; to be handed over is harmless."""
    async with (
        running_server(tmp_path, simulated=SLOW) as server,
        another(server),
        server.connect(extensions=1) as client,
    ):
        for engine in server.engines:
            engine.engine.add_fault(Fault("hang", after_tokens=0, times=None))
        await client.say(LONG)
        await client.send("response.create")
        await client.until("response.created")
        key = session_keys(client.session["id"])[3]
        async with redis.asyncio.Redis.from_url(server.redis_url) as admin:
            for number in range(5):
                if number == 4:
                    assert await admin.hget(key, "attempts") == b"1"
                    await admin.hset(key, "attempts", 4)
                async with asyncio.timeout(5):
                    await all_answers[number % 2].hand_over()
                await asyncio.sleep(0.7)
        response = await done(client)
        assert response["status"] == "failed"
        assert client.types.count("response.done") == 1
        assert response["output"] == []


# --- a store in trouble


async def test_an_answer_that_waits_for_the_store_keeps_no_other_from_being_handed_over() -> None:
    """It is left as soon as it can be."""
    store, committer = PlayedStore(), PlayedCommitter()
    committer.stuck = {"a1"}
    async with running_hub(store) as hub:
        for session_id in ALL:
            await make_here(hub, session_id)
        leaving = asyncio.create_task(answers_of(hub, store, committer).hand_over())
        await until(lambda: store.asked_for("hand_over") == set(ALL) - {"a1"})
        assert not leaving.done()
        committer.stuck = set()
        async with asyncio.timeout(5):
            await leaving
        assert store.asked_for("hand_over") == set(ALL)


async def test_what_is_heard_before_an_answer_is_ours_belongs_to_what_is_written_again() -> None:
    """The message of an item may be quicker than the store's answer that we are the owner, which it follows."""
    store, committer = PlayedStore(), PlayedCommitter()
    asked = Item(id="item_0", status="completed", role="user", content=[Part(type="input_text", text="Well?")])
    moved = b'"response":"resp_1","owner":"replica_1","token":"%b","epoch":["epoch_2",0],"reason":""}'
    written: list[Snapshot] = []

    async def take_over(session_id: str, read: str, token: str, *_: str) -> TakenOver:
        item = encode_item(Item(id="item_9", status="completed", role="user", content=asked.content))
        hub._hear(b'{"kind":"item","session":"a1","before":11,"version":12,"previous":"item_1","item":%b}' % item)
        message = b'{"kind":"moved","session":"a1","before":10,"version":11,' + moved % token.encode()
        return TakenOver(message, "", None, 1, None, (asked,))

    async def restore(session_id: str, snapshot: Snapshot) -> bool:
        written.append(snapshot)
        return True

    store.take_over, store.restore = take_over, restore  # type: ignore[method-assign, assignment]
    async with running_hub(store) as hub:
        live, _ = await connect(hub, "a1")
        restorer = restorer_of(hub, store, committer)
        await answers_of(hub, store, committer, restorer).take_over(live, "replica_lost")
        assert await restorer.write_again(live)
    [snapshot] = written
    assert snapshot.version == 12
    assert [item.id for item in snapshot.items] == ["item_0", "item_9"]
