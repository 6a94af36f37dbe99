"""A session's settings: what a patch makes of them, and what a response gets of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import UNSET

from chat_server.core.client_events import Flush, ResponseCreate, ResponseParams, SessionPatch, SessionUpdate
from chat_server.core.codec import decode
from chat_server.core.items import SessionSettings
from chat_server.core.principal import Principal
from chat_server.core.response import Begun
from chat_server.core.session import begun, cache_salt, check_flush, check_response_create, patched
from chat_server.errors import ClientError

pytestmark = pytest.mark.pure

DEFAULT = SessionSettings()
FULL = SessionSettings(instructions="Be brief.", max_output_tokens=50, temperature=0.5, top_p=0.9, stop=("END",))
OTHER: dict[str, Any] = {
    "instructions": "Rhyme.",
    "max_output_tokens": 70,
    "temperature": 1.5,
    "top_p": 0.2,
    "stop": ["A", "B"],
}


def patch(**fields: Any) -> SessionPatch:
    """A patch as it comes from a client."""
    event = decode(json.dumps({"type": "session.update", "session": fields}))
    assert isinstance(event, SessionUpdate)
    return event.session


def create(response: dict[str, Any] | None = None, **fields: Any) -> ResponseCreate:
    event = decode(json.dumps({"type": "response.create", "response": response, **fields}))
    assert isinstance(event, ResponseCreate)
    return event


def begin(params: ResponseParams, settings: SessionSettings = FULL, *, token_limit: int = 1000) -> Begun:
    return begun(
        params,
        settings,
        response_id="resp_1",
        item_id="item_2",
        epoch="epoch_1",
        replica="replica_1",
        model="m",
        in_reply_to=None,
        token_limit=token_limit,
        now_ms=5,
    )


# --- session.update


def test_unset_fields_stay() -> None:
    """A client sends what it wants changed."""
    assert patched(FULL, patch()) == FULL
    assert patched(FULL, patch(type="realtime")) == FULL


@pytest.mark.parametrize("name", OTHER)
def test_a_field_is_changed_alone(name: str) -> None:
    """All others stay as they are."""
    after = patched(FULL, patch(**{name: OTHER[name]}))
    value = tuple(OTHER[name]) if name == "stop" else OTHER[name]
    assert getattr(after, name) == value
    assert all(getattr(after, other) == getattr(FULL, other) for other in OTHER if other != name)


@pytest.mark.parametrize("name", OTHER)
def test_null_goes_back_to_the_default(name: str) -> None:
    """Of this field alone."""
    after = patched(FULL, patch(**{name: None}))
    assert getattr(after, name) == getattr(DEFAULT, name)
    assert all(getattr(after, other) == getattr(FULL, other) for other in OTHER if other != name)


def test_the_longest_answer_can_be_asked_for_by_name() -> None:
    """``inf`` is the API's word for no bound of the session's own."""
    assert patched(FULL, patch(max_output_tokens="inf")).max_output_tokens == "inf"


def test_empty_values_are_values() -> None:
    """Instructions can be taken away, and so can stop strings."""
    after = patched(FULL, patch(instructions="", stop=[], temperature=0))
    assert (after.instructions, after.stop, after.temperature) == ("", (), 0)


def test_fields_of_the_api_without_meaning_here_change_nothing() -> None:
    """The agents SDKs send them with each update, empty tools among them."""
    ignored: dict[str, Any] = {"audio": {}, "tracing": "auto", "model": "other", "tools": [], "tool_choice": "auto"}
    assert patched(FULL, patch(**ignored)) == FULL
    assert patched(FULL, patch(tools=None)) == FULL


def test_flush_is_not_the_sessions() -> None:
    """It belongs to the connection."""
    assert patched(FULL, patch(flush={"mode": "token"})) == FULL


def test_tools_are_refused_with_all_that_the_patch_holds() -> None:
    """Half an update would be worse than none."""
    with pytest.raises(ClientError) as refused:
        patched(FULL, patch(instructions="Rhyme.", tools=[{"type": "function", "name": "f"}]))
    assert (refused.value.code, refused.value.param) == ("unsupported", "session.tools")


@pytest.mark.parametrize("mode", ["word", "sentence", "paragraph"])
def test_a_flush_mode_that_is_not_there_yet_is_refused(mode: Any) -> None:
    """It says which is there."""
    with pytest.raises(ClientError, match="token") as refused:
        check_flush(Flush(mode=mode), "session.flush")
    assert (refused.value.code, refused.value.param) == ("unsupported", "session.flush.mode")


def test_text_can_be_sent_on_as_it_comes() -> None:
    """The mode that is there."""
    check_flush(Flush(), "session.flush")


# --- response.create


def test_a_plain_response_is_accepted() -> None:
    """With its own parameters, or none."""
    assert check_response_create(create()) == ResponseParams()
    params = check_response_create(create({"instructions": "Rhyme.", "tools": [], "conversation": "auto"}))
    assert params.instructions == "Rhyme."


@pytest.mark.parametrize(
    ("response", "fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, {}, "response.tools"),
    ],
)
def test_a_response_that_can_not_be_made_yet_is_refused(
    response: dict[str, Any] | None, fields: dict[str, Any], param: str
) -> None:
    """Rather than made in another way than it was asked for."""
    with pytest.raises(ClientError) as refused:
        check_response_create(create(response, **fields))
    assert (refused.value.code, refused.value.param) == ("unsupported", param)


def test_a_response_takes_from_the_session_what_it_does_not_say() -> None:
    """As it stands now: later changes of the session are not its own."""
    start = begin(ResponseParams())
    assert (start.instructions, start.max_output_tokens, start.temperature) == ("Be brief.", 50, 0.5)
    assert (start.top_p, start.stop, start.metadata) == (0.9, ("END",), None)


def test_a_response_has_its_own_parameters_first() -> None:
    """Field by field; an empty one is one."""
    params = check_response_create(create({**OTHER, "metadata": {"topic": "sea"}}))
    start = begin(params)
    assert (start.instructions, start.max_output_tokens, start.temperature) == ("Rhyme.", 70, 1.5)
    assert (start.top_p, start.stop, start.metadata) == (0.2, ("A", "B"), {"topic": "sea"})
    start = begin(check_response_create(create({"instructions": "", "stop": [], "temperature": 0})))
    assert (start.instructions, start.stop, start.temperature) == ("", (), 0)


@pytest.mark.parametrize(
    ("of_response", "of_session", "expected"),
    [
        (None, "inf", None),
        (None, 50, 50),
        (None, 5000, 1000),
        (70, 50, 70),
        (70, "inf", 70),
        (5000, 50, 1000),
        ("inf", 50, None),
    ],
)
def test_the_length_of_an_answer_is_bounded(of_response: Any, of_session: Any, expected: int | None) -> None:
    """By the response, else the session, and never above the server's limit (None: the limit is applied later)."""
    settings = SessionSettings(max_output_tokens=of_session)
    assert begin(ResponseParams(max_output_tokens=of_response), settings).max_output_tokens == expected


def test_a_response_begins_with_its_first_epoch() -> None:
    """At the start of the text; ids, model and time as they were given."""
    start = begin(ResponseParams())
    assert (start.id, start.item_id, start.replica, start.model) == ("resp_1", "item_2", "replica_1", "m")
    assert (start.epochs, start.created_ms, start.in_reply_to) == ([("epoch_1", 0)], 5, UNSET)


def test_a_response_says_what_it_replies_to() -> None:
    """If it was asked for by the item."""
    start = begun(
        ResponseParams(),
        DEFAULT,
        response_id="resp_1",
        item_id="item_2",
        epoch="epoch_1",
        replica="replica_1",
        model="m",
        in_reply_to="item_1",
        token_limit=10,
        now_ms=5,
    )
    assert start.in_reply_to == "item_1"


# --- cache_salt


def test_users_of_a_tenant_share_their_cached_prefixes() -> None:
    """Instructions that all have are computed once."""
    assert cache_salt(Principal("acme", "ada")) == cache_salt(Principal("acme", "bob"))


def test_tenants_do_not_share_cached_prefixes() -> None:
    """Else one could find out another's prompts by the time of a first token."""
    salts = {cache_salt(Principal(tenant, "ada")) for tenant in ("acme", "ACME", "acme ", "a", "default", "local", "é")}
    assert len(salts) == 7


def test_the_salt_is_the_same_in_every_process() -> None:
    """A restart of a replica, or another replica, costs no cached prefix. It does not tell the tenant's name."""
    assert cache_salt(Principal("acme", "ada")) == "b879a7ec84a6cb3829dbbef8d7016952"
