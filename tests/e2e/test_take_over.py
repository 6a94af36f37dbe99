"""A replica dies in the middle of an answer: another one goes on with it, and nobody loses or hears twice a word."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from chat_server import lease, supervisor
from chat_server.engine.simulated import answer_for
from chat_server.store.keys import session_keys
from loadtest.chaos_texts import check_marked
from tests.support import ws
from tests.support.held import Held
from tests.support.server import QUICK, RunningServer, ServerProcess, another, running_server, server_process
from tests.support.ws import WsClient

pytestmark = [pytest.mark.server, pytest.mark.timeout(60)]

DELTA = "response.output_text.delta"
LONG = "Tell me more, in 400 words."
WHOLE = answer_for([{"role": "user", "content": LONG}])
SLOW = replace(QUICK, tokens_per_s=120.0)


@asynccontextmanager
async def two_replicas(tmp_path: Path) -> AsyncIterator[tuple[RunningServer, ServerProcess]]:
    """One in this process, and one that can be killed, on the same store and engines."""
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(running_server(tmp_path, simulated=SLOW))
        folder = tmp_path / "other"
        folder.mkdir()
        engines = [arg for e in here.settings.engines for arg in ("--engine", f"{e.name}={e.url}")]
        other = await stack.enter_async_context(server_process(folder, *engines, "--redis", here.redis_url))
        await other.ready()
        yield here, other


async def rest(client: WsClient) -> dict[str, Any]:
    while (event := await client.next())["type"] != "response.done":
        assert event["type"] != "error", event
    response: dict[str, Any] = event["response"]
    return response


async def test_who_was_connected_elsewhere_gets_the_rest_of_the_same_answer(tmp_path: Path) -> None:
    """Under six seconds after ``kill -9``; and is told that it goes on elsewhere, if it asked for extensions."""
    async with (
        two_replicas(tmp_path) as (here, other),
        ws.connect(other.ws_url, extensions=1) as one,
        here.connect(session_id=one.session["id"], extensions=1) as two,
        here.connect(session_id=one.session["id"]) as plain,
    ):
        await one.say(LONG)
        await one.send("response.create")
        for _ in range(30):
            await two.until(DELTA)
        killed_at = time.monotonic()
        await other.end(signal.SIGKILL)
        migrated = await two.until("response.migrated")
        assert migrated["reason"] == "replica_lost"
        await two.until(DELTA)
        assert time.monotonic() - killed_at < 6
        response = await rest(two)
        assert response["status"] == "completed"
        [item] = response["output"]
        assert two.texts[item["id"]] == item["content"][0]["text"] == WHOLE
        assert len(item["epochs"]) == 2
        assert (await rest(plain))["output"][0]["content"][0]["text"] == plain.texts[item["id"]] == WHOLE
        assert response["usage"]["output_tokens"] >= 400
        assert (await two.turn("And now?")).response["status"] == "completed"


async def test_who_comes_back_to_another_replica_goes_on_from_its_offset(tmp_path: Path) -> None:
    """Also if nobody was connected elsewhere, and nobody came back before the answer was taken over."""
    async with two_replicas(tmp_path) as (here, other):
        async with ws.connect(other.ws_url, extensions=1) as one:
            await one.say(LONG)
            await one.send("response.create")
            created = await one.until("response.created")
            for _ in range(30):
                delta = await one.until(DELTA)
            [text] = one.texts.values()
            await other.end(signal.SIGKILL)
        async with asyncio.timeout(12):
            while here_runs(here) == 0:
                await asyncio.sleep(0.05)
        held = {"response_id": created["response"]["id"], "epoch": delta["epoch"], "offset": len(text)}
        async with here.connect(session_id=one.session["id"], extensions=1, **held) as again:
            again.texts[delta["item_id"]] = text
            assert again.events[0]["active_response"]["offset"] == len(text)
            response = await rest(again)
            assert again.texts[delta["item_id"]] == WHOLE
            assert response["status"] == "completed"


@pytest.mark.parametrize("deltas", [0, 30])
async def test_who_comes_back_when_the_other_replica_has_ended_it_gets_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deltas: int
) -> None:
    """From where it was, with each making of the text in its place; on the replica that ended it, and on one more."""
    monkeypatch.setattr(lease, "_GRACE_S", 0.1)  # those that are gone are seen to be gone at once
    monkeypatch.setattr(supervisor, "_UNCONFIRMED_MS", 500)
    varying = replace(QUICK, tokens_per_s=300.0, words=300, vary=True)
    async with running_server(tmp_path, simulated=varying) as here, another(here) as gone, another(here) as later:
        async with gone.connect(extensions=1) as client:
            held = await Held.begin(client, LONG)
            await held.read(client, deltas=deltas)
            if not deltas:  # it knows of the answer, and has nothing of it
                await client.until(DELTA)
        await gone.stop()
        async with redis.asyncio.Redis.from_url(here.redis_url) as store, asyncio.timeout(15):
            while await store.exists(session_keys(held.session_id)[3]):
                await asyncio.sleep(0.02)
        for server in (here, later):
            again = replace(held)
            async with again.back(server.ws_url) as client:
                assert client.events[0]["active_response"] is None
                assert "response.output_text.delta" not in client.types
                await again.read(client)
            first = next(event for event in client.events if event["type"] == DELTA)
            assert first["offset"] == len(held.text), "it has the text up to there"
            assert again.done is not None
            [item] = again.done["output"]
            assert item["content"][0]["text"] == again.text
            assert len(item["epochs"]) == 2
            check_marked(again.text, whole=300, starts={at for _, at in item["epochs"]})
            assert again.text.split()[0].split("·")[0] != again.text.split()[-1].split("·")[0], "two attempts made it"


async def test_a_wish_to_stop_survives_the_one_who_had_to_carry_it_out(tmp_path: Path) -> None:
    """A stopped answer does not come back: whoever takes it over ends it, cut."""
    async with two_replicas(tmp_path) as (here, other):
        async with (
            ws.connect(other.ws_url, extensions=1) as one,
            here.connect(session_id=one.session["id"], extensions=1) as two,
        ):
            await one.say(LONG)
            await one.send("response.create")
            for _ in range(30):
                await two.until(DELTA)
            other.process.send_signal(signal.SIGSTOP)
            try:
                await two.send("response.cancel", seen=20)
                response = await rest(two)
            finally:
                other.process.send_signal(signal.SIGCONT)
            assert response["status"] == "cancelled"
            assert response["output"][0]["content"][0]["text"] == WHOLE[:20]
            # The other one wakes up, finds that it is not the owner, and its client has to come back.
            assert await one.closed() == 1012
        async with ws.connect(other.ws_url, session_id=one.session["id"], history="all") as again:
            await again.until("conversation.item.done")
            done = await again.until("conversation.item.done")
            assert done["item"]["content"][0]["text"] == WHOLE[:20]


async def test_one_that_was_paused_for_longer_than_its_lease_harms_nothing(tmp_path: Path) -> None:
    """Another one took its answer over: it is refused, and its clients go on where the answer is."""
    async with (
        two_replicas(tmp_path) as (here, other),
        ws.connect(other.ws_url, extensions=1) as one,
        here.connect(session_id=one.session["id"], extensions=1) as two,
    ):
        await one.say(LONG)
        await one.send("response.create")
        for _ in range(30):
            await two.until(DELTA)
        other.process.send_signal(signal.SIGSTOP)
        try:
            await two.until("response.migrated")
            await two.until(DELTA)
        finally:
            other.process.send_signal(signal.SIGCONT)
        response = await rest(two)
        assert response["output"][0]["content"][0]["text"] == WHOLE
        assert await one.closed() == 1012


def here_runs(server: RunningServer) -> int:
    return sum(engine.engine.running for engine in server.engines)
