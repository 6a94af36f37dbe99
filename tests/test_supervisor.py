"""Looking after answers: nobody makes them, or nobody reads them, whatever is wrong with the sessions beside them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from chat_server import hub as hub_module
from chat_server import supervisor
from chat_server.engine.simulated import answer_for
from chat_server.hub import Hub
from chat_server.settings import Limits
from chat_server.supervisor import Supervisor
from tests.hubs import (
    ALL,
    AWAY,
    BROKEN,
    PlayedCommitter,
    PlayedStore,
    answers_of,
    connect,
    restorer_of,
    running_hub,
    until,
)
from tests.support.server import QUICK, RunningServer, another, running_server
from tests.support.ws import WsClient

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


# --- answers that nobody reads


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


# --- answers that nobody makes


@asynccontextmanager
async def looking(store: PlayedStore, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hub]:
    """A hub, and a supervisor that looks all the time."""
    monkeypatch.setattr(hub_module, "_TICK_S", 0.002)
    monkeypatch.setattr(supervisor, "_LOOK_S", 0.002)
    monkeypatch.setattr(supervisor, "_CONFIRM_S", 0.0)
    monkeypatch.setattr(supervisor, "_LOOK_EVERYWHERE_S", 0.0)
    async with running_hub(store) as hub:
        committer = PlayedCommitter()
        restorer = restorer_of(hub, store, committer)
        parts = cast("Any", {"store": store, "answers": answers_of(hub, store, committer, restorer)})
        looks = Supervisor(hub=hub, restorer=restorer, limits=Limits(), **parts)
        task = asyncio.create_task(looks.run())
        try:
            yield hub
            assert not task.done(), "it goes on, whatever happens"
        finally:
            task.cancel()
            await asyncio.wait({task})


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize("trouble", BROKEN)
async def test_one_broken_session_keeps_no_other_from_being_taken_over(
    monkeypatch: pytest.MonkeyPatch, trouble: Exception, connected: bool
) -> None:
    """Whether somebody reads them here or nobody does, whichever is looked at first, and whatever it is."""
    store = PlayedStore()
    store.troubles = {"a1": trouble, "c1": trouble}
    if not connected:
        store.replicas.orphans = list(ALL)
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
    store.replicas.orphans = [] if connected else list(ALL)
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
