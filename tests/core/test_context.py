"""The prompt that an engine is asked with, and how long its answer may be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_server.core.context import estimated_tokens, messages, output_budget
from chat_server.core.items import Item, Part, Role, Usage

pytestmark = pytest.mark.pure

LIMIT = 100


def item(role: Role, *texts: str, usage: Usage | None = None, **fields: Any) -> Item:
    kind: Any = "output_text" if role == "assistant" else "input_text"
    content = [Part(type=kind, text=text) for text in texts]
    if usage is not None:
        fields["usage"] = usage
    return Item(**{"id": "item_1", "status": "completed", "role": role, "content": content, **fields})


def budget(wanted: int | None = None, *items: Item, window: int | None = 1000, instructions: str = "") -> int | None:
    return output_budget(wanted, limit=LIMIT, window=window, instructions=instructions, items=items)


def test_instructions_come_first() -> None:
    """As the system's message, then the conversation in its order."""
    items = [item("user", "Hi"), item("assistant", "Hello."), item("system", "Rhyme."), item("user", "Go on")]
    assert messages("Be brief.", items) == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "system", "content": "Rhyme."},
        {"role": "user", "content": "Go on"},
    )


def test_without_instructions_there_is_no_system_message() -> None:
    """Some templates take none."""
    assert messages("", [item("user", "Hi")]) == ({"role": "user", "content": "Hi"},)


def test_the_parts_of_a_message_are_one_text() -> None:
    """Joined without a change: white space is the client's."""
    assert messages("", [item("user", "Look: ", "", "\n👍")])[0]["content"] == "Look: \n👍"


def test_items_without_text_are_left_out() -> None:
    """The answer that is about to be made is one of them."""
    items = [item("user", "Hi"), item("assistant", "", status="incomplete"), item("assistant", status="in_progress")]
    assert messages("", items) == ({"role": "user", "content": "Hi"},)


def test_an_answer_that_ended_early_is_there_as_it_was_seen() -> None:
    """The person answers to what they saw."""
    assert messages("", [item("assistant", "Once upon", status="incomplete")])[0]["content"] == "Once upon"


def test_a_turn_more_leaves_the_prompt_before_it_as_it_was() -> None:
    """The engine's cached prefix holds."""
    items = [item("user", "Hi"), item("assistant", "Hello."), item("user", "Go on"), item("assistant", "Well.")]
    whole = messages("Be brief.", items)
    assert all(messages("Be brief.", items[:count]) == whole[: count + 1] for count in range(len(items)))


def test_an_answer_that_is_to_go_on_comes_last() -> None:
    """As the assistant's, and the prompt before it is the same as when it was begun: its cached prefix holds."""
    items = [item("user", "Hi"), item("assistant", "Hello."), item("user", "Go on")]
    whole = messages("Be brief.", items, "Once upon")
    assert whole == (*messages("Be brief.", items), {"role": "assistant", "content": "Once upon"})
    assert messages("Be brief.", items, "") == messages("Be brief.", items)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("", 0), ("a", 1), ("The rain in Spain stays mainly in the plain.", 15), ("这是一段中文", 6), ("👍🏿", 3)],
)
def test_tokens_are_estimated_by_bytes(text: str, tokens: int) -> None:
    """More than a tokenizer makes of prose, so that a bound is kept: three bytes a token."""
    assert estimated_tokens(text) == tokens


def test_a_client_gets_what_it_wants_within_the_limit() -> None:
    """It knows its prompt; the engine says no where that does not fit."""
    assert [budget(wanted) for wanted in (1, 99, 100, 101, 10_000)] == [1, 99, 100, 100, 100]
    assert budget(50, item("user", "x" * 5000)) == 50
    assert budget(50, window=None) == 50


def test_an_answer_has_the_limit_where_it_surely_fits() -> None:
    """Beside the prompt, in the engine's window."""
    assert budget(None, item("user", "Hi")) == LIMIT


def test_an_answer_has_the_limit_where_the_window_is_unknown() -> None:
    """Nothing else is known that could bound it."""
    assert budget(None, item("user", "x" * 5000), window=None) == LIMIT


def test_an_answer_has_what_is_left_where_the_limit_may_not_fit() -> None:
    """The engine knows exactly; it would refuse a request for more than its window."""
    assert budget(None, item("user", "x" * 950)) is None
    assert budget(None, instructions="x" * 950) is None
    assert budget(None, window=LIMIT) is None


def test_a_prompt_is_counted_in_bytes() -> None:
    """A token has at least one: 300 code points of Chinese may be 900 tokens."""
    assert budget(None, item("user", "x" * 300)) == LIMIT
    assert budget(None, item("user", "中" * 300)) is None


def test_the_last_usage_counts_for_all_before_it() -> None:
    """The engine counted them; only what came later is estimated."""
    long = item("user", "x" * 5000)
    answer = item("assistant", "y" * 5000, usage=Usage.of(200, 100, 0))
    assert budget(None, long, answer, item("user", "Go on")) == LIMIT
    assert budget(None, long, answer, item("user", "x" * 600)) is None
    assert budget(None, long, item("assistant", "y" * 5000), item("user", "Go on")) is None


def test_the_latest_usage_counts() -> None:
    """Each answer's prompt holds all before it."""
    small, big = Usage.of(10, 10, 0), Usage.of(800, 90, 0)
    assert budget(None, item("assistant", "a", usage=small), item("assistant", "b", usage=big)) is None
    assert budget(None, item("assistant", "a", usage=big), item("assistant", "b", usage=small)) == LIMIT


def test_instructions_count_beside_the_last_usage() -> None:
    """They may have changed since."""
    answer = item("assistant", "Hello.", usage=Usage.of(400, 100, 0))
    assert budget(None, answer) == LIMIT
    assert budget(None, answer, instructions="x" * 450) is None


turns = st.lists(
    st.tuples(
        st.sampled_from(["user", "assistant", "system"]),
        st.sampled_from(["", "Hi", "中文" * 20, "x" * 200, "👍" * 30]),
        st.booleans(),
    ),
    max_size=8,
)


@settings(max_examples=40)
@given(turns, st.integers(1, 2000), st.sampled_from(["", "Be brief.", "é" * 100]))
def test_prompt_and_answer_always_fit_the_window(turns: list[Any], window: int, instructions: str) -> None:
    """For the worst tokenizer, a token a byte, and a template that adds ten tokens round each message."""
    items: list[Item] = []
    for role, text, counted in turns:
        usage = None
        if role == "assistant" and counted:
            usage = Usage.of(tokens(instructions, items), len(text.encode()), 0)
        items.append(item(role, text, usage=usage))
    allowed = budget(None, *items, window=window, instructions=instructions)
    assert allowed in (None, LIMIT)
    if allowed is not None:
        assert tokens(instructions, items) + allowed <= window


def tokens(instructions: str, items: list[Item]) -> int:
    """The size of a prompt at a token per byte."""
    return sum(len(message["content"].encode()) + 10 for message in messages(instructions, items))
