"""An answer in the making and the connections that are told of it, as tests play them.

``Reader`` asks its view as the outbox of a connection does, and judges every frame; ``Play`` also keeps by itself what
the store holds, so that no frame can tell more.
"""

from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import strategies as st

from chat_server.core.items import ResponseStatus, StatusDetails, StatusError, Timing, Usage
from chat_server.core.response import Begun, Commit, Outcome, Response, ResumePoint, State
from chat_server.core.view import View
from tests.support import events

EPOCH = "epoch_0a"
CUT_EPOCH = "epoch_0b"

#: The table of the protocol, a letter a frame.
LETTERS = {
    "response.created": "c",
    "response.output_item.added": "o",
    "conversation.item.added": "a",
    "response.content_part.added": "p",
    "response.output_text.delta": "d",
    "response.output_text.done": "T",
    "response.content_part.done": "P",
    "response.output_item.done": "O",
    "conversation.item.done": "I",
    "conversation.item.deleted": "X",
    "response.done": "D",
}
#: A client that comes back has the beginning, and the part if it has text.
ORDER = re.compile(r"(?P<head>coa)?(?P<part>(?P<added>p?)d*TP)?O(?P<place>[IX])D")

DETAILS: dict[ResponseStatus, StatusDetails] = {
    "completed": StatusDetails(type="completed"),
    "cancelled": StatusDetails(type="cancelled", reason="client_cancelled"),
    "incomplete": StatusDetails(type="incomplete", reason="max_output_tokens"),
    "failed": StatusDetails(type="failed", error=StatusError(type="server_error", code="overloaded", message="Full.")),
}


def begun(**changes: Any) -> Begun:
    fields: dict[str, Any] = {
        "id": "resp_1",
        "item_id": "item_2",
        "replica": "replica_1",
        "epochs": [(EPOCH, 0)],
        "created_ms": 1,
        "model": "m",
        "instructions": "",
        "max_output_tokens": None,
        "temperature": None,
        "top_p": None,
        "stop": (),
        "metadata": None,
    }
    return Begun(**{**fields, **changes})


def new_response(**changes: Any) -> Response:
    return Response(begun(**changes), previous_item_id="item_1")


def streaming(*pieces: str) -> Response:
    """A response whose text so far was stored in these pieces."""
    response = new_response()
    response.move(State.PREFILL)
    response.move(State.STREAMING)
    for piece in pieces:
        response.on_stored(piece, len(piece.encode()))
    return response


def outcome(response: Response, status: ResponseStatus = "completed", *, cut: int | None = None) -> Outcome:
    """The end of a response as the conductor makes it; ``cut``: what was seen of it."""
    length = response.length if cut is None else min(cut, response.length)
    return Outcome(
        status=status,
        details=DETAILS[status],
        usage=Usage.of(10, 5, 4),
        timing=Timing(queue_ms=1, ttft_ms=2, total_ms=3),
        engine="engine-1",
        text_length=length,
        epochs=[*response.epochs, (CUT_EPOCH, length)] if length < response.length else list(response.epochs),
        keeps_item=length > 0 or status == "completed",
    )


class Reader:
    """One connection: what it was told, and the text that it has by the offset rule.

    ``back``: its client had that connection before, and comes back with what it holds from there.
    """

    def __init__(self, response: Response, *, takes_cuts: bool = True, back: Reader | None = None) -> None:
        self.response = response
        #: the text that it holds, and the last epoch that it was told of
        self.text, self.epoch = "", ""
        held: ResumePoint | None = None
        if back is not None and back.events:
            self.text, self.epoch = back.text, back.epoch
            held = ResumePoint(response.id, back.epoch, len(back.text))
        self.resumed = held
        self.view = View(response, takes_cuts=takes_cuts, held=held)
        self.events: list[dict[str, Any]] = []
        self.frames: list[bytes] = []
        self._began = False

    def step(self) -> dict[str, Any] | None:
        """The next frame, judged; None if there is nothing to tell at the moment."""
        frame = self._next()
        if frame is None:
            return None
        event: dict[str, Any] = json.loads(frame)
        assert not self.events or self.events[-1]["type"] != "response.done", f"after the end: {event}"
        events.check(event, extensions=True)
        assert event["event_id"] not in {earlier["event_id"] for earlier in self.events}
        if event["type"] == "response.output_text.delta":
            assert event["offset"] <= len(self.text), "a gap"
            assert event["epoch"] == self.response.epoch
            self.text = self.text[: event["offset"]] + event["delta"]
            self.epoch = event["epoch"]
        self.frames.append(frame)
        self.events.append(event)
        return event

    def read(self) -> list[str]:
        """All that there is to tell now, as types."""
        told = []
        while (event := self.step()) is not None:
            told.append(event["type"])
        return told

    def named(self, kind: str) -> dict[str, Any]:
        """The only event of a type."""
        [event] = [event for event in self.events if event["type"] == kind]
        return event

    @property
    def order(self) -> str:
        return "".join(LETTERS[event["type"]] for event in self.events)

    def _next(self) -> bytes | None:
        if not self._began:
            frame = self.view.next_head()
            if frame is not None:
                return frame
            self._began = True
        return self.view.next_text() if self.response.outcome is None else self.view.next_tail()


#: Pieces as an engine streams them: words, white space, halves of what one sees as one character, what JSON escapes.
PIECES = [
    "Hi",
    " there",
    "\n\n",
    " ",
    "中文",
    "。",
    "é",
    "e",
    "\u0301",
    "👩",
    "🏽",
    "\u200d",
    "💻",
    "🇩",
    "🇪",
    '"\\',
    "\0\u2028",
]

Step = tuple[Any, ...]

steps = st.one_of(
    st.tuples(st.just("text"), st.sampled_from(PIECES)),
    st.tuples(st.just("text"), st.sampled_from(PIECES)),
    st.sampled_from([("take",), ("stored",), ("take",), ("stored",), ("think",), ("retry",)]),
    st.tuples(st.just("read"), st.integers(0, 3), st.integers(1, 5)),
    st.tuples(st.just("join"), st.booleans(), st.one_of(st.none(), st.integers(0, 3))),
)
schedules = st.lists(steps, min_size=1, max_size=50)
endings: st.SearchStrategy[tuple[ResponseStatus, int]] = st.tuples(
    st.sampled_from(["completed", "cancelled", "incomplete", "failed"]), st.integers(0, 12)
)


class Play:
    """An answer from its beginning to its end, with readers that join at any moment and read at any pace."""

    def __init__(self) -> None:
        self.response = new_response()
        self.readers = [Reader(self.response)]
        self.stored = ""
        self.final = ""
        self._commit: Commit | None = None
        self._frames: dict[tuple[int, str, int], bytes] = {}

    def run(self, schedule: list[Step], ending: tuple[ResponseStatus, int], after: list[Step]) -> None:
        self.response.move(State.PREFILL)
        for step in schedule:
            self._act(step)
        self._end(*ending)
        for step in after:
            if step[0] in ("read", "join"):
                self._act(step)
        for reader in self.readers:
            while self._read(reader):
                pass

    def _act(self, step: Step) -> None:
        match step:
            case ("text", text):
                self.response.on_text(text)
            case ("think",):
                self.response.on_thinking()
            case ("retry",):
                self.response.move(State.QUEUED)
                self.response.move(State.PREFILL)
            case ("take",):
                self._commit = self.response.take_commit() or self._commit
            case ("stored",):
                self._settle()
            case ("join", takes_cuts, back):
                known = None if back is None else self.readers[back % len(self.readers)]
                self.readers.append(Reader(self.response, takes_cuts=takes_cuts, back=known))
            case ("read", which, count):
                reader = self.readers[which % len(self.readers)]
                for _ in range(count):
                    self._read(reader)

    def _settle(self) -> None:
        if self._commit is not None:
            self.stored += self._commit.text
            self._commit = None
            self.response.stored_in_flight()

    def _end(self, status: ResponseStatus, seen: int) -> None:
        self._settle()
        rest = self.response.take_rest()
        if rest and status != "cancelled":
            self.stored += rest
            self.response.on_stored(rest, len(rest.encode()))
        end = outcome(self.response, status, cut=seen if status == "cancelled" else None)
        self.final = self.stored = self.stored[: end.text_length]
        self.response.end(end)

    def _read(self, reader: Reader) -> bool:
        event = reader.step()
        if event is None:
            return False
        if event["type"] == "response.output_text.delta":
            offset = event["offset"]
            assert event["delta"] == self.stored[offset:], "told what is not stored, or not all that is"
            place = (offset, event["epoch"], len(self.stored))
            assert self._frames.setdefault(place, reader.frames[-1]) == reader.frames[-1]
        return True
