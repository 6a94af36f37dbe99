"""The items as the owner of an answer holds them."""

from __future__ import annotations

import pytest

from chat_server.core.conversation import Conversation
from chat_server.core.items import Item, Part

pytestmark = pytest.mark.pure


def item(name: str, text: str = "Hello") -> Item:
    return Item(id=name, status="completed", role="user", content=[Part(type="input_text", text=text)])


def names(conversation: Conversation) -> str:
    return "".join(item.id for item in conversation.items)


def test_items_enter_behind_the_one_that_is_named() -> None:
    """At the start, in between, at the end; behind one that is not there any more: at the end."""
    conversation = Conversation([item("b"), item("d")])
    conversation.put(item("a"), None)
    conversation.put(item("c"), "b")
    conversation.put(item("e"), "d")
    conversation.put(item("f"), "x")
    assert names(conversation) == "abcdef"


def test_an_item_that_is_another_one_now_keeps_its_place() -> None:
    """It is not there twice."""
    conversation = Conversation([item("a"), item("b"), item("c")])
    conversation.put(item("b", "cut"), None)
    assert names(conversation) == "abc"
    assert conversation.items[1].text == "cut"


def test_an_item_leaves() -> None:
    """And one that is not there makes no difference."""
    conversation = Conversation([item("a"), item("b")])
    conversation.remove("a")
    conversation.remove("x")
    assert names(conversation) == "b"


def test_the_prompt_is_what_stands_before_the_answer() -> None:
    """All of it, where the answer has no place any more."""
    conversation = Conversation([item("a"), item("b"), item("c")])
    assert [item.id for item in conversation.before("c")] == ["a", "b"]
    assert conversation.before("a") == ()
    assert len(conversation.before("x")) == 3
