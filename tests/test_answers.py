"""The answers of one replica: made to their end, stopped when nobody comes back, handed over to another one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import redis.asyncio

from chat_server import answers as answers_module
from chat_server import hub as hub_module
from chat_server.answers import Answers
from chat_server.core.items import Item, Part, encode_item
from chat_server.core.response import State
from chat_server.engine.simulated import Fault, answer_for
from chat_server.hub import Hub
from chat_server.live import LiveSession
from chat_server.settings import Limits
from chat_server.store.committer import Writer
from chat_server.store.keys import session_keys
from chat_server.store.replies import Held, Snapshot, TakenOver
from tests.hubs import AWAY, BROKEN, PlayedStore, connect, running_hub
from tests.support.server import QUICK, RunningServer, another, running_server
from tests.support.ws import WsClient
from tests.turns import Script

pytestmark = pytest.mark.server

DELTA = "response.output_text.delta"
LONG = "Tell me more, in 400 words."
WHOLE = answer_for([{"role": "user", "content": LONG}])
SLOW = replace(QUICK, tokens_per_s=150.0)


def at_work(server: RunningServer) -> int:
    return sum(engine.engine.running for engine in server.engines)


async def done(client: WsClient) -> dict[str, Any]:
    response: dict[str, Any] = (await client.until("response.done"))["response"]
    return response


@pytest.fixture
def all_answers(monkeypatch: pytest.MonkeyPatch) -> list[Answers]:
    """The ``Answers`` of each replica, in the order of their start."""
    found: list[Answers] = []
    run = Answers.run

    async def noted(self: Answers) -> None:
        found.append(self)
        await run(self)

    monkeypatch.setattr(Answers, "run", noted)
    return found


async def test_an_answer_that_nobody_comes_back_for_is_stopped(tmp_path: Path) -> None:
    """After ``resume_window_s`` without a connection anywhere, no sooner; what is stored stays, as incomplete."""
    window_s = 2.0
    async with running_server(tmp_path, simulated=SLOW, limits=Limits(resume_window_s=window_s)) as server:
        async with server.connect(extensions=1) as client:
            await client.say(LONG)
            await client.send("response.create")
            created = await client.until("response.created")
            for _ in range(10):
                await client.until(DELTA)
            left_at = time.time()  # the window is told by the store's clock
        async with asyncio.timeout(8):
            while at_work(server):
                await asyncio.sleep(0.01)
        assert time.time() - left_at >= window_s
        held = {"response_id": created["response"]["id"], "epoch": "", "offset": 0}
        async with server.connect(session_id=client.session["id"], extensions=1, **held) as again:
            response = await done(again)
            assert response["status"] == "cancelled"
            text = response["output"][0]["content"][0]["text"]
            assert len(text) > 40
            assert WHOLE.startswith(text)


async def test_an_answer_goes_on_as_long_as_somebody_reads_it_anywhere(tmp_path: Path) -> None:
    """On another replica, or somebody who came back in time."""
    async with (
        running_server(tmp_path, simulated=SLOW, limits=Limits(resume_window_s=1.0)) as server,
        another(server) as replica,
        server.connect(extensions=1) as one,
        replica.connect(session_id=one.session["id"], extensions=1) as two,
    ):
        await one.say(LONG)
        await one.send("response.create")
        await one.until(DELTA)
        one.connection.transport.abort()
        response = await done(two)
        assert response["output"][0]["content"][0]["text"] == WHOLE


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


# --- sessions in trouble, and servers of the store that are away


class PlayedCommitter:
    """Notes what it is asked for; of ``stuck`` sessions commits are under way for ever."""

    def __init__(self) -> None:
        self.stuck: set[str] = set()
        self.lost: list[Writer] = []
        self.stored_again: list[Writer] = []

    async def settle(self, writer: Writer) -> None:
        while writer.session_id in self.stuck:
            await asyncio.sleep(0.001)

    async def store_rest(self, writer: Writer) -> bool:
        return True

    async def store_again(self, writer: Writer) -> None:
        self.stored_again.append(writer)

    def lose(self, writer: Writer) -> None:
        self.lost.append(writer)


def answers_of(hub: Hub, store: PlayedStore, committer: PlayedCommitter) -> Answers:
    parts = cast("Any", {"store": store, "committer": committer, "conductor": None})
    return Answers(hub=hub, limits=Limits(), **parts)


@asynccontextmanager
async def looking(store: PlayedStore, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hub]:
    """A hub, and answers that look after what they find, at once and all the time."""
    monkeypatch.setattr(hub_module, "_TICK_S", 0.002)
    monkeypatch.setattr(answers_module, "_LOOK_S", 0.002)
    monkeypatch.setattr(answers_module, "_CONFIRM_S", 0.0)
    monkeypatch.setattr(answers_module, "_LOOK_EVERYWHERE_S", 0.0)
    async with running_hub(store) as hub:
        task = asyncio.create_task(answers_of(hub, store, PlayedCommitter()).run())
        try:
            yield hub
            assert not task.done(), "it goes on, whatever happens"
        finally:
            task.cancel()
            await asyncio.wait({task})


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.001)


ALL = ("a1", "a2", "b1", "c1", "c2")


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize("trouble", BROKEN)
async def test_one_broken_session_keeps_no_other_from_being_taken_over(
    monkeypatch: pytest.MonkeyPatch, trouble: Exception, connected: bool
) -> None:
    """Whether somebody reads them here or nobody does, whichever is looked at first, and whatever it is."""
    store = PlayedStore()
    store.troubles = {"a1": trouble, "c1": trouble}
    if not connected:
        store.orphans = list(ALL)
    async with looking(store, monkeypatch) as hub:
        if connected:
            store.troubles, troubles = {}, store.troubles
            for session_id in ALL:
                await connect(hub, session_id)
            store.troubles = troubles
        await until(lambda: {"a2", "b1", "c2"} <= store.asked_for("take_over"))


@pytest.mark.parametrize("silent", [True, False])
@pytest.mark.parametrize("connected", [True, False])
async def test_a_server_of_the_store_that_is_away_keeps_none_of_the_others_from_being_taken_over(
    monkeypatch: pytest.MonkeyPatch, connected: bool, silent: bool
) -> None:
    """Whether it refuses or is silent; what lies on it is taken over when it is back."""
    store = PlayedStore()
    store.orphans = [] if connected else list(ALL)
    async with looking(store, monkeypatch) as hub:
        if connected:
            for session_id in ALL:
                await connect(hub, session_id)
            store.asked.clear()
        store.silent = {"a"} if silent else set()
        store.troubles = {} if silent else {"a1": AWAY, "a2": AWAY}
        await until(lambda: {"b1", "c1", "c2"} <= store.asked_for("take_over"))
        assert "forget" not in dict(store.asked)
        store.silent, store.troubles = set(), {}
        await until(lambda: set(ALL) <= store.asked_for("take_over"))


async def make_here(hub: Hub, session_id: str) -> LiveSession:
    """A session whose answer is made here."""
    live, _ = await connect(hub, session_id)
    turn = Script().turn()
    turn.writer.session_id = session_id
    monkey = cast("Any", turn)
    monkey.leave = lambda: True
    live.turn = turn
    return live


async def test_a_server_of_the_store_that_is_away_keeps_no_other_answer_from_being_handed_over() -> None:
    """Those on it are left as soon as it is back."""
    store, committer = PlayedStore(), PlayedCommitter()
    committer.stuck = {"a1"}
    async with running_hub(store) as hub:
        for session_id in ALL:
            await make_here(hub, session_id)
        leaving = asyncio.create_task(answers_of(hub, store, committer).hand_over())
        await until(lambda: store.asked_for("hand_over") == {"b1", "c1", "c2"})
        assert not leaving.done()
        committer.stuck = set()
        async with asyncio.timeout(5):
            await leaving
        assert store.asked_for("hand_over") == set(ALL)


@pytest.mark.parametrize("trouble", BROKEN)
async def test_an_answer_that_can_not_be_written_again_is_left(trouble: Exception) -> None:
    """It does not wait for ever, and nothing else ends by it."""
    store, committer = PlayedStore(), PlayedCommitter()
    async with running_hub(store) as hub:
        live = await make_here(hub, "a1")
        assert live.turn is not None
        store.troubles = {"a1": trouble}
        answers_of(hub, store, committer)._refused(live, live.turn, "missing")
        await until(lambda: committer.lost == [live.turn.writer] if live.turn else False)


async def test_text_on_its_way_to_a_store_that_loses_it_is_written_again_too() -> None:
    """The answer that says that it is stored may come later, from the store as it was: then it is told."""
    store, committer = PlayedStore(), PlayedCommitter()
    written: list[Snapshot] = []

    async def restore(session_id: str, snapshot: Snapshot) -> bool:
        written.append(snapshot)
        return True

    store.restore = restore  # type: ignore[method-assign, assignment]
    async with running_hub(store) as hub:
        live = await make_here(hub, "a1")
        assert live.turn is not None
        response = live.turn.response
        response.move(State.PREFILL)
        response.on_text("Hello")
        response.take_commit()
        response.stored_in_flight()
        response.on_text(" you there")
        under_way = response.take_commit()
        assert await answers_of(hub, store, committer).write_again(live)
    assert under_way is not None
    assert under_way.text
    assert [snapshot.text for snapshot in written] == [response.text(0) + under_way.text]


@pytest.mark.parametrize(("holds", "again"), [(Held(10, 4), True), (Held(11, 4), True), (Held(10, 5), False)])
async def test_text_that_the_store_lost_need_not_wait_for_more_of_it(holds: Held, again: bool) -> None:
    """The engine thinks, or a commit hangs: who comes meanwhile, or takes over, reads all that was told."""
    store, committer = PlayedStore(), PlayedCommitter()

    async def held(session_ids: Sequence[str]) -> list[Held | None]:
        return [holds for _ in session_ids]

    store.held = held  # type: ignore[method-assign]
    async with running_hub(store) as hub:
        live = await make_here(hub, "a1")
        assert live.turn is not None
        response = live.turn.response
        response.move(State.PREFILL)
        response.on_text("Hello ")
        response.take_commit()
        response.stored_in_flight()
        assert response.byte_length == 5
        await answers_of(hub, store, committer).check_kept()
        assert committer.stored_again == [live.turn.writer] * again


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
        answers = answers_of(hub, store, committer)
        await answers._take_over(live, "replica_lost")
        assert await answers.write_again(live)
    [snapshot] = written
    assert snapshot.version == 12
    assert [item.id for item in snapshot.items] == ["item_0", "item_9"]
