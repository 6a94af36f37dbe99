"""What replicas tell each other of a session, as the scripts write it.

A change of a session is one JSON object; the script that made the change built it, published it to the other watchers
and returned it to the caller. So the replica that writes and those that listen apply the very same message. Text of a
running response is a line of its own with the bytes after it: there is one per commit, and nothing to parse.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec import Struct

from chat_server.core.items import Item, SessionSettings
from chat_server.core.response import Begun, Outcome


class Change(Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base: which session, and from which version to which. ``before`` must be the reader's, else it missed one."""

    session: str
    before: int
    version: int


class ItemPut(Change, frozen=True, kw_only=True, tag="item"):
    """An item entered the conversation behind ``previous``."""

    previous: str | None
    item: Item


class ItemGone(Change, frozen=True, kw_only=True, tag="deleted"):
    """An item left it; ``previous`` stood before it."""

    item_id: str
    previous: str | None = None


class ItemTruncated(Change, frozen=True, kw_only=True, tag="truncated"):
    """An item keeps only its first ``text_end`` code points."""

    item: Item
    text_end: int


class SettingsChanged(Change, frozen=True, kw_only=True, tag="settings"):
    """New settings, whole."""

    model: str
    settings: SessionSettings


class ResponseBegan(Change, frozen=True, kw_only=True, tag="begin"):
    """A response has its place in the conversation. ``token`` is its owner's: who takes over compares it.

    A ``queued`` one starts when the running one has ended.
    """

    previous: str | None
    token: str
    begun: Begun
    queued: bool = False


class ResponseMoved(Change, frozen=True, kw_only=True, tag="moved"):
    """A response has another owner (none: ``""``), or the same one goes on with it on another engine.

    A new owner starts an ``epoch``. ``reason`` is for clients; empty while nobody goes on with it.
    """

    response: str
    owner: str
    token: str
    epoch: tuple[str, int] | None
    reason: str


class Next(Struct, frozen=True):
    """The queued response, which starts now: its owner, and the token that it starts with."""

    response: str
    token: str
    replica: str


class ResponseEnded(Change, frozen=True, kw_only=True, tag="end"):
    """A response ended: the rest of its text (from ``offset``, code points), its outcome; the ``next`` one starts."""

    response: str
    offset: int
    rest: str
    outcome: Outcome
    next: Next | None = None

    @property
    def needs(self) -> int:
        """How much of the text must be there before it (code points): what a cut takes away is not missed."""
        return min(self.offset, self.outcome.text_length)


class SessionDeleted(Change, frozen=True, kw_only=True, tag="gone"):
    """The session is no more."""


AnyChange = (
    ItemPut
    | ItemGone
    | ItemTruncated
    | SettingsChanged
    | ResponseBegan
    | ResponseMoved
    | ResponseEnded
    | SessionDeleted
)


@dataclass(frozen=True, slots=True)
class Text:
    """Text of a running response was stored: it begins at ``offset`` (code points)."""

    session: str
    response: str
    epoch: str
    offset: int
    text: str
    size: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """To the owner of a response: somebody wants it stopped, its text cut to ``cut`` code points."""

    session: str
    response: str
    cut: int


@dataclass(frozen=True, slots=True)
class Wake:
    """To any replica: nobody makes the answer of this session; go on with it."""

    session: str


_decoder: msgspec.json.Decoder[AnyChange] = msgspec.json.Decoder(AnyChange)
_encoder = msgspec.json.Encoder()


def decode(raw: bytes) -> AnyChange | Text | Cancel | Wake:
    """A message from an inbox or a script's reply. Raises ValueError for one that is neither."""
    if raw.startswith(b"text "):
        head, _, data = raw.partition(b"\n")
        _, session, response, epoch, offset = head.decode().split(" ")
        return Text(session, response, epoch, int(offset), data.decode(), len(data))
    if raw.startswith(b"cancel "):
        _, session, response, cut = raw.decode().split(" ")
        return Cancel(session, response, int(cut))
    if raw.startswith(b"wake "):
        return Wake(raw[5:].decode())
    return _decoder.decode(raw)


def wake(session: str) -> bytes:
    """A Wake message."""
    return b"wake %b" % session.encode()


def truncated_body(item: Item, text_end: int) -> bytes:
    """The inside of an ItemTruncated message."""
    return _encoder.encode({"item": item, "text_end": text_end})[1:-1]


def end_body(response: str, offset: int, rest: str, outcome: Outcome) -> bytes:
    """The inside of a ResponseEnded message, for the script to complete."""
    return _encoder.encode({"response": response, "offset": offset, "rest": rest, "outcome": outcome})[1:-1]
