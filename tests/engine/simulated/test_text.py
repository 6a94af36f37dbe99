"""What a simulated engine says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_server.engine.simulated.text import (
    answer_for,
    attempt_words,
    content,
    continuation,
    next_marked,
    prompt_tokens,
    token_id,
    tokens,
)

pytestmark = pytest.mark.pure

USER = {"role": "user", "content": "What is a session?"}


@given(st.text())
def test_tokens_joined_are_the_text(text: str) -> None:
    """Nothing is lost or changed by counting tokens."""
    assert "".join(tokens(text)) == text


def test_an_emoji_of_several_code_points_is_several_tokens() -> None:
    """So streams cut it in the middle, as those of real engines do."""
    assert tokens("👩🏽‍💻") == ["👩", "🏽", "\u200d", "💻"]


def test_the_same_conversation_gets_the_same_answer() -> None:
    """It is a function of the messages, so a test can compute it."""
    assert answer_for([USER]) == answer_for([dict(USER)])
    assert answer_for([USER]) != answer_for([{"role": "user", "content": "What is a view?"}])


def test_an_answer_shows_what_it_remembers() -> None:
    """A person sees at the second turn that the first is known, and what the instructions are."""
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello, Ada."},
        {"role": "user", "content": "What is my name?"},
    ]
    answer = answer_for(messages)
    assert "You wrote: “What is my name?”" in answer
    assert "Before it came 2 messages; the first was “My name is Ada.”." in answer
    assert "I was told: “Be kind.”" in answer


def test_answers_hold_what_makes_text_hard() -> None:
    """Over a few answers: Chinese, Japanese, a joined emoji, a combining accent, a table, code, markup."""
    text = answer_for([{"role": "user", "content": "In 400 words, please."}])
    for hard in ("中文", "日本語", "👨‍👩‍👧‍👦", "e\u0301", "|---|", "```python", "<img"):
        assert hard in text


@pytest.mark.parametrize("words", [200, 1500])
def test_an_answer_is_about_as_long_as_asked(words: int) -> None:
    """A message that asks for a number of words gets about as many."""
    answer = answer_for([{"role": "user", "content": f"Tell me something in {words} words."}])
    assert words <= len(answer.split()) <= words + 50


def test_a_default_length_can_be_set() -> None:
    """A load test sets it for all answers; the message's own wish goes first."""
    assert len(answer_for([USER], words=500).split()) >= 500
    assert len(answer_for([{"role": "user", "content": "In 10 words"}], words=500).split()) < 100


@given(st.data())
def test_a_cut_answer_goes_on_exactly(data: st.DataObject) -> None:
    """What was said and what follows are the whole answer, wherever it was cut."""
    answer = answer_for([USER])
    cut = data.draw(st.integers(0, len(answer)))
    assert answer[:cut] + continuation(answer, answer[:cut]) == answer


def test_text_that_is_not_ours_goes_on_from_its_length() -> None:
    """A partial answer of somebody else ends some time too, and goes on with a whole word."""
    answer = "one two three four"
    assert continuation(answer, "something") == " four"
    assert continuation(answer, "something longer than the answer") == ""


def test_words_of_an_attempt_bear_its_mark_and_a_number() -> None:
    """A mixture, a hole or a repetition shows in the text itself."""
    assert attempt_words("a1", 1, 3) == "a1·1 a1·2 a1·3"
    assert attempt_words("b2", 40, 2) == " b2·40\n\nb2·41"
    assert tokens(attempt_words("b2", 40, 2)) == [" b2·40", "\n\n", "b2·41"]


def test_an_attempt_goes_on_after_the_last_whole_number() -> None:
    """The next attempt goes on with the numbers of the one before."""
    assert next_marked("") == 1
    assert next_marked(attempt_words("a1", 1, 17)) == 18


def test_the_prompt_of_a_turn_begins_with_the_turn_before() -> None:
    """The prompt and the answer of turn one are the beginning of the prompt of turn two: a cache can hold them."""
    answer = answer_for([USER])
    first = [*prompt_tokens([USER]), *tokens(answer)]
    second = prompt_tokens([USER, {"role": "assistant", "content": answer}, {"role": "user", "content": "Go on"}])
    assert second[: len(first)] == first


def test_an_unfinished_message_stays_open() -> None:
    """``continue_final_message``: nothing ends the last message, and no new one begins."""
    prompt = prompt_tokens([USER, {"role": "assistant", "content": "A session is"}], continue_final=True)
    assert prompt[-3:] == ["A", " session", " is"]
    assert prompt_tokens([USER], generate=False)[-2:] == ["<|im_end|>", "\n"]


def test_content_in_parts_is_read() -> None:
    """The API allows a list of parts; only text counts."""
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}, {"type": "text", "text": "b"}]
    assert content({"role": "user", "content": parts}) == "ab"
    assert content({"role": "assistant", "content": None}) == ""


def test_token_ids_are_the_same_everywhere() -> None:
    """No seed of the process is in them."""
    assert token_id(" the") == 1736667976
