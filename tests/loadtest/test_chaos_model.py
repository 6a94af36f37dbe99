"""The judge of events: silent on what the server's own core tells, and on each fault, made by hand, it speaks.

A checker that can not fail is worth nothing, so each promise has a test in which it is broken.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from chat_server.core.response import Response, ResumePoint, State
from chat_server.core.view import View
from chat_server.engine.simulated.text import answer_for, attempt_words, tokens
from loadtest import chaos_model
from loadtest.chaos_model import Answer, Asked, Event, Reader, judge_conversation, judge_end
from loadtest.chaos_texts import Violation
from tests.core.answers import new_response, outcome

pytestmark = pytest.mark.pure

WHOLE = answer_for([{"role": "user", "content": "Hello 👋"}])
PIECES = tokens(WHOLE)
DELTA = "response.output_text.delta"
CREATED: Event = {
    "type": "session.created",
    "event_id": "event_first",
    "session": {"id": "sess_1"},
    "resumed": False,
    "item_count": 1,
    "active_response": None,
}


class Teller:
    """An answer of the server's own core, and what it tells a connection of it."""

    def __init__(self, pieces: list[str] = PIECES) -> None:
        self.response: Response = new_response(in_reply_to="item_1")
        self.response.move(State.PREFILL)
        self.response.move(State.STREAMING)
        self.pieces = list(pieces)

    def write(self, count: int) -> None:
        """Store so many pieces more."""
        for piece in self.pieces[:count]:
            self.response.on_stored(piece, len(piece.encode()))
        del self.pieces[:count]

    def end(self, cut: int | None = None) -> None:
        self.response.end(outcome(self.response, "completed" if cut is None else "cancelled", cut=cut))

    def tell(self, view: View) -> list[Event]:
        """All that there is to tell now."""
        steps = (view.next_head, view.next_text, view.next_tail if self.response.outcome else lambda: None)
        frames = [frame for step in steps for frame in iter(step, None)]
        return [json.loads(frame) for frame in frames]

    def stream(self, view: View, pieces: int) -> list[Event]:
        """What is told while so many pieces come one by one."""
        told = self.tell(view)
        for _ in range(pieces):
            self.write(1)
            told += self.tell(view)
        return told


def whole_stream(*, cut: int | None = None) -> list[Event]:
    """One connection from the beginning of an answer to its end."""
    teller = Teller()
    view = View(teller.response, takes_cuts=True)
    told = teller.stream(view, len(PIECES))
    teller.end(cut)
    return [CREATED, *told, *teller.tell(view)]


def asked(**facts: Any) -> Asked:
    return Asked("item_1", "Hello 👋", expected=WHOLE, **facts)


def reader(facts: Asked | None = None) -> Reader:
    return Reader({"item_1": facts or asked()}, Counter())


def verdict(events: list[Event], facts: Asked | None = None) -> str | None:
    """The kind of the violation that a new client finds on this connection."""
    client = reader(facts)
    client.connect()
    try:
        for event in events:
            client.take(copy.deepcopy(event))
    except Violation as violation:
        return violation.kind
    return None


def at(events: list[Event], kind: str, number: int = 0) -> int:
    return [n for n, event in enumerate(events) if event["type"] == kind][number]


# What is right


def test_what_the_core_tells_is_right() -> None:
    """A whole answer, piece by piece."""
    assert verdict(whole_stream()) is None


@pytest.mark.parametrize("cut", [0, 1, 40])
def test_a_cut_that_was_wanted_is_right(cut: int) -> None:
    """Also if nothing is left."""
    assert verdict(whole_stream(cut=cut), asked(stops=[(cut, cut)])) is None


@pytest.mark.parametrize("held", range(0, 60, 7))
def test_a_resume_anywhere_is_right(held: int) -> None:
    """Before the first text, within, and after the end."""
    teller = Teller()
    client = reader()
    client.connect()
    view = View(teller.response, takes_cuts=True)
    for event in [CREATED, *teller.stream(view, held)]:
        client.take(event)
    answer = client.answers["resp_1"]
    teller.write(5)
    point = ResumePoint("resp_1", answer.epoch, len(answer.text))
    client.connect(answer)
    client.take({**CREATED, "active_response": {"id": "resp_1", "offset": teller.response.resume_at(point)}})
    later = View(teller.response, takes_cuts=True, held=point)
    told = teller.stream(later, len(teller.pieces))
    teller.end()
    for event in [*told, *teller.tell(later)]:
        client.take(event)
    assert (answer.text, answer.status) == (WHOLE, "completed")
    assert client._counts[chaos_model.GOES_ON] == (held > 0)


# What is wrong: a change of the events of one connection, and how it must be called


def without(kind: str, number: int = 0) -> Callable[[list[Event]], None]:
    return lambda events: events.__delitem__(at(events, kind, number))


def twice(kind: str, number: int = 0) -> Callable[[list[Event]], None]:
    def spoil(events: list[Event]) -> None:
        place = at(events, kind, number)
        events.insert(place, {**events[place], "event_id": "event_other"})

    return spoil


def late(kind: str) -> Callable[[list[Event]], None]:
    """After the end."""
    return lambda events: events.append({**events[at(events, kind)], "event_id": "event_late"})


def changed(kind: str, number: int = 0, **fields: Any) -> Callable[[list[Event]], None]:
    return lambda events: events[at(events, kind, number)].update(fields)


def other_character(events: list[Event]) -> None:
    events[at(events, DELTA, 9)]["delta"] = "¤"


def one_less(events: list[Event]) -> None:
    """A code point of a long delta is missing, and the offsets are right for that."""
    place = next(n for n, event in enumerate(events) if len(event.get("delta", "")) > 3)
    events[place]["delta"] = events[place]["delta"][:-1]
    for event in events[place + 1 :]:
        if event["type"] == DELTA:
            event["offset"] -= 1


def shorter_at_the_end(events: list[Event]) -> None:
    events[at(events, "response.output_text.done")]["text"] = WHOLE[:-1]


def swapped(events: list[Event]) -> None:
    place = at(events, "response.content_part.added")
    events[place], events[place + 1] = events[place + 1], events[place]


def other_output(events: list[Event]) -> None:
    events[-1]["response"]["output"][0]["content"][0]["text"] += "!"


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (without(DELTA, 5), "lost"),
        (without(DELTA, -1), "lost"),
        (one_less, "lost or wrong"),
        (shorter_at_the_end, "lost, repeated or wrong"),
        (twice(DELTA, 5), "repeated"),
        (changed(DELTA, 5, offset=0), "taken back or wrong"),
        (other_character, "wrong"),
        (other_output, "lost or wrong"),
        (late(DELTA), "order"),
        (late("response.created"), "order"),
        (twice("response.done"), "end"),
        (without("response.output_text.done"), "order"),
        (without("conversation.item.done"), "end"),
        (without("response.created"), "order"),
        (without("session.created"), "order"),
        (twice("response.output_item.added"), "order"),
        (swapped, "order"),
        (changed(DELTA, 5, epoch="epoch_other"), "mixed"),
        (changed(DELTA, 5, item_id="item_9"), "mixed"),
        (changed(DELTA, 5, response_id="resp_9"), "order"),
        (changed("response.created", in_reply_to="item_9"), "wrong"),
    ],
)
def test_each_broken_promise_is_named(spoil: Callable[[list[Event]], None], kind: str) -> None:
    """One event is left out, doubled, late or other than it was."""
    events = copy.deepcopy(whole_stream())
    spoil(events)
    assert (verdict(events) or "nothing") in kind


def test_the_same_event_again_is_seen() -> None:
    """By its id, of whatever kind it is."""
    events = whole_stream()
    assert verdict([*events[:8], events[7]]) == "repeated"


def test_a_cut_that_nobody_wanted_is_seen() -> None:
    """Nor may it be another than was wanted."""
    assert verdict(whole_stream(cut=40)) == "taken back"
    assert verdict(whole_stream(cut=40), asked(stops=[(39, 39)])) == "end"
    assert verdict(whole_stream(cut=40), asked(stops=[(50, None)])) == "end"


def test_an_end_that_can_not_be_is_seen() -> None:
    """Nothing failed, so nothing may be incomplete."""
    events = whole_stream()
    events[-1]["response"]["status"] = "incomplete"
    assert verdict(events) == "end"


def test_an_item_told_twice_is_seen() -> None:
    """One client item id makes one item; asked again, it is marked as a duplicate."""
    item = {"id": "item_1", "role": "user", "status": "completed", "content": []}
    added = {"type": "conversation.item.added", "item": item, "previous_item_id": None}
    events = [CREATED, {**added, "event_id": "a"}, {**added, "event_id": "b"}]
    assert verdict(events) == "duplicate"
    events[2]["duplicate"] = True
    assert verdict(events) is None


def test_a_second_answer_is_seen() -> None:
    """One ``in_reply_to`` makes one answer."""
    events = whole_stream()
    again = json.loads(json.dumps(events[1:]).replace("resp_1", "resp_2"))
    assert verdict([*events, *({**event, "event_id": f"x{n}"} for n, event in enumerate(again))]) == "duplicate"


# Resumes that are not right


def resumed(offset: int, facts: Asked | None = None, *, promised: int | None = None) -> str | None:
    """A client holds 20 pieces and comes back; its text goes on from ``offset``."""
    teller = Teller()
    client = reader(facts)
    client.connect()
    for event in [CREATED, *teller.stream(View(teller.response, takes_cuts=True), 20)]:
        client.take(event)
    answer = client.answers["resp_1"]
    client.connect(answer)
    teller.write(5)
    active = None if promised is None else {"id": "resp_1", "offset": promised}
    try:
        client.take({**CREATED, "active_response": active})
        client.take(json.loads(teller.response.delta(offset)))
    except Violation as violation:
        return violation.kind
    return None


HELD = len("".join(PIECES[:20]))


def test_a_resume_goes_on_from_its_offset() -> None:
    """From before it only if the store lost data; never from behind it."""
    assert resumed(HELD) is None
    assert resumed(0) == "repeated"
    assert resumed(HELD - 1) == "repeated"
    assert resumed(0, asked(loss=True)) is None
    assert resumed(HELD + 1) == "lost"


def test_the_promised_offset_is_kept() -> None:
    """``active_response.offset`` is where the text that follows begins."""
    assert resumed(HELD, promised=HELD) is None
    assert resumed(HELD, promised=0) == "wrong"


def test_text_is_taken_back_only_by_a_double_fault() -> None:
    """A store that lost data is no reason while the owner lives."""

    def told_shorter(facts: Asked) -> str | None:
        events = whole_stream()[:40]
        last = events[-1]
        return verdict([*events, {**last, "event_id": "x", "offset": 10, "delta": ""}], facts)

    assert told_shorter(asked(loss=True)) == "taken back"
    assert told_shorter(asked(loss=True, double_fault=True)) is None


# The end, in the mode in which each attempt writes other text


def end_of(text: str, chain: list[tuple[str, int]], **facts: Any) -> str | None:
    answer = Answer(Asked("item_1", "?", words=60, **facts), "resp_1", "item_2", text, status="completed")
    try:
        judge_end(answer, chain)
    except Violation as violation:
        return violation.kind
    return None


def test_a_mixture_of_attempts_is_seen() -> None:
    """A take-over is no mixture: it begins where the chain of epochs says, and a replica was killed."""
    half = attempt_words("aa1x1", 1, 30)
    text = half + attempt_words("bb2x1", 31, 30)
    chain = [("epoch_1", 0), ("epoch_2", len(half))]
    assert end_of(text, chain, kills=1) is None
    assert end_of(text, chain) == "mixed"
    assert end_of(text, [("epoch_1", 0)], kills=1) == "mixed"
    assert end_of(text, [("epoch_1", 0), ("epoch_2", 3)], kills=1) == "mixed"


def test_a_chain_of_epochs_begins_at_0() -> None:
    """And names every epoch that was told, in that order."""
    text = attempt_words("aa1x1", 1, 60)
    assert end_of(text, [("epoch_1", 0)]) is None
    assert end_of(text, [("epoch_1", 5)]) == "mixed"
    assert end_of(text, []) == "mixed"


# The conversation


def item(item_id: str, role: str, text: str, **more: Any) -> Event:
    return {"id": item_id, "role": role, "content": [{"text": text}], **more}


SAID = [("u1", "user", "Hello"), ("", "assistant", "Hi there"), ("u2", "user", "Bye")]
ITEMS = [item("u1", "user", "Hello"), item("a1", "assistant", "Hi there", in_reply_to="u1"), item("u2", "user", "Bye")]


@pytest.mark.parametrize(
    ("items", "kind"),
    [
        (ITEMS, None),
        (ITEMS[:2], "lost"),
        ([ITEMS[0], ITEMS[2]], "lost"),
        ([*ITEMS, ITEMS[2]], "duplicate"),
        ([*ITEMS, item("a2", "assistant", "Hi", in_reply_to="u1")], "duplicate"),
        ([ITEMS[2], *ITEMS[:2]], "wrong"),
        ([ITEMS[0], item("a1", "assistant", "Hi ther", in_reply_to="u1"), ITEMS[2]], "lost"),
    ],
)
def test_a_conversation_that_differs_is_seen(items: list[Event], kind: str | None) -> None:
    """In its items, their order, and each text."""
    found = None
    try:
        judge_conversation(SAID, items, "test")
    except Violation as violation:
        found = violation.kind
    assert found == kind
