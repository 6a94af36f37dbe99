"""Sessions that are not as the store holds them: who is asked for, what is doubted, and what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from chat_server import comparing
from chat_server.core import close_codes
from chat_server.core.items import encode_item
from chat_server.errors import StoreUnavailable
from chat_server.live import LiveSession
from chat_server.store.replies import Held, SessionState
from tests.support.clock import Clock
from tests.test_live import ITEM, FakeConnection, FakeTurn, session, state, told

pytestmark = pytest.mark.pure


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(comparing, "time", clock)
    monkeypatch.setattr("chat_server.live.time", clock)
    return clock


class FakeStore:
    """Holds one session as the test says; None: it is not there."""

    def __init__(self, found: SessionState | None = None) -> None:
        self.found = found
        self.deleted = False
        self.away = False
        self.holds: Held | None = Held(10, 0)

    async def watch(self, session_id: str, *, changes: bool) -> SessionState | None:
        assert changes
        if self.away:
            raise StoreUnavailable("away")
        return self.found

    async def was_deleted(self, session_id: str) -> bool:
        return self.deleted

    async def renew_watch(self, session_ids: Sequence[str]) -> list[Held | None]:
        return [self.holds for _ in session_ids]


async def read_missed(store: FakeStore, live: LiveSession) -> None:
    await comparing.read_missed(cast("Any", store), live)


async def ask(store: FakeStore, live: LiveSession) -> None:
    await comparing.ask(cast("Any", store), [live])


def item_message(before: int, version: int) -> bytes:
    head = f'{{"kind":"item","session":"sess_1","before":{before},"version":{version},"previous":null,"item":'
    return head.encode() + encode_item(ITEM) + b"}"


def dropped(live: LiveSession, connection: FakeConnection) -> bool:
    assert bool(connection.closed) != live.loaded
    assert connection.closed in ([], [close_codes.RESTART])
    return not live.loaded


# --- what was missed


async def test_changes_and_text_that_were_missed_are_told(clock: Clock) -> None:
    """From what the store keeps of the last changes, and the text that it holds."""
    live, [one] = session(state(text="Hel"))
    live.doubted = True
    missed = (item_message(9, 10), item_message(10, 11))
    await read_missed(FakeStore(replace(state(11, text="Hello"), changes=missed)), live)
    assert not dropped(live, one)
    assert not live.doubted
    assert live.version == 11
    assert one.socket.types.count("conversation.item.added") == 1 + 1  # the answer's own place, and what was missed
    assert told(one) == "Hello"


@pytest.mark.parametrize(
    "found",
    [
        replace(state(12), changes=(item_message(11, 12),)),
        replace(state(12), changes=()),
        state(10, text="He"),
    ],
)
async def test_what_can_not_be_told_any_more_drops_the_session(clock: Clock, found: SessionState) -> None:
    """Its clients come back: changes that are kept no longer, and text that was told and is not there."""
    live, [one] = session(state(text="Hel"))
    await read_missed(FakeStore(found), live)
    assert dropped(live, one)


@pytest.mark.parametrize("found", [None, state(9)])
async def test_who_makes_an_answer_has_time_to_write_again_what_was_lost(
    clock: Clock, found: SessionState | None
) -> None:
    """All of the session or the last changes; after that time it is as the store has it."""
    live, [one] = session()
    store = FakeStore(found)
    for _ in range(2):
        await read_missed(store, live)
        assert not dropped(live, one)
        assert live.doubted
        clock.now += comparing.RESTORE_S / 2
    await read_missed(store, live)
    assert dropped(live, one)


async def test_the_owner_of_an_answer_does_not_wait_for_others(clock: Clock) -> None:
    """It is the one that writes again, however long that takes."""
    live, [one] = session()
    live.turn = cast("Any", FakeTurn())
    for _ in range(3):
        await read_missed(FakeStore(state(9)), live)
        assert not dropped(live, one)
        assert not live.doubted
        clock.now += comparing.RESTORE_S


async def test_a_session_that_was_deleted_is_not_waited_for(clock: Clock) -> None:
    """It is gone, and not lost."""
    live, [one] = session()
    store = FakeStore(None)
    store.deleted = True
    await read_missed(store, live)
    assert dropped(live, one)


async def test_while_the_store_is_away_the_doubt_stays(clock: Clock) -> None:
    """It is asked again when it is back."""
    live, [one] = session()
    live.doubted = True
    store = FakeStore()
    store.away = True
    with pytest.raises(StoreUnavailable):
        await read_missed(store, live)
    assert not dropped(live, one)
    assert live.doubted


# --- asking


async def test_only_a_difference_that_stays_is_a_reason_for_doubt(clock: Clock) -> None:
    """At the first look what makes it may be on its way."""
    live, _ = session()
    store = FakeStore()
    store.holds = Held(11, 0)
    await ask(store, live)
    assert not live.doubted
    live.version = 11  # it came
    await ask(store, live)
    assert not live.doubted
    store.holds = Held(12, 0)
    await ask(store, live)
    await ask(store, live)
    assert live.doubted


async def test_a_store_that_holds_less_than_we_know_is_doubted_too(clock: Clock) -> None:
    """At the second look, as any other difference."""
    live, _ = session()
    store = FakeStore()
    store.holds = Held(9, 0)
    await ask(store, live)
    assert not live.doubted
    await ask(store, live)
    assert live.doubted


async def test_a_server_of_the_store_that_does_not_answer_is_noted(clock: Clock) -> None:
    """It says nothing about the session."""
    live, _ = session()
    store = FakeStore()
    store.holds = None
    for _ in range(2):
        await ask(store, live)
    assert (live.away, live.doubted, live.behind) == (True, False, None)


def test_those_that_wait_longest_are_asked_for_first() -> None:
    """So many as one round trip takes; not those that were asked for a moment ago, or that nobody listens to."""
    lives = []
    for number in range(600):
        live, _ = session()
        live.watched = True
        live.asked_at = float(600 - number)
        lives.append(live)
    assert comparing.due(lives, 10.0) == []
    assert comparing.due(lives, 1000.0) == lives[:99:-1]
    for live in lives[100:]:
        live.watched = False
    lives[0].unload()
    assert comparing.due(lives, 1000.0) == lives[99:0:-1]


def test_an_answer_of_another_replica_that_falls_silent_is_asked_for_sooner() -> None:
    """The last of its text may be what was lost."""
    live, _ = session(state(text="Hel"))
    live.watched = True
    live.asked_at = live.heard_at = 100.0
    assert comparing.due([live], 101.0) == []
    assert comparing.due([live], 103.0) == [live]
    live.heard_at = 102.0
    assert comparing.due([live], 103.0) == []
