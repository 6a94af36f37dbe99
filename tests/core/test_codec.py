"""Whatever a client sends gives an event or a ``BadEvent`` that says which field is wrong, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chat_server.core.client_events import (
    UNSUPPORTED,
    ItemCreate,
    Ping,
    ResponseCancel,
    ResponseCreate,
    SessionUpdate,
)
from chat_server.core.codec import BadEvent, decode
from tests.core.client_frames import BODY, IGNORED, VALID, event, json_values, kinds, mutated_events, places

pytestmark = pytest.mark.pure

CODES = {"invalid_json", "invalid_value", "missing_required_parameter", "unknown_parameter", "unsupported"}


def refusal(frame: Any) -> BadEvent:
    """What a frame is refused with."""
    text = frame if isinstance(frame, str | bytes) else json.dumps(frame)
    with pytest.raises(BadEvent) as caught:
        decode(text)
    return caught.value


def judge(frame: str | bytes) -> BadEvent | None:
    """Decode whatever it is; fail unless the outcome is an event or a refusal that is fit to be sent."""
    try:
        decode(frame)
    except BadEvent as error:
        assert error.code in CODES
        assert (error.type, error.retryable, error.status) == ("invalid_request_error", False, 400)
        assert 10 < len(error.message) < 400
        assert error.message.endswith(".")
        if error.code in ("unknown_parameter", "missing_required_parameter", "unsupported"):
            assert error.param is not None
        return error
    return None


# --- any input


@settings(max_examples=30)
@given(st.one_of(st.binary(max_size=60), st.text(st.characters(), max_size=60)))
@example(b"")
@example("\ud800")
@example("[" * 100_000)
@example('{"a":' * 100_000)
@example(b"\xef\xbb\xbf{}")
def test_any_bytes_or_text_are_refused_in_order(frame: str | bytes) -> None:
    """Never with another exception; lone surrogates, wrong UTF-8 and endless nesting included."""
    error = judge(frame)
    assert error is not None


@settings(max_examples=30)
@given(json_values)
def test_any_json_value_is_refused_in_order(value: Any) -> None:
    """Also numbers that no float holds and NaN, which JSON has not."""
    assert judge(json.dumps(value)) is not None


@settings(max_examples=100)
@given(mutated_events())
def test_a_mutated_event_is_decoded_or_refused_in_order(mutant: dict[str, Any]) -> None:
    """Wrong types, missing fields and unknown ones, at any depth; the refusal echoes the event's id."""
    error = judge(json.dumps(mutant))
    if error is not None and error.code != "invalid_json":
        assert error.param is not None
        sent = mutant.get("event_id")
        assert error.event_id == (sent if isinstance(sent, str) and len(sent) <= 512 else None)


@settings(max_examples=40)
@given(kinds, st.data())
def test_a_refusal_repeats_nothing_of_the_content(kind: str, data: st.DataObject) -> None:
    """It says which field and which type; what the client wrote into it may be private, and of any length."""
    mutant = event(kind)
    secret = "s3cret" * data.draw(st.sampled_from([1, 100, 10_000]))
    *way, last = data.draw(st.sampled_from(places(mutant)[2:]))
    parent: Any = mutant
    for key in way:
        parent = parent[key]
    parent[last] = data.draw(st.sampled_from([secret, [secret], {"id": secret}, f"{secret} - at `$.x`"]))
    try:
        decode(json.dumps(mutant))
    except BadEvent as error:
        assert "s3cret" not in f"{error.message} {error.param}"


@pytest.mark.parametrize("depth", [10, 300, 1000, 1020])
def test_nesting_that_json_allows_is_no_fault(depth: int) -> None:
    """In a field that is ignored anything may stand."""
    frame = json.dumps(event("session.update", session={"audio": "?"})).replace('"?"', "[" * depth + "]" * depth)
    assert isinstance(decode(frame), SessionUpdate)


@pytest.mark.parametrize("depth", [1025, 5000, 200_000])
def test_deeper_nesting_is_refused(depth: int) -> None:
    """Before it can exhaust the stack."""
    frame = json.dumps(event("session.update", session={"audio": "?"})).replace('"?"', "[" * depth + "]" * depth)
    assert refusal(frame).code == "invalid_json"


# --- what is right


def covers(got: Any, sent: Any) -> bool:
    """Whether all that was sent is there; fields that were not sent may be there too, with their default."""
    if isinstance(sent, dict):
        return all(name in got and covers(got[name], value) for name, value in sent.items())
    if isinstance(sent, list):
        return len(got) == len(sent) and all(map(covers, got, sent))
    return bool(got == sent)


@pytest.mark.parametrize("kind", sorted(VALID))
def test_an_event_is_decoded_with_all_its_fields(kind: str) -> None:
    """Nothing that has a meaning gets lost."""
    sent = event(kind, event_id="e1")
    assert covers(msgspec.to_builtins(decode(json.dumps(sent))), sent)


def test_the_content_of_an_item_is_decoded() -> None:
    """Part by part, as it was sent: text is never changed."""
    text = "  Zeile\n\u0000 👩🏽\u200d💻 e\u0301 \u2028"
    content = [{"type": "input_text", "text": text}, {"type": "input_text", "text": ""}]
    decoded = decode(json.dumps(event("conversation.item.create", item={"role": "system", "content": content})))
    assert isinstance(decoded, ItemCreate)
    assert [(part.type, part.text) for part in decoded.item.content] == [("input_text", text), ("input_text", "")]


def test_bytes_and_text_are_decoded_alike() -> None:
    """A frame comes as either."""
    text = json.dumps(event("conversation.item.create"), ensure_ascii=False)
    assert decode(text) == decode(text.encode())


@pytest.mark.parametrize(
    "frame",
    [
        '{"type":"response.create"}',
        '{"type":"response.create","response":null}',
        '{"type":"response.create","response":{}}',
    ],
)
def test_a_bare_response_create_is_enough(frame: str) -> None:
    """All comes from the session then."""
    decoded = decode(frame)
    assert isinstance(decoded, ResponseCreate)
    assert decoded.if_active == "reject"


@pytest.mark.parametrize(
    ("kind", "name", "value"), [(kind, *field) for kind, fields in IGNORED.items() for field in fields]
)
def test_a_field_of_the_api_without_meaning_here_is_accepted(kind: str, name: str, value: Any) -> None:
    """With a real value, and with null."""
    for sent in (value, None):
        decode(json.dumps(event(kind, **{BODY[kind]: {name: sent}})))


def test_of_a_doubled_key_the_last_counts() -> None:
    """As in every common JSON parser; what is checked is what is used."""
    assert isinstance(decode('{"type":"nope","type":"ping"}'), Ping)
    assert refusal('{"type":"ping","type":"nope"}').param == "type"
    cancel = decode('{"type":"response.cancel","seen":-1,"seen":5}')
    assert isinstance(cancel, ResponseCancel)
    assert cancel.seen == 5


# --- what is wrong, and where


@pytest.mark.parametrize(
    ("kind", "change", "code", "param"),
    [
        ("session.update", {"session": {"temprature": 1}}, "unknown_parameter", "session.temprature"),
        ("session.update", {"session": {"flush": {"mod": "x"}}}, "unknown_parameter", "session.flush.mod"),
        ("session.update", {"session": {"flush": {"mode": "x"}}}, "invalid_value", "session.flush.mode"),
        ("session.update", {"session": {"temperature": 2.5}}, "invalid_value", "session.temperature"),
        ("session.update", {"session": {"temperature": True}}, "invalid_value", "session.temperature"),
        ("session.update", {"session": {"top_p": 0}}, "invalid_value", "session.top_p"),
        ("session.update", {"session": {"instructions": 7}}, "invalid_value", "session.instructions"),
        ("session.update", {"session": {"max_output_tokens": 0}}, "invalid_value", "session.max_output_tokens"),
        ("session.update", {"session": {"max_output_tokens": "all"}}, "invalid_value", "session.max_output_tokens"),
        ("session.update", {"session": {"stop": ["a", ""]}}, "invalid_value", "session.stop[1]"),
        ("session.update", {"session": {"stop": ["a"] * 17}}, "invalid_value", "session.stop"),
        ("session.update", {"session": {"type": "transcription"}}, "invalid_value", "session.type"),
        ("session.update", {"session": None}, "invalid_value", "session"),
        ("session.update", {"sessoin": {}}, "unknown_parameter", "sessoin"),
        ("conversation.item.create", {"item": []}, "invalid_value", "item"),
        ("conversation.item.create", {"item": {"role": "user"}}, "missing_required_parameter", "item.content"),
        ("conversation.item.create", {"item": {"role": "user", "content": []}}, "invalid_value", "item.content"),
        (
            "conversation.item.create",
            {"item": {"role": "user", "content": [{"type": "input_text"}]}},
            "missing_required_parameter",
            "item.content[0].text",
        ),
        ("conversation.item.create", {"item": {"role": "tool", "content": []}}, "invalid_value", "item.role"),
        ("conversation.item.create", {"previous_item_id": "a b"}, "invalid_value", "previous_item_id"),
        ("conversation.item.retrieve", {"item_id": "x" * 65}, "invalid_value", "item_id"),
        ("conversation.item.delete", {"item_id": "a\n"}, "invalid_value", "item_id"),
        ("response.create", {"if_active": "now"}, "invalid_value", "if_active"),
        ("response.create", {"in_reply_to": 5}, "invalid_value", "in_reply_to"),
        ("response.create", {"response": {"metadata": {"k": 1}}}, "invalid_value", "response.metadata"),
        ("response.create", {"response": {"metadata": {"k" * 65: "v"}}}, "invalid_value", "response.metadata"),
        ("response.create", {"response": {"metadata": {"k": "v" * 513}}}, "invalid_value", "response.metadata"),
        ("response.create", {"response": {"conversation": "other"}}, "invalid_value", "response.conversation"),
        ("response.create", {"response": {"input": {}}}, "invalid_value", "response.input"),
        ("response.cancel", {"seen": -1}, "invalid_value", "seen"),
        ("response.cancel", {"seen": 1.5}, "invalid_value", "seen"),
        ("response.cancel", {"seen": 2**60}, "invalid_value", "seen"),
        ("ping", {"t": "now"}, "invalid_value", "t"),
        ("ping", {"event_id": 5}, "invalid_value", "event_id"),
        ("ping", {"event_id": "x" * 513}, "invalid_value", "event_id"),
        ("ping", {"T": 1}, "unknown_parameter", "T"),
    ],
)
def test_the_field_at_fault_is_named(kind: str, change: dict[str, Any], code: str, param: str) -> None:
    """By its path, and in the message as well."""
    error = refusal(event(kind, **change))
    assert (error.code, error.param) == (code, param)
    assert f"`{param}`" in error.message


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("session.update", "session"),
        ("conversation.item.create", "item"),
        ("conversation.item.retrieve", "item_id"),
        ("conversation.item.delete", "item_id"),
    ],
)
def test_a_missing_field_is_named(kind: str, name: str) -> None:
    """Without it the event has no meaning."""
    frame = event(kind)
    del frame[name]
    error = refusal(frame)
    assert (error.code, error.param) == ("missing_required_parameter", name)


@pytest.mark.parametrize(
    "name", ["a`b", "x` - at `$.session.stop", "a\nb", "n" * 5000, "` - at `$" + "n" * 5000, "ключ"]
)
@pytest.mark.parametrize("kind", ["session.update", "ping"])
def test_a_strange_name_of_a_field_is_shortened_at_most(kind: str, name: str) -> None:
    """It is the client's own, so it may hold what looks like our message."""
    inside = {"session": {name: 1}} if kind == "session.update" else {name: 1}
    error = refusal(event(kind, **inside))
    assert error.code == "unknown_parameter"
    assert error.param is not None
    assert len(error.param) < 200
    if kind == "session.update":
        assert error.param == f"session.{name[:64]}"


@pytest.mark.parametrize(
    "value", [None, 5, ["ping"], {"a": 1}, True, "", "Ping", "ping ", "session.created", "x" * 9999]
)
def test_an_unknown_type_is_refused_with_those_that_are_known(value: Any) -> None:
    """So the next attempt can be right."""
    error = refusal({"type": value, "event_id": "e7"})
    assert (error.code, error.param, error.event_id) == ("invalid_value", "type", "e7")
    assert all(kind in error.message for kind in VALID)
    assert len(error.message) < 400


def test_an_event_without_a_type_is_refused() -> None:
    """The field that is missing is the type."""
    error = refusal({"event_id": "e7"})
    assert (error.code, error.param, error.event_id) == ("missing_required_parameter", "type", "e7")


@pytest.mark.parametrize("kind", sorted(UNSUPPORTED))
def test_an_event_for_audio_is_unsupported_rather_than_unknown(kind: str) -> None:
    """Known, and not done here: it is named, whatever its fields."""
    error = refusal({"type": kind, "audio": "AAAA", "event_id": "e7"})
    assert (error.code, error.param, error.event_id) == ("unsupported", "type", "e7")
    assert kind in error.message


@pytest.mark.parametrize(
    "kind",
    [
        "function_call",
        "function_call_output",
        "item_reference",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
    ],
)
def test_an_item_that_is_no_message_is_unsupported(kind: str) -> None:
    """Told apart from a misspelt type, whatever else the item holds."""
    error = refusal(event("conversation.item.create", item={"type": kind, "call_id": "c"}, event_id="e7"))
    assert (error.code, error.param, error.event_id) == ("unsupported", "item.type", "e7")
    assert kind in error.message


@pytest.mark.parametrize("kind", ["input_audio", "input_image", "output_audio"])
def test_a_part_that_is_no_text_is_unsupported(kind: str) -> None:
    """It says which part."""
    content = [{"type": "input_text", "text": "Look:"}, {"type": kind, "audio": "AAAA"}]
    error = refusal(event("conversation.item.create", item={"role": "user", "content": content}))
    assert (error.code, error.param) == ("unsupported", "item.content[1].type")
    assert kind in error.message


@pytest.mark.parametrize(
    "frame", ["", "{", "NaN", '{"type":"ping","t":NaN}', '{"type":"ping","t":1e400}', '{"type":"\\ud800"}', "{'a':1}"]
)
def test_what_is_no_json_is_refused_without_its_content(frame: str) -> None:
    """There is no field to name and no id to echo."""
    error = refusal(frame)
    assert (error.code, error.param, error.event_id) == ("invalid_json", None, None)
    assert "line 1" not in error.message


def test_an_integer_that_nothing_holds_is_refused() -> None:
    """400 digits are JSON, but no number of ours; a big one that fits is echoed as it came."""
    assert refusal(f'{{"type":"ping","t":1{"0" * 400}}}').code == "invalid_json"
    assert decode(f'{{"type":"ping","t":{2**53 + 1}}}') == Ping(t=2**53 + 1)
    assert refusal(f'{{"type":"response.cancel","seen":1{"0" * 30}}}').param == "seen"
