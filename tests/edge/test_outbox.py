"""The only writer of a socket: what it tells, in which order, and what it does about a reader that is slow or stuck."""

from __future__ import annotations

import random
from typing import Any

import pytest

from chat_server.core.response import Response, ResumePoint, State
from chat_server.core.server_events import ItemDeleted, encode
from chat_server.edge import outbox as outbox_module
from chat_server.edge.outbox import MAX_EVENT_BYTES, MAX_EVENTS, Outbox
from tests.core.answers import new_response, outcome, streaming
from tests.edge.sockets import FakeSocket

pytestmark = pytest.mark.pure

HEAD = ["response.created", "response.output_item.added", "conversation.item.added"]
PART, DELTA = "response.content_part.added", "response.output_text.delta"
TAIL = [
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "conversation.item.done",
    "response.done",
]


def outbox_of(socket: FakeSocket, *, extensions: bool = True, heartbeat_s: float = 15.0) -> Outbox:
    return Outbox(socket, extensions=extensions, heartbeat_s=heartbeat_s, send_timeout_s=10.0, now=0.0)


def gone(name: str) -> ItemDeleted:
    """A small event, to be told from others."""
    return ItemDeleted(item_id=name)


def stored(response: Response, text: str) -> None:
    if response.state is State.QUEUED:
        response.move(State.PREFILL)
    response.move(State.STREAMING)
    response.on_stored(text, len(text.encode()))


def texts(socket: FakeSocket) -> list[tuple[int, str]]:
    return [(event["offset"], event["delta"]) for event in socket.events if event["type"] == DELTA]


def story(socket: FakeSocket) -> list[dict[str, Any]]:
    """All that was told, without event ids, and with deltas that follow each other as one."""
    told: list[dict[str, Any]] = []
    for event in socket.events:
        one = {name: value for name, value in event.items() if name != "event_id"}
        if one["type"] == DELTA and told and told[-1]["type"] == DELTA:
            told[-1] = {**told[-1], "delta": told[-1]["delta"] + one["delta"]}
        else:
            told.append(one)
    return told


# --- the order


def test_events_are_told_at_once_or_in_their_order() -> None:
    """While the socket takes bytes nothing waits; else all wait, and none overtakes another."""
    socket = FakeSocket()
    outbox = outbox_of(socket)
    outbox.push(gone("a"))
    assert len(socket.frames) == 1
    socket.room = 0
    for name in "bcd":
        outbox.push(gone(name))
    assert len(socket.frames) == 1
    socket.room = 1
    outbox.push(gone("e"))
    assert [event["item_id"] for event in socket.events] == ["a", "b"]
    socket.room = None
    outbox.pump()
    assert [event["item_id"] for event in socket.events] == list("abcde")
    assert outbox.statistics() == {"events": 0, "event_bytes": 0, "views": 0}


def test_an_answer_begins_between_the_events_round_it() -> None:
    """Its beginning has its place in the queue; its text follows what waits."""
    socket = FakeSocket(room=0)
    outbox = outbox_of(socket)
    response = new_response()
    outbox.push(gone("before"))
    outbox.begin(response)
    outbox.push(gone("after"))
    stored(response, "Hello")
    outbox.pump()
    socket.room = None
    outbox.pump()
    assert socket.types == ["conversation.item.deleted", *HEAD, "conversation.item.deleted", PART, DELTA]


def test_the_end_of_one_answer_comes_before_the_beginning_of_the_next() -> None:
    """However long the reader was away: each answer whole, one after the other, and the events between them."""
    socket = FakeSocket(room=0)
    outbox = outbox_of(socket)
    for number in (1, 2):
        response = new_response(id=f"resp_{number}", item_id=f"item_{number}")
        outbox.begin(response)
        stored(response, "Hello")
        outbox.push(gone("between"))
        response.end(outcome(response))
        outbox.end(response)
    socket.room = None
    outbox.pump()
    one = [*HEAD, "conversation.item.deleted", PART, DELTA, *TAIL]
    assert socket.types == [*one, *one]
    assert outbox.statistics()["views"] == 0


def test_an_answer_that_was_never_begun_here_has_no_end_here() -> None:
    """Whoever was not told of it is not told of its end."""
    socket = FakeSocket()
    outbox = outbox_of(socket)
    response = streaming("Hello")
    response.end(outcome(response))
    outbox.end(response)
    assert socket.frames == []


def test_an_answer_that_has_ended_already_can_be_told_from_its_beginning() -> None:
    """Begin and end in one go, as when a reader joins just then."""
    socket = FakeSocket()
    outbox = outbox_of(socket)
    response = streaming("Hello")
    outbox.begin(response)
    response.end(outcome(response))
    outbox.end(response)
    assert socket.types == [*HEAD, PART, DELTA, *TAIL]


def test_a_client_that_comes_back_gets_the_rest() -> None:
    """From where it was, without the beginning."""
    socket = FakeSocket()
    outbox = outbox_of(socket)
    response = streaming("Hello")
    outbox.begin(response, ResumePoint(response.id, response.epoch, 2))
    assert [(event["type"], event["delta"]) for event in socket.events] == [(DELTA, "llo")]


def test_frames_of_a_source_are_made_when_they_are_taken() -> None:
    """A long history does not lie in memory for a reader that takes it slowly."""
    socket = FakeSocket(room=0)
    outbox = outbox_of(socket)
    made: list[str] = []

    def source() -> bytes | None:
        if len(made) == 100:
            return None
        made.append(str(len(made)))
        return encode(gone(made[-1]))

    outbox.push_source(source)
    outbox.push(gone("behind"))
    assert made == []
    for room in (1, 2, 3):
        socket.room = room
        outbox.pump()
    assert len(made) == len(socket.frames) == 6
    assert outbox.statistics()["events"] == 2
    socket.room = None
    outbox.pump()
    assert [event["item_id"] for event in socket.events] == [*made, "behind"]


def test_it_is_settled_when_all_was_told_and_nothing_goes_on() -> None:
    """Not while an answer runs, its end waits, or the socket takes nothing: closing then would cut something off."""
    socket = FakeSocket()
    outbox = outbox_of(socket)
    assert outbox.settled
    response = new_response()
    outbox.begin(response)
    stored(response, "Hello")
    outbox.pump()
    assert not outbox.settled
    socket.room = 2
    response.end(outcome(response))
    outbox.end(response)
    assert not outbox.settled
    socket.room = None
    outbox.pump()
    assert outbox.settled
    socket.room = 0
    assert not outbox.settled


# --- readers that lag


def test_a_reader_that_keeps_up_gets_each_piece() -> None:
    """The text goes out as it is stored."""
    socket = FakeSocket()
    outbox = outbox_of(socket)
    response = new_response()
    outbox.begin(response)
    for piece in ("Hel", "lo", " 👋🏽 you"):
        stored(response, piece)
        outbox.pump()
    assert texts(socket) == [(0, "Hel"), (3, "lo"), (5, " 👋🏽 you")]


def test_a_reader_that_lags_gets_a_longer_delta_and_costs_no_memory() -> None:
    """Nothing is queued per token: only its place in the text is kept."""
    socket = FakeSocket()
    outbox = outbox_of(socket)
    response = new_response()
    outbox.begin(response)
    stored(response, "First")
    outbox.pump()
    socket.room = 0
    before = outbox.statistics()
    for _ in range(10_000):
        stored(response, "token")
        outbox.pump()
    assert outbox.statistics() == before == {"events": 0, "event_bytes": 0, "views": 1}
    assert outbox.told(response.id) == 5
    socket.room = None
    outbox.pump()
    assert texts(socket) == [(0, "First"), (5, "token" * 10_000)]
    assert outbox.told(response.id) == 50_005


def test_the_whole_text_is_told_in_events_made_one_by_one() -> None:
    """The end holds the text four times; each event is made when the socket has taken the one before."""
    socket = FakeSocket()
    outbox = outbox_of(socket)
    response = streaming("Hello")
    outbox.begin(response)
    socket.room = 0
    response.end(outcome(response))
    outbox.end(response)
    assert outbox.statistics() == {"events": 1, "event_bytes": 0, "views": 1}
    for number, kind in enumerate(TAIL, 1):
        socket.room = 1
        outbox.pump()
        assert socket.types[5:] == TAIL[:number]
        assert socket.types[-1] == kind
        assert outbox.told(response.id) == (5 if kind != "response.done" else None)


def test_a_reader_that_lags_at_the_end_gets_the_rest_first() -> None:
    """Between its place and the whole text there is no gap."""
    socket = FakeSocket()
    outbox = outbox_of(socket)
    response = streaming("Hel")
    outbox.begin(response)
    socket.room = 0
    stored(response, "lo")
    response.end(outcome(response))
    outbox.end(response)
    socket.room = None
    outbox.pump()
    assert texts(socket) == [(0, "Hel"), (3, "lo")]
    assert socket.types[-5:] == TAIL


@pytest.mark.parametrize("extensions", [True, False])
def test_a_cut_is_told_to_those_who_can_follow_it(extensions: bool) -> None:
    """By an empty delta at a lower offset; a strict client learns it by the whole text."""
    socket = FakeSocket()
    outbox = outbox_of(socket, extensions=extensions)
    response = streaming("Hello")
    outbox.begin(response)
    response.end(outcome(response, "cancelled", cut=2))
    outbox.end(response)
    assert texts(socket) == [(0, "Hello"), (2, "")] if extensions else [(0, "Hello")]
    done = next(event for event in socket.events if event["type"] == TAIL[0])
    assert done["text"] == "He"


def test_whatever_the_pace_the_story_is_the_same() -> None:
    """Random events, answers, and a socket that takes now none, now some: in the end each reader was told the same."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for _ in range(15):
        sockets = [FakeSocket(), *(FakeSocket(room=0) for _ in range(3))]
        outboxes = [outbox_of(socket) for socket in sockets]
        response: Response | None = None
        for step in range(60):
            what = dice.choice(["push", "begin", "text", "text", "text", "end", "room", "room"])
            if what == "begin" and response is None:
                response = new_response(id=f"resp_{step}", item_id=f"item_{step}")
                for outbox in outboxes:
                    outbox.begin(response)
            elif what == "text" and response is not None:
                stored(response, dice.choice(["a", "ü ", "👩🏽‍💻"]))
            elif what == "end" and response is not None:
                response.end(outcome(response))
                for outbox in outboxes:
                    outbox.end(response)
                response = None
            elif what == "push":
                frame = encode(gone(str(step)))
                for outbox in outboxes:
                    outbox.push(frame)
            for socket, outbox in zip(sockets, outboxes, strict=True):
                if socket.room is not None and what == "room":
                    socket.room = dice.randrange(4)
                outbox.pump()
        for socket, outbox in zip(sockets, outboxes, strict=True):
            socket.room = None
            outbox.pump()
        assert _by_response(sockets[0]) == _by_response(sockets[1]) == _by_response(sockets[2])
        for socket in sockets:
            assert [e for e in story(socket) if "deleted" in e["type"]] == [
                e for e in story(sockets[0]) if "deleted" in e["type"]
            ]


def _by_response(socket: FakeSocket) -> dict[str, list[dict[str, Any]]]:
    """What was told of each answer, with its text in one piece."""
    told: dict[str, list[dict[str, Any]]] = {}
    for event in story(socket):
        place = event.get("response_id") or event.get("response", {}).get("id") or event.get("item", {}).get("id")
        if place is None:
            continue
        one = told.setdefault(place.partition("_")[2], [])
        if event["type"] == DELTA and one and one[-1]["type"] == DELTA:
            one[-1] = {**one[-1], "delta": one[-1]["delta"] + event["delta"]}
        else:
            one.append(event)
    return told


# --- readers that are too slow


@pytest.mark.parametrize(("size", "most"), [(10, MAX_EVENTS), (MAX_EVENT_BYTES // 10, 9)])
def test_a_reader_that_is_too_far_behind_is_dropped(size: int, most: int) -> None:
    """In events or in their bytes: then the connection is closed, and what waited is forgotten."""
    socket = FakeSocket(room=0)
    outbox = outbox_of(socket)
    for _ in range(most):
        outbox.push(b"x" * size)
    assert socket.is_open
    for _ in range(3):
        outbox.push(b"x" * size)
    assert socket.close_code == 1013
    assert socket.frames == []


def test_what_was_told_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is of what waits, not of all that ever did."""
    monkeypatch.setattr(outbox_module, "MAX_EVENTS", 3)
    monkeypatch.setattr(outbox_module, "MAX_EVENT_BYTES", 300)
    socket = FakeSocket(room=0)
    outbox = outbox_of(socket)
    for _ in range(20):
        for _ in range(3):
            outbox.push(b"x" * 100)
        socket.room = 3
        outbox.pump()
    assert socket.is_open
    assert len(socket.frames) == 60


def test_after_its_end_nothing_is_told() -> None:
    """A connection that closes forgets its answers and what waits."""
    socket = FakeSocket(room=0)
    outbox = outbox_of(socket)
    response = streaming("Hello")
    outbox.begin(response)
    outbox.push(gone("a"))
    outbox.close()
    socket.room = None
    outbox.pump()
    response.end(outcome(response))
    outbox.end(response)
    assert socket.frames == []
    assert outbox.statistics() == {"events": 0, "event_bytes": 0, "views": 0}


def test_a_socket_that_takes_nothing_is_dropped_in_time() -> None:
    """When bytes wait and none was taken for ``send_timeout_s``; not a moment before."""
    socket = FakeSocket()
    socket.stuck = True
    outbox = outbox_of(socket)
    outbox.tick(1.0, 0, "idle", None)
    outbox.push(gone("a"))
    for now in (2.0, 5.0, 10.0):
        outbox.tick(now, 0, "idle", None)
    assert socket.is_open
    outbox.tick(11.0, 0, "idle", None)
    assert socket.close_code == 1013


def test_a_slow_reader_that_moves_is_not_dropped() -> None:
    """A byte now and then is enough; its deltas are longer, that is all."""
    socket = FakeSocket()
    socket.stuck = True
    outbox = outbox_of(socket)
    outbox.push(b"x" * 1000)
    for now in range(100):
        if now % 9 == 0:
            socket.waiting -= 1
        outbox.tick(float(now), 0, "idle", None)
    assert socket.is_open


def test_a_reader_that_took_all_may_be_silent_for_ever() -> None:
    """The deadline is for what waits; an idle connection has none."""
    socket = FakeSocket()
    outbox = outbox_of(socket, extensions=False)
    outbox.push(gone("a"))
    for now in (1.0, 1000.0, 2000.0):
        outbox.tick(now, 0, "idle", None)
    socket.stuck = True
    outbox.push(gone("b"))
    outbox.tick(2001.0, 0, "idle", None)
    assert socket.is_open


# --- heartbeats


def beats(outbox: Outbox, socket: FakeSocket, seconds: int, state: str = "idle", start: int = 1) -> list[int]:
    """The seconds at which a heartbeat was sent, ticking once a second."""
    at = []
    for now in range(start, start + seconds):
        before = len(socket.frames)
        outbox.tick(float(now), now * 1000, state, "resp_1")
        if len(socket.frames) > before:
            at.append(now)
    return at


def test_a_silent_connection_hears_a_heartbeat() -> None:
    """Each ``heartbeat_s``, with the time, what the answer is doing, and which it is."""
    socket = FakeSocket()
    outbox = outbox_of(socket, heartbeat_s=5.0)
    assert outbox.heartbeat_interval_ms == 5000
    assert beats(outbox, socket, 20) == [5, 10, 15, 20]
    event = socket.events[0]
    assert (event["type"], event["now_ms"], event["state"], event["response_id"]) == (
        "heartbeat",
        5000,
        "idle",
        "resp_1",
    )


@pytest.mark.parametrize("state", ["queued", "prefill"])
def test_who_waits_for_the_first_word_hears_one_each_two_seconds(state: str) -> None:
    """A person looks at an empty bubble then."""
    socket = FakeSocket()
    assert beats(outbox_of(socket), socket, 10, state) == [2, 4, 6, 8, 10]
    assert {event["state"] for event in socket.events} == {state}


@pytest.mark.parametrize("state", ["thinking", "streaming", "waiting"])
def test_in_all_other_states_silence_counts_as_ever(state: str) -> None:
    """The text says it itself."""
    socket = FakeSocket()
    assert beats(outbox_of(socket), socket, 32, state) == [15, 30]


def test_what_is_told_puts_the_heartbeat_off() -> None:
    """It is for silence only."""
    socket = FakeSocket()
    outbox = outbox_of(socket, heartbeat_s=5.0)
    assert beats(outbox, socket, 4) == []
    outbox.push(gone("a"))
    assert beats(outbox, socket, 12, start=5) == [10, 15]


def test_a_strict_client_hears_none() -> None:
    """It has WebSocket pings."""
    socket = FakeSocket()
    assert beats(outbox_of(socket, extensions=False), socket, 100, "prefill") == []


def test_a_socket_that_takes_nothing_is_not_given_more() -> None:
    """Heartbeats do not pile up before a reader that lags."""
    socket = FakeSocket(room=0)
    outbox = outbox_of(socket)
    assert beats(outbox, socket, 100) == []
    assert outbox.statistics()["events"] == 0


# --- calls within calls


def test_a_socket_that_calls_back_while_it_is_written_to_changes_nothing() -> None:
    """``on_writable`` may come inside a write: each frame is told once and in order all the same."""
    calm, eager = FakeSocket(), FakeSocket()
    for socket in (calm, eager):
        outbox = outbox_of(socket)
        if socket is eager:
            eager.on_write = outbox.pump
        response = new_response()
        outbox.push(gone("a"))
        outbox.begin(response)
        stored(response, "Hello")
        outbox.push(gone("b"))
        outbox.pump()
        response.end(outcome(response))
        outbox.end(response)
    assert story(eager) == story(calm)


def test_an_event_pushed_while_another_is_written_comes_behind_it() -> None:
    """Also in the midst of an answer's beginning, which stays whole."""
    socket = FakeSocket(room=0)
    outbox = outbox_of(socket)
    outbox.begin(streaming("Hello"))

    def push_once() -> None:
        socket.on_write = lambda: None
        outbox.push(gone("a"))

    socket.on_write = push_once
    socket.room = None
    outbox.pump()
    assert socket.types == [*HEAD, "conversation.item.deleted", PART, DELTA]


def test_a_source_that_raises_leaves_the_outbox_usable() -> None:
    """The error goes to the caller, who closes the connection; nothing stays locked until then."""
    socket = FakeSocket()
    outbox = outbox_of(socket)

    def broken() -> bytes | None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError):
        outbox.push_source(broken)
    outbox.close()
    outbox.push(gone("a"))
    assert socket.types == ["conversation.item.deleted"]


def test_a_connection_that_is_lost_in_the_midst_of_a_write_is_left_at_once() -> None:
    """Nothing is written to a socket that is gone."""
    socket = FakeSocket()
    outbox = outbox_of(socket)
    outbox.begin(new_response())
    response = streaming("Hello")

    def lose() -> None:
        socket.is_open = False

    socket.on_write = lose
    outbox.begin(response)
    outbox.pump()
    assert socket.types == [*HEAD, HEAD[0]]
