"""Items keep their shape on the way over the wire and through the store."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from chat_server.core.client_events import ItemIn, PartIn
from chat_server.core.items import (
    Item,
    Part,
    StatusDetails,
    Timing,
    Usage,
    decode_item,
    encode_item,
    item_from_client,
    to_wire,
)

pytestmark = pytest.mark.pure

TIMING = Timing(queue_ms=1, ttft_ms=None, total_ms=9)

parts = st.builds(Part, type=st.sampled_from(["input_text", "output_text"]), text=st.text(max_size=12))
answers = st.builds(
    Item,
    id=st.just("item_2"),
    status=st.sampled_from(["in_progress", "completed", "incomplete"]),
    role=st.sampled_from(["user", "assistant", "system"]),
    content=st.lists(parts, max_size=3),
    in_reply_to=st.sampled_from([UNSET, "item_1"]),
    response_id=st.sampled_from([UNSET, "resp_1"]),
    epochs=st.sampled_from([UNSET, [("epoch_1", 0), ("epoch_2", 7)]]),
    engine=st.sampled_from([UNSET, "engine-1"]),
    usage=st.sampled_from([UNSET, Usage.of(10, 5, 4)]),
    timing=st.sampled_from([UNSET, TIMING]),
)


def message(**changes: Any) -> Item:
    return Item(**{"id": "item_1", "status": "completed", "role": "user", "content": [], **changes})


@settings(max_examples=30)
@given(answers)
def test_an_item_is_read_back_as_it_was_stored(item: Item) -> None:
    """Also with fields that were not set."""
    assert decode_item(encode_item(item)) == item


@settings(max_examples=30)
@given(answers)
def test_the_same_item_gives_the_same_bytes(item: Item) -> None:
    """The store tells a harmless retry from a conflict by them."""
    assert encode_item(item) == encode_item(decode_item(encode_item(item))) == to_wire(item)


def test_a_message_shows_no_fields_of_answers() -> None:
    """The wire has the API's fields and nothing that means nothing."""
    item = message(content=[Part(type="input_text", text="Hi")])
    assert json.loads(encode_item(item)) == {
        "id": "item_1",
        "object": "realtime.item",
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": "Hi"}],
    }


def test_an_answer_shows_how_it_was_made() -> None:
    """A client that joins later can show it."""
    shown = json.loads(encode_item(message(epochs=[("e", 0)], engine="a", usage=Usage.of(10, 5, 4), timing=TIMING)))
    assert (shown["epochs"], shown["engine"]) == ([["e", 0]], "a")
    assert shown["usage"]["input_token_details"]["cached_tokens"] == 4
    assert shown["timing"] == {"queue_ms": 1, "ttft_ms": None, "total_ms": 9}


@pytest.mark.parametrize("raw", [b"", b"{}", b'{"id":1}', b"[]", b"\xff"])
def test_what_is_no_item_is_refused(raw: bytes) -> None:
    """With msgspec's own error, for the store holds something else then."""
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
        decode_item(raw)


def test_fields_of_a_later_version_are_left_out() -> None:
    """An old replica reads what a new one wrote beside it."""
    raw = encode_item(message()).replace(b'"object"', b'"new":{"a":1},"object"')
    assert decode_item(raw) == message()


def test_the_text_is_all_parts() -> None:
    """In their order, as they are."""
    item = message(content=[Part(type="input_text", text=text) for text in ("Look: ", "", "\n👍")])
    assert item.text == "Look: \n👍"
    assert message().text == ""


def test_usage_adds_up() -> None:
    """All tokens are text here."""
    usage = Usage.of(input_tokens=100, output_tokens=20, cached_tokens=64)
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (100, 20, 120)
    assert (usage.input_token_details.cached_tokens, usage.input_token_details.text_tokens) == (64, 100)
    assert usage.output_token_details.text_tokens == 20


def test_details_show_only_what_is_said() -> None:
    """An end without a reason has none."""
    assert json.loads(to_wire(StatusDetails(type="completed"))) == {"type": "completed"}


@pytest.mark.parametrize(
    ("role", "kind"), [("user", "input_text"), ("system", "input_text"), ("assistant", "output_text")]
)
def test_a_message_of_a_client_becomes_an_item(role: Any, kind: Any) -> None:
    """It is whole at once; the parts have the type that belongs to the role."""
    item = item_from_client(ItemIn(role=role, content=[PartIn(text=t, type=kind) for t in ("Hi", "!")]), "item_1")
    assert item == message(role=role, content=[Part(type=kind, text="Hi"), Part(type=kind, text="!")])


def test_a_client_says_nothing_of_how_an_item_was_made() -> None:
    """Its own id and status do not count: the caller decides on the id, and a message is complete."""
    given = ItemIn(id="mine", role="user", status="in_progress", content=[PartIn(text="Hi", type="input_text")])
    item = item_from_client(given, "item_1")
    assert (item.id, item.status) == ("item_1", "completed")
    assert {item.engine, item.response_id, item.in_reply_to} == {UNSET}
