"""Whatever a socket takes, and when: all is told once, in its order, and what waits is bounded."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_server.core.response import Response
from chat_server.core.server_events import ItemDeleted
from chat_server.edge import outbox as outbox_module
from tests.core.answers import LETTERS, ORDER, new_response, outcome
from tests.edge.sockets import FakeSocket
from tests.edge.test_outbox import outbox_of, stored

pytestmark = pytest.mark.pure

#: bytes at which the buffer is full; it takes more when a quarter of it is left.
HIGH = 600
#: bytes of the longest frame here.
LONGEST = 2500
MOST_EVENTS, MOST_BYTES = 8, 1500

Step = tuple[str, int]
steps = st.lists(
    st.tuples(
        st.sampled_from(["push", "begin", "text", "text", "text", "end", "take", "take", "eager", "tick"]),
        st.integers(0, 700),
    ),
    max_size=60,
)


class Kernel(FakeSocket):
    """A socket with a buffer in bytes, of which the kernel takes what it likes, at once or later."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = False
        #: bytes that it takes of a frame while that is written.
        self.eager = 0

    @property
    def can_write(self) -> bool:
        return self.is_open and not self.paused

    def write_text(self, payload: bytes) -> None:
        self.waiting += len(payload)
        super().write_text(payload)
        self.paused = self.waiting > HIGH
        assert self.waiting <= HIGH + LONGEST
        self.take(self.eager)

    def take(self, count: int) -> None:
        """The kernel takes so many bytes; the outbox hears of it, also in the midst of its own write."""
        self.waiting = max(0, self.waiting - count)
        if self.paused and self.waiting <= HIGH // 4:
            self.paused = False
            self.on_write()


class Play:
    """An outbox on such a socket. ``script`` is what must be told: events, and beginnings and ends of answers."""

    def __init__(self) -> None:
        self.socket = Kernel()
        self.outbox = outbox_of(self.socket)
        self.socket.on_write = self.outbox.pump
        self.script: list[str] = []
        self.running: list[Response] = []
        self.texts: dict[str, str] = {}
        self.now = 0.0

    def act(self, step: Step) -> None:
        what, number = step
        running = self.running[number % len(self.running)] if self.running else None
        match what:
            case "push":
                self.script.append(f"event {len(self.script)}")
                self.outbox.push(ItemDeleted(item_id=self.script[-1]))
            case "begin" if len(self.running) < 2:
                response = new_response(id=f"resp_{len(self.script)}", item_id=f"item_{len(self.script)}")
                self.script.append(f"begin {response.id}")
                self.running.append(response)
                self.outbox.begin(response)
            case "text" if running is not None:
                stored(running, ["Hi", " ü", "👩🏽\u200d💻", '"\n'][number % 4] * (1 + number // 100))
                self.outbox.pump()
            case "end" if running is not None:
                self.running.remove(running)
                running.end(outcome(running, "cancelled", cut=number))
                self.script.append(f"end {running.id}")
                self.texts[running.item_id] = running.text(0)
                self.outbox.end(running)
            case "take":
                self.socket.take(number)
            case "eager":
                self.socket.eager = number
            case "tick":
                self.now += 1
                self.outbox.tick(self.now, 0, "idle", None)
        waits = self.outbox.statistics()
        assert waits["events"] <= outbox_module.MAX_EVENTS
        assert waits["event_bytes"] <= outbox_module.MAX_EVENT_BYTES
        assert waits["views"] <= len(self.texts) + len(self.running)

    @property
    def told(self) -> list[dict[str, Any]]:
        return [told for told in map(json.loads, self.socket.frames) if told["type"] != "heartbeat"]

    @property
    def told_script(self) -> list[str]:
        """What was told, as the script has it."""
        names = []
        for event in self.told:
            match event:
                case {"type": "response.created", "response": {"id": name}}:
                    names.append(f"begin {name}")
                case {"type": "response.done", "response": {"id": name}}:
                    names.append(f"end {name}")
                case {"type": "conversation.item.deleted", "item_id": name} if name.startswith("event"):
                    names.append(name)
        return names

    def judge(self) -> None:
        """Each answer in the protocol's order, its text whole by the offset rule, no event twice."""
        order: dict[str, str] = {}
        texts: dict[str, str] = {}
        for event in self.told:
            if event["type"] == "response.output_text.delta":
                have = texts.get(event["item_id"], "")
                assert event["offset"] <= len(have), "a gap"
                texts[event["item_id"]] = have[: event["offset"]] + event["delta"]
            name = event.get("response_id") or event.get("response", event.get("item", event)).get("id")
            kind, _, number = (name or event["item_id"]).partition("_")
            if kind in ("resp", "item"):
                order[number] = order.get(number, "") + LETTERS[event["type"]]
        ids = [event["event_id"] for event in self.told if event["type"] != "response.output_text.delta"]
        assert len(set(ids)) == len(ids)
        for number, letters in order.items():
            if letters.endswith("D"):
                assert ORDER.fullmatch(letters), letters
                assert texts.get(f"item_{number}", "") == self.texts[f"item_{number}"]


@settings(max_examples=100)
@given(steps)
def test_all_is_told_once_and_in_its_order(play_of: list[Step]) -> None:
    """Events, beginnings and ends as they came; text as the reader takes it."""
    play = Play()
    for step in play_of:
        play.act(step)
    while play.running:
        play.act(("end", 5))
    while play.socket.waiting:
        play.socket.take(play.socket.waiting)
    assert play.told_script == play.script
    play.judge()
    assert play.outbox.statistics() == {"events": 0, "event_bytes": 0, "views": 0}


@settings(max_examples=100)
@given(steps)
def test_a_reader_that_is_dropped_was_told_the_beginning_of_it(play_of: list[Step]) -> None:
    """Too many events or too many bytes wait: it is gone at once, and nothing more is told or kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outbox_module, "MAX_EVENTS", MOST_EVENTS)
        patch.setattr(outbox_module, "MAX_EVENT_BYTES", MOST_BYTES)
        play = Play()
        for step in [("push", 0)] * 4 + play_of:
            play.act(step)
            if not play.socket.is_open:
                break
        at_the_end = len(play.socket.frames)
        if not play.socket.is_open:
            assert play.outbox.statistics()["views"] == 0
            play.socket.take(1 << 30)
            play.act(("text", 0))
            assert len(play.socket.frames) == at_the_end
    assert play.told_script == play.script[: len(play.told_script)]
    play.judge()
