"""What the store's operations take and answer, as types, and how these are written and read in the scripts' terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from chat_server.core.items import Item, SessionSettings, decode_item, encode_item, to_wire
from chat_server.core.placement import Binding
from chat_server.core.principal import Principal
from chat_server.core.response import Begun


@dataclass(frozen=True, slots=True)
class Cut:
    """A wish to stop a response: its text is cut to ``length`` code points, never past what is stored."""

    length: int


#: a stop that keeps all of the text: no text has so many code points.
KEEP_ALL = Cut(1 << 53)


@dataclass(frozen=True, slots=True)
class SessionState:
    """A session as ``watch`` found it."""

    owner: Principal
    created_ms: int
    model: str
    settings: SessionSettings
    version: int
    item_count: int
    running: RunningState | None
    queued: QueuedState | None = None
    #: the messages of the last changes, oldest first, if they were asked for.
    changes: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, reply: list[Any]) -> SessionState:
        fields, response = _pairs(reply[1]), _pairs(reply[3])
        return cls(
            owner=Principal(fields["tenant"].decode(), fields["user"].decode()),
            created_ms=int(fields["created"]),
            model=fields["model"].decode(),
            settings=msgspec.json.decode(fields["settings"], type=SessionSettings),
            version=int(fields["version"]),
            item_count=reply[2],
            running=RunningState.of(response, reply[4], reply[5]) if "id" in response else None,
            queued=QueuedState.of(response, reply[6]) if "q_id" in response else None,
            changes=tuple(reply[7]),
        )


@dataclass(frozen=True, slots=True)
class RunningState:
    """The running response of a session as ``watch`` found it."""

    begun: Begun
    previous: str | None
    token: str
    replica: str
    text: str
    #: those that joined the chain since it was begun.
    later_epochs: tuple[tuple[str, int], ...] = ()
    #: somebody wants it stopped.
    wish: Cut | None = None

    @classmethod
    def of(cls, fields: dict[str, bytes], text: bytes, previous: bytes | None) -> RunningState:
        later = msgspec.json.decode(b"[%b]" % fields.get("later", b""), type=tuple[tuple[str, int], ...])
        return cls(
            later_epochs=later,
            begun=msgspec.json.decode(fields["begun"], type=Begun),
            previous=text_of(previous),
            token=fields["token"].decode(),
            replica=fields["replica"].decode(),
            text=text.decode(),
            wish=Cut(int(fields["cancel"])) if "cancel" in fields else None,
        )


@dataclass(frozen=True, slots=True)
class QueuedState:
    """The response that waits behind the running one; ``token`` is the one that it starts with."""

    begun: Begun
    previous: str | None
    token: str

    @classmethod
    def of(cls, fields: dict[str, bytes], previous: bytes | None) -> QueuedState:
        begun = msgspec.json.decode(fields["q_begun"], type=Begun)
        return cls(begun, text_of(previous), fields["q_token"].decode())


@dataclass(frozen=True, slots=True, order=True)
class Held:
    """What the store holds of a session, in short: its version, and the bytes of the running response's text.

    ``wish``: the response that somebody wants stopped, and where.
    """

    version: int
    size: int
    wish: tuple[str, Cut] | None = field(default=None, compare=False)

    @classmethod
    def of(cls, reply: list[Any]) -> Held:
        wish = (reply[2].decode(), Cut(int(reply[3]))) if reply[2] else None
        return cls(int(reply[0]), reply[1], wish)


@dataclass(frozen=True, slots=True)
class Added:
    """What came of putting an item in. ``message`` for ``ok``, ``previous`` for ``duplicate``."""

    kind: Literal["ok", "duplicate", "conflict", "full", "too_large", "no_previous"]
    message: bytes = b""
    previous: str | None = None

    @classmethod
    def of(cls, reply: list[Any]) -> Added:
        match reply[0]:
            case b"ok":
                return cls("ok", message=reply[1])
            case b"duplicate":
                return cls("duplicate", previous=text_of(reply[1]))
            case kind:
                return cls(kind.decode())


@dataclass(frozen=True, slots=True)
class BeginReply:
    """What came of beginning a response: ``ok``, the caller makes it; ``queued``, it waits behind the running one.

    All items and the session's binding come with ``ok``, the wish to stop the running one with ``queued``.
    ``stopping``: the item's answer is being stopped before it said anything; when it has ended, the item has none.
    """

    kind: Literal["ok", "queued", "active", "duplicate", "stopping", "ended", "no_item", "full", "too_large"]
    messages: tuple[bytes, ...] = ()
    items: tuple[Item, ...] = ()
    binding: Binding | None = None
    wish: Cut | None = None
    #: the response that runs, or that answered the item before, and that one's item.
    response_id: str = ""
    item_id: str = ""

    @classmethod
    def of(cls, reply: list[Any]) -> BeginReply:
        match reply[0]:
            case b"ok":
                return cls("ok", tuple(reply[1]), items=_items(reply[3]), binding=_binding(reply[2]))
            case b"queued":
                wish = Cut(int(reply[3])) if reply[3] else None
                return cls("queued", tuple(reply[1]), response_id=reply[2].decode(), wish=wish)
            case b"duplicate" | b"stopping" as kind:
                response_id, _, item_id = reply[1].decode().partition(" ")
                return cls(kind.decode(), response_id=response_id, item_id=item_id)
            case b"active":
                return cls("active", response_id=reply[1].decode())
            case kind:
                return cls(kind.decode())


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A session as the owner of its answer knows it, to write it again if the store loses it.

    ``response`` are the fields of the running one, if there is one, and ``text`` is what is stored of it.
    """

    version: int
    owner: Principal
    model: str
    settings: SessionSettings
    created_ms: int
    items: tuple[Item, ...]
    response: dict[str, str | bytes]
    text: str

    def arguments(self) -> list[Any]:
        """Its version, the hashes of the session, each with its length, and the text, as a script takes them."""
        fields = {
            "tenant": self.owner.tenant,
            "user": self.owner.user,
            "model": self.model,
            "settings": to_wire(self.settings),
            "created": self.created_ms,
        }
        items = {item.id: encode_item(item) for item in self.items}
        hashes: tuple[dict[str, Any], ...] = (fields, items, _answered(self.items), self.response)
        flat = [[part for pair in pairs.items() for part in pair] for pairs in hashes]
        return [self.version, *(value for pairs in flat for value in (len(pairs), *pairs)), self.text.encode()]


@dataclass(frozen=True, slots=True)
class TextCommit:
    """One response's share of a group commit."""

    session_id: str
    response_id: str
    token: str
    epoch: str
    byte_offset: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class TakenOver:
    """A response that was taken over, as it is stored.

    ``attempts`` counts the makings that brought no new text, the one that begins now included.
    """

    message: bytes
    text: str
    wish: Cut | None
    attempts: int
    binding: Binding | None
    items: tuple[Item, ...]

    @classmethod
    def of(cls, reply: list[Any]) -> TakenOver:
        return cls(
            message=reply[1],
            text=reply[2].decode(),
            wish=None if reply[3] is None else Cut(int(reply[3])),
            attempts=reply[4],
            binding=_binding(reply[5]),
            items=_items(reply[6]),
        )


#: What became of a commit: stored; stored, and somebody wants the response stopped; this replica is not the owner (any
#: more); the response or its text was lost.
CommitReply = Literal["ok", "wished", "refused", "missing", "short"]


def text_of(value: bytes | None) -> str | None:
    """An id, or none."""
    return value.decode() if value else None


def _pairs(flat: list[bytes]) -> dict[str, bytes]:
    return {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2)}


def _binding(reply: list[bytes | None]) -> Binding | None:
    engine, epoch = reply
    return Binding(engine.decode(), (epoch or b"").decode()) if engine else None


def _items(reply: list[bytes | None]) -> tuple[Item, ...]:
    return tuple(decode_item(raw) for raw in reply if raw)


def _answered(items: Sequence[Item]) -> dict[str, str]:
    """Which item is answered by which response and item, and which item a response left."""
    found = {}
    for item in items:
        if isinstance(item.response_id, str):
            if isinstance(item.in_reply_to, str):
                found[item.in_reply_to] = f"{item.response_id} {item.id}"
            if item.status != "in_progress":
                found[f">{item.response_id}"] = item.id
    return found
