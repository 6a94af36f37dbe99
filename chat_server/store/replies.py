"""What the store's operations take and answer, as types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from chat_server.core.items import Item, SessionSettings
from chat_server.core.placement import Binding
from chat_server.core.principal import Principal
from chat_server.core.response import Begun


@dataclass(frozen=True, slots=True)
class Cut:
    """A wish to stop a response: its text is cut to ``length`` code points, never past what is stored."""

    length: int


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


@dataclass(frozen=True, slots=True)
class QueuedState:
    """The response that waits behind the running one; ``token`` is the one that it starts with."""

    begun: Begun
    previous: str | None
    token: str


@dataclass(frozen=True, slots=True, order=True)
class Held:
    """What the store holds of a session, in short: its version, and the bytes of the running response's text."""

    version: int
    size: int


@dataclass(frozen=True, slots=True)
class Added:
    """What came of putting an item in. ``message`` for ``ok``, ``previous`` for ``duplicate``."""

    kind: Literal["ok", "duplicate", "conflict", "full", "too_large", "no_previous"]
    message: bytes = b""
    previous: str | None = None


@dataclass(frozen=True, slots=True)
class BeginReply:
    """What came of beginning a response: ``ok``, the caller makes it; ``queued``, it waits behind the running one.

    All items and the session's binding come with ``ok``, the wish to stop the running one with ``queued``.
    """

    kind: Literal["ok", "queued", "active", "duplicate", "ended", "no_item", "full", "too_large"]
    messages: tuple[bytes, ...] = ()
    items: tuple[Item, ...] = ()
    binding: Binding | None = None
    wish: Cut | None = None
    #: the response that runs, or that answered the item before, and that one's item.
    response_id: str = ""
    item_id: str = ""


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


#: What became of a commit: stored; stored, and somebody wants the response stopped; this replica is not the owner (any
#: more); the response or its text was lost.
CommitReply = Literal["ok", "wished", "refused", "missing", "short"]
