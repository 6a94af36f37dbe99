"""A session as one replica knows it: it changes by the store's messages only, and tells them to its connections."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from chat_server.core.client_events import Flush
from chat_server.core.conversation import Conversation
from chat_server.core.items import Item, Part, SessionSettings, Timing, Usage
from chat_server.core.principal import LOCAL
from chat_server.core.response import Outcome
from chat_server.edge.outbox import Outbox
from chat_server.live import Gap, LiveSession
from chat_server.store.messages import (
    AnyChange,
    ItemGone,
    ItemPut,
    ResponseBegan,
    ResponseEnded,
    ResponseMoved,
    SessionDeleted,
    SettingsChanged,
    Text,
)
from chat_server.store.replies import RunningState, SessionState
from chat_server.turn import Turn
from tests.core.answers import EPOCH, begun
from tests.edge.sockets import FakeSocket

pytestmark = pytest.mark.pure

BEGUN = begun()
ITEM = Item(id="item_1", status="completed", role="user", content=[Part(type="input_text", text="Hi")])


class FakeConnection:
    """A connection that keeps what it is told, and the code with which it was closed."""

    def __init__(self, flush: Flush | None = None, *, room: int | None = None) -> None:
        self.socket = FakeSocket(room)
        self.outbox = Outbox(self.socket, extensions=True, heartbeat_s=15.0, send_timeout_s=10.0, now=0.0)
        self.flush = flush or Flush()
        self.closed: list[int] = []

    def close(self, code: int, reason: str) -> None:
        self.closed.append(code)
        self.socket.is_open = False


class FakeTurn:
    """The making of an answer, by an owner with the token of the states below."""

    def __init__(self) -> None:
        self.writer = SimpleNamespace(token="token_1")
        self.response = SimpleNamespace(id=BEGUN.id, outcome=None)
        self.lost = 0

    def lose(self) -> None:
        self.lost += 1


def state(version: int = 10, *, text: str | None = None, items: int = 1) -> SessionState:
    """A session as ``watch`` found it; with ``text``, an answer that another replica makes."""
    running = None if text is None else RunningState(BEGUN, "item_1", "token_1", "replica_1", text)
    return SessionState(LOCAL, 0, "m", SessionSettings(), version, items, running)


def session(found: SessionState | None = None, connections: int = 1) -> tuple[LiveSession, list[FakeConnection]]:
    live = LiveSession("sess_1")
    live.load(found or state())
    some = [FakeConnection() for _ in range(connections)]
    live.connections.update(some)
    if live.response is not None:
        for connection in some:
            connection.outbox.begin(live.response)
    return live, some


def put(before: int, version: int, item: Item = ITEM) -> ItemPut:
    return ItemPut(session="sess_1", before=before, version=version, previous=None, item=item)


def began(before: int = 10, version: int = 11) -> ResponseBegan:
    return ResponseBegan(
        session="sess_1", before=before, version=version, previous="item_1", token="token_1", begun=BEGUN
    )


def ended(
    offset: int,
    rest: str,
    *,
    before: int = 11,
    version: int = 12,
    response: str = BEGUN.id,
    keeps: bool = True,
    cut: int | None = None,
) -> ResponseEnded:
    outcome = Outcome(
        status="completed" if keeps else "failed",
        usage=Usage.of(10, 5, 4),
        timing=Timing(queue_ms=1, ttft_ms=2, total_ms=3),
        engine="engine-1",
        text_length=offset + len(rest) if cut is None else cut,
        epochs=[(EPOCH, 0)],
        keeps_item=keeps,
    )
    return ResponseEnded(
        session="sess_1", before=before, version=version, response=response, offset=offset, rest=rest, outcome=outcome
    )


def text(offset: int, piece: str, response: str = BEGUN.id) -> Text:
    return Text("sess_1", response, EPOCH, offset, piece, len(piece.encode()))


def told(connection: FakeConnection) -> str:
    """The text that a connection has by the offset rule."""
    have = ""
    for event in connection.socket.events:
        if event["type"] == "response.output_text.delta":
            assert event["offset"] <= len(have), "a gap"
            have = have[: event["offset"]] + event["delta"]
    return have


# --- what it knows


def test_it_looks_as_it_was_found() -> None:
    """Each connection sees the session with its own flush and heartbeat."""
    live, [one] = session(state(items=3))
    other = FakeConnection(Flush(max_chars=9))
    created = live.created(one, resumed=True)
    assert (created.resumed, created.item_count, created.active_response) == (True, 3, None)
    assert (created.session.id, created.session.model) == ("sess_1", "m")
    assert created.session.heartbeat_interval_ms == 15_000
    assert live.object(other).flush == Flush(max_chars=9) != live.object(one).flush


def test_an_answer_that_another_replica_makes_is_mirrored() -> None:
    """With its text so far, its owner and its token, as who joins is told it."""
    live, [one] = session(state(text="Hel"))
    active = live.created(one, resumed=True).active_response
    assert active is not None
    assert (active.id, active.item_id, active.state, active.epoch, active.offset) == (
        *(BEGUN.id, BEGUN.item_id, "streaming", EPOCH),
        0,
    )
    assert (live.response_owner, live.response_token) == ("replica_1", "token_1")
    assert told(one) == "Hel"


def test_an_answer_without_text_waits() -> None:
    """A mirror does not know more than that."""
    live, [one] = session(state(text=""))
    active = live.created(one, resumed=True).active_response
    assert active is not None
    assert active.state == "queued"


def test_an_answer_that_is_made_here_is_known_better_here() -> None:
    """Reading the session again does not replace it."""
    live, _ = session()
    live.apply(began())
    response = live.response
    live.turn = cast("Turn", FakeTurn())
    live.unload()
    assert not live.loaded
    live.load(state(20, text="stale"))
    assert live.response is response
    assert (live.loaded, live.version) == (True, 20)


# --- changes


def test_changes_are_told_to_all_in_their_order() -> None:
    """The same to every connection, with the count of items kept."""
    live, connections = session(connections=3)
    changes: list[AnyChange] = [
        put(10, 11),
        SettingsChanged(session="sess_1", before=11, version=15, model="n", settings=SessionSettings(top_p=0.5)),
        began(15, 16),
        ended(0, "Hello", before=16, version=17),
        ItemGone(session="sess_1", before=17, version=18, item_id="item_1"),
    ]
    for change in changes:
        live.apply(change)
    assert (live.version, live.item_count, live.model, live.settings.top_p) == (18, 2, "n", 0.5)
    assert live.response is None
    for connection in connections:
        types = connection.socket.types
        assert types[:4] == [
            *("conversation.item.added", "conversation.item.done", "session.updated", "response.created")
        ]
        assert types[-2:] == ["response.done", "conversation.item.deleted"]
        assert told(connection) == "Hello"


def test_a_change_that_is_known_already_is_left_out() -> None:
    """The reply to an own command may come after the state that holds it."""
    live, [one] = session(state(11))
    live.apply(put(10, 11))
    live.apply(put(5, 6))
    assert one.socket.frames == []
    assert (live.version, live.item_count) == (11, 1)


def test_a_missing_change_is_a_gap() -> None:
    """Nothing of what follows it is told or taken."""
    live, [one] = session()
    with pytest.raises(Gap):
        live.apply(put(11, 12))
    assert one.socket.frames == []
    assert (live.version, live.item_count) == (10, 1)


def test_each_connection_keeps_its_flush() -> None:
    """When others change the session's settings."""
    live, [one] = session()
    other = FakeConnection(Flush(max_chars=9))
    live.connections.add(other)
    live.apply(SettingsChanged(session="sess_1", before=10, version=11, model="m", settings=SessionSettings()))
    assert [c.socket.events[0]["session"]["flush"]["max_chars"] for c in (one, other)] == [None, 9]


@pytest.mark.parametrize("keeps", [True, False])
def test_an_answer_that_leaves_nothing_does_not_count(keeps: bool) -> None:
    """It had a place while it ran."""
    live, _ = session()
    live.apply(began())
    assert live.item_count == 2
    live.apply(ended(0, "Hello" if keeps else "", keeps=keeps))
    assert live.item_count == (2 if keeps else 1)


# --- text


def test_text_of_another_replica_is_told_as_it_comes() -> None:
    """Piece by piece, and the rest with the end."""
    live, connections = session(connections=2)
    live.apply(began())
    for offset, piece in ((0, "Grü"), (3, "ezi 👋🏽"), (9, " you")):
        live.apply_text(text(offset, piece))
    live.apply(ended(13, "!"))
    for connection in connections:
        assert told(connection) == "Grüezi 👋🏽 you!"
        assert connection.socket.types[-1] == "response.done"


def test_text_that_came_with_the_state_is_not_told_twice() -> None:
    """Messages that were on their way when the state was read."""
    live, [one] = session(state(text="Hello"))
    live.apply_text(text(0, "Hel"))
    live.apply_text(text(3, "lo"))
    live.apply_text(text(5, ", you"))
    live.apply(ended(3, "lo, you", before=10))
    assert told(one) == "Hello, you"


@pytest.mark.parametrize("message", [text(4, "o"), text(0, "Hello", "resp_other")])
def test_a_hole_in_the_text_is_a_gap(message: Text) -> None:
    """Or text of an answer that we know nothing of."""
    live, [one] = session(state(text="Hel"))
    with pytest.raises(Gap):
        live.apply_text(message)
    assert told(one) == "Hel"


@pytest.mark.parametrize("cut", [0, 3, 5])
def test_text_that_a_cut_takes_away_is_not_missed(cut: int) -> None:
    """It was stored, and never heard of here: the end is told all the same."""
    live, [one] = session(state(text="Hello"))
    change = ended(13, "", before=10, cut=cut)
    assert not live.lacks(change)
    live.apply(change)
    assert told(one) == "Hello"[:cut]
    assert one.socket.types[-1] == "response.done"


@pytest.mark.parametrize(
    "change",
    [
        ended(4, "o", before=10),
        ended(3, "lo", before=10, response="resp_other"),
        ended(13, "", before=10, cut=4),
    ],
)
def test_an_end_that_does_not_fit_is_a_gap(change: ResponseEnded) -> None:
    """Behind a hole, or of another answer."""
    live, [one] = session(state(text="Hel"))
    with pytest.raises(Gap):
        live.apply(change)
    assert "response.done" not in one.socket.types


def test_text_without_an_answer_is_a_gap() -> None:
    """Its beginning was missed."""
    live, _ = session()
    with pytest.raises(Gap):
        live.apply_text(text(0, "Hello"))


# --- messages out of order


def test_messages_that_overtake_each_other_are_told_in_order() -> None:
    """The answer to an own write and what others tell come on two ways; every order of arrival gives the same."""
    begin, piece = began(11, 12), text(0, "Hel")
    messages: list[AnyChange | Text] = [put(10, 11), begin, piece, ended(3, "lo", before=12, version=13), put(13, 14)]
    types = []
    for order in itertools.permutations(messages):
        if order.index(piece) < order.index(begin):
            continue  # both come from the answer's owner, in their order
        live, [one] = session()
        for message in order:
            live.take(message)
        assert live.held == []
        assert (live.version, live.item_count, told(one)) == (14, 4, "Hello")
        types.append([kind for kind in one.socket.types if kind != "response.output_text.delta"])
    assert len(types) == 60
    assert all(told == types[0] for told in types)


def test_too_many_messages_behind_a_missing_one_are_left_out() -> None:
    """What waits is bounded; the session is compared with the store."""
    live, [one] = session()
    for version in range(11, 300):
        live.take(put(version, version + 1))
    assert len(live.held) < 200
    assert live.doubted
    assert one.socket.frames == []


def test_text_of_an_answer_that_ended_before_we_listened_is_left_out() -> None:
    """It was on its way when the state was read; or its beginning was missed, and the store is asked."""
    live, [one] = session()
    live.take(text(5, "late"))
    assert (live.held, one.socket.frames, live.doubted) == ([], [], True)


def test_the_answer_of_a_session_that_is_deleted_is_made_no_more() -> None:
    """Its engine need not wait until the store refuses its text."""
    live, [one] = session()
    live.apply(began())
    turn = FakeTurn()
    live.turn = cast("Turn", turn)
    live.apply(SessionDeleted(session="sess_1", before=live.version, version=live.version + 1))
    assert turn.lost == 1
    assert one.closed == [1000]


# --- after messages may have been missed


def test_what_was_missed_of_a_text_is_told() -> None:
    """It is longer than what we know; the owner may be another by now."""
    live, [one] = session(state(text="Hel"))
    assert live.catch_up(state(text="Hello, you"))
    assert told(one) == "Hello, you"
    live.apply_text(text(10, "!"))
    assert told(one) == "Hello, you!"


@pytest.mark.parametrize(
    "found",
    [state(11, text="Hello"), state(), state(text="He")],
    ids=["another version", "the answer is gone", "text was lost"],
)
def test_what_can_not_be_told_is_said(found: SessionState) -> None:
    """Then the connections have to start again."""
    live, [one] = session(state(text="Hel"))
    before = len(one.socket.frames)
    assert not live.catch_up(found)
    assert len(one.socket.frames) == before


def test_nothing_was_missed() -> None:
    """Of a session at rest, and of an answer that is made here, whatever the store holds of it."""
    live, _ = session()
    assert live.catch_up(state())
    live.apply(began())
    live.turn = cast("Turn", FakeTurn())
    assert live.catch_up(state(11, text="whatever"))


@pytest.mark.parametrize("found", [state(11), replace(state(12, text="Hel"), version=11)])
def test_an_answer_that_somebody_else_has_is_left(found: SessionState) -> None:
    """Another token in the store, or none any more: it is not ours; a store that lost changes says nothing."""
    live, _ = session()
    live.apply(began())
    turn = FakeTurn()
    turn.writer.token = "token_of_ours"
    live.turn = cast("Turn", turn)
    assert live.catch_up(replace(found, version=10)) is False
    assert turn.lost == 0
    assert live.catch_up(found) is False
    assert turn.lost == 1


def test_an_answer_follows_the_item_that_was_put_before_it() -> None:
    """What its clients are told at its end is its place in the store."""
    live, _ = session(state(text="Hello"))
    live.apply(ItemPut(session="sess_1", before=10, version=11, previous="item_1", item=replaced(id="item_7")))
    live.apply(ItemPut(session="sess_1", before=11, version=12, previous=BEGUN.item_id, item=replaced(id="item_8")))
    assert live.response is not None
    assert live.response.previous_item_id == "item_7"


def replaced(**changes: Any) -> Item:
    return msgspec.structs.replace(ITEM, **changes)


# --- an answer is made here, and nobody here listens


def test_what_is_kept_of_a_session_that_nobody_reads_is_of_one_version() -> None:
    """A message that follows one that was missed changes nothing of it: it may be written again as it is known."""
    live, _ = session(connections=0)
    live.conversation = Conversation([ITEM])
    live.turn = cast("Turn", FakeTurn())
    live.apply(began())
    live.unload()
    queued = begun(id="resp_2", item_id="item_3")
    live.apply(msgspec.structs.replace(began(20, 21), queued=True, begun=queued))
    live.apply(put(21, 22, msgspec.structs.replace(ITEM, id="item_9")))
    live.apply(SettingsChanged(session="sess_1", before=22, version=23, model="other", settings=SessionSettings()))
    assert (live.known, live.model, live.queued) == (11, "m", None)
    assert [item.id for item in live.conversation.items] == ["item_1", BEGUN.item_id]
    live.apply(put(11, 12, msgspec.structs.replace(ITEM, id="item_8")))
    assert live.known == 12
    assert [item.id for item in live.conversation.items] == ["item_8", "item_1", BEGUN.item_id]


def test_what_is_said_of_an_answer_that_is_made_here_is_heard_whatever_was_missed() -> None:
    """Somebody else has it now, or the session is deleted: its maker stops, though nobody here listens."""
    said = {"session": "sess_1", "before": 20, "version": 21}
    to_another = {"response": BEGUN.id, "owner": "replica_2", "token": "token_2", "epoch": None, "reason": ""}
    for change in (ResponseMoved(**said, **to_another), SessionDeleted(**said)):  # type: ignore[arg-type]
        live, _ = session(connections=0)
        live.conversation = Conversation([ITEM])
        turn = FakeTurn()
        live.turn = cast("Turn", turn)
        live.apply(began())
        live.unload()
        live.apply(change)
        assert turn.lost == 1
