"""What the server says, as types. Fields marked ``+`` are ours; every client tolerates them.

``encode`` gives a frame. Deltas do not come by here: ``response.py`` splices them, for there is one per token.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from chat_server.core.client_events import Flush
from chat_server.core.ids import new_id
from chat_server.core.items import Item, ResponseObject


class ServerEvent(Struct, kw_only=True, tag_field="type"):
    """Base of all; ``encode`` fills in the ``event_id`` of one that has none."""

    event_id: str = ""


class SessionObject(Struct, kw_only=True):
    """The session's settings in effect; ``flush`` is this connection's."""

    id: str
    object: Literal["realtime.session"] = "realtime.session"
    type: Literal["realtime"] = "realtime"
    model: str
    output_modalities: tuple[Literal["text"]] = ("text",)
    instructions: str
    max_output_tokens: int | Literal["inf"]
    temperature: float | None  # +
    top_p: float | None  # +
    stop: tuple[str, ...]  # +
    flush: Flush  # +
    heartbeat_interval_ms: int  # +


class ActiveResponse(Struct):
    """+ The answer that is being made while a connection joins; its text follows from ``offset``."""

    id: str
    item_id: str
    state: str
    epoch: str
    offset: int


class SessionCreated(ServerEvent, tag="session.created"):
    """The first frame, always."""

    session: SessionObject
    resumed: bool  # +
    item_count: int  # +
    active_response: ActiveResponse | None  # +


class SessionUpdated(ServerEvent, tag="session.updated"):
    """The settings after a change, whole."""

    session: SessionObject


class ItemAdded(ServerEvent, tag="conversation.item.added"):
    """An item has its place in the conversation."""

    previous_item_id: str | None
    item: Item
    duplicate: bool | UnsetType = UNSET  # +


class ItemDone(ServerEvent, tag="conversation.item.done"):
    """An item is whole."""

    previous_item_id: str | None
    item: Item
    duplicate: bool | UnsetType = UNSET  # +


class ItemRetrieved(ServerEvent, tag="conversation.item.retrieved"):
    """The answer to ``conversation.item.retrieve``."""

    item: Item


class ItemDeleted(ServerEvent, tag="conversation.item.deleted"):
    """An item left the conversation."""

    item_id: str


class ItemTruncated(ServerEvent, tag="conversation.item.truncated"):
    """An item keeps only what was seen of it: its first ``text_end`` code points."""

    item_id: str
    text_end: int  # +
    content_index: int = 0
    audio_end_ms: int = 0


class ResponseCreated(ServerEvent, tag="response.created"):
    """An answer was accepted."""

    response: ResponseObject
    in_reply_to: str | UnsetType = UNSET  # +
    duplicate: bool | UnsetType = UNSET  # +


class ResponseQueued(ServerEvent, tag="response.queued"):
    """+ It waits for a place on an engine. Only to connections with extensions."""

    response_id: str
    position: int


class ResponseMigrated(ServerEvent, tag="response.migrated"):
    """+ Another engine or replica goes on with it, without a gap. Only to connections with extensions."""

    response_id: str
    reason: str


class OutputItemAdded(ServerEvent, tag="response.output_item.added"):
    """The item that will hold the answer."""

    response_id: str
    output_index: int
    item: Item


class OutputItemDone(ServerEvent, tag="response.output_item.done"):
    """The item with the answer, whole."""

    response_id: str
    output_index: int
    item: Item


class WirePart(Struct):
    """A part as the events of a response show it."""

    text: str
    type: Literal["text"] = "text"


class ContentPartAdded(ServerEvent, tag="response.content_part.added"):
    """Text begins."""

    response_id: str
    item_id: str
    output_index: int
    content_index: int
    part: WirePart


class ContentPartDone(ServerEvent, tag="response.content_part.done"):
    """Text ended: the part, whole."""

    response_id: str
    item_id: str
    output_index: int
    content_index: int
    part: WirePart


class OutputTextDone(ServerEvent, tag="response.output_text.done"):
    """Text ended: the last word on what it is."""

    response_id: str
    item_id: str
    output_index: int
    content_index: int
    text: str


class ResponseDone(ServerEvent, tag="response.done"):
    """The end of a response: exactly once per response and connection, always last."""

    response: ResponseObject


class Heartbeat(ServerEvent, tag="heartbeat"):
    """+ We are here, and what the answer is doing. Only to connections with extensions."""

    now_ms: int
    state: Literal["idle", "queued", "prefill", "thinking", "streaming", "waiting"]
    response_id: str | None


class Pong(ServerEvent, tag="pong"):
    """+ The answer to ``ping``."""

    t: float | int | None
    now_ms: int


class ServerDraining(ServerEvent, tag="server.draining"):
    """+ This replica goes away: come back after ``retry_after_ms``, anywhere. Only to connections with extensions."""

    retry_after_ms: int


class ErrorBody(Struct, kw_only=True):
    """What went wrong, for programs (``code``, ``param``) and for people (``message``)."""

    type: str
    code: str
    message: str
    param: str | None = None
    event_id: str | None = None
    retryable: bool = False  # +
    retry_after_ms: int | UnsetType = UNSET  # +


class Error(ServerEvent, tag="error"):
    """Something that the client asked for was not done; the connection stays."""

    error: ErrorBody


_encoder = msgspec.json.Encoder()


def encode(event: ServerEvent) -> bytes:
    """One frame. Every event gets an id of its own."""
    if not event.event_id:
        event.event_id = new_id("event")
    return _encoder.encode(event)
