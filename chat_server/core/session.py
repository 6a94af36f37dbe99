"""A session's settings: what a patch makes of them, and what a response gets. Pure functions."""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from chat_server.core.client_events import Flush, ItemTruncate, ResponseCreate, ResponseParams, SessionPatch
from chat_server.core.items import Item, Part, SessionSettings
from chat_server.core.principal import Principal
from chat_server.core.response import Begun
from chat_server.errors import ClientError

T = TypeVar("T")
_DEFAULTS = SessionSettings()


def patched(settings: SessionSettings, patch: SessionPatch) -> SessionSettings:
    """``settings`` after a ``session.update``: unset fields stay, null ones go back to the default.

    Raises ClientError for what we can not do (nothing is changed then).
    """
    _check_tools(patch.tools if patch.tools is not UNSET else None, "session.tools")
    changes: dict[str, Any] = {}
    for name in ("instructions", "max_output_tokens", "temperature", "top_p", "stop"):
        value = getattr(patch, name)
        if value is not UNSET:
            changes[name] = getattr(_DEFAULTS, name) if value is None else value
    if "stop" in changes:
        changes["stop"] = tuple(changes["stop"])
    return msgspec.structs.replace(settings, **changes)


def check_flush(flush: Flush, param: str) -> None:
    """Raises ClientError for a mode that needs the sentence splitter, which is not there yet."""
    if flush.mode != "token":
        message = f"Flush mode `{flush.mode}` is not supported yet; `token` is."
        raise ClientError("unsupported", message, param=f"{param}.mode")


def check_response_create(event: ResponseCreate) -> ResponseParams:
    """The parameters of a ``response.create``. Raises ClientError for what is not supported yet."""
    params = event.response or ResponseParams()
    _check_tools(params.tools, "response.tools")
    if params.conversation == "none" and event.in_reply_to is not None:
        message = "A response outside of the conversation can not be the answer to one of its items."
        raise ClientError("invalid_value", message, param="in_reply_to")
    return params


def truncated(item: Item, event: ItemTruncate, epoch: str) -> tuple[Item, int]:
    """An answer without what the event takes off, and its length in code points. Raises ClientError.

    The text before the cut is the same as before, so the chain of epochs goes on with ``epoch``.
    """
    if item.role != "assistant":
        raise ClientError("invalid_value", "Only answers can be truncated.", param="item_id")
    if event.text_end is None:
        message = "Say with `text_end` how many code points of the text were seen."
        raise ClientError("missing_required_parameter", message, param="text_end")
    length = len(item.text)
    if event.text_end > length:
        message = f"The text has {length} code points, fewer than `text_end`."
        raise ClientError("invalid_value", message, param="text_end")
    if event.text_end == length:
        return item, length
    shorter = msgspec.structs.replace(
        item,
        status="incomplete",
        content=[Part(type="output_text", text=item.text[: event.text_end])],
        epochs=UNSET if item.epochs is UNSET else [*item.epochs, (epoch, event.text_end)],
    )
    return shorter, event.text_end


def begun(
    params: ResponseParams,
    settings: SessionSettings,
    *,
    response_id: str,
    item_id: str,
    epoch: str,
    replica: str,
    model: str,
    in_reply_to: str | None,
    input: list[Item] | UnsetType = UNSET,
    token_limit: int,
    now_ms: int,
) -> Begun:
    """What is stored of a response when it begins: its own parameters, else the session's, within our limit."""
    wanted = _first(params.max_output_tokens, settings.max_output_tokens)
    return Begun(
        id=response_id,
        item_id=item_id,
        in_reply_to=in_reply_to or UNSET,
        replica=replica,
        epochs=[(epoch, 0)],
        created_ms=now_ms,
        model=model,
        instructions=_first(params.instructions, settings.instructions),
        max_output_tokens=None if wanted == "inf" else min(int(wanted), token_limit),
        temperature=_first(params.temperature, settings.temperature),
        top_p=_first(params.top_p, settings.top_p),
        stop=tuple(_first(params.stop, settings.stop)),
        metadata=params.metadata,
        input=input,
    )


def cache_salt(principal: Principal) -> str:
    """Separates tenants in an engine's prefix cache: one's prompts must not be measurable by another's timing.

    The same for all sessions of a tenant, so that they share what they have in common.
    """
    return hashlib.blake2b(principal.tenant.encode(), digest_size=16, person=b"chat-salt").hexdigest()


def _first(value: T | None, default: T) -> T:
    return default if value is None else value


def _check_tools(tools: list[Any] | UnsetType | None, param: str) -> None:
    if tools:
        raise ClientError("unsupported", "Tools are not supported yet.", param=param)
