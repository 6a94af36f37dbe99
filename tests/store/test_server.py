"""A server under the store that forgets our functions, hangs, or is away: the operations, on a real Valkey."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import redis.asyncio

from chat_server.errors import StoreError, StoreUnavailable
from chat_server.store import server as server_module
from chat_server.store.embedded import EmbeddedValkey
from chat_server.store.redis import Store
from chat_server.store.server import library
from tests.store.sessions import ANN, add, begin, commit, end, ids, item, new_session, store_at

pytestmark = [pytest.mark.valkey, pytest.mark.asyncio(loop_scope="module")]


async def test_functions_that_the_server_lost_are_loaded_again(store: Store, raw: redis.asyncio.Redis) -> None:
    """In mid-use, by whichever operation comes first, also by many at once; those of others are left alone."""
    session_id = await new_session(store)
    asked, _ = await begin(store, session_id)
    theirs = "#!lua name=theirs\nredis.register_function('theirs', function() return 'ok' end)"
    for operation in (
        lambda: store.commit([commit(session_id, asked, "Hello")]),
        lambda: store.watch(session_id),
        lambda: asyncio.gather(*(add(store, session_id, item()) for _ in range(4))),
        lambda: end(store, session_id, asked, "Hello", stored="Hello"),
    ):
        await raw.function_flush()
        await raw.function_load(theirs)
        assert await operation()
        assert await raw.fcall("theirs", 0) == b"ok"
        await raw.function_delete("theirs")
    stored = await store.get_item(session_id, asked.item_id)
    assert stored is not None
    assert stored.text == "Hello"


async def test_the_functions_are_named_after_their_code() -> None:
    """Replicas of two versions run side by side on one server, each with its own."""
    prefix, code = library()
    assert code.startswith(f"#!lua name={prefix}lib\n")
    assert prefix in code
    assert library() == (prefix, code)


async def test_a_store_that_is_away_is_unavailable_and_comes_back(tmp_path: Path) -> None:
    """Every operation says so; after a restart of the server all goes on, with all data."""
    valkey = EmbeddedValkey(tmp_path)
    store = store_at(await valkey.start())
    try:
        await store.open()
        session_id = await new_session(store)
        first = item()
        await add(store, session_id, first)
        asked, _ = await begin(store, session_id)
        await store.commit([commit(session_id, asked, "Hello")])
        before = await store.watch(session_id)
        await valkey.stop()
        for operation in (
            store.ping,
            store.open,
            lambda: store.watch(session_id),
            lambda: store.add_item(session_id, item(), None),
            lambda: store.get_item(session_id, first.id),
            lambda: store.commit([commit(session_id, asked, "!", "Hello")]),
            lambda: end(store, session_id, asked, "Hello"),
            lambda: store.replicas.renew_lease(1),
            lambda: store.session_count(ANN, 1),
        ):
            with pytest.raises(StoreUnavailable):
                await operation()
        with pytest.raises(StoreUnavailable):
            async with store.replicas.inbox():
                pass
        await valkey.start()
        assert await store.watch(session_id) == before
        assert await store.commit([commit(session_id, asked, "!", "Hello")]) == ["ok"]
        assert isinstance(await end(store, session_id, asked, "Hello!", stored="Hello!"), bytes)
    finally:
        await store.close()
        await valkey.stop()


async def test_a_store_that_hangs_is_unavailable(
    store: Store, raw: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a deadline, and the connections that waited are not used again with somebody else's answers."""
    session_id = await new_session(store)
    await add(store, session_id, item(id="a"))
    pid = (await raw.info("server"))["process_id"]
    monkeypatch.setattr(server_module, "_TIMEOUT_S", 0.1)
    os.kill(pid, signal.SIGSTOP)
    try:
        results = await asyncio.gather(*(store.ping() for _ in range(5)), return_exceptions=True)
        assert {type(result) for result in results} == {StoreUnavailable}
        with pytest.raises(StoreUnavailable):
            await store.commit([])
            await store.get_item(session_id, "a")
    finally:
        os.kill(pid, signal.SIGCONT)
    monkeypatch.undo()
    assert await ids(store, session_id) == ["a"]
    assert [one.id for one in await asyncio.gather(*(store.get_item(session_id, "a") for _ in range(9))) if one] == [
        "a"
    ] * 9


async def test_what_ends_something_is_done_in_a_full_store(store: Store, raw: redis.asyncio.Redis) -> None:
    """Stops, ends and deletes make room; all else waits for it."""
    session_id, other = await new_session(store), await new_session(store)
    one = item(id="a")
    await add(store, session_id, one)
    asked, _ = await begin(store, session_id)
    await begin(store, other)
    try:
        await raw.config_set("maxmemory", 1)
        with pytest.raises(StoreUnavailable, match="can not take writes"):
            await add(store, session_id, item())
        assert await store.cancel(session_id, asked.id, 0) is not None
        assert isinstance(await end(store, session_id, asked, "", keep=False, cut=0), bytes)
        assert isinstance(await store.delete_item(session_id, one), bytes)
        assert await store.hand_over(other, "token_1", "token_2") is not None
        await store.unwatch(other)
        for each in (session_id, other):
            assert await store.delete_session(each, ANN) is not None
    finally:
        await raw.config_set("maxmemory", 0)


async def test_a_call_can_be_cancelled_at_any_moment(store: Store) -> None:
    """The cancellation is never lost, else a server would not stop; and the next call is answered as it should be."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)

    async def call_for_ever() -> None:
        while True:
            await store.ping()

    for _ in range(300):
        task = asyncio.create_task(call_for_ever())
        for _ in range(dice.randrange(12)):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=2)
        assert done, "the cancellation was swallowed"
        with suppress(asyncio.CancelledError):
            await task
    session_id = await new_session(store)
    assert await store.last_items(session_id, 0) is not None


async def test_a_server_that_is_too_old_is_refused_for_good(valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """StoreError, not StoreUnavailable: waiting does not help."""
    monkeypatch.setattr(server_module, "library", lambda: ("x_", "#!lua name=x\nthis is no Lua"))
    store = store_at(valkey_url)
    try:
        with pytest.raises(StoreError, match="version 7") as error:
            await store.open()
        assert not isinstance(error.value, StoreUnavailable)
    finally:
        await store.close()
