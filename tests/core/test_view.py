"""Every connection is told the same answer, in the protocol's order, whenever it joins and however fast it reads."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from chat_server.core.items import ResponseStatus
from chat_server.core.response import Response, ResumePoint, State
from chat_server.core.view import Stage, View
from tests.core.answers import (
    CUT_EPOCH,
    EPOCH,
    ORDER,
    Play,
    Reader,
    Step,
    endings,
    new_response,
    outcome,
    schedules,
    streaming,
)

pytestmark = pytest.mark.pure

HEAD = ["response.created", "response.output_item.added", "conversation.item.added"]
DELTA = "response.output_text.delta"
TAIL = [
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "conversation.item.done",
    "response.done",
]


def ended(response: Response, status: ResponseStatus = "completed", *, cut: int | None = None) -> Response:
    response.end(outcome(response, status, cut=cut))
    return response


def content(text: str) -> list[dict[str, Any]]:
    return [{"type": "output_text", "text": text}]


@settings(max_examples=50)
@given(schedules, endings, schedules)
def test_any_play_is_told_right(schedule: list[Step], ending: tuple[ResponseStatus, int], after: list[Step]) -> None:
    """Text, commits, joins and reads in any order, cut or not: see ``Play`` for what holds at every frame."""
    play = Play()
    play.run(schedule, ending, after)
    for reader in play.readers:
        order = ORDER.fullmatch(reader.order)
        assert order, f"{reader.order} is not the order of the protocol"
        assert bool(order["head"]) == (reader.resumed is None)
        if order["part"]:
            assert bool(order["added"]) == (reader.resumed is None or not reader.resumed.offset)
        assert (order["place"] == "I") == (bool(play.final) or ending[0] == "completed")
        if reader.view.takes_cuts or ending[0] != "cancelled":
            assert reader.text == play.final
        else:
            assert reader.text.startswith(play.final), "what it holds too much is corrected by the final events"
        judge_ends(reader, play.final, ending[0], has_part=order["part"] is not None)


def judge_ends(reader: Reader, text: str, status: ResponseStatus, *, has_part: bool) -> None:
    """The frames with the whole text and the outcome say the same thing."""
    done = reader.named("response.done")["response"]
    if reader.resumed is None:
        created = reader.named("response.created")["response"]
        assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert (done["status"], done["status_details"]["type"]) == (status, status)
    item = reader.named("response.output_item.done")["item"]
    assert item["content"] == content(text)
    assert item["status"] == ("completed" if status == "completed" else "incomplete")
    assert has_part or not text
    if has_part:
        assert reader.named("response.output_text.done")["text"] == text
        assert reader.named("response.content_part.done")["part"]["text"] == text
    if reader.events[-2]["type"] == "conversation.item.done":
        assert done["output"] == [reader.named("conversation.item.done")["item"]] == [item]
    else:
        assert (done["output"], text) == ([], "")


def test_an_answer_is_told_in_the_order_of_the_table() -> None:
    """Its beginning, its text, its end; each as soon as it is there."""
    response = new_response()
    reader = Reader(response)
    assert reader.read() == HEAD
    response.move(State.PREFILL)
    assert reader.read() == []
    response.on_text("Hello")
    assert reader.read() == [], "nothing is stored yet"
    response.take_commit()
    assert reader.read() == [], "nothing is stored yet"
    response.stored_in_flight()
    assert reader.read() == ["response.content_part.added", DELTA]
    ended(response)
    assert reader.read() == TAIL
    assert reader.read() == []
    assert reader.view.stage is Stage.FINISHED


def test_the_beginning_stands_at_its_place_in_the_conversation() -> None:
    """The item follows the one that it answers, and is empty so far."""
    reader = Reader(new_response(in_reply_to="item_1", metadata={"topic": "sea"}))
    reader.read()
    assert reader.events[0]["in_reply_to"] == "item_1"
    assert reader.events[0]["response"]["metadata"] == {"topic": "sea"}
    added = reader.named("conversation.item.added")
    assert added["previous_item_id"] == "item_1"
    assert (added["item"]["status"], added["item"]["content"]) == ("in_progress", [])
    assert added["item"] == reader.named("response.output_item.added")["item"]


def test_a_reader_that_lags_gets_one_longer_delta() -> None:
    """Its place in the text is all that is kept of it."""
    response = streaming("One ")
    quick, slow = Reader(response), Reader(response)
    quick.read()
    for piece in ("two ", "three"):
        response.on_stored(piece, len(piece))
        quick.read()
    slow.read()
    assert [event["delta"] for event in quick.events if event["type"] == DELTA] == ["One ", "two ", "three"]
    assert [event["delta"] for event in slow.events if event["type"] == DELTA] == ["One two three"]


def test_a_new_reader_is_told_the_text_so_far_as_one_delta() -> None:
    """From the beginning, as if it had been there."""
    reader = Reader(streaming("Hel", "lo 👍"))
    assert reader.read() == [*HEAD, "response.content_part.added", DELTA]
    delta = reader.named(DELTA)
    assert (delta["delta"], delta["offset"], delta["epoch"]) == ("Hello 👍", 0, EPOCH)


def test_readers_at_the_same_place_get_the_same_bytes() -> None:
    """The text is escaped and framed once for all of them."""
    response = streaming("Hello")
    views = [View(response, takes_cuts=True) for _ in range(3)]
    for view in views:
        while view.next_head():
            pass
        view.next_text()
    first, *others = [view.next_text() for view in views]
    assert first is not None
    assert all(frame is first for frame in others)


def test_offsets_count_code_points() -> None:
    """Neither bytes nor UTF-16: an emoji of one code point counts one."""
    response = streaming("👍中é")
    reader = Reader(response)
    reader.read()
    response.on_stored("!", 1)
    reader.read()
    assert [event["offset"] for event in reader.events if event["type"] == DELTA] == [0, 3]


def test_a_client_that_comes_back_is_told_the_rest() -> None:
    """From what it holds on, without the beginning; also when the answer ended meanwhile."""
    response = streaming("Hello")
    first = Reader(response)
    first.read()
    response.on_stored(" there", 6)
    second = Reader(response, back=first)
    assert second.read() == [DELTA]
    assert (second.named(DELTA)["delta"], second.named(DELTA)["offset"]) == (" there", 5)
    ended(response)
    third = Reader(response, back=first)
    assert third.read() == [DELTA, *TAIL]
    assert third.text == "Hello there"


def test_a_client_that_holds_nothing_yet_is_told_the_part_too() -> None:
    """It had the beginning only."""
    response = new_response()
    first = Reader(response)
    first.read()
    second = Reader(response, back=first)
    response.move(State.PREFILL)
    response.move(State.STREAMING)
    response.on_stored("Hi", 2)
    assert second.read() == ["response.content_part.added", DELTA]


@pytest.mark.parametrize(
    ("epochs", "held", "at"),
    [
        ([("a", 0)], ("a", 3), 3),
        ([("a", 0)], ("a", 99), 10),
        ([("a", 0)], ("x", 3), 0),
        ([("a", 0)], ("", 3), 0),
        ([("a", 0), ("b", 5)], ("a", 3), 3),
        ([("a", 0), ("b", 5)], ("a", 8), 5),
        ([("a", 0), ("b", 5)], ("b", 8), 8),
        ([("a", 0), ("b", 5), ("c", 2)], ("a", 4), 2),
        ([("a", 0), ("b", 5), ("c", 2)], ("b", 7), 2),
        ([("a", 0), ("b", 5), ("c", 2)], ("c", 7), 7),
    ],
)
def test_where_a_text_goes_on(epochs: list[tuple[str, int]], held: tuple[str, int], at: int) -> None:
    """The least of what the client holds, the start of every later epoch, and the length; 0 if the epoch is unknown."""
    response = streaming("0123456789")
    response.epochs = epochs
    assert response.resume_at(ResumePoint(response.id, *held)) == at


@pytest.mark.parametrize("takes_cuts", [True, False])
def test_a_text_that_starts_again_replaces_what_the_client_holds(takes_cuts: bool) -> None:
    """Whatever it is; an empty delta if there is nothing yet."""
    first = Reader(streaming("Something else"))
    first.read()
    first.epoch = "epoch_lost"
    for text in ("Hello", ""):
        second = Reader(streaming(text) if text else streaming(), back=first, takes_cuts=takes_cuts)
        assert second.read() == [DELTA]
        assert second.text == text


def test_a_cut_takes_text_back_with_an_empty_delta() -> None:
    """A reader with extensions follows; the epoch says that this is another text."""
    response = streaming("Hello there")
    reader = Reader(response)
    reader.read()
    ended(response, "cancelled", cut=5)
    reader.read()
    delta = reader.events[-6]
    assert (delta["type"], delta["delta"], delta["offset"], delta["epoch"]) == (DELTA, "", 5, CUT_EPOCH)
    assert reader.text == "Hello"


def test_a_cut_is_told_to_plain_clients_by_the_final_events() -> None:
    """They know no delta that takes text back."""
    response = streaming("Hello there")
    reader = Reader(response, takes_cuts=False)
    reader.read()
    ended(response, "cancelled", cut=5)
    assert reader.read() == TAIL
    assert reader.named("response.output_text.done")["text"] == "Hello"


def test_a_reader_behind_the_cut_is_told_the_text_up_to_it() -> None:
    """It has nothing to take back."""
    response = streaming("Hel")
    reader = Reader(response, takes_cuts=False)
    reader.read()
    response.on_stored("lo there", 8)
    ended(response, "cancelled", cut=5)
    assert reader.read() == [DELTA, *TAIL]
    assert reader.text == "Hello"


@pytest.mark.parametrize("status", ["cancelled", "failed", "incomplete"])
def test_the_place_of_an_answer_without_text_is_given_up(status: ResponseStatus) -> None:
    """There was an item in progress; it goes, and the response has no output."""
    response = new_response()
    reader = Reader(response)
    reader.read()
    ended(response, status)
    assert reader.read() == ["response.output_item.done", "conversation.item.deleted", "response.done"]
    assert reader.named("conversation.item.deleted")["item_id"] == response.item_id
    assert reader.named("response.done")["response"]["output"] == []


def test_the_place_is_given_up_when_the_cut_takes_all_that_was_told() -> None:
    """The part ends empty first, for it had begun."""
    response = streaming("Hello")
    reader = Reader(response)
    reader.read()
    ended(response, "cancelled", cut=0)
    assert reader.read() == [DELTA, *TAIL[:3], "conversation.item.deleted", "response.done"]
    assert reader.text == ""


def test_an_empty_answer_that_is_complete_is_kept() -> None:
    """A model may say nothing; that is an answer with an empty part."""
    response = new_response()
    reader = Reader(response)
    ended(response)
    assert reader.read() == [*HEAD, "response.content_part.added", *TAIL]
    assert reader.named("conversation.item.done")["item"]["content"] == content("")


def test_the_beginning_is_told_as_it_was_also_after_the_end() -> None:
    """A reader may be so slow that the answer ended before it took the first frame."""
    reader = Reader(ended(streaming("Hi"), "failed"))
    event = reader.step()
    assert event is not None
    response = event["response"]
    assert (response["status"], response["status_details"], response["usage"]) == ("in_progress", None, None)
    assert not {"timing", "engine"} & response.keys()


def test_the_end_is_told_only_after_it() -> None:
    """To ask before is a fault of ours, and loses nothing."""
    reader = Reader(streaming("Hi"))
    reader.read()
    with pytest.raises(AssertionError):
        reader.view.next_tail()
    ended(reader.response)
    assert reader.read() == TAIL


def test_a_view_holds_no_text() -> None:
    """A frozen reader costs a few words of memory, however long the answer."""
    view = View(streaming("x" * 10_000), takes_cuts=True)
    while view.next_head() or view.next_text():
        pass
    own = [getattr(view, name) for name in View.__slots__ if name != "response"]
    assert all(isinstance(value, bool | int | None) for value in own)
