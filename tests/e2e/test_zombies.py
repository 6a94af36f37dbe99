"""An owner that was cut off goes on with an answer that another replica took over, and the store has forgotten that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from chat_server import lease
from chat_server.settings import Secret
from chat_server.store import replicas as replicas_module
from chat_server.store.embedded import EmbeddedValkey
from loadtest.chaos_texts import check_marked
from tests.support.copies import copies_of
from tests.support.held import Held
from tests.support.proxy import Proxy, proxy_to
from tests.support.server import QUICK, RunningServer, another, running_server
from tests.support.ws import WsClient

pytestmark = [pytest.mark.server, pytest.mark.timeout(60)]

SPEED = 100.0


@dataclass
class Replica:
    server: RunningServer
    way: Proxy

    def cut_off(self) -> None:
        self.way.closed = True
        self.way.cut()

    def back(self) -> None:
        self.way.closed = False


@asynccontextmanager
async def replicas(folder: Path, words: int) -> AsyncIterator[tuple[Replica, Replica, str]]:
    """Two on one store, each on its own way; each attempt of an engine writes other text."""
    varying = replace(QUICK, tokens_per_s=SPEED, words=words, vary=True)
    valkey = EmbeddedValkey(folder)
    try:
        url = await valkey.start()
        async with (
            proxy_to(url) as way,
            proxy_to(url) as other,
            running_server(folder, simulated=varying, redis_url=Secret(way.url)) as first,
            another(first, other.url) as second,
        ):
            yield Replica(first, way), Replica(second, other), url
    finally:
        await valkey.stop()


async def follow(server: RunningServer, client: WsClient | None, held: Held) -> None:
    """Read to the end of the answer, and come back as often as it takes."""
    while held.done is None:
        try:
            if client is not None:
                await held.read(client)
            else:
                async with held.back(server.ws_url) as again:
                    await held.read(again)
        except (ConnectionClosed, InvalidStatus):
            await asyncio.sleep(0.05)
        client = None


async def until_new(held: Held) -> None:
    """Until more is told, or other text, or the end."""
    before = held.text
    async with asyncio.timeout(10):
        while held.text == before and held.done is None:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("words", [400, 100], ids=["still writes", "has written all"])
@pytest.mark.parametrize("quicker", ["zombie", "heir"])
async def test_a_zombie_with_a_store_that_forgot_the_take_over_mixes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: int, quicker: str
) -> None:
    """Whoever of the two writes first: one of them makes the answer, all read the same text, and it ends once."""
    monkeypatch.setattr(replicas_module, "LEASE_MS", 1000)
    monkeypatch.setattr(lease, "_GRACE_S", 0.2)
    async with (
        replicas(tmp_path, words) as (zombie, heir, url),
        zombie.server.connect(extensions=1) as one,
        heir.server.connect(session_id=one.session["id"], extensions=1) as two,
        copies_of(url, one.session["id"]) as copies,
    ):
        here = await Held.begin(one, "Tell me more.")
        there = replace(here)
        await here.read(one, deltas=10)
        await there.read(two, deltas=10)
        zombie.cut_off()
        forgets = await copies.take()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follow(zombie.server, one, here))
            while (event := await two.next())["type"] != "response.migrated":
                there.take(event)
            await there.read(two, deltas=10)
            tasks.create_task(follow(heir.server, two, there))
            assert here.done is None
            if quicker == "zombie":
                heir.cut_off()
                await copies.put_back(forgets)
                zombie.back()
                await until_new(here)
                heir.back()
            else:
                await copies.put_back(forgets)
                await copies.cut_subscriptions()
                await until_new(there)
                zombie.back()
        assert here.done is not None
        assert there.done is not None
        assert here.done["status"] == there.done["status"] == "completed"
        assert here.text == there.text
        for replica in (zombie, heir):
            await replica.server.ready()
            async with replica.server.connect(session_id=here.session_id, history="all") as later:
                assert later.events[0]["active_response"] is None
                assert later.events[0]["item_count"] == 2
                for _ in range(2):
                    item = (await later.until("conversation.item.done"))["item"]
            assert item["content"][0]["text"] == here.text
            check_marked(here.text, whole=words, starts={at for _, at in item["epochs"]})
        print(f"{quicker} was to write first; the text had {len(item['epochs'])} makings")
        async with asyncio.timeout(5):
            while any(engine.engine.running for engine in zombie.server.engines):
                await asyncio.sleep(0.01)
