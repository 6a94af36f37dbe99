"""A frame's text -> a typed client event. Whatever a client sends, the outcome is an event or a ``BadEvent``."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import orjson

from chat_server.core.client_events import MAX_PARTS, UNSUPPORTED, AnyClientEvent, ClientEvent
from chat_server.errors import ClientError

_KNOWN = frozenset(event.__struct_config__.tag for event in ClientEvent.__subclasses__())
_UNKNOWN_FIELD = "Object contains unknown field `"
_MISSING_FIELD = re.compile(r"Object missing required field `(?P<field>[^`]*)`")
# Names of fields are the client's, of any length, and may hold anything; the path is ours, and last.
_AT = " - at `"
_PATH = re.compile(r" - at `(?:key` in `)?\$(?P<path>[\w.\[\]]{1,128})`")
_OTHER_ITEMS = frozenset(
    {
        "function_call",
        "function_call_output",
        "item_reference",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
    }
)


class BadEvent(ClientError):
    """A frame that is no event of ours. ``event_id`` is the client's, if it could be read."""

    def __init__(self, code: str, message: str, *, param: str | None = None, event_id: str | None = None) -> None:
        super().__init__(code, message, param=param)
        self.event_id = event_id


def decode(text: str | bytes) -> AnyClientEvent:
    """Decode one frame. Raises BadEvent with the API's own codes (``invalid_json``, ``unknown_parameter``,
    ``missing_required_parameter``, ``invalid_value``, ``unsupported``) and the path of the field at fault."""
    try:
        raw = orjson.loads(text)
    except ValueError as error:  # also lone surrogates and nesting over 1024 deep
        raise BadEvent("invalid_json", f"The frame is no JSON that can be read: {_no_position(str(error))}.") from None
    if not isinstance(raw, dict):
        raise BadEvent("invalid_value", "An event is a JSON object with a `type`.")
    event_id = raw.get("event_id")
    if not isinstance(event_id, str) or len(event_id) > 512:
        event_id = None
    _check_type(raw, event_id)
    try:
        event: AnyClientEvent = msgspec.convert(raw, AnyClientEvent)
        return event
    except msgspec.ValidationError as error:
        code, message, param = _explain(str(error))
        raise BadEvent(code, message, param=param, event_id=event_id) from None


def _check_type(raw: dict[str, Any], event_id: str | None) -> None:
    kind = raw.get("type")
    if "type" not in raw:
        message = "The event has no `type`."
        raise BadEvent("missing_required_parameter", message, param="type", event_id=event_id)
    if isinstance(kind, str) and kind in UNSUPPORTED:
        message = f"`{kind}` is not supported by this server: it speaks text."
        raise BadEvent("unsupported", message, param="type", event_id=event_id)
    if not isinstance(kind, str) or kind not in _KNOWN:
        shown = repr(kind[:64]) if isinstance(kind, str) else "it is no string"
        message = f"Unknown event type: {shown}. Supported: {', '.join(sorted(map(str, _KNOWN)))}."
        raise BadEvent("invalid_value", message, param="type", event_id=event_id)
    if kind == "conversation.item.create":
        _check_item(raw.get("item"), event_id, "item")
    params = raw.get("response") if kind == "response.create" else None
    asked = params.get("input") if isinstance(params, dict) else None
    for index, item in enumerate(asked if isinstance(asked, list) else ()):
        _check_item(item, event_id, f"response.input[{index}]")


def _check_item(item: object, event_id: str | None, at: str) -> None:
    """Tell items and parts that are not text apart from plain mistakes: the answer to them is ``unsupported``."""
    if not isinstance(item, dict):
        return
    kind = item.get("type")
    if isinstance(kind, str) and kind in _OTHER_ITEMS and not (kind == "item_reference" and at != "item"):
        raise BadEvent(
            "unsupported", f"Items of type `{kind}` are not supported yet.", param=f"{at}.type", event_id=event_id
        )
    content = item.get("content")
    for index, part in enumerate(content[:MAX_PARTS] if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in ("input_audio", "input_image", "output_audio"):
            message = f"Parts of type `{kind}` are not supported: this server speaks text."
            raise BadEvent("unsupported", message, param=f"{at}.content[{index}].type", event_id=event_id)


def _explain(error: str) -> tuple[str, str, str | None]:
    """msgspec's message -> (code, message, param). Its path ``$.session.stop[0]`` becomes ``session.stop[0]``."""
    what, path = error, ""
    at = error.rfind(_AT)
    if at >= 0 and (match := _PATH.fullmatch(error, at)):
        what, path = error[:at], match["path"].lstrip(".").replace("[...]", "")
    if what.startswith(_UNKNOWN_FIELD):
        field = what[len(_UNKNOWN_FIELD) :].removesuffix("`")[:64]
        param = f"{path}.{field}" if path else field  # which may be empty
        return "unknown_parameter", f"Unknown parameter: `{param}`.", param
    if found := _MISSING_FIELD.match(what):
        param = ".".join(filter(None, (path, found["field"])))
        return "missing_required_parameter", f"Missing required parameter: `{param}`.", param
    if what.startswith(("Invalid enum value", "Invalid value")):  # it would repeat the client's text
        what = "Not one of the values that are known"
    return "invalid_value", f"Invalid value{f' for `{path}`' if path else ''}: {what}.", path or None


def _no_position(message: str) -> str:
    """orjson's message without its position, which counts bytes of a frame that the client no longer holds."""
    return message.partition(": line ")[0]
