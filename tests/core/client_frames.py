"""What clients send: right events, and ways to spoil them."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

#: One event of each kind with all of its fields.
VALID: dict[str, dict[str, Any]] = {
    "session.update": {
        "session": {
            "type": "realtime",
            "instructions": "Be brief.",
            "max_output_tokens": 100,
            "temperature": 0.5,
            "top_p": 0.9,
            "stop": ["END"],
            "flush": {"mode": "token", "max_delay_ms": 100, "max_chars": 200},
            "tools": [],
        }
    },
    "conversation.item.create": {
        "previous_item_id": "root",
        "item": {
            "id": "msg_1",
            "object": "realtime.item",
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": [{"type": "input_text", "text": "Hi 👍"}],
        },
    },
    "conversation.item.retrieve": {"item_id": "msg_1"},
    "conversation.item.delete": {"item_id": "msg_1"},
    "conversation.item.truncate": {"item_id": "msg_1", "content_index": 0, "audio_end_ms": 0, "text_end": 5},
    "response.create": {
        "in_reply_to": "msg_1",
        "if_active": "reject",
        "seen": 3,
        "response": {
            "instructions": "Rhyme.",
            "max_output_tokens": "inf",
            "temperature": 0,
            "top_p": 1,
            "stop": ["END", "STOP"],
            "metadata": {"topic": "sea"},
            "conversation": "auto",
            "input": [
                {"type": "item_reference", "id": "msg_1"},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            ],
            "tools": [],
        },
    },
    "response.cancel": {"response_id": "resp_1", "seen": 7},
    "ping": {"t": 1700000000000},
}

#: Fields of the API that mean nothing here; the SDKs send them all the same.
IGNORED = {
    "session.update": [
        ("audio", {"input": {"turn_detection": None}, "output": {"voice": "marin"}}),
        ("include", ["item.input_audio_transcription.logprobs"]),
        ("model", "gpt-realtime"),
        ("output_modalities", ["text"]),
        ("parallel_tool_calls", True),
        ("prompt", {"id": "pmpt_1"}),
        ("reasoning", {"effort": "low"}),
        ("tool_choice", "auto"),
        ("tracing", "auto"),
        ("truncation", {"type": "retention_ratio", "retention_ratio": 0.8}),
    ],
    "response.create": [
        ("audio", {"output": {"voice": "marin"}}),
        ("output_modalities", ["text"]),
        ("parallel_tool_calls", False),
        ("prompt", {"id": "pmpt_1", "variables": {"city": "Paris"}}),
        ("reasoning", {"effort": "low"}),
        ("tool_choice", {"type": "function", "name": "f"}),
    ],
}
BODY = {"session.update": "session", "response.create": "response"}

json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from([10**400, -(2**63), 2**64, "x" * 70, "\ud800", "a\n", [], {}]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
kinds = st.sampled_from(sorted(VALID))


def event(kind: str, **fields: Any) -> dict[str, Any]:
    """A valid event of a kind, with these fields changed."""
    return {"type": kind, **copy.deepcopy(VALID[kind]), **fields}


def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The path of every value inside."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, child in children for place in places(child, (*path, key)))]


@st.composite
def mutated_events(draw: st.DrawFn) -> dict[str, Any]:
    """A valid event with one value replaced, taken out, or put beside the others."""
    mutant = event(draw(kinds), event_id="mine")
    *way, last = draw(st.sampled_from(places(mutant)[1:]))
    parent: Any = mutant
    for key in way:
        parent = parent[key]
    match draw(st.sampled_from(["replace", "remove", "add"])):
        case "replace":
            parent[last] = draw(json_values)
        case "remove":
            del parent[last]
        case _ if isinstance(parent, dict):
            parent[draw(st.text(max_size=6))] = draw(json_values)
        case _:
            parent.append(draw(json_values))
    return mutant
