"""The judge of events refuses what is wrong: else every test that relies on it would pass for nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import events

pytestmark = pytest.mark.pure


def delta(**changes: Any) -> dict[str, Any]:
    event = {
        "type": "response.output_text.delta",
        "event_id": "event_1",
        "response_id": "resp_1",
        "item_id": "item_1",
        "output_index": 0,
        "content_index": 0,
        "delta": "Hi",
        "offset": 0,
        "epoch": "e",
        **changes,
    }
    return {name: value for name, value in event.items() if value is not None}


def test_a_right_event_passes() -> None:
    """The API's fields with our extras."""
    events.check(delta(), extensions=False)


@pytest.mark.parametrize(
    "changes",
    [{"delta": None}, {"output_index": "0"}, {"offset": None}, {"ofset": 0}, {"type": "response.text.delta"}],
    ids=["missing", "wrong type", "our field missing", "unknown field", "unknown event"],
)
def test_a_wrong_event_fails(changes: dict[str, Any]) -> None:
    """A missing, mistyped or undescribed field, or an event that nobody knows."""
    with pytest.raises((AssertionError, ValueError)):
        events.check(delta(**changes), extensions=True)


def test_an_extra_field_deep_inside_fails() -> None:
    """Fields that no page describes are found in an item's content too."""
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x", "txt": "x"}]}
    event = {"type": "conversation.item.retrieved", "event_id": "event_1", "item": item}
    with pytest.raises(AssertionError, match=r"item\.content\.txt"):
        events.check(event, extensions=False)


def test_our_own_event_is_wrong_on_a_connection_without_extensions() -> None:
    """Strict clients turn an event that they do not know into an error."""
    pong = {"type": "pong", "event_id": "event_1", "t": 1, "now_ms": 1}
    events.check(pong, extensions=True)
    with pytest.raises(AssertionError):
        events.check(pong, extensions=False)
