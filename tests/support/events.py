"""Strict judgement of an event that the server sent: against the types of the ``openai`` package, and our extras.

The protocol allows extra *fields* everywhere (every client tolerates them) and extra *events* only on connections that
asked for extensions. Both are listed here, so that a misspelt field or an event sent to the wrong connection fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

import pydantic
from openai.types.realtime import realtime_server_event


class _Extension(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    event_id: str


class _Queued(_Extension):
    type: Literal["response.queued"]
    response_id: str
    position: int


class _Migrated(_Extension):
    type: Literal["response.migrated"]
    response_id: str
    reason: str


class _Heartbeat(_Extension):
    type: Literal["heartbeat"]
    now_ms: int
    state: Literal["idle", "queued", "prefill", "thinking", "streaming", "waiting"]
    response_id: str | None


class _Pong(_Extension):
    type: Literal["pong"]
    t: Any
    now_ms: int


class _Draining(_Extension):
    type: Literal["server.draining"]
    retry_after_ms: int


def _by_type(models: tuple[type[pydantic.BaseModel], ...]) -> dict[str, type[pydantic.BaseModel]]:
    return {get_args(model.model_fields["type"].annotation)[0]: model for model in models}


#: type of an event -> its model, as the installed ``openai`` package has it.
STANDARD = _by_type(get_args(get_args(realtime_server_event.RealtimeServerEvent)[0]))
#: the same for the events that only connections with ``extensions=1`` get.
EXTENSIONS = _by_type((_Queued, _Migrated, _Heartbeat, _Pong, _Draining))

_SESSION = {"id", "object", "temperature", "top_p", "stop", "flush", "heartbeat_interval_ms"}
#: what an answer's item tells of its making, so that a client that joins later can show it
_ITEM = {"in_reply_to", "response_id", "epochs", "engine", "usage", "timing", "status_details", "metadata"}
_IN_ITEM = {f"item.{name}" for name in _ITEM}
_RESPONSE = {
    "in_reply_to",
    "duplicate",
    "response.timing",
    "response.engine",
    "response.status_details.error.retryable",
}
_RESPONSE |= {"response.status_details.error.retry_after_ms"} | {f"response.output.{name}" for name in _ITEM}

#: type of an event -> the fields that we add to the API's own.
EXTRA_FIELDS: dict[str, set[str]] = {
    "session.created": {f"session.{name}" for name in _SESSION} | {"resumed", "item_count", "active_response"},
    "session.updated": {f"session.{name}" for name in _SESSION},
    "conversation.item.added": {"duplicate"} | _IN_ITEM,
    "conversation.item.done": {"duplicate"} | _IN_ITEM,
    "conversation.item.retrieved": _IN_ITEM,
    "conversation.item.truncated": {"text_end"},
    "response.created": _RESPONSE,
    "response.output_item.added": _IN_ITEM,
    "response.output_item.done": _IN_ITEM,
    "response.output_text.delta": {"offset", "epoch"},
    "response.done": _RESPONSE,
    "error": {"error.retryable", "error.retry_after_ms"},
}

#: Fields that the API's types leave optional and that our protocol promises.
REQUIRED_FIELDS: dict[str, set[str]] = {
    "session.created": {
        *("session.id", "session.object", "session.model", "session.output_modalities", "session.instructions"),
        *("session.max_output_tokens", "session.flush", "session.heartbeat_interval_ms"),
        *("resumed", "item_count", "active_response"),
    },
    "session.updated": {"session.id", "session.model", "session.instructions", "session.flush"},
    "conversation.item.added": {"previous_item_id", "item.id", "item.object", "item.status", "item.content"},
    "conversation.item.done": {"previous_item_id", "item.id", "item.object", "item.status", "item.content"},
    "response.created": {"response.id", "response.object", "response.status", "response.output"},
    "response.output_text.delta": {"offset", "epoch"},
    "response.done": {
        *("response.id", "response.object", "response.status", "response.status_details", "response.output"),
        *("response.usage", "response.metadata"),
    },
    "error": {"error.code", "error.event_id", "error.param", "error.retryable"},
}


def check(event: dict[str, Any], *, extensions: bool) -> None:
    """Fail with what is wrong unless ``event`` is right in each field, on a connection with or without extensions."""
    kind = event.get("type")
    assert isinstance(kind, str), f"an event without a type: {event}"
    if kind in EXTENSIONS:
        assert extensions, f"{kind} was sent to a connection that did not ask for extensions"
        EXTENSIONS[kind].model_validate(event, strict=True)
        return
    assert kind in STANDARD, f"{kind} is neither an event of the API nor one of ours"
    model = STANDARD[kind].model_validate(event, strict=True)
    extra = set(_extra_fields(model)) - EXTRA_FIELDS.get(kind, set())
    assert not extra, f"{kind} has fields that no page describes: {sorted(extra)}"
    required = REQUIRED_FIELDS.get(kind, set())
    if kind == "response.done" and event["response"]["status"] == "completed":
        required = required | {"response.timing", "response.engine", "response.usage.input_token_details.cached_tokens"}
    missing = {path for path in required if not _has(event, path)}
    assert not missing, f"{kind} lacks {sorted(missing)}: {event}"


def _extra_fields(model: pydantic.BaseModel, prefix: str = "") -> Iterator[str]:
    """Paths of the fields that the model's class does not know, at any depth."""
    yield from (prefix + name for name in model.model_extra or ())
    for name in type(model).model_fields:
        value = getattr(model, name)
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, pydantic.BaseModel):
                yield from _extra_fields(part, f"{prefix}{name}.")


def _has(event: dict[str, Any], path: str) -> bool:
    value: Any = event
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            return False
        value = value[name]
    return True
