"""One answer in the making: states by the table, text that is stored before it can be told, and one end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_server.core.response import Response, State
from tests.core.answers import CUT_EPOCH, EPOCH, PIECES, begun, new_response, outcome, streaming
from tests.support import events

pytestmark = pytest.mark.pure

#: A way into each state, and the states that may follow it, as the architecture has them.
WAY: dict[State, list[State]] = {
    State.QUEUED: [],
    State.PREFILL: [State.PREFILL],
    State.THINKING: [State.PREFILL, State.THINKING],
    State.STREAMING: [State.PREFILL, State.STREAMING],
    State.ENDED: [State.ENDED],
}
NEXT: dict[State, set[State]] = {
    State.QUEUED: {State.PREFILL, State.ENDED},
    State.PREFILL: {State.QUEUED, State.THINKING, State.STREAMING, State.ENDED},
    State.THINKING: {State.QUEUED, State.STREAMING, State.ENDED},
    State.STREAMING: {State.QUEUED, State.THINKING, State.ENDED},
    State.ENDED: set(),
}


def in_state(state: State) -> Response:
    response = new_response()
    for step in WAY[state]:
        response.move(step)
    return response


def snapshot(response: Response) -> dict[str, Any]:
    """All that a response is, as far as anybody can see."""
    return {
        "state": response.state,
        "text": response.text(0),
        "length": response.length,
        "byte_length": response.byte_length,
        "epochs": list(response.epochs),
        "outcome": response.outcome,
        "in_flight": response.in_flight,
        "has_pending": response.has_pending,
        "delta": response.delta(0),
        "item": response.item(),
    }


def delta(response: Response, start: int) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(response.delta(start))
    events.check(event, extensions=True)
    return event


# --- states


@pytest.mark.parametrize("after", State)
@pytest.mark.parametrize("before", State)
def test_a_state_follows_only_where_the_table_says(before: State, after: State) -> None:
    """Anything else is our own fault: it raises, and the response is as it was. To stay is no change."""
    response = in_state(before)
    if after is before or after in NEXT[before]:
        response.move(after)
        assert response.state is after
    else:
        was = snapshot(response)
        with pytest.raises(ValueError, match=f"{before} can not become {after}"):
            response.move(after)
        assert snapshot(response) == was


def test_a_response_begins_queued() -> None:
    """It waits for an engine, and has no text."""
    response = new_response()
    assert (response.state, response.length, response.byte_length) == (State.QUEUED, 0, 0)
    assert (response.id, response.item_id, response.previous_item_id) == ("resp_1", "item_2", "item_1")


def test_text_makes_it_stream_and_reasoning_makes_it_think() -> None:
    """The heartbeat says what it is doing."""
    response = in_state(State.PREFILL)
    response.on_thinking()
    assert response.heartbeat_state == "thinking"
    response.on_text("Hi")
    assert response.heartbeat_state == "streaming"
    response.on_thinking()
    assert response.heartbeat_state == "thinking"


def test_the_heartbeat_says_when_it_waits_for_the_store() -> None:
    """Whatever the engine does meanwhile."""
    response = in_state(State.STREAMING)
    response.waiting_for_store = True
    assert response.heartbeat_state == "waiting"
    response.waiting_for_store = False
    assert response.heartbeat_state == "streaming"


@pytest.mark.parametrize("feed", [lambda r: r.on_text("Hi"), lambda r: r.on_thinking()], ids=["text", "reasoning"])
def test_an_engine_can_not_speak_before_it_was_asked(feed: Callable[[Response], None]) -> None:
    """Text of a queued response is our own fault, and is not taken."""
    response = new_response()
    was = snapshot(response)
    with pytest.raises(ValueError, match="can not become"):
        feed(response)
    assert snapshot(response) == was


def test_empty_text_changes_nothing() -> None:
    """Engines send empty deltas, with the role for one."""
    response = in_state(State.PREFILL)
    response.on_text("")
    assert (response.state, response.has_pending) == (State.PREFILL, False)


# --- text on its way to the store


def test_text_is_pending_until_it_is_stored() -> None:
    """Nothing of it can be told before."""
    response = in_state(State.PREFILL)
    response.on_text("Hello")
    assert response.has_pending
    assert response.take_commit() is not None
    assert (response.in_flight, response.has_pending, response.length) == (True, False, 0)
    assert response.text(0) == ""
    response.stored_in_flight()
    assert (response.in_flight, response.length, response.text(0)) == (False, 5, "Hello")


def test_one_commit_is_under_way_at_a_time() -> None:
    """What comes meanwhile goes with the next, in one piece."""
    response = in_state(State.PREFILL)
    response.on_text("One")
    response.take_commit()
    response.on_text(", two")
    response.on_text(", three")
    assert response.take_commit() is None
    response.stored_in_flight()
    commit = response.take_commit()
    assert commit is not None
    assert (commit.text, commit.offset, commit.byte_offset) == (", two, three", 3, 3)


def test_a_commit_ends_where_another_engine_can_go_on() -> None:
    """White space and what may still grow wait for what follows."""
    response = in_state(State.PREFILL)
    response.on_text("Hi 👩")
    commit = response.take_commit()
    assert commit is not None
    assert commit.text == "Hi"
    response.stored_in_flight()
    assert response.take_commit() is None, "the rest may still grow"
    response.on_text("\u200d💻!")
    commit = response.take_commit()
    assert commit is not None
    assert commit.text == " 👩\u200d💻!"


def test_the_rest_goes_with_the_end_wherever_it_ends() -> None:
    """Nothing follows that it could wait for."""
    response = in_state(State.PREFILL)
    response.on_text("Hi 👍 ")
    response.take_commit()
    response.stored_in_flight()
    assert response.take_rest() == " "
    assert (response.take_rest(), response.has_pending) == ("", False)


def test_the_rest_is_not_taken_while_a_commit_is_under_way() -> None:
    """Its place in the text is not sure yet."""
    response = in_state(State.PREFILL)
    response.on_text("One")
    response.take_commit()
    response.on_text("two")
    was = snapshot(response)
    with pytest.raises(AssertionError):
        response.take_rest()
    assert snapshot(response) == was


def test_what_was_not_taken_can_not_be_stored() -> None:
    """An answer of the store without a commit is our own fault."""
    response = in_state(State.STREAMING)
    was = snapshot(response)
    with pytest.raises(AssertionError):
        response.stored_in_flight()
    assert snapshot(response) == was


@settings(max_examples=40)
@given(st.lists(st.sampled_from([*PIECES, None, None]), max_size=40))
def test_commits_and_rest_are_the_text_that_came(pieces: list[str | None]) -> None:
    """Each begins where the one before ended, in code points and in bytes. (None: the store answers, and is asked.)"""
    response = in_state(State.PREFILL)
    came = stored = ""
    for piece in pieces:
        if piece is not None:
            came += piece
            response.on_text(piece)
            continue
        if response.in_flight:
            response.stored_in_flight()
        assert response.text(0) == stored
        commit = response.take_commit()
        if commit is not None:
            assert commit.text
            assert (commit.offset, commit.byte_offset) == (len(stored), len(stored.encode()))
            assert commit.data == commit.text.encode()
            stored += commit.text
    if response.in_flight:
        response.stored_in_flight()
    assert (response.text(0), response.length, response.byte_length) == (stored, len(stored), len(stored.encode()))
    assert stored + response.take_rest() == came


def test_with_stop_strings_text_goes_in_whole_words() -> None:
    """An engine that looks out for them sends half a word, which is no place to go on from."""
    response = new_response(stop=("END",))
    response.move(State.PREFILL)
    response.on_text("The fox was ama")
    commit = response.take_commit()
    assert commit is not None
    assert commit.text == "The fox was"
    assert response.go_on() == "The fox was"
    response.on_text(" amazed. ")
    response.stored_in_flight()
    commit = response.take_commit()
    assert commit is not None
    assert commit.text == " amazed."


# --- going on elsewhere


def test_another_engine_goes_on_from_all_that_came_up_to_a_safe_place() -> None:
    """What is stored, what is on its way there, what is pending; the white space after it is written again."""
    response = in_state(State.PREFILL)
    response.on_text("One")
    response.take_commit()
    response.stored_in_flight()
    response.on_text(", two")
    response.take_commit()
    response.on_text(", three 👍 ")
    response.on_text("\n")
    assert response.go_on() == "One, two, three 👍"
    assert response.text(0) == "One", "nothing more is told by that"
    response.stored_in_flight()
    response.on_text("\n\nFour")
    commit = response.take_commit()
    assert commit is not None
    assert (commit.text, commit.offset) == (", three 👍\n\nFour", 8)


def test_without_text_at_a_safe_place_an_answer_starts_anew() -> None:
    """An emoji that may grow, or white space, was never told, and is forgotten."""
    for pending in ("", " \n", "👩"):
        response = in_state(State.PREFILL)
        response.on_text(pending)
        assert response.go_on() == ""
        assert (response.has_pending, response.take_rest()) == (False, "")


def test_an_answer_that_was_taken_over_goes_on_from_its_stored_text() -> None:
    """Nothing of it came from an engine of ours."""
    response = new_response()
    response.on_stored("Once upon", 9)
    assert (response.go_on(), response.state) == ("Once upon", State.QUEUED)


@settings(max_examples=60)
@given(st.lists(st.sampled_from([*PIECES, "store", "take", "break"]), max_size=40), st.data())
def test_an_answer_that_breaks_off_again_and_again_is_whole(steps: list[str], data: st.DataObject) -> None:
    """Each engine writes what follows the text that it was given; the text is as of one engine that never broke off.

    Whatever the store does meanwhile, and never is anything taken back that is stored or on its way there.
    """
    answer = "".join(step for step in steps if step not in ("store", "take", "break"))
    response = in_state(State.PREFILL)
    written = 0
    for step in steps:
        sure = response.text(0)
        if step == "store":
            if response.in_flight:
                response.stored_in_flight()
        elif step == "take":
            response.take_commit()
        elif step == "break":
            text = response.go_on()
            assert answer[: len(text)] == text
            assert text.startswith(sure)
            assert text == text.rstrip()
            written = len(text)
        else:
            size = data.draw(st.integers(0, 4))
            response.on_text(answer[written : written + size])
            written += len(answer[written : written + size])
    response.on_text(answer[written:])
    if response.in_flight:
        response.stored_in_flight()
    assert response.text(0) + response.take_rest() == answer


# --- what is told


@settings(max_examples=30)
@given(st.lists(st.sampled_from(PIECES), max_size=8))
def test_the_text_can_be_read_from_any_place(pieces: list[str]) -> None:
    """However it came in pieces."""
    response = streaming(*pieces)
    whole = "".join(pieces)
    assert [response.text(start) for start in range(len(whole) + 2)] == [whole[at:] for at in range(len(whole) + 2)]


@pytest.mark.parametrize(
    "text", ['"quoted" \\ and / \n\t\r', "\u2028\0\x1f\x7f", "👩🏽\u200d💻 中文 e\u0301", "</script>"]
)
def test_a_delta_is_a_right_event_whatever_the_text(text: str) -> None:
    """It is spliced by hand, so each part is checked against the API's type."""
    event = delta(streaming("Hi", text), 2)
    assert (event["delta"], event["offset"], event["epoch"]) == (text, 2, EPOCH)
    assert (event["response_id"], event["item_id"]) == ("resp_1", "item_2")
    assert (event["output_index"], event["content_index"]) == (0, 0)


def test_a_delta_is_framed_once_for_all_that_are_at_its_place() -> None:
    """And anew when there is more text, or another place."""
    response = streaming("Hello")
    first = response.delta(0)
    assert response.delta(0) is first
    assert json.loads(response.delta(2))["delta"] == "llo"
    response.on_stored("!", 1)
    assert json.loads(response.delta(2))["delta"] == "llo!"


def test_deltas_at_different_places_have_different_event_ids() -> None:
    """Unique on a connection, without a random number per token."""
    response = streaming("Hello")
    ids = {delta(response, start)["event_id"] for start in range(5)}
    response.end(outcome(response, "cancelled", cut=2))
    ids |= {delta(response, start)["event_id"] for start in range(3)}
    assert len(ids) == 8


def test_a_running_response_shows_no_outcome() -> None:
    """Its item is empty and in progress."""
    response = streaming("Hello")
    shown = response.object()
    assert (shown.status, shown.output, shown.usage, shown.status_details) == ("in_progress", [], None, None)
    assert (response.item().status, response.item().content) == ("in_progress", [])


def test_an_ended_response_shows_its_outcome() -> None:
    """With its item, whole: who made it, of how many tokens, in what time."""
    response = streaming("Hello")
    end = outcome(response)
    response.end(end)
    shown = response.object()
    assert (shown.status, shown.usage, shown.timing, shown.engine) == ("completed", end.usage, end.timing, end.engine)
    [item] = shown.output
    assert (item.id, item.status, item.text, item.response_id) == ("item_2", "completed", "Hello", "resp_1")
    assert (item.usage, item.timing, item.engine, item.epochs) == (end.usage, end.timing, end.engine, [(EPOCH, 0)])


# --- the end


@pytest.mark.parametrize("cut", range(8))
def test_the_end_cuts_the_text(cut: int) -> None:
    """To what was seen; code points, so no character of several bytes is torn."""
    response = streaming("Ä", "中👍", "bcd")
    response.end(outcome(response, "cancelled", cut=cut))
    left = "Ä中👍bcd"[:cut]
    assert (response.text(0), response.length, response.byte_length) == (left, len(left), len(left.encode()))
    assert response.epochs[-1] == ((CUT_EPOCH, cut) if cut < 6 else (EPOCH, 0))
    assert response.item().text == left


def test_the_end_comes_from_any_state() -> None:
    """An answer can fail before an engine had it, or while it thinks."""
    for state in State:
        if state is not State.ENDED:
            response = in_state(state)
            response.end(outcome(response, "failed"))
            assert response.heartbeat_state == "ended"


def test_after_the_end_an_engine_is_not_heard() -> None:
    """A stream that is being closed may still say something; that is no fault."""
    response = streaming("Hello")
    response.on_text(" and more")
    response.end(outcome(response))
    was = snapshot(response)
    response.on_text("late")
    response.on_thinking()
    assert response.take_commit() is None
    assert response.take_rest() == ""
    assert snapshot(response) == was


@pytest.mark.parametrize(
    "change",
    [lambda r: r.end(outcome(r, "failed", cut=1)), lambda r: r.on_stored(" more", 5)],
    ids=["a second end", "text"],
)
def test_after_the_end_nothing_changes(change: Callable[[Response], None]) -> None:
    """Connections were told; a second end or more text is our own fault."""
    response = streaming("Hello")
    response.end(outcome(response))
    was = snapshot(response)
    with pytest.raises(ValueError, match=r"ended|ends once"):
        change(response)
    assert snapshot(response) == was


def test_what_the_store_keeps_of_a_response_is_read_back() -> None:
    """Beginning and end go through it as JSON; another replica goes on with what it reads."""
    first = begun(in_reply_to="item_1", temperature=0.5, stop=("END",), metadata={"a": "b"}, max_output_tokens=7)
    response = streaming("Hello")
    for value in (first, begun(), outcome(response, "cancelled", cut=2), outcome(response, "failed")):
        assert msgspec.json.decode(msgspec.json.encode(value), type=type(value)) == value
