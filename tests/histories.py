"""A session as the store has it, whatever is done to it by two replicas, and what is told of that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from chat_server.core.items import Item, Part, SessionSettings, Timing, Usage
from chat_server.core.principal import LOCAL
from chat_server.core.response import Outcome
from chat_server.store.messages import (
    AnyChange,
    ItemGone,
    ItemPut,
    ItemTruncated,
    Next,
    ResponseBegan,
    ResponseEnded,
    ResponseMoved,
    SettingsChanged,
    Text,
)
from chat_server.store.replies import QueuedState, RunningState, SessionState
from tests.core.answers import begun

#: the replica that the session is looked at from, and another one.
US, THEM = "replica_us", "replica_them"
OPERATIONS = ["put", "gone", "truncate", "settings", "begin", "text", "text", "text", "move", "end", "cancel queued"]
PIECES = ["Hi", " there", "ü", "👩🏽\u200d💻", "\n"]


@dataclass(frozen=True)
class Message:
    """What the store said, its place in the order of writes, and by whose write: the answer goes to him."""

    number: int
    who: str
    what: AnyChange | Text


@dataclass
class Answer:
    """A response as the store has it."""

    id: str
    item_id: str
    previous: str | None
    owner: str
    token: str
    epochs: list[tuple[str, int]]
    text: str = ""


@dataclass
class World:
    """The store, in short: what was done, and by whom. ``told`` are the messages in their order."""

    version: int = 10
    items: list[str] = field(default_factory=lambda: ["item_0"])
    top_p: float = 1.0
    running: Answer | None = None
    queued: Answer | None = None
    count: int = 0
    told: list[Message] = field(default_factory=list)

    def state(self) -> SessionState:
        """What ``watch`` finds now."""
        running = queued = None
        if self.running is not None:
            one = self.running
            first, *later = one.epochs
            running = RunningState(
                begun(id=one.id, item_id=one.item_id, epochs=[first]),
                one.previous,
                one.token,
                one.owner,
                one.text,
                tuple(later),
            )
        if self.queued is not None:
            one = self.queued
            queued = QueuedState(
                begun(id=one.id, item_id=one.item_id, epochs=list(one.epochs)), one.previous, one.token
            )
        return SessionState(
            LOCAL, 0, "m", SessionSettings(top_p=self.top_p), self.version, len(self.items), running, queued
        )

    def do(self, what: str, who: str, number: int) -> None:
        """Carry out an operation, if it can be done now."""
        match what:
            case "put":
                name = self._name("item")
                content = [Part(type="input_text", text=name)]
                item = Item(id=name, status="completed", role="user", content=content)
                self._change(who, ItemPut, previous=self._last(), item=item)
                self.items.append(name)
            case "gone" if free := self._free():
                name = free[number % len(free)]
                at = self.items.index(name)
                previous = self.items[at - 1] if at else None
                self._change(who, ItemGone, item_id=name, previous=previous)
                self._take_out(name)
            case "truncate" if free := self._free():
                name = free[number % len(free)]
                content = [Part(type="input_text", text=name[:number])]
                cut = Item(id=name, status="incomplete", role="user", content=content)
                self._change(who, ItemTruncated, item=cut, text_end=number)
            case "settings":
                self.top_p = (number + 1) / 10
                self._change(who, SettingsChanged, model="m", settings=SessionSettings(top_p=self.top_p))
            case "begin" if self.running is None or self.queued is None:
                self._begin(who)
            case "text" if self.running is not None and self.running.owner:
                one, piece = self.running, PIECES[number % len(PIECES)]
                message = Text("sess_1", one.id, one.epochs[-1][0], len(one.text), piece, len(piece.encode()))
                one.text += piece
                self._tell(one.owner, message)
            case "move" if self.running is not None:
                self._move(who, number)
            case "end" if self.running is not None and self.running.owner:
                self._end(self.running, number)
            case "cancel queued" if self.queued is not None:
                one, self.queued = self.queued, None
                self._told_end(who, one, "", 0, keeps=False, starts=None)

    def _begin(self, who: str) -> None:
        name = self._name("resp")
        one = Answer(name, self._name("item"), self._last(), who, self._name("token"), [(self._name("epoch"), 0)])
        is_queued = self.running is not None
        self._change(
            who,
            ResponseBegan,
            previous=one.previous,
            token=one.token,
            begun=begun(id=one.id, item_id=one.item_id, epochs=list(one.epochs), replica=who),
            queued=is_queued,
        )
        self.items.append(one.item_id)
        if is_queued:
            self.queued = one
        else:
            self.running = one

    def _move(self, who: str, number: int) -> None:
        """It is left to whoever comes, goes on elsewhere with the same owner, or has another owner."""
        one = self.running
        assert one is not None
        epoch, reason = None, ""
        if number % 3 == 0 and one.owner == who:
            one.owner = ""
        elif number % 3 == 1 and one.owner == who:
            reason = "engine_lost"
        else:
            epoch, reason = (self._name("epoch"), len(one.text)), "replica_lost"
            one.epochs.append(epoch)
            one.owner = who
        one.token = self._name("token")
        self._change(who, ResponseMoved, response=one.id, owner=one.owner, token=one.token, epoch=epoch, reason=reason)

    def _end(self, one: Answer, number: int) -> None:
        """With its rest, or cut."""
        rest = PIECES[number % len(PIECES)] if number % 2 else ""
        length = len(one.text + rest)
        if number % 3 == 0:
            length = min(length, number)
        starts = None
        self.running, self.queued = self.queued, None
        if self.running is not None:
            self.running.owner, self.running.token = one.owner, self._name("token")
            starts = Next(self.running.id, self.running.token, self.running.owner)
        self._told_end(one.owner, one, rest, length, keeps=length > 0, starts=starts)

    def _told_end(self, who: str, one: Answer, rest: str, length: int, *, keeps: bool, starts: Next | None) -> None:
        whole = len(one.text + rest)
        epochs = [*one.epochs, (self._name("epoch"), length)] if length < whole else list(one.epochs)
        outcome = Outcome(
            status="cancelled",
            usage=Usage.of(10, 5, 4),
            timing=Timing(queue_ms=1, ttft_ms=2, total_ms=3),
            engine="engine-1",
            text_length=length,
            epochs=epochs,
            keeps_item=keeps,
        )
        self._change(who, ResponseEnded, response=one.id, offset=len(one.text), rest=rest, outcome=outcome, next=starts)
        if not keeps:
            self._take_out(one.item_id)

    def _take_out(self, name: str) -> None:
        at = self.items.index(name)
        previous = self.items[at - 1] if at else None
        for one in (self.running, self.queued):
            if one is not None and one.previous == name:
                one.previous = previous
        self.items.remove(name)

    def _change(self, who: str, kind: Callable[..., AnyChange], **fields: Any) -> None:
        before, self.version = self.version, self.version + 1 + self.count % 3
        self._tell(who, kind(session="sess_1", before=before, version=self.version, **fields))

    def _tell(self, who: str, what: AnyChange | Text) -> None:
        self.told.append(Message(len(self.told) + 1, who, what))

    def _name(self, kind: str) -> str:
        self.count += 1
        return f"{kind}_{self.count}"

    def _last(self) -> str | None:
        return self.items[-1] if self.items else None

    def _free(self) -> list[str]:
        busy = {one.item_id for one in (self.running, self.queued) if one is not None}
        return [name for name in self.items if name not in busy]
