"""Ids may stand in keys of the store and in logs, whoever chose them."""

from __future__ import annotations

import re

import pytest

from chat_server.core.ids import CLIENT_ID, is_id, new_id

pytestmark = pytest.mark.pure


def test_a_new_id_says_its_kind_and_carries_128_random_bits() -> None:
    """32 hex digits after the kind: nobody guesses one."""
    assert re.fullmatch(r"sess_[0-9a-f]{32}", new_id("sess"))


def test_new_ids_differ() -> None:
    """Drawn anew each time."""
    assert len({new_id("item") for _ in range(1000)}) == 1000


def test_our_own_ids_are_ids() -> None:
    """What we gave out, a client may send back."""
    assert is_id(new_id("resp"))


@pytest.mark.parametrize("text", ["a", "msg_1", "root", "0", "A-b.c:d_e", "x" * 64])
def test_what_a_client_may_choose(text: str) -> None:
    """Letters, digits and four marks, at most 64 of them."""
    assert is_id(text)
    assert re.search(CLIENT_ID, text)


@pytest.mark.parametrize(
    "text", ["", "x" * 65, "a b", "a/b", "a{b}", "é", "a\n", "\na", "a\nb", "a\x00", "*", '"', "\u0661", "a\u200d"]
)
def test_what_a_client_may_not_choose(text: str) -> None:
    """Nothing that means something in a key, a log line or JSON; also not a line end at the end."""
    assert not is_id(text)
    assert not re.search(CLIENT_ID, text), "events are checked by a search, not a full match"
