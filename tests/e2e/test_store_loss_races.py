"""The store forgets more than one thing, or while it is away: nobody's newer knowledge is written over by an older one.

Who looks first at what was lost is a matter of chance; here the tests say when each replica looks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from websockets.exceptions import ConnectionClosed

from chat_server import commands, comparing, restoring
from chat_server.engine.simulated import Fault, answer_for
from chat_server.restoring import Restorer
from chat_server.settings import Secret
from chat_server.store.embedded import EmbeddedValkey
from chat_server.supervisor import Supervisor
from tests.support.copies import Copies, copies_of
from tests.support.proxy import proxy_to
from tests.support.server import QUICK, RunningServer, running_server, two_replicas
from tests.support.ws import WsClient, refused

pytestmark = [pytest.mark.server, pytest.mark.timeout(60)]

DELTA = "response.output_text.delta"
LONG = "Tell me more, in 150 words."
WHOLE = answer_for([{"role": "user", "content": LONG}])
SLOW = replace(QUICK, tokens_per_s=150.0)

Looks = Callable[[int], Awaitable[None]]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """No replica looks by itself whether the store lost something; ``looks(0)`` makes the first one do it."""
    found: list[Restorer] = []
    run, check = Supervisor.run, Restorer.check_kept

    async def noted(self: Supervisor) -> None:
        found.append(self._restorer)
        await run(self)

    async def unseen(self: Restorer) -> None:
        pass

    async def look(number: int) -> None:
        await check(found[number])

    monkeypatch.setattr(Supervisor, "run", noted)
    monkeypatch.setattr(Restorer, "check_kept", unseen)
    return look


@asynccontextmanager
async def two_tabs(
    folder: Path,
) -> AsyncIterator[tuple[RunningServer, RunningServer, WsClient, WsClient, Copies]]:
    """Two replicas, a connection to each of them, in the same session, and copies of that."""
    async with (
        two_replicas(folder, simulated=SLOW) as (first, second),
        first.connect(extensions=1) as one,
        second.connect(session_id=one.session["id"], extensions=1) as two,
        copies_of(first.redis_url, one.session["id"]) as copies,
    ):
        yield first, second, one, two, copies


async def start(client: WsClient, deltas: int, **fields: Any) -> None:
    await client.say(LONG)
    await client.send("response.create", **fields)
    for _ in range(deltas):
        await client.until(DELTA)


async def done(client: WsClient) -> dict[str, Any]:
    response = (await client.until("response.done"))["response"]
    assert response["status"] == "completed", response
    return response  # type: ignore[no-any-return]


async def history(server: RunningServer, client: WsClient) -> list[str]:
    """The texts of the conversation as somebody finds it who comes later; nothing runs."""
    async with server.connect(session_id=client.session["id"], history="all") as later:
        created = later.events[0]
        assert created["active_response"] is None
        items = [(await later.until("conversation.item.done"))["item"] for _ in range(created["item_count"])]
    return [item["content"][0]["text"] for item in items]


async def test_an_end_that_was_lost_while_the_store_was_away_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fail-over may take longer than an end is kept while all is well: the answer is not made a second time."""
    monkeypatch.setattr(restoring, "_KEEP_ENDED_S", 0.5)
    valkey = EmbeddedValkey(tmp_path)
    try:
        url = await valkey.start()
        async with (
            proxy_to(url) as proxy,
            running_server(tmp_path, simulated=SLOW, redis_url=Secret(proxy.url)) as server,
            server.connect(extensions=1) as client,
            copies_of(url, client.session["id"]) as copies,
        ):
            await start(client, 10)
            copy = await copies.take()
            await done(client)
            proxy.closed = True
            proxy.cut()
            await copies.put_back(copy)
            await asyncio.sleep(1.5)
            proxy.closed = False
            await asyncio.sleep(1.5)
            assert await history(server, client) == [LONG, WHOLE]
            assert (await client.turn("And then? In 5 words.")).response["status"] == "completed"
            assert client.types.count("response.done") == 2
            assert sum(engine.engine.counters.finished for engine in server.engines) == 2
    finally:
        await valkey.stop()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_who_knows_more_has_the_last_word(tmp_path: Path, looks: Looks, order: tuple[int, int]) -> None:
    """One replica knows the end of an answer that was lost, the other one the next answer, which it makes."""
    async with two_tabs(tmp_path) as (first, second, one, two, copies):
        await start(one, 10)
        copy = await copies.take()
        await done(one)
        await done(two)
        await start(two, 10)
        await copies.put_back(copy)
        for number in order:
            await looks(number)
        await done(two)
        assert (await history(first, one))[:3] == [LONG, WHOLE, LONG]
        assert len(await history(second, one)) == 4


async def test_an_end_does_not_hide_what_was_lost_before_it(tmp_path: Path, looks: Looks) -> None:
    """The queued answer, which its asker was told of, is made when the running one has ended."""
    async with two_tabs(tmp_path) as (_, second, one, two, copies):
        await start(one, 10)
        copy = await copies.take()
        await start(one, 0, if_active="queue")
        await one.until("response.queued")
        await copies.put_back(copy)
        for client in (one, two):
            await done(client)
            await done(client)
        assert [len(text) > 0 for text in await history(second, one)] == [True] * 4


async def test_what_was_queued_can_be_cancelled_though_the_store_lost_it(tmp_path: Path, looks: Looks) -> None:
    """Neither its end nor that of the other one is lost."""
    async with (
        two_replicas(tmp_path, simulated=SLOW) as (first, _),
        first.connect(extensions=1) as client,
        copies_of(first.redis_url, client.session["id"]) as copies,
    ):
        await start(client, 10)
        copy = await copies.take()
        await start(client, 0, if_active="queue")
        queued = (await client.until("response.queued"))["response_id"]
        await copies.put_back(copy)
        await client.send("response.cancel", response_id=queued)
        ended = (await client.until("response.done"))["response"]
        assert (ended["id"], ended["status"]) == (queued, "cancelled")
        await done(client)


async def test_what_was_said_where_the_maker_did_not_listen_stays(tmp_path: Path, looks: Looks) -> None:
    """Its reader moved to another replica and went on there; the store loses the end only."""
    async with two_replicas(tmp_path, simulated=SLOW) as (first, second):
        async with first.connect(extensions=1) as one:
            await start(one, 10)
        async with (
            second.connect(session_id=one.session["id"], extensions=1) as two,
            copies_of(first.redis_url, one.session["id"]) as copies,
        ):
            await two.say("By the way.")
            copy = await copies.take()
            await done(two)
            await copies.put_back(copy)
            await looks(0)
            assert await history(second, one) == [LONG, WHOLE, "By the way."]


async def test_who_comes_back_to_an_answer_that_the_store_lost_gets_the_whole_of_it(
    tmp_path: Path, looks: Looks
) -> None:
    """A commit finds out that it was lost, with nobody there, and it is written again."""
    async with two_replicas(tmp_path, simulated=SLOW) as (first, _):
        async with (
            first.connect(extensions=1) as one,
            copies_of(first.redis_url, one.session["id"]) as copies,
        ):
            copy = await copies.take()
            await start(one, 10)
            await one.connection.close()
            await copies.put_back(copy)
        await asyncio.sleep(0.3)
        async with first.connect(session_id=one.session["id"], extensions=1) as again:
            response = await done(again)
            assert again.texts[response["output"][0]["id"]] == WHOLE


@pytest.mark.parametrize("hard", [False, True], ids=["unnoticed", "subscriptions cut"])
async def test_a_session_that_was_lost_whole_is_not_gone(tmp_path: Path, looks: Looks, hard: bool) -> None:
    """Whoever writes before it is written again waits for that, in either tab; both hear of what follows."""
    async with two_tabs(tmp_path) as (_, second, one, two, copies):
        await start(one, 10)
        await done(one)
        await done(two)
        await copies.put_back({})
        if hard:  # a store that loses something was away
            await copies.cut_subscriptions()
            await asyncio.sleep(0.2)
        says = asyncio.gather(*(client.say("By the way.") for client in (one, two)))
        await asyncio.sleep(0.3)
        await looks(0)
        await says
        await two.send("session.update", session={"instructions": "Be short."})
        for client in (one, two):
            await client.until("session.updated")
        assert await history(second, one) == [LONG, WHOLE, "By the way.", "By the way."]


@pytest.mark.parametrize("hard", [False, True], ids=["unnoticed", "subscriptions cut"])
async def test_a_session_that_is_lost_whole_in_mid_answer_goes_on(tmp_path: Path, hard: bool) -> None:
    """Nobody is disconnected: not where the answer is made, nor elsewhere."""
    async with two_tabs(tmp_path) as (_, second, one, two, copies):
        await start(one, 10)
        await two.until(DELTA)
        await copies.put_back({})
        if hard:
            await copies.cut_subscriptions()
        for client in (one, two):
            response = await done(client)
            assert client.texts[response["output"][0]["id"]] == WHOLE
        assert await history(second, one) == [LONG, WHOLE]


async def test_a_session_that_nobody_can_write_again_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while, in which it might have come back: so long, who asks for it is told to try again."""
    monkeypatch.setattr(comparing, "RESTORE_S", 2.0)
    async with (
        two_replicas(tmp_path, simulated=SLOW) as (first, second),
        first.connect() as client,
        copies_of(first.redis_url, client.session["id"]) as copies,
    ):
        await copies.put_back({})
        await copies.cut_subscriptions()
        await asyncio.sleep(0.5)
        refusal = await refused(second.ws_url, session_id=client.session["id"])
        assert (refusal.status, refusal.error["code"]) == (503, "store_unavailable")
        with pytest.raises(ConnectionClosed):
            await client.until("never")
        assert client.connection.close_code == 1012
        await asyncio.sleep(0.5)
        refusal = await refused(second.ws_url, session_id=client.session["id"])
        assert (refusal.status, refusal.error["code"]) == (404, "session_not_found")


async def delete(server: RunningServer, client: WsClient) -> int:
    async with (
        aiohttp.ClientSession() as http,
        http.delete(f"{server.url}/v1/sessions/{client.session['id']}") as answer,
    ):
        return answer.status


async def start_silent(server: RunningServer, *clients: WsClient) -> None:
    """Begin an answer whose engine writes nothing: so nothing is stored that would show what was lost."""
    for engine in server.engines:
        engine.engine.add_fault(Fault("hang", times=None))
    await start(clients[0], 0)
    for client in clients:
        await client.until("response.created")
    async with asyncio.timeout(5):
        while not at_work(server):
            await asyncio.sleep(0.01)


def at_work(server: RunningServer) -> int:
    return sum(engine.engine.running for engine in server.engines)


@pytest.mark.parametrize("replica", [0, 1])
async def test_a_session_that_is_deleted_while_it_is_lost_ends_in_order(
    tmp_path: Path, looks: Looks, replica: int
) -> None:
    """It is written again by who makes its answer, whose end is told, and then it is gone for everybody."""
    async with two_tabs(tmp_path) as (first, second, one, two, copies):
        await start_silent(first, one, two)
        await copies.put_back({})
        await copies.cut_subscriptions()
        deleting = asyncio.create_task(delete((first, second)[replica], one))
        while not deleting.done():
            await looks(0)
            await asyncio.sleep(0.02)
        assert deleting.result() == 200
        assert at_work(first) == 0
        here, there = (one, two) if replica == 0 else (two, one)
        assert await here.closed() == 1000
        [response] = [event["response"] for event in here.events if event["type"] == "response.done"]
        assert response["status"] == "cancelled"
        assert await there.closed() in (1000, 1012), "that it is to be told was lost too, perhaps for longer"
        assert (await refused(second.ws_url, session_id=one.session["id"])).status == 404


async def test_a_session_that_is_deleted_before_it_is_written_again_stays_so(
    tmp_path: Path, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner finds that out in place of its loss, and the engine has nothing to do any more."""
    monkeypatch.setattr(commands, "_RESTORED_S", 0.1)
    monkeypatch.setattr(commands, "_ENDS_S", 0.1)
    async with two_tabs(tmp_path) as (first, second, one, two, copies):
        await start_silent(first, one, two)
        await copies.put_back({})
        assert await delete(second, one) == 200
        assert await two.closed() == 1000
        assert at_work(first) == 1
        await looks(0)
        assert await one.closed() == 1012
        async with asyncio.timeout(5):
            while at_work(first):
                await asyncio.sleep(0.01)
        for server in (first, second):
            assert (await refused(server.ws_url, session_id=one.session["id"])).status == 404
