"""The scripted client notices what must never happen on a connection."""

from __future__ import annotations

from typing import Any, cast

import pytest
from websockets.asyncio.client import ClientConnection

from tests.support.ws import WsClient

pytestmark = pytest.mark.pure


def event(number: int, kind: str, **fields: Any) -> dict[str, Any]:
    place = {"response_id": "resp_1", "item_id": "item_1", "output_index": 0, "content_index": 0}
    return {"type": kind, "event_id": f"event_{number}", **place, **fields}


def delta(number: int, text: str, offset: int) -> dict[str, Any]:
    return event(number, "response.output_text.delta", delta=text, offset=offset, epoch="e")


def whole(number: int, text: str) -> dict[str, Any]:
    return event(number, "response.output_text.done", text=text)


def client() -> WsClient:
    return WsClient(cast("ClientConnection", None), extensions=False)


def test_deltas_are_applied_at_their_offset() -> None:
    """A delta that comes twice, or takes text back, leaves the text that the server means."""
    ws = client()
    for told in (delta(1, "Hel", 0), delta(2, "lo", 3), delta(3, "lo", 3), delta(4, "p", 3), whole(5, "Help")):
        ws.judge(told)
    assert ws.texts == {"item_1": "Help"}


@pytest.mark.parametrize(
    "second",
    [delta(2, "lo", 4), delta(1, "lo", 3), whole(2, "Helo")],
    ids=["gap", "event id twice", "whole text differs"],
)
def test_a_broken_promise_fails(second: dict[str, Any]) -> None:
    """A gap in the text, an event id used twice, or a whole text that is not what the deltas gave."""
    ws = client()
    ws.judge(delta(1, "Hel", 0))
    with pytest.raises(AssertionError):
        ws.judge(second)
