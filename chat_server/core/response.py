"""One answer in the making: its state, its one text, and the frames that tell of it.

A running response keeps its text once: what the engine sent is *pending* until the store has it; what is *stored* may
be told. Connections keep only how far they have been told (``view.py``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson
from msgspec import UNSET, Struct, UnsetType

from chat_server.core.items import Item, Part, ResponseObject, ResponseStatus, StatusDetails, Timing, Usage
from chat_server.core.text import safe_length, word_length


class State(StrEnum):
    """What a response is doing; the names are those of the heartbeat, and ``ended``."""

    QUEUED = "queued"  # waits for an engine
    PREFILL = "prefill"  # an engine reads the prompt
    THINKING = "thinking"  # the model reasons, nothing of it is shown
    STREAMING = "streaming"  # text comes
    ENDED = "ended"


#: Which state may follow which; anything else is our own fault and raises.
TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.PREFILL, State.ENDED}),
    State.PREFILL: frozenset({State.QUEUED, State.THINKING, State.STREAMING, State.ENDED}),
    State.THINKING: frozenset({State.QUEUED, State.STREAMING, State.ENDED}),
    State.STREAMING: frozenset({State.QUEUED, State.THINKING, State.ENDED}),
    State.ENDED: frozenset(),
}


class Begun(Struct, frozen=True, kw_only=True):
    """What is stored of a response when it begins: all that any replica needs to tell of it or to go on with it."""

    id: str
    item_id: str
    in_reply_to: str | UnsetType = UNSET
    replica: str
    epochs: list[tuple[str, int]]
    created_ms: int
    model: str
    instructions: str
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    stop: tuple[str, ...]
    metadata: dict[str, str] | None
    #: the prompt, for a response that does not answer the conversation.
    input: list[Item] | UnsetType = UNSET


class Outcome(Struct, frozen=True, kw_only=True):
    """How a response ended; stored and told with its end. ``text_length`` is in code points, after any cut."""

    status: ResponseStatus
    details: StatusDetails | None = None
    usage: Usage | None = None
    timing: Timing | UnsetType = UNSET
    engine: str | UnsetType = UNSET
    text_length: int
    epochs: list[tuple[str, int]]
    keeps_item: bool


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """What a client holds of an answer that it was reading: the last epoch that it saw, and how many code points."""

    response_id: str
    epoch: str
    offset: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Text for the store: where it begins (bytes of UTF-8, and code points) and what it is."""

    byte_offset: int
    offset: int
    text: str
    data: bytes


class Response:
    """One answer. Pure: the owner feeds it, the committer takes from it, views read it.

    Invariants: ``stored`` text is a prefix of stored plus pending text; offsets count code points; nothing changes
    after ``end``.
    """

    def __init__(
        self,
        begun: Begun,
        *,
        previous_item_id: str | None,
        later_epochs: Sequence[tuple[str, int]] = (),
        private: bool = False,
    ) -> None:
        self.begun = begun
        #: whether it stays outside of the conversation, and belongs to the connection that asked for it.
        self.private = private
        self.id = begun.id
        self.item_id = begun.item_id
        self.previous_item_id = previous_item_id
        self.epochs = [*begun.epochs, *later_epochs]
        self.state = State.QUEUED
        self.outcome: Outcome | None = None
        #: whether the store can not take text at the moment; the heartbeat says ``waiting``.
        self.waiting_for_store = False
        self.length = 0  # stored, code points
        self.byte_length = 0  # stored, bytes
        self._pieces: list[str] = []
        self._starts: list[int] = []
        self._pending: list[str] = []
        self._in_flight: Commit | None = None
        self._frame_at = -1
        self._frame = b""
        self._safe_length = word_length if begun.stop else safe_length
        self._make_prefix()

    # --- the owner feeds it

    def move(self, state: State) -> None:
        """Go to ``state``. Raises ValueError if that can not follow the present one; nothing is changed then."""
        if state is self.state:
            return
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"a response that is {self.state} can not become {state}")
        self.state = state

    def on_text(self, text: str) -> None:
        """Text came from the engine."""
        if text and self.state is not State.ENDED:
            self.move(State.STREAMING)
            self._pending.append(text)

    def on_thinking(self) -> None:
        """Reasoning came from the engine; it is not shown."""
        if self.state is not State.ENDED:
            self.move(State.THINKING)

    def go_on(self) -> str:
        """The text that another engine goes on from; ask when the last one is left, and before the next one writes.

        It is what is stored, what is on its way there (it will be stored: the committer does not give up), and what
        is pending up to a safe place. What is pending after that is dropped: the next engine writes it again.
        """
        pending = "".join(self._pending)
        kept = pending[: self._safe_length(pending)]
        self._pending = [kept] if kept else []
        return self.text_under_way() + kept

    def take_commit(self) -> Commit | None:
        """The text to store next, up to a place from which another engine could go on exactly; None if there is none.

        One commit at a time: ``stored_in_flight`` must follow.
        """
        if self._in_flight is not None or not self._pending or self.state is State.ENDED:
            return None
        text = "".join(self._pending) if len(self._pending) > 1 else self._pending[0]
        length = self._safe_length(text)
        self._pending = [text[length:]] if length < len(text) else []
        if not length:
            return None
        text = text[:length]
        data = text.encode()  # never fails: no JSON that orjson takes gives a lone surrogate
        self._in_flight = Commit(self.byte_length, self.length, text, data)
        return self._in_flight

    def whole_commit(self) -> Commit:
        """All text up to the end of a commit under way, for a store that lost some of what it held."""
        text = self.text_under_way()
        return Commit(0, 0, text, text.encode())

    def text_under_way(self) -> str:
        """The stored text, and what a commit under way adds."""
        return self.text(0) + (self._in_flight.text if self._in_flight is not None else "")

    def forget_unstored(self) -> None:
        """Another making begins from what is stored; what else was there came from one that was left."""
        self._pending.clear()
        self._in_flight = None

    def take_rest(self) -> str:
        """All text that no commit took; it is stored with the end. Only while no commit is under way."""
        assert self._in_flight is None, "a commit is under way"
        rest = "".join(self._pending)
        self._pending.clear()
        return rest

    def stored_in_flight(self) -> None:
        """The store holds what ``take_commit`` gave: it may be told."""
        commit = self._in_flight
        assert commit is not None, "nothing was taken"
        self._in_flight = None
        self.on_stored(commit.text, len(commit.data))

    # --- what the store holds

    def on_stored(self, text: str, size: int) -> None:
        """The store holds ``text`` (``size`` bytes) more. Raises ValueError after the end."""
        if self.state is State.ENDED:
            raise ValueError("a response that has ended takes no more text")
        self._pieces.append(text)
        self._starts.append(self.length)
        self.length += len(text)
        self.byte_length += size
        self._frame = b""  # it is not the whole rest any more

    @property
    def in_flight(self) -> bool:
        """Whether a commit is under way."""
        return self._in_flight is not None

    @property
    def has_pending(self) -> bool:
        """Whether there is text that was not taken for a commit yet (it may wait for a safe place)."""
        return bool(self._pending)

    @property
    def epoch(self) -> str:
        return self.epochs[-1][0]

    def migrate(self, epoch: tuple[str, int]) -> None:
        """Another owner goes on with the text from here. Raises ValueError if the store holds more or less of it."""
        if epoch[1] != self.length:
            raise ValueError("the text is not what the new owner goes on from")
        self.epochs.append(epoch)
        self._make_prefix()

    def end(self, outcome: Outcome) -> None:
        """It ended, and the store knows: what is left to tell may be told. The text is cut as the outcome says.

        Raises ValueError if it has ended already; nothing is changed then.
        """
        if self.state is State.ENDED:
            raise ValueError("a response ends once")
        if outcome.text_length < self.length:
            text = self.text(0)[: outcome.text_length]
            self._pieces, self._starts = ([text], [0]) if text else ([], [])
            self.length = len(text)
            self.byte_length = len(text.encode())
        self._pending.clear()
        self.epochs = list(outcome.epochs)
        self._make_prefix()
        self.outcome = outcome
        self.move(State.ENDED)

    # --- what is told

    def resume_at(self, point: ResumePoint) -> int:
        """From which code point the text goes on for a client: whole, or from 0 if we do not know its epoch.

        The text before the start of an epoch is the same in that epoch and in the one before it.
        """
        known = [index for index, (epoch, _) in enumerate(self.epochs) if epoch == point.epoch]
        if not known:
            return 0
        return min([point.offset, self.length, *(start for _, start in self.epochs[known[0] + 1 :])])

    def text(self, start: int) -> str:
        """The stored text from code point ``start`` on."""
        if start >= self.length:
            return ""
        index = bisect_right(self._starts, start) - 1
        rest = self._pieces[index][start - self._starts[index] :]
        return rest if index == len(self._pieces) - 1 else rest + "".join(self._pieces[index + 1 :])

    def delta(self, start: int) -> bytes:
        """The frame with the stored text from ``start`` on (which may be none, after a cut).

        Views at the same place get the same bytes: in the common case it is escaped and framed once for all.
        """
        if start != self._frame_at or not self._frame:
            self._frame_at = start
            self._frame = b"".join(
                (
                    self._prefix,
                    b"%d" % start,
                    b',"delta":',
                    orjson.dumps(self.text(start)),
                    self._suffix,
                    # two deltas may begin at the same place: the first then is empty, and takes text back
                    b'%d_%d"}' % (start, self.length),
                )
            )
        return self._frame

    @property
    def heartbeat_state(self) -> str:
        return "waiting" if self.waiting_for_store else self.state.value

    def item(self) -> Item:
        """The answer's item as it stands: empty and in progress, or whole."""
        outcome = self.outcome
        if outcome is None:
            return self.make_item("in_progress", None)
        return self.make_item("completed" if outcome.status == "completed" else "incomplete", self.text(0), outcome)

    def make_item(self, status: Any, text: str | None, outcome: Outcome | None = None) -> Item:
        """The answer's item with ``text`` (None: no content yet)."""
        return Item(
            id=self.item_id,
            status=status,
            role="assistant",
            content=[] if text is None else [Part(type="output_text", text=text)],
            in_reply_to=self.begun.in_reply_to,
            response_id=self.id,
            epochs=UNSET if outcome is None else outcome.epochs,
            engine=UNSET if outcome is None else outcome.engine,
            usage=UNSET if outcome is None or outcome.usage is None else outcome.usage,
            timing=UNSET if outcome is None else outcome.timing,
            status_details=UNSET if outcome is None or outcome.details is None else outcome.details,
            metadata=UNSET if outcome is None or self.begun.metadata is None else self.begun.metadata,
        )

    def object(self) -> ResponseObject:
        """The response as ``response.created`` (running) or ``response.done`` (ended) shows it."""
        outcome = self.outcome
        if outcome is None:
            return ResponseObject(id=self.id, status="in_progress", output=[], metadata=self.begun.metadata)
        return ResponseObject(
            id=self.id,
            status=outcome.status,
            status_details=outcome.details,
            output=[self.item()] if outcome.keeps_item else [],
            usage=outcome.usage,
            metadata=self.begun.metadata,
            timing=outcome.timing,
            engine=outcome.engine,
        )

    def _make_prefix(self) -> None:
        """The constant parts of a delta's frame, built once per epoch. Its event id is made of the place."""
        head = orjson.dumps(
            {
                "type": "response.output_text.delta",
                "response_id": self.id,
                "item_id": self.item_id,
                "output_index": 0,
                "content_index": 0,
                "epoch": self.epoch,
            }
        )
        self._prefix = head[:-1] + b',"offset":'
        self._suffix = b',"event_id":"event_%s_' % self.epoch.rpartition("_")[2].encode()
        self._frame = b""


def cancelled_in_queue(response: Response) -> tuple[Item, Outcome]:
    """How a response ends that is cancelled before anything of it was made: its item, and the outcome."""
    outcome = Outcome(
        status="cancelled",
        details=StatusDetails(type="cancelled", reason="client_cancelled"),
        text_length=0,
        epochs=list(response.epochs),
        keeps_item=False,
    )
    return response.make_item("incomplete", "", outcome), outcome


def ended_response(item: Item, *, previous: str | None, kept: bool) -> Response:
    """An answer that ended, out of its stored item; ``kept``: the item is part of the conversation.

    Raises ValueError for an item that is no answer of ours.
    """
    if item.response_id is UNSET or item.epochs is UNSET or item.status_details is UNSET:
        raise ValueError("no answer of ours")
    status = item.status_details.type
    begun = Begun(
        id=item.response_id,
        item_id=item.id,
        in_reply_to=item.in_reply_to,
        replica="",
        epochs=item.epochs,
        created_ms=0,
        model="",
        instructions="",
        max_output_tokens=None,
        temperature=None,
        top_p=None,
        stop=(),
        metadata=None if item.metadata is UNSET else item.metadata,
    )
    response = Response(begun, previous_item_id=previous)
    response.on_stored(item.text, len(item.text.encode()))
    response.end(
        Outcome(
            status="completed" if status is UNSET else status,
            details=item.status_details,
            usage=None if item.usage is UNSET else item.usage,
            timing=item.timing,
            engine=item.engine,
            text_length=response.length,
            epochs=item.epochs,
            keeps_item=kept,
        )
    )
    return response
