"""What a conversation is made of, in the shape that goes over the wire and into the store (it is the same one)."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from chat_server.core.client_events import ItemIn
from chat_server.errors import ClientError

Role = Literal["user", "assistant", "system"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "cancelled", "incomplete", "failed"]


class Part(Struct, frozen=True):
    """One part of an item's content."""

    type: Literal["input_text", "output_text"]
    text: str


class TokenDetails(Struct, frozen=True):
    """How many of the prompt's tokens the engine had in its prefix cache."""

    cached_tokens: int
    text_tokens: int


class OutputTokenDetails(Struct, frozen=True):
    """All that we make is text."""

    text_tokens: int


class Usage(Struct, frozen=True):
    """Tokens of one response, as the engine counted them."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: TokenDetails
    output_token_details: OutputTokenDetails

    @classmethod
    def of(cls, input_tokens: int, output_tokens: int, cached_tokens: int) -> Usage:
        return cls(
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            total_tokens=input_tokens + output_tokens,
            input_token_details=TokenDetails(cached_tokens=cached_tokens, text_tokens=input_tokens),
            output_token_details=OutputTokenDetails(text_tokens=output_tokens),
        )


class Timing(Struct, frozen=True):
    """+ Milliseconds: until an engine was found, until the first text, until the end (each from the request)."""

    queue_ms: int
    ttft_ms: int | None
    total_ms: int


class StatusError(Struct, frozen=True):
    """Why a response failed."""

    type: str
    code: str
    message: str
    retryable: bool | UnsetType = UNSET  # +
    retry_after_ms: int | UnsetType = UNSET  # +


class StatusDetails(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a response ended as it did."""

    type: Literal["completed", "cancelled", "incomplete", "failed"] | UnsetType = UNSET
    reason: Literal["turn_detected", "client_cancelled", "max_output_tokens", "content_filter"] | UnsetType = UNSET
    error: StatusError | UnsetType = UNSET


class Item(Struct, frozen=True, kw_only=True):
    """A message of the conversation. The fields from ``in_reply_to`` on are ours (+), on answers only."""

    id: str
    object: Literal["realtime.item"] = "realtime.item"
    type: Literal["message"] = "message"
    status: ItemStatus
    role: Role
    content: list[Part]
    in_reply_to: str | UnsetType = UNSET
    response_id: str | UnsetType = UNSET
    epochs: list[tuple[str, int]] | UnsetType = UNSET
    engine: str | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET
    timing: Timing | UnsetType = UNSET
    status_details: StatusDetails | UnsetType = UNSET
    metadata: dict[str, str] | UnsetType = UNSET

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


class ResponseObject(Struct, kw_only=True):
    """A response as ``response.created`` and ``response.done`` show it."""

    id: str
    object: Literal["realtime.response"] = "realtime.response"
    status: ResponseStatus
    status_details: StatusDetails | None = None
    output: list[Item]
    output_modalities: tuple[Literal["text"]] = ("text",)
    usage: Usage | None = None
    metadata: dict[str, str] | None = None
    timing: Timing | UnsetType = UNSET  # +
    engine: str | UnsetType = UNSET  # +


class SessionSettings(Struct, frozen=True, kw_only=True):
    """What a session asks of its answers; stored with it. None: the engine's own default."""

    instructions: str = ""
    max_output_tokens: int | Literal["inf"] = "inf"
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()


_item_encoder = msgspec.json.Encoder()
_item_decoder = msgspec.json.Decoder(Item)


def encode_item(item: Item) -> bytes:
    """An item as it is stored. The same item always gives the same bytes, so equal bytes are a harmless retry."""
    return _item_encoder.encode(item)


def decode_item(raw: bytes) -> Item:
    """A stored item. Raises msgspec.ValidationError if the store holds something else."""
    return _item_decoder.decode(raw)


def item_from_client(item: ItemIn, item_id: str) -> Item:
    """A client's message as an item of the conversation. Raises ClientError for a part of another role's kind."""
    kind: Literal["input_text", "output_text"] = "output_text" if item.role == "assistant" else "input_text"
    for index, part in enumerate(item.content):
        if part.type != kind:
            message = f"A part of a message of role `{item.role}` is `{kind}`."
            raise ClientError("invalid_value", message, param=f"item.content[{index}].type")
    content = [Part(type=kind, text=part.text) for part in item.content]
    return Item(id=item_id, status="completed", role=item.role, content=content)


def to_wire(value: Any) -> bytes:
    """Any of the types here as JSON bytes."""
    return _item_encoder.encode(value)
