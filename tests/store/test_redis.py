"""The store's operations, each one script, on a real Valkey."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import redis.asyncio

from chat_server.core.items import SessionSettings, encode_item
from chat_server.core.placement import Binding
from chat_server.core.principal import Principal
from chat_server.errors import StoreBehind, StoreError
from chat_server.store import keys
from chat_server.store.messages import (
    ItemGone,
    ItemPut,
    ResponseBegan,
    ResponseEnded,
    SessionDeleted,
    SettingsChanged,
)
from chat_server.store.redis import Store
from chat_server.store.replies import Snapshot
from tests.store.sessions import (
    ANN,
    EMPTY_TTL_S,
    MAX_ITEMS,
    MODEL,
    TEXTS,
    TTL_S,
    add,
    begin,
    change,
    commit,
    end,
    ids,
    item,
    lives,
    new_session,
)
from tests.support.copies import Copies

pytestmark = [pytest.mark.valkey, pytest.mark.asyncio(loop_scope="module")]


# --- sessions


async def test_a_session_is_there_as_it_was_made(store: Store) -> None:
    """Owner, model and settings, of whatever characters; a session's id is given once."""
    settings = SessionSettings(instructions=TEXTS[5] + TEXTS[3], max_output_tokens=7, top_p=0.5, stop=("a", '"'))
    await store.create_session("sess_made", Principal("acme", "ann"), 'org/"model"', settings)
    state = await store.watch("sess_made")
    assert state is not None
    assert (state.owner, state.model, state.settings) == (Principal("acme", "ann"), 'org/"model"', settings)
    assert (state.item_count, state.running) == (0, None)
    with pytest.raises(StoreError):
        await store.create_session("sess_made", ANN, MODEL, SessionSettings())


async def test_what_is_not_there_is_gone(store: Store) -> None:
    """No operation makes a session out of nothing."""
    assert await store.watch("sess_none") is None
    assert await store.update_session("sess_none", -1, MODEL, SessionSettings()) == "gone"
    assert await store.add_item("sess_none", item(), None) is None
    assert await store.get_item("sess_none", "item_none") is None
    assert await store.delete_item("sess_none", item()) == "gone"
    assert await store.last_items("sess_none", 0) is None
    assert await store.bind("sess_none", None, Binding("e", "1")) is None
    assert await store.take_over("sess_none", "token_1", "token_2", "epoch_2", "why") is None
    await store.unwatch("sess_none")
    assert await store.watch("sess_none") is None


async def test_what_is_known_and_not_there_is_lost_unless_it_was_deleted(store: Store) -> None:
    """A session that a caller knows does not go away by itself; what must not be deleted twice is remembered."""
    with pytest.raises(StoreBehind):
        await store.add_item("sess_none", item(), None, known=0)
    with pytest.raises(StoreBehind):
        await store.update_session("sess_none", 0, MODEL, SessionSettings())
    assert not await store.was_deleted("sess_none")
    session_id = await new_session(store)
    await store.delete_session(session_id, Principal("acme", "ann"))
    assert await store.was_deleted(session_id)
    assert await store.add_item(session_id, item(), None, known=0) is None
    assert await store.update_session(session_id, 0, MODEL, SessionSettings()) == "gone"


@pytest.mark.parametrize("lost", ["all", "a change"])
async def test_a_session_that_the_store_lost_is_deleted_for_good(
    store: Store, raw: redis.asyncio.Redis, lost: str
) -> None:
    """Its owner writes it again to whom it is lost, not to whom it is deleted; who listens hears of it as of any."""
    session_id = await new_session(store)
    copies = Copies(raw, session_id)
    copy = await copies.take()
    known = (await add(store, session_id, item())).version
    await copies.put_back({} if lost == "all" else copy)
    deleted = change(await store.delete_session(session_id, ANN, known=known))
    assert isinstance(deleted, SessionDeleted)
    assert deleted.before == known < deleted.version
    snapshot = Snapshot(known, ANN, MODEL, SessionSettings(), 1, (item(),), {}, "")
    assert not await store.restore(session_id, snapshot)
    assert await store.watch(session_id) is None
    deleted_key = keys.session_keys(session_id)[8]
    assert 3590 < await raw.ttl(deleted_key) <= 3600
    assert await store.delete_session(session_id, ANN, known=known) is None, "once is enough"
    assert await raw.exists(*keys.session_keys(session_id)) == 1


async def test_a_session_that_is_only_lost_is_written_again(store: Store, raw: redis.asyncio.Redis) -> None:
    """The test above can fail: without its deletion it comes back."""
    session_id = await new_session(store)
    await Copies(raw, session_id).put_back({})
    assert await store.delete_session(session_id, ANN) is None, "who knows nothing of it has nothing to delete"
    assert await store.restore(session_id, Snapshot(7, ANN, MODEL, SessionSettings(), 1, (item(),), {}, ""))
    assert await store.watch(session_id) is not None


async def test_a_session_knows_since_when_nobody_listens(
    stores: Callable[..., Store], raw: redis.asyncio.Redis
) -> None:
    """From the last that leaves to the next that comes."""
    one, two = stores(), stores()
    session_id = await new_session(one)
    [name, *_] = keys.session_keys(session_id)
    for store in (one, two):
        await store.watch(session_id)
    await one.unwatch(session_id)
    assert await raw.hget(name, "unwatched_since") is None
    await two.unwatch(session_id)
    assert int(await raw.hget(name, "unwatched_since") or 0) > 1_700_000_000_000
    await one.watch(session_id)
    assert await raw.hget(name, "unwatched_since") is None


async def test_a_replica_that_died_is_told_nothing_for_long(
    stores: Callable[..., Store], raw: redis.asyncio.Redis
) -> None:
    """A session outlives many of them, and each one costs a message for each piece of text."""
    one, two = stores(), stores()
    session_id = await new_session(one)
    watchers = keys.session_keys(session_id)[5]
    for look in (two.watch(session_id), two.renew_watch([session_id])):
        await raw.zadd(watchers, {one.replica_id: 1000})
        await look
        assert await raw.zrange(watchers, 0, -1) == [two.replica_id.encode()]


async def test_every_change_follows_the_one_before(stores: Callable[..., Store]) -> None:
    """Versions only grow, each change says the one before it, and what is no change leaves it alone."""
    store = stores()
    session_id = await new_session(store)
    state = await store.watch(session_id)
    assert state is not None
    version = state.version
    first = item()
    told = [await add(store, session_id, first)]
    settings = SessionSettings(instructions="x")
    assert await store.update_session(session_id, version, MODEL, settings) == "stale", "an item came since"
    changes = [change(await store.update_session(session_id, told[-1].version, MODEL, settings))]
    asked, reply = await begin(store, session_id)
    changes.append(change(reply.messages[0]))
    await store.commit([commit(session_id, asked, "text is no change")])
    await store.add_item(session_id, first, None)  # nor is a duplicate
    changes.append(change(await end(store, session_id, asked, "text is no change")))
    deleted = await store.delete_item(session_id, first)
    changes.append(change(deleted))
    assert [type(one) for one in (*told, *changes)] == [
        *(ItemPut, SettingsChanged, ResponseBegan, ResponseEnded, ItemGone)
    ]
    last = told[-1].version
    assert last > version
    for one in changes:
        assert one.before == last
        assert one.version > one.before
        last = one.version
    state = await store.watch(session_id)
    assert state is not None
    assert state.version == last


async def test_other_sessions_are_not_touched(store: Store, raw: redis.asyncio.Redis) -> None:
    """An operation reads and writes the keys of its own session only."""
    other, session_id = await new_session(store), await new_session(store)
    await add(store, other, item())
    await begin(store, other)
    names = keys.session_keys(other)
    before = [await raw.dump(name) for name in names]
    await add(store, session_id, one := item())
    asked, _ = await begin(store, session_id)
    await store.commit([commit(session_id, asked, "Hello")])
    await end(store, session_id, asked, "Hello")
    await store.delete_item(session_id, one)
    assert [await raw.dump(name) for name in names] == before


async def test_a_user_has_so_many_sessions(store: Store) -> None:
    """Each counted once, however often it was used; those that ended their life are not counted."""
    user = Principal("acme", "counted")
    now = 10_000_000_000
    assert await store.session_count(user, now) == 0
    for session_id, at in (("a", now), ("b", now), ("b", now + 1), ("c", now - TTL_S * 1000 + 5)):
        await store.note_session(user, session_id, at)
    assert await store.session_count(user, now) == 3
    assert await store.session_count(user, now + 10) == 2
    assert await store.session_count(Principal("acme", "other"), now) == 0


# --- items


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
async def test_every_text_comes_back_as_it_was(store: Store, raw: redis.asyncio.Redis, text: str) -> None:
    """Byte for byte, as an item, in messages, as text of a running answer and as its rest."""
    session_id = await new_session(store)
    one = item(text)
    added = await store.add_item(session_id, one, None)
    assert added is not None
    put = change(added.message)
    assert isinstance(put, ItemPut)
    assert put.item == one
    assert await store.get_item(session_id, one.id) == one
    assert await raw.hget(keys.session_keys(session_id)[1], one.id) == encode_item(one)
    again = await store.add_item(session_id, one, None)
    assert again is not None
    assert again.kind == "duplicate"
    asked, reply = await begin(store, session_id, metadata={"k": text}, instructions=text)
    assert reply.items == (one,)
    if text:
        await store.commit([commit(session_id, asked, text)])
    state = await store.watch(session_id)
    assert state is not None
    assert state.running is not None
    assert (state.running.text, state.running.begun) == (text, asked)
    ended = change(await end(store, session_id, asked, text + text, stored=text))
    assert isinstance(ended, ResponseEnded)
    assert ended.rest == text
    stored = await store.get_item(session_id, asked.item_id)
    assert stored is not None
    assert stored.text == text + text


async def test_items_take_their_place(store: Store) -> None:
    """At the end, at the start, or behind another; never behind one that is not there."""
    session_id = await new_session(store)
    places = [("b", None, None), ("d", None, "b"), ("a", "root", None), ("c", "b", "b"), ("e", "d", "d")]
    for id, previous, before in places:
        added = await store.add_item(session_id, item(id, id), previous)
        assert added is not None
        put = change(added.message)
        assert isinstance(put, ItemPut)
        assert put.previous == before
    refused = await store.add_item(session_id, item("f", "f"), "nobody")
    assert refused is not None
    assert refused.kind == "no_previous"
    assert await ids(store, session_id) == ["a", "b", "c", "d", "e"]
    for id, before in zip("abcde", [None, *"abcd"], strict=True):
        again = await store.add_item(session_id, item(id, id), "e")
        assert again is not None
        assert (again.kind, again.previous) == ("duplicate", before)


async def test_one_id_is_one_item(store: Store) -> None:
    """The same content is a harmless retry, another a conflict; both change nothing."""
    session_id = await new_session(store)
    await add(store, session_id, item("Hello", "mine"))
    before = await store.watch(session_id)
    for other in (item("Hello!", "mine"), item("Hello", "mine", role="system")):
        reply = await store.add_item(session_id, other, None)
        assert reply is not None
        assert reply.kind == "conflict"
    assert await store.watch(session_id) == before


async def test_a_conversation_has_so_many_items(store: Store) -> None:
    """Above the bound neither an item nor an answer is taken; what is there already still is a duplicate."""
    session_id = await new_session(store)
    items = [item() for _ in range(MAX_ITEMS)]
    await add(store, session_id, *items)
    for one, kind in ((item(), "full"), (items[0], "duplicate")):
        reply = await store.add_item(session_id, one, None)
        assert reply is not None
        assert reply.kind == kind
    assert (await begin(store, session_id))[1].kind == "full"
    await store.delete_item(session_id, items[0])
    assert (await begin(store, session_id))[1].kind == "ok"


async def test_a_conversation_has_so_many_bytes(stores: Callable[..., Store]) -> None:
    """Above the bound neither an item nor an answer is taken; what is deleted makes room."""
    store = stores(max_session_bytes=1000)
    session_id = await new_session(store)
    large = item("x" * 600)
    await add(store, session_id, large)
    reply = await store.add_item(session_id, item("y" * 400), None)
    assert reply is not None
    assert reply.kind == "too_large"
    await add(store, session_id, item("z" * 50))
    assert (await begin(store, session_id))[1].kind == "too_large"
    await store.delete_item(session_id, large)
    assert (await begin(store, session_id))[1].kind == "ok"


async def test_the_bytes_of_a_conversation_are_those_of_its_items(store: Store, raw: redis.asyncio.Redis) -> None:
    """Whatever became of them: put in, answered, cut, taken out, written again, or given up."""
    session_id = await new_session(store)
    session, items, *_ = keys.session_keys(session_id)

    async def counted() -> int:
        held = sum(len(value) for value in await raw.hvals(items))
        assert await raw.hget(session, "bytes") == str(held).encode()
        return held

    one, two = item("Grüezi"), item("Hello")
    await add(store, session_id, one, two)
    alone = await counted()
    begun, _ = await begin(store, session_id)
    assert await counted() > alone
    await end(store, session_id, begun, "An answer.")
    answered = await counted()
    shorter = item("Grüez", one.id)
    await store.truncate_item(session_id, one, shorter, 5)
    assert await counted() == answered - 1
    await store.delete_item(session_id, two)
    assert await counted() < answered
    begun, _ = await begin(store, session_id, token="token_2")
    before = await counted()
    await end(store, session_id, begun, "", token="token_2", keep=False)
    assert await counted() < before


async def test_a_deleted_item_is_gone_and_its_id_is_free(store: Store) -> None:
    """Told with its id; deleting it again is told to be nothing."""
    session_id = await new_session(store)
    one = item("Hello", "mine")
    await add(store, session_id, item(id="a"), one, item(id="b"))
    gone = change(await store.delete_item(session_id, one))
    assert isinstance(gone, ItemGone)
    assert gone.item_id == "mine"
    assert await store.delete_item(session_id, one) == "gone"
    assert await ids(store, session_id) == ["a", "b"]
    await add(store, session_id, item("Other", "mine"))
    assert await ids(store, session_id) == ["a", "b", "mine"]


async def test_a_deleted_question_takes_its_answers_name_with_it(store: Store) -> None:
    """Another one under the same id has no answer yet."""
    session_id = await new_session(store)
    question = item("Hello", "mine")
    await add(store, session_id, question)
    asked, _ = await begin(store, session_id, in_reply_to="mine")
    await end(store, session_id, asked, "Hello")
    await store.delete_item(session_id, question)
    await add(store, session_id, item("Other", "mine"))
    assert (await begin(store, session_id, in_reply_to="mine"))[1].kind == "ok"


@pytest.mark.parametrize(("count", "first", "previous"), [(0, 0, None), (1, 3, "2"), (3, 1, "0"), (9, 0, None)])
async def test_the_last_items_come_in_order(store: Store, count: int, first: int, previous: str | None) -> None:
    """With the version that they were read at, and the item before them."""
    session_id = await new_session(store)
    told = await add(store, session_id, *(item(id=str(n)) for n in range(4)))
    reply = await store.last_items(session_id, count)
    assert reply is not None
    assert (reply[0], reply[1]) == (told.version, previous)
    assert [one.id for one in reply[2]] == [str(n) for n in range(first, 4)]


async def test_a_long_conversation_is_read_whole(stores: Callable[..., Store], raw: redis.asyncio.Redis) -> None:
    """Lua hands on some thousand values at most; ten thousand items come all the same, as history and as a prompt."""
    store = stores(max_items=20_000)
    session_id = await new_session(store)
    many = [item(str(n), f"item_{n}") for n in range(10_000)]
    _, items, order, *_ = keys.session_keys(session_id)
    await raw.hset(items, mapping={one.id: encode_item(one) for one in many})
    await raw.rpush(order, *(one.id for one in many))
    reply = await store.last_items(session_id, 0)
    assert reply is not None
    assert reply[2] == many
    assert (await begin(store, session_id))[1].items == tuple(many)


# --- lives


async def test_all_keys_of_a_session_live_equally_long(store: Store, raw: redis.asyncio.Redis) -> None:
    """Short without items, long with them, from the last use on; a running answer's text is no exception."""
    session_id = await new_session(store)
    await store.watch(session_id)
    assert set((await lives(raw, session_id)).values()) == {EMPTY_TTL_S}
    one = item()
    await add(store, session_id, one)
    asked, _ = await begin(store, session_id, in_reply_to=one.id)
    for text, before in (("Hel", ""), ("lo", "Hel")):
        await store.commit([commit(session_id, asked, text, before)])
    found = await lives(raw, session_id)
    assert len(found) == 7
    assert set(found.values()) <= {TTL_S, TTL_S - 1}
    for name in keys.session_keys(session_id)[:8]:
        await raw.expire(name, 50)
    await store.watch(session_id)
    assert set((await lives(raw, session_id)).values()) == {TTL_S}
    await end(store, session_id, asked, "Hello", stored="Hello")
    for id in (one.id, asked.item_id):
        await store.delete_item(session_id, item(id=id))
    assert set((await lives(raw, session_id)).values()) == {EMPTY_TTL_S}


# --- what others left


async def test_what_is_no_item_is_said(store: Store, raw: redis.asyncio.Redis) -> None:
    """Somebody else's bytes under our keys are not taken for a message."""
    session_id = await new_session(store)
    await raw.hset(keys.session_keys(session_id)[1], "x", b"{}")
    with pytest.raises(msgspec.ValidationError):
        await store.get_item(session_id, "x")
