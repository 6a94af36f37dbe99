"""What a client may send, as types: the text part of the OpenAI Realtime API (GA) and our extensions.

Decoded by ``codec.py``. A field that is not named here is an error with its path, except those of the API that have no
meaning for text: they are named here as ignored, for the SDKs always send them. Extensions are marked with ``+``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from chat_server.core.ids import CLIENT_ID

Id = Annotated[str, Meta(pattern=CLIENT_ID)]
Text = str
TokenCount = Annotated[int, Meta(ge=1, le=10_000_000)]
MaxOutputTokens = TokenCount | Literal["inf"] | None
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Stop = Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=16)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
Count = Annotated[int, Meta(ge=0, le=2**53)]
#: parts of one message.
MAX_PARTS = 64


class Flush(Struct, frozen=True, forbid_unknown_fields=True):
    """+ When text is sent on. Only ``token`` (as it comes) so far."""

    mode: Literal["token", "word", "sentence", "paragraph"] = "token"
    max_delay_ms: Annotated[int, Meta(ge=1, le=60_000)] | None = None
    max_chars: Annotated[int, Meta(ge=1, le=100_000)] | None = None


class SessionPatch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of ``session.update``; unset ones stay as they are, null ones go back to their default."""

    type: Literal["realtime"] | UnsetType = UNSET
    instructions: Text | UnsetType | None = UNSET
    max_output_tokens: MaxOutputTokens | UnsetType = UNSET
    temperature: Temperature | UnsetType | None = UNSET  # +
    top_p: TopP | UnsetType | None = UNSET  # +
    stop: Stop | UnsetType | None = UNSET  # +
    flush: Flush | UnsetType | None = UNSET  # +, of this connection; the rest is the session's
    tools: list[Any] | UnsetType | None = UNSET  # must be empty so far
    # Of the API, accepted and ignored, not echoed.
    audio: Any = None
    include: Any = None
    model: Any = None
    output_modalities: Any = None
    parallel_tool_calls: Any = None
    prompt: Any = None
    reasoning: Any = None
    tool_choice: Any = None
    tracing: Any = None
    truncation: Any = None


class PartIn(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message: text of the caller (``input_text``), or of the assistant to seed history."""

    text: Text
    type: Literal["input_text", "output_text"]


class ItemIn(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="message"):
    """A message to put into the conversation. ``id``, if the client chooses it, makes a retry harmless."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[PartIn], Meta(min_length=1, max_length=MAX_PARTS)]
    id: Id | None = None
    object: Literal["realtime.item"] | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class ItemReference(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="item_reference"
):
    """An item of the conversation, in the prompt of a response that does not answer the conversation."""

    id: Id


class ResponseParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of ``response.create``'s ``response``; unset ones come from the session."""

    instructions: Text | None = None
    max_output_tokens: MaxOutputTokens = None
    temperature: Temperature | None = None  # +
    top_p: TopP | None = None  # +
    stop: Stop | None = None  # +
    metadata: Metadata | None = None
    conversation: Literal["auto", "none"] | None = None
    input: Annotated[list[ItemIn | ItemReference], Meta(max_length=1000)] | None = None
    tools: list[Any] | None = None
    # Of the API, accepted and ignored.
    audio: Any = None
    output_modalities: Any = None
    parallel_tool_calls: Any = None
    prompt: Any = None
    reasoning: Any = None
    tool_choice: Any = None


class ClientEvent(Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """Base of all. ``event_id`` is echoed by an error that the event causes."""

    event_id: Annotated[str, Meta(max_length=512)] | None = None


class SessionUpdate(ClientEvent, frozen=True, kw_only=True, tag="session.update"):
    """Change the settings of the session, from the next response on."""

    session: SessionPatch


class ItemCreate(ClientEvent, frozen=True, kw_only=True, tag="conversation.item.create"):
    """Put a message into the conversation, after ``previous_item_id`` (an id, ``root``, or null: at the end)."""

    item: ItemIn
    previous_item_id: Id | None = None


class ItemRetrieve(ClientEvent, frozen=True, kw_only=True, tag="conversation.item.retrieve"):
    """Ask for an item as it is stored."""

    item_id: Id


class ItemDelete(ClientEvent, frozen=True, kw_only=True, tag="conversation.item.delete"):
    """Take an item out of the conversation."""

    item_id: Id


class ItemTruncate(ClientEvent, frozen=True, kw_only=True, tag="conversation.item.truncate"):
    """Keep only what was seen of an answer: its first ``text_end`` code points (+)."""

    item_id: Id
    content_index: Annotated[int, Meta(ge=0, le=0)] = 0
    audio_end_ms: Any = None  # of the API; it says nothing of a text
    text_end: Count | None = None  # +


class ResponseCreate(ClientEvent, frozen=True, kw_only=True, tag="response.create"):
    """Ask for an answer to the conversation as it stands."""

    response: ResponseParams | None = None
    in_reply_to: Id | None = None  # +
    if_active: Literal["reject", "interrupt", "queue"] = "reject"  # +
    seen: Count | None = None  # +, with ``interrupt``


class ResponseCancel(ClientEvent, frozen=True, kw_only=True, tag="response.cancel"):
    """Stop an answer. ``seen`` is how many code points of it the person has seen: the stored text is cut there."""

    response_id: Id | None = None
    seen: Count | None = None  # +


class Ping(ClientEvent, frozen=True, kw_only=True, tag="ping"):
    """+ Ask for a ``pong`` with the same ``t``."""

    t: Annotated[float, Meta(ge=-(2**53), le=2**53)] | int | None = None


AnyClientEvent = (
    SessionUpdate | ItemCreate | ItemRetrieve | ItemDelete | ItemTruncate | ResponseCreate | ResponseCancel | Ping
)

#: Events of the API that have no meaning here; the answer is error ``unsupported``, not ``unknown``.
UNSUPPORTED = frozenset(
    {
        "input_audio_buffer.append",
        "input_audio_buffer.clear",
        "input_audio_buffer.commit",
        "output_audio_buffer.clear",
    }
)
