"""The judge of texts sees each way in which a text can be spoiled, and nothing in a good one."""

from __future__ import annotations

import random

import pytest

from chat_server.engine.simulated.text import answer_for, attempt_words
from loadtest.chaos_texts import Violation, check_marked, check_same

pytestmark = pytest.mark.pure

ANSWER = answer_for([{"role": "user", "content": "Tell me all."}])
WORDS = attempt_words("ab12x1", 1, 90)
#: Begun by one engine, ended by another.
HALF = attempt_words("ab12x1", 1, 45)
TAKEN_OVER = HALF + attempt_words("cd34x9", 46, 45)


def kind(have: str, want: str) -> str | None:
    try:
        check_same(have, want, "test")
    except Violation as violation:
        return violation.kind
    return None


def marked(text: str, whole: int | None = 90, starts: tuple[int, ...] = (0,)) -> str | None:
    try:
        check_marked(text, whole=whole, starts=starts)
    except Violation as violation:
        return violation.kind
    return None


@pytest.mark.parametrize("at", [0, 1, 100, len(ANSWER) - 7])
def test_each_spoiled_text_is_named(at: int) -> None:
    """A hole, a repetition, another character: at the start, within, and near the end."""
    assert kind(ANSWER, ANSWER) is None
    assert kind(ANSWER[:at] + ANSWER[at + 5 :], ANSWER) == "lost"
    assert kind(ANSWER[: at + 5] + ANSWER[at:], ANSWER) == "repeated"
    assert kind(ANSWER[:at] + "\ufffd" + ANSWER[at + 1 :], ANSWER) == "wrong"
    assert kind(ANSWER[:at], ANSWER) == "lost"


def test_one_code_point_is_enough() -> None:
    """Wherever it is: the verdict must not depend on luck."""
    seed = random.randrange(10**6)
    print("seed", seed)
    choose = random.Random(seed)
    for _ in range(200):
        at = choose.randrange(len(ANSWER))
        assert kind(ANSWER[:at] + ANSWER[at + 1 :], ANSWER) == "lost"
        assert kind(ANSWER[:at] + "¤" + ANSWER[at:], ANSWER) == "wrong"


def test_words_of_one_attempt_are_right() -> None:
    """The whole, and every beginning of it as a cut text."""
    assert marked(WORDS) is None
    assert [at for at in range(len(WORDS)) if marked(WORDS[:at], whole=None)] == []


def test_another_attempt_goes_on_only_where_a_making_began() -> None:
    """At a start that the item tells it is a take-over; elsewhere two makers wrote into one text."""
    assert marked(TAKEN_OVER, starts=(0, len(HALF))) is None
    assert [at for at in range(len(TAKEN_OVER)) if marked(TAKEN_OVER[:at], None, (0, len(HALF)))] == []
    assert marked(TAKEN_OVER) == "mixed"
    assert marked(TAKEN_OVER, starts=(0, len(HALF) - 1)) == "mixed"


def test_an_attempt_that_comes_back_is_a_mixture() -> None:
    """Even if each change stands where a making began."""
    third = TAKEN_OVER[: len(HALF)] + attempt_words("cd34x9", 46, 5)
    text = third + attempt_words("ab12x1", 51, 40)
    assert marked(text, starts=(0, len(HALF), len(third))) == "mixed"


@pytest.mark.parametrize("whole", [90, None])
def test_spoiled_words_are_named(whole: int | None) -> None:
    """Also in a text that was cut somewhere behind the fault."""
    place = WORDS.index(" ab12x1·30")
    again = WORDS.index(" ab12x1·32")
    assert marked(WORDS[:place] + WORDS[again:], whole) == "lost"
    assert marked(WORDS[:again] + WORDS[place:], whole) == "repeated"
    assert marked(WORDS[:place] + WORDS[place + 1 :], whole) == "wrong"
    assert marked(WORDS[: place + 3] + WORDS[place + 4 :], whole) is not None
    assert marked(WORDS.replace("\n\n", " "), whole) == "wrong"


def test_a_text_that_ends_too_early_lost_something() -> None:
    """If nobody cut it."""
    assert marked(attempt_words("ab12x1", 1, 89)) == "lost"
    assert marked(WORDS[:-1]) is not None
    assert marked("") == "lost"
