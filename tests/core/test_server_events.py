"""Every event that we can send is right in each field by the installed ``openai`` types."""

from __future__ import annotations

import json
from typing import Any, Literal, get_args

import pytest

from chat_server.core.client_events import Flush
from chat_server.core.items import Item, Part, ResponseObject, ResponseStatus, Timing, Usage
from chat_server.core.server_events import (
    ActiveResponse,
    ContentPartAdded,
    ContentPartDone,
    Error,
    ErrorBody,
    Heartbeat,
    ItemAdded,
    ItemDeleted,
    ItemDone,
    ItemRetrieved,
    ItemTruncated,
    OutputItemAdded,
    OutputItemDone,
    OutputTextDone,
    Pong,
    ResponseCreated,
    ResponseDone,
    ResponseMigrated,
    ResponseQueued,
    ServerDraining,
    ServerEvent,
    SessionCreated,
    SessionObject,
    SessionUpdated,
    WirePart,
    encode,
)
from tests.core.answers import DETAILS
from tests.support import events

pytestmark = pytest.mark.pure

MESSAGE = Item(id="item_1", status="completed", role="user", content=[Part(type="input_text", text="Hi 👍")])
BEGUN = Item(
    id="item_2", status="in_progress", role="assistant", content=[], in_reply_to="item_1", response_id="resp_1"
)
ANSWER = Item(
    id="item_2",
    status="incomplete",
    role="assistant",
    content=[Part(type="output_text", text="Hello")],
    in_reply_to="item_1",
    response_id="resp_1",
    epochs=[("epoch_1", 0), ("epoch_2", 5)],
    engine="engine-1",
    usage=Usage.of(10, 5, 4),
    timing=Timing(queue_ms=1, ttft_ms=2, total_ms=3),
)
SYSTEM = Item(id="item_0", status="completed", role="system", content=[Part(type="input_text", text="Rhyme.")])
RUNNING = ResponseObject(id="resp_1", status="in_progress", output=[], metadata={"topic": "sea"})


def session(**changes: Any) -> SessionObject:
    fields: dict[str, Any] = {
        "id": "sess_1",
        "model": "m",
        "instructions": "Be brief.",
        "max_output_tokens": 50,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ("END",),
        "flush": Flush(mode="token", max_delay_ms=100, max_chars=200),
        "heartbeat_interval_ms": 15000,
    }
    return SessionObject(**{**fields, **changes})


PLAIN = session(instructions="", max_output_tokens="inf", temperature=None, top_p=None, stop=(), flush=Flush())


def done(status: ResponseStatus, *output: Item, **changes: Any) -> ResponseDone:
    fields: dict[str, Any] = {
        "usage": Usage.of(10, 5, 4),
        "timing": Timing(queue_ms=1, ttft_ms=None, total_ms=3),
        "engine": "engine-1",
        **changes,
    }
    details = DETAILS[status]
    return ResponseDone(
        response=ResponseObject(id="resp_1", status=status, status_details=details, output=list(output), **fields)
    )


place: dict[str, Any] = {"response_id": "resp_1", "item_id": "item_2", "output_index": 0, "content_index": 0}
output: dict[str, Any] = {"response_id": "resp_1", "output_index": 0}

ALL: list[ServerEvent] = [
    SessionCreated(session=session(), resumed=False, item_count=0, active_response=None),
    SessionCreated(
        session=PLAIN,
        resumed=True,
        item_count=3,
        active_response=ActiveResponse(id="resp_1", item_id="item_2", state="streaming", epoch="epoch_1", offset=0),
    ),
    SessionUpdated(session=session()),
    SessionUpdated(session=PLAIN),
    *(kind(previous_item_id=None, item=SYSTEM) for kind in (ItemAdded, ItemDone)),
    *(kind(previous_item_id="item_0", item=MESSAGE, duplicate=True) for kind in (ItemAdded, ItemDone)),
    ItemAdded(previous_item_id="item_1", item=BEGUN),
    ItemDone(previous_item_id="item_1", item=ANSWER),
    *(ItemRetrieved(item=item) for item in (SYSTEM, MESSAGE, BEGUN, ANSWER)),
    ItemDeleted(item_id="item_1"),
    ItemTruncated(item_id="item_1", text_end=5),
    ResponseMigrated(response_id="resp_1", reason="engine_lost"),
    ServerDraining(retry_after_ms=1500),
    ResponseCreated(response=RUNNING),
    ResponseCreated(response=RUNNING, in_reply_to="item_1", duplicate=True),
    ResponseQueued(response_id="resp_1", position=3),
    OutputItemAdded(**output, item=BEGUN),
    OutputItemDone(**output, item=ANSWER),
    ContentPartAdded(**place, part=WirePart("")),
    OutputTextDone(**place, text="Hello"),
    ContentPartDone(**place, part=WirePart("Hello")),
    done("completed", ANSWER),
    *(done(status, ANSWER) for status in ("cancelled", "incomplete", "failed")),
    done("failed", usage=None),
    Pong(t=1.5, now_ms=1),
    Pong(t=2**53, now_ms=1),
    Pong(t=None, now_ms=1),
    Error(error=ErrorBody(type="invalid_request_error", code="unknown_parameter", message="Unknown: `x`.", param="x")),
    Error(
        error=ErrorBody(
            type="server_error",
            code="store_unavailable",
            message="Later.",
            event_id="e1",
            retryable=True,
            retry_after_ms=500,
        )
    ),
]
ALL += [
    Heartbeat(now_ms=1, state=state, response_id=None if state == "idle" else "resp_1")
    for state in get_args(Literal["idle", "queued", "prefill", "thinking", "streaming", "waiting"])
]


def kind(event: ServerEvent) -> str:
    return str(type(event).__struct_config__.tag)


@pytest.mark.parametrize("event", ALL, ids=kind)
def test_an_event_is_right_by_the_types_of_the_api(event: ServerEvent) -> None:
    """Strictly, and with no field that the protocol does not describe; ours by our own."""
    sent = json.loads(encode(event))
    assert sent["type"] == kind(event)
    events.check(sent, extensions=kind(event) in events.EXTENSIONS)


def test_no_event_is_left_out_above() -> None:
    """A new one needs a line there."""
    assert {type(event) for event in ALL} == set(ServerEvent.__subclasses__())


def test_an_event_gets_an_id_of_its_own() -> None:
    """Clients tell events apart by it."""
    ids = {json.loads(encode(ItemDeleted(item_id="item_1")))["event_id"] for _ in range(100)}
    assert len(ids) == 100
    assert all(id.startswith("event_") for id in ids)


def test_an_event_keeps_its_id() -> None:
    """One event told to several connections is the same event."""
    event = ItemDeleted(item_id="item_1")
    assert encode(event) == encode(event)
    assert json.loads(encode(ItemDeleted(event_id="event_mine", item_id="item_1")))["event_id"] == "event_mine"


def test_fields_without_a_value_are_left_out_or_null() -> None:
    """As the API has them: our own are absent, its own are null."""
    created = json.loads(encode(ResponseCreated(response=RUNNING)))
    assert not {"in_reply_to", "duplicate"} & created.keys()
    assert not {"timing", "engine"} & created["response"].keys()
    assert (created["response"]["usage"], created["response"]["status_details"]) == (None, None)
    error = json.loads(encode(Error(error=ErrorBody(type="t", code="c", message="m"))))["error"]
    assert error == {"type": "t", "code": "c", "message": "m", "param": None, "event_id": None, "retryable": False}


def test_an_event_is_one_line_of_utf_8() -> None:
    """Text goes out as it is, control characters escaped."""
    frame = encode(OutputTextDone(**place, text='Zeile\n"👩🏽\u200d💻" 中文\u0000'))
    assert b"\n" not in frame
    assert "👩🏽\u200d💻".encode() in frame
    assert json.loads(frame)["text"] == 'Zeile\n"👩🏽\u200d💻" 中文\u0000'
