"""Connections to the store that the other side has reset: on both event loops, for they say it each in its own way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
import uvloop

from chat_server.core.response import Response, State
from chat_server.errors import StoreUnavailable
from chat_server.store import committer as committer_module
from chat_server.store import keys
from chat_server.store.committer import Committer, Writer
from chat_server.store.embedded import EmbeddedValkey
from chat_server.store.redis import Store
from tests.store.sessions import begin, new_session, store_at
from tests.support.proxy import Proxy, proxy_to

pytestmark = pytest.mark.valkey

LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
Loop = Callable[[], asyncio.AbstractEventLoop]


def on(loop: Loop, folder: Path, work: Callable[[Store, Proxy, str], Any]) -> None:
    """Do something with a store that is reached through a proxy; the last argument is its address without one."""

    async def run() -> None:
        valkey = EmbeddedValkey(folder)
        try:
            url = await valkey.start()
            async with asyncio.timeout(30), proxy_to(url) as proxy:
                store = store_at(proxy.url)
                try:
                    await store.open()
                    await work(store, proxy, url)
                finally:
                    await store.close()
        finally:
            await valkey.stop()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


@LOOPS
def test_a_connection_that_was_reset_is_a_store_that_is_away(tmp_path: Path, loop: Loop) -> None:
    """No call fails in another way, and the next one has a connection again."""

    async def work(store: Store, proxy: Proxy, url: str) -> None:
        session_id = await new_session(store)
        for _ in range(10):
            await asyncio.gather(*(store.watch(session_id) for _ in range(5)))
            proxy.cut()
            await asyncio.sleep(0)
            for call in (store.ping(), store.last_items(session_id, 0)):
                try:
                    await call
                except StoreUnavailable:
                    continue
            assert await store.watch(session_id) is not None

    on(loop, tmp_path, work)


@LOOPS
def test_answers_outlive_resets_at_any_moment(tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """All text is stored, once."""
    monkeypatch.setattr(committer_module, "_RETRY_S", 0.01)
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)

    async def work(store: Store, proxy: Proxy, url: str) -> None:
        session_id = await new_session(store)
        asked, _ = await begin(store, session_id)
        response = Response(asked, previous_item_id=None)
        response.move(State.PREFILL)
        response.move(State.STREAMING)
        told = asyncio.Event()
        writer = Writer(session_id, "token_1", response, told.set, lambda: None, pytest.fail, told.set)
        committer = Committer(store)
        task = asyncio.create_task(committer.run())
        text = ""
        try:
            for number in range(40):
                told.clear()
                text += f"{number} "
                response.on_text(f"{number} ")
                committer.add(writer)
                if chance.random() < 0.5:
                    await asyncio.sleep(chance.uniform(0, 0.002))
                    proxy.cut()
                await told.wait()
                assert not task.done()
        finally:
            task.cancel()
            await asyncio.wait({task})
        async with redis.asyncio.Redis.from_url(url) as raw:
            assert await raw.get(keys.session_keys(session_id)[4]) == text.rstrip().encode()

    on(loop, tmp_path, work)


@LOOPS
def test_a_store_that_was_closed_is_away(tmp_path: Path, loop: Loop) -> None:
    """Whoever asks so late opens no connection that nobody closes."""

    async def work(store: Store, proxy: Proxy, url: str) -> None:
        await store.close()
        with pytest.raises(StoreUnavailable):
            await store.ping()

    on(loop, tmp_path, work)
