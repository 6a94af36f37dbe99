"""What comes of beginning, writing and ending an answer in a real store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import redis.asyncio

from chat_server.core.placement import Binding
from chat_server.core.response import Response
from chat_server.store import keys, messages
from chat_server.store.messages import Cancel, ItemGone, ResponseBegan, ResponseEnded
from chat_server.store.redis import Store
from chat_server.store.replies import Cut, SessionState
from tests.store.sessions import (
    add,
    begin,
    change,
    commit,
    end,
    ids,
    item,
    new_session,
)

pytestmark = [pytest.mark.valkey, pytest.mark.asyncio(loop_scope="module")]


# --- beginning


async def test_an_answer_takes_its_place_and_gets_the_prompt(store: Store) -> None:
    """The prompt is what stands before; the answer is told with its place, its token and all its parameters."""
    session_id = await new_session(store)
    one, two = item("One"), item("Two")
    await add(store, session_id, one, two)
    asked, reply = await begin(store, session_id, in_reply_to=two.id, temperature=0.5, stop=("x",))
    assert (reply.kind, reply.items, reply.binding) == ("ok", (one, two), None)
    began = change(reply.messages[0])
    assert isinstance(began, ResponseBegan)
    assert (began.previous, began.token, began.begun) == (two.id, "token_1", asked)
    assert await ids(store, session_id) == [one.id, two.id, asked.item_id]
    state = await store.watch(session_id)
    assert state is not None
    assert state.running is not None
    assert (state.running.begun, state.running.previous) == (asked, two.id)
    assert (state.running.token, state.running.replica, state.running.text) == ("token_1", store.replica_id, "")


@pytest.mark.parametrize("items", [0, 2])
async def test_a_begin_can_be_repeated(store: Store, items: int) -> None:
    """With the same token, for its reply was lost: the same message and prompt, whatever came after it."""
    session_id = await new_session(store)
    for _ in range(items):
        await add(store, session_id, item())
    await store.bind(session_id, None, Binding("engine-1", "1"))
    asked, first = await begin(store, session_id)
    before = await add(store, session_id, item("later"))
    asked_again, again = await begin(store, session_id, id=asked.id, item_id=asked.item_id)
    assert asked_again == asked
    assert again == first
    assert (len(again.items), again.binding) == (items, Binding("engine-1", "1"))
    state = await store.watch(session_id)
    assert state is not None
    assert state.version == before.version
    # Another token is somebody else, and it is made already.
    other = (await begin(store, session_id, "token_2", id=asked.id, item_id=asked.item_id))[1]
    assert (other.kind, other.messages) == ("queued", ())


async def test_only_one_answer_runs(stores: Callable[..., Store]) -> None:
    """Of many that ask at once one begins; the others are told which one runs."""
    several = [stores() for _ in range(5)]
    session_id = await new_session(several[0])
    replies = await asyncio.gather(*(begin(s, session_id, f"token_{n}") for n, s in enumerate(several)))
    [winner] = [asked.id for asked, reply in replies if reply.kind == "ok"]
    rest = [reply for _, reply in replies if reply.kind != "ok"]
    assert [(reply.kind, reply.response_id) for reply in rest] == [("active", winner)] * 4
    assert len(await ids(several[0], session_id)) == 1


async def test_one_item_has_one_answer(store: Store) -> None:
    """While it runs and when it ended; deleting the answer frees the item, and so does one that left nothing."""
    session_id = await new_session(store)
    await add(store, session_id, item(id="question"), item(id="other"))
    asked, _ = await begin(store, session_id, in_reply_to="question")
    for _ in range(2):
        again = (await begin(store, session_id, "token_2", in_reply_to="question"))[1]
        assert (again.kind, again.response_id, again.item_id) == ("duplicate", asked.id, asked.item_id)
        await end(store, session_id, asked, "Hello")
    assert (await begin(store, session_id, in_reply_to="nobody"))[1].kind == "no_item"
    answer = await store.get_item(session_id, asked.item_id)
    assert answer is not None
    assert answer.in_reply_to == "question"
    await store.delete_item(session_id, answer)
    for _ in range(2):
        asked, reply = await begin(store, session_id, in_reply_to="question")
        assert reply.kind == "ok"
        await end(store, session_id, asked, "", keep=False)


async def test_an_answer_that_is_stopped_before_it_said_anything_is_none(store: Store) -> None:
    """Who asks again is told that it ends; with text it is the answer, stopped or not."""
    session_id = await new_session(store)
    await add(store, session_id, item(id="question"))
    asked, _ = await begin(store, session_id, in_reply_to="question")
    await store.cancel(session_id, asked.id, 0)
    again = (await begin(store, session_id, "token_2", in_reply_to="question"))[1]
    assert (again.kind, again.response_id) == ("stopping", asked.id)
    await store.commit([commit(session_id, asked, "Hello")])
    again = (await begin(store, session_id, "token_2", in_reply_to="question"))[1]
    assert (again.kind, again.response_id) == ("duplicate", asked.id)


async def test_the_item_of_a_running_answer_stays(store: Store) -> None:
    """Deleting it is refused until the answer has ended."""
    session_id = await new_session(store)
    asked, _ = await begin(store, session_id)
    answer = await store.get_item(session_id, asked.item_id)
    assert answer is not None
    assert (answer.status, answer.content) == ("in_progress", [])
    assert await store.delete_item(session_id, answer) == "busy"
    await end(store, session_id, asked, "Hello")
    assert isinstance(change(await store.delete_item(session_id, answer)), ItemGone)


async def test_a_session_is_bound_to_one_engine(stores: Callable[..., Store]) -> None:
    """Of several that bind it at once one wins, and all are told which; it is replaced only by who read it."""
    several = [stores() for _ in range(5)]
    session_id = await new_session(several[0])
    bindings = [Binding(f"engine-{n}", "1") for n in range(5)]
    held = await asyncio.gather(*(s.bind(session_id, None, b) for s, b in zip(several, bindings, strict=True)))
    assert len(set(held)) == 1
    first = held[0]
    assert first in bindings
    store = several[0]
    assert await store.bind(session_id, Binding("engine-9", "1"), Binding("engine-8", "1")) == first
    assert await store.bind(session_id, None, Binding("engine-8", "1")) == first
    anew = Binding(first.engine, "2")
    assert await store.bind(session_id, first, anew) == anew
    assert (await begin(store, session_id))[1].binding == anew


# --- text


async def test_text_is_stored_at_its_place(store: Store) -> None:
    """Each commit says where it begins, so a retry does not double it; many answers go in one round trip."""
    session_id, other = await new_session(store), await new_session(store)
    asked, _ = await begin(store, session_id)
    theirs, _ = await begin(store, other, "token_9")
    first, second = commit(session_id, asked, "Grüezi 👋"), commit(session_id, asked, ", wie", "Grüezi 👋")
    assert await store.commit([first, commit(other, theirs, "Hello", token="token_9")]) == ["ok", "ok"]
    for again in (first, second, second):
        assert await store.commit([again]) == ["ok"]
    for id, text in ((session_id, "Grüezi 👋, wie"), (other, "Hello")):
        state = await store.watch(id)
        assert state is not None
        assert state.running is not None
        assert state.running.text == text


async def test_text_is_taken_from_its_owner_only(store: Store) -> None:
    """Refused by another token, missing without a response, short behind a hole; none of them stops the others."""
    session_id, idle = await new_session(store), await new_session(store)
    asked, _ = await begin(store, session_id)
    commits = [
        commit(session_id, asked, "theirs", token="token_2"),
        commit(idle, asked, "nobody's"),
        commit("sess_none", asked, "nobody's"),
        commit(session_id, asked, "hole", "before"),
        commit(session_id, asked, "ours"),
    ]
    assert await store.commit(commits) == ["refused", "missing", "missing", "short", "ok"]
    state = await store.watch(session_id)
    assert state is not None
    assert state.running is not None
    assert state.running.text == "ours"
    assert not await store.watch("sess_none")


async def test_one_broken_session_does_not_stop_the_text_of_others(store: Store, raw: redis.asyncio.Redis) -> None:
    """Whatever stands in its keys is its own trouble."""
    broken, whole = await new_session(store), await new_session(store)
    asked, _ = await begin(store, broken)
    theirs, _ = await begin(store, whole)
    await raw.rpush(keys.session_keys(broken)[4], "not a string")
    assert await store.commit([commit(broken, asked, "x"), commit(whole, theirs, "y")]) == ["missing", "ok"]


# --- ending an answer


async def test_an_end_is_told_once(store: Store, raw: redis.asyncio.Redis) -> None:
    """Asked again, for the reply was lost, it answers as the first time and changes nothing."""
    session_id = await new_session(store)
    asked, _ = await begin(store, session_id)
    await store.commit([commit(session_id, asked, "Hel")])
    first = await end(store, session_id, asked, "Hello", stored="Hel")
    before = await store.watch(session_id)
    assert await end(store, session_id, asked, "Hello", stored="Hel") == first
    assert await store.watch(session_id) == before
    ended = change(first)
    assert isinstance(ended, ResponseEnded)
    assert (ended.response, ended.offset, ended.rest) == (asked.id, 3, "lo")
    assert before is not None
    assert before.running is None
    stored = await store.get_item(session_id, asked.item_id)
    assert stored is not None
    assert (stored.text, stored.status) == ("Hello", "completed")
    _, _, _, response, text, *_ = keys.session_keys(session_id)
    assert await raw.exists(response, text) == 0


async def test_an_end_is_taken_from_its_owner_only(store: Store) -> None:
    """Another's token is refused; where nothing runs there is nothing to end."""
    session_id = await new_session(store)
    asked, _ = await begin(store, session_id)
    assert await end(store, session_id, asked, "Hello", "token_2") == "refused"
    assert isinstance(await end(store, session_id, asked, "Hello"), bytes)
    assert await end(store, session_id, asked, "Hello", "token_2") == "missing"
    assert await end(store, "sess_none", asked, "Hello") == "missing"
    later, _ = await begin(store, session_id, "token_3")
    assert await end(store, session_id, asked, "Late", "token_2") == "refused"
    assert (await store.watch(session_id)).running.begun == later  # type: ignore[union-attr]


async def test_an_answer_of_which_nothing_is_kept_gives_its_place_up(store: Store) -> None:
    """Its item is gone, and the rest stands as if it had never been."""
    session_id = await new_session(store)
    await add(store, session_id, item(id="a"))
    asked, _ = await begin(store, session_id)
    await add(store, session_id, item(id="b"))
    ended = change(await end(store, session_id, asked, "", keep=False))
    assert isinstance(ended, ResponseEnded)
    assert not ended.outcome.keeps_item
    assert await ids(store, session_id) == ["a", "b"]
    assert await store.get_item(session_id, asked.item_id) is None


async def test_one_takes_an_answer_over(stores: Callable[..., Store]) -> None:
    """Of several that read the same token one becomes the owner; the old one can neither write nor end any more."""
    old, *several = [stores() for _ in range(4)]
    session_id = await new_session(old)
    asked, _ = await begin(old, session_id)
    await old.commit([commit(session_id, asked, "Hel")])
    took = await asyncio.gather(
        *(s.take_over(session_id, "token_1", f"new_{n}", f"epoch_{n}", "why") for n, s in enumerate(several))
    )
    [number] = [number for number, taken in enumerate(took) if taken is not None]
    taken = took[number]
    assert taken is not None
    assert (taken.text, taken.wish, taken.attempts) == ("Hel", None, 1)
    winner, token = several[number], f"new_{number}"
    assert await old.commit([commit(session_id, asked, "lo", "Hel")]) == ["refused"]
    assert await end(old, session_id, asked, "Hello", stored="Hel") == "refused"
    state = await winner.watch(session_id)
    assert state is not None
    assert state.running is not None
    assert (state.running.replica, state.running.token, state.running.text) == (winner.replica_id, token, "Hel")
    assert await winner.commit([commit(session_id, asked, "lo", "Hel", token=token)]) == ["ok"]
    assert isinstance(await end(winner, session_id, asked, "Hello", token, stored="Hello"), bytes)


async def test_a_take_over_without_new_text_counts_unless_it_was_handed_over(stores: Callable[..., Store]) -> None:
    """An owner that died may have died of it; one that left it to others has not. New text begins the count anew."""
    one, two = stores(), stores()
    session_id = await new_session(one)
    asked, _ = await begin(one, session_id)
    attempts, token, said = [], "token_1", ""
    for step, new_text, leaves in ((1, "", False), (2, "", True), (3, "", False), (4, "Hel", True), (5, "", False)):
        owner, other = (one, two) if step % 2 else (two, one)
        if new_text:
            assert await owner.commit([commit(session_id, asked, new_text, said, token=token)]) == ["ok"]
            said += new_text
        read = f"left_{step}" if leaves else token
        if leaves:
            assert await owner.hand_over(session_id, token, read) is not None
        token = f"taken_{step}"
        taken = await other.take_over(session_id, read, token, f"epoch_{step}", "why")
        assert taken is not None
        attempts.append(taken.attempts)
    assert attempts == [2, 2, 3, 1, 2]


@pytest.mark.parametrize("keep", [True, False])
async def test_an_answer_that_ended_is_found_by_its_id(store: Store, keep: bool) -> None:
    """As it ended, whether it left an item in the conversation or not, also when others followed; else nothing is."""
    session_id = await new_session(store)
    asked, _ = await begin(store, session_id, metadata={"topic": "sea"})
    assert (await store.answer(session_id, asked.id)) == ((await state_of(store, session_id)).version, None)
    await end(store, session_id, asked, "Hello", keep=keep)
    for number in range(5):
        other, _ = await begin(store, session_id, f"token_{number}")
        await end(store, session_id, other, "Else", f"token_{number}", keep=number % 2 == 0)
    found = await store.answer(session_id, asked.id)
    assert found is not None
    version, response = found
    assert version == (await state_of(store, session_id)).version
    assert response is not None
    assert (response.id, response.item_id, response.text(0)) == (asked.id, asked.item_id, "Hello")
    assert response.begun.metadata == {"topic": "sea"}
    assert response.outcome is not None
    assert (response.outcome.status, response.outcome.keeps_item) == ("completed", keep)
    assert await store.answer("sess_none", asked.id) is None


async def test_an_answer_whose_item_was_deleted_is_forgotten(store: Store) -> None:
    """Nothing of it is told any more."""
    session_id = await new_session(store)
    asked, _ = await begin(store, session_id)
    await end(store, session_id, asked, "Hello")
    item = await store.get_item(session_id, asked.item_id)
    assert item is not None
    await store.delete_item(session_id, item)
    found = await store.answer(session_id, asked.id)
    assert found is not None
    assert found[1] is None


@pytest.mark.parametrize("keep", [True, False])
async def test_a_begin_that_comes_late_revives_nothing(store: Store, keep: bool) -> None:
    """The reply of the first one was lost, the answer was made and ended, and then the second one arrives."""
    session_id = await new_session(store)
    asked, _ = await begin(store, session_id)
    await end(store, session_id, asked, "Hello", keep=keep)
    before = await store.watch(session_id)
    again = await store.begin(session_id, Response(asked, previous_item_id=None), "token_1")
    assert again is not None
    assert again.kind == "ended"
    assert await store.watch(session_id) == before


async def test_so_many_answers_without_an_item_are_remembered(store: Store, raw: redis.asyncio.Redis) -> None:
    """What is kept of them is bounded."""
    session_id = await new_session(store)
    for number in range(50):
        asked, _ = await begin(store, session_id, f"token_{number}")
        await end(store, session_id, asked, "", f"token_{number}", keep=False)
    assert await raw.llen(keys.session_keys(session_id)[7]) == 30


async def test_the_end_of_one_answer_is_not_that_of_another_that_names_it(store: Store) -> None:
    """Metadata may hold anything, another response's id too."""
    session_id = await new_session(store)
    first, _ = await begin(store, session_id)
    await end(store, session_id, first, "", keep=False)
    second, _ = await begin(store, session_id, metadata={"response_id": first.id})
    await end(store, session_id, second, "", keep=False)
    for asked in (first, second):
        found = await store.answer(session_id, asked.id)
        assert found is not None
        assert found[1] is not None
        assert found[1].id == asked.id


async def state_of(store: Store, session_id: str) -> SessionState:
    state = await store.watch(session_id)
    assert state is not None
    return state


async def test_the_first_wish_to_stop_counts_and_stays(stores: Callable[..., Store], raw: redis.asyncio.Redis) -> None:
    """Whoever says it, whoever dies: it is found by commits, by the end, by who watches and by who takes over."""
    owner, other = stores(), stores()
    session_id = await new_session(owner)
    asked, _ = await begin(owner, session_id)
    assert await owner.commit([commit(session_id, asked, "Hello")]) == ["ok"]
    async with owner.replicas.inbox() as inbox:
        assert await other.cancel(session_id, asked.id, 3) == Cut(3)
        assert messages.decode(await anext(inbox)) == Cancel(session_id, asked.id, 3)
    assert await owner.cancel(session_id, asked.id, 5) == Cut(3)
    assert await owner.commit([commit(session_id, asked, "!", "Hello")]) == ["wished"]
    state = await state_of(owner, session_id)
    assert state.running is not None
    assert state.running.wish == Cut(3)
    before = await owner.watch(session_id)
    assert await end(owner, session_id, asked, "Hello!", stored="Hello!") == Cut(3)
    assert await end(owner, session_id, asked, "Hello!", stored="Hello!", cut=5) == Cut(3)
    assert await owner.watch(session_id) == before, "nothing was written"
    taken = await other.take_over(session_id, "token_1", "token_2", "epoch_2", "why")
    assert taken is not None
    assert (taken.text, taken.wish) == ("Hello!", Cut(3))
    assert isinstance(await end(other, session_id, asked, "Hel", "token_2", stored="Hel", cut=3), bytes)
    assert await other.cancel(session_id, asked.id, 1) is None, "it is over"


async def test_only_what_runs_can_be_stopped(store: Store) -> None:
    """Not another response, not a session without one."""
    session_id = await new_session(store)
    assert await store.cancel(session_id, "resp_none", 0) is None
    asked, _ = await begin(store, session_id)
    assert await store.cancel(session_id, "resp_none", 0) is None
    assert await store.cancel("sess_none", asked.id, 0) is None
    assert isinstance(await end(store, session_id, asked, "Hello"), bytes)
