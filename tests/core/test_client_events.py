"""What clients of the API may send has its place here, in the installed package's own words."""

from __future__ import annotations

import inspect
from typing import Any, get_args

import msgspec
import pytest
from openai.types.realtime import (
    conversation_item_create_event,
    realtime_client_event,
    realtime_conversation_item_assistant_message,
    realtime_conversation_item_system_message,
    realtime_conversation_item_user_message,
    realtime_response_create_params,
    realtime_session_create_request,
)

from chat_server.core import client_events
from chat_server.core.client_events import (
    UNSUPPORTED,
    AnyClientEvent,
    ClientEvent,
    Flush,
    ItemIn,
    ResponseParams,
    SessionPatch,
)
from chat_server.core.codec import BadEvent, decode
from tests.core.client_frames import VALID

pytestmark = pytest.mark.pure

OURS = {"ping"}


def kind(event: Any) -> str:
    return str(event.__struct_config__.tag)


def api_events() -> dict[str, Any]:
    """The API's client events by type."""
    models = get_args(get_args(realtime_client_event.RealtimeClientEvent)[0])
    return {get_args(model.model_fields["type"].annotation)[0]: model for model in models}


def test_each_event_of_the_api_is_done_or_refused_by_name() -> None:
    """None is called unknown; a new one of a later package fails here."""
    assert {kind(event) for event in get_args(AnyClientEvent)} - OURS | UNSUPPORTED == api_events().keys()


def test_nothing_is_both_done_and_refused() -> None:
    """The lists have nothing in common, and all events are in the union."""
    assert not {kind(event) for event in get_args(AnyClientEvent)} & UNSUPPORTED
    assert set(get_args(AnyClientEvent)) == set(ClientEvent.__subclasses__())


@pytest.mark.parametrize("event", get_args(AnyClientEvent), ids=kind)
def test_an_event_knows_the_fields_of_the_api(event: Any) -> None:
    """And ours beside them."""
    fields = {field.name for field in msgspec.structs.fields(event)} | {"type"}
    if kind(event) not in OURS:
        assert fields >= api_events()[kind(event)].model_fields.keys()
    assert fields >= VALID[kind(event)].keys()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SessionPatch, realtime_session_create_request.RealtimeSessionCreateRequest),
        (ResponseParams, realtime_response_create_params.RealtimeResponseCreateParams),
        (ItemIn, realtime_conversation_item_user_message.RealtimeConversationItemUserMessage),
        (ItemIn, realtime_conversation_item_system_message.RealtimeConversationItemSystemMessage),
        (ItemIn, realtime_conversation_item_assistant_message.RealtimeConversationItemAssistantMessage),
    ],
    ids=lambda model: model.__name__,
)
def test_an_object_knows_the_fields_of_the_api(ours: type, theirs: Any) -> None:
    """Also those that mean nothing for text: the SDKs send them all the same."""
    fields = {field.name for field in msgspec.structs.fields(ours)} | {ours.__struct_config__.tag_field}  # type: ignore[attr-defined]
    assert fields >= theirs.model_fields.keys()


def test_each_item_of_the_api_is_taken_or_unsupported() -> None:
    """None is called invalid; a new kind of a later package fails here."""
    models = get_args(conversation_item_create_event.ConversationItemCreateEvent.model_fields["item"].annotation)
    for kind_of_item in {get_args(model.model_fields["type"].annotation)[0] for model in models} - {"message"}:
        with pytest.raises(BadEvent) as refused:
            decode(msgspec.json.encode({"type": "conversation.item.create", "item": {"type": kind_of_item}}))
        assert (refused.value.code, refused.value.param) == ("unsupported", "item.type")


def test_nothing_can_be_changed_after_it_was_checked() -> None:
    """All are frozen, and refuse fields that they do not know."""
    structs = [
        value for _, value in inspect.getmembers(client_events, inspect.isclass) if issubclass(value, msgspec.Struct)
    ]
    ours = [struct for struct in structs if struct is not msgspec.Struct]
    assert len(ours) > 10
    assert all(struct.__struct_config__.frozen and struct.__struct_config__.forbid_unknown_fields for struct in ours)


def test_text_is_sent_on_as_it_comes_unless_asked_otherwise() -> None:
    """The default of ``flush``."""
    assert Flush() == Flush(mode="token", max_delay_ms=None, max_chars=None)
