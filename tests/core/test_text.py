"""Where a text may be cut: not in white space, not inside what one sees as one character, and never far back."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chat_server.core.text import safe_length, word_length

pytestmark = pytest.mark.pure

#: The most that may wait, white space aside.
BOUND = 64
#: The same of a word, where the engine may have cut anywhere.
WORD_BOUND = 512

#: What one sees as one character. The first code points of "e + accent" and of a keycap are characters by themselves.
EMOJI = {
    "emoji": "👍",
    "skin tone": "👍🏽",
    "variation selector": "❤\ufe0f",
    "family": "👨\u200d👩\u200d👧\u200d👦",
    "joined with skin tones": "👩🏽\u200d🤝\u200d👨🏿",
    "profession": "👩🏽\u200d💻",
    "flag of a rainbow": "🏳\ufe0f\u200d🌈",
    "heart on fire": "❤\ufe0f\u200d🔥",
    "flag": "🇩🇪",
    "flags": "🇩🇪🇫🇷🇯🇵",
    "flag of Scotland": "🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",
    "sign": "✅",
    "arrow": "➡\ufe0f",
    "clock": "⏰",
    "trademark": "™\ufe0f",
    "copyright": "©\ufe0f",
    "registered": "®\ufe0f",
    "newer emoji": "🫱🏻\u200d🫲🏿",
}
MARKED = {
    "keycap": "1\ufe0f\u20e3",
    "keycap of a hash": "#\ufe0f\u20e3",
    "combining accent": "e\u0301",
    "several marks": "o\u0302\u0323\u0301",
    "Devanagari": "नि",
    "virama": "क\u094d",
    "Thai": "ที่",
    "Arabic": "بِّ",
    "Hebrew": "שָׁ",
    "Zalgo": "a" + "\u0334\u0353\u0301" * 8,
}
BEFORE = ["", "Hello", "Hello ", "line\n\n", "中文。", "中文\u3000", "a\u00a0", "👍 ", "é"]

few = settings(max_examples=30)

pieces = st.one_of(
    st.sampled_from([*EMOJI.values(), *MARKED.values()]),
    st.sampled_from(["\u200d", "\ufe0f", "🏽", "🇩", "\u0301", "👩", "🔥", "\U000e0062"]),
    st.sampled_from([" ", "\n", "\t", "\u3000", "\u00a0", "\u2028", "a", "Hi", "中", "ไทย", "é", "\x00", "\x7f", "1"]),
)
texts = st.lists(pieces, max_size=12).map("".join)


def ends_well(text: str) -> bool:
    return not text or not text[-1].isspace()


every_sequence = pytest.mark.parametrize("sequence", [*EMOJI.values(), *MARKED.values()], ids=[*EMOJI, *MARKED])


@every_sequence
def test_a_sequence_that_may_grow_waits_whole(sequence: str) -> None:
    """However little of it came; and the white space before it waits with it."""
    first = 2 if sequence in MARKED.values() else 1
    begun = [before + sequence[:end] for before in BEFORE for end in range(first, len(sequence) + 1)]
    wanted = [len(before.rstrip()) for before in BEFORE for _ in range(first, len(sequence) + 1)]
    assert [safe_length(text) for text in begun] == wanted


@every_sequence
def test_a_sequence_goes_when_other_text_follows(sequence: str) -> None:
    """It can not grow any more."""
    texts = [f"a {sequence}{after}" for after in ("x", "?", "中")]
    assert [safe_length(text) for text in texts] == [len(text) for text in texts]


@every_sequence
def test_a_sequence_goes_when_white_space_follows(sequence: str) -> None:
    """Only the white space waits then."""
    assert safe_length(f"a{sequence} \n") == len(f"a{sequence}")


def test_an_emoji_goes_when_another_begins() -> None:
    """Two that are not joined are two characters; only the last may grow."""
    assert safe_length("👍👩🏽\u200d💻") == len("👍")


@pytest.mark.parametrize(
    "space", [" ", "   ", "\n", "\r\n", "\t", "\u3000", "\u00a0", "\u2003", "\u2028", "\x85", "\x1c", " \u3000\n"]
)
def test_trailing_white_space_waits(space: str) -> None:
    """The tokens of a space and of the word after it are one: an engine that starts between them starts otherwise."""
    assert safe_length(f"Hello{space}") == len("Hello")
    assert safe_length(space) == 0


def test_white_space_of_any_length_waits() -> None:
    """There is no exact place in it, so the bound is not for it."""
    assert safe_length("a" + " " * 1000) == 1


@few
@given(st.text(st.characters(max_codepoint=127), max_size=40))
def test_plain_ascii_is_never_held(text: str) -> None:
    """White space at the end aside. Nearly all that models write waits for nothing."""
    assert safe_length(text) == len(text.rstrip())


@pytest.mark.parametrize("text", ["中文", "日本語。", "ไทย", "Привет", "naïve", "한국어", "العربية", "“Hi”", "a–b…"])
def test_letters_and_marks_of_any_script_are_not_held(text: str) -> None:
    """What can not grow into something else goes at once."""
    assert safe_length(text) == len(text)


def test_nothing_is_nothing() -> None:
    """The empty text may be cut at its end."""
    assert safe_length("") == 0


@few
@given(texts)
@example("a  \u0301")
@example("Hello 👍")
@example("\u200d")
def test_the_cut_is_a_good_place(text: str) -> None:
    """Within the text, and not after white space, whatever stands there."""
    length = safe_length(text)
    assert 0 <= length <= len(text)
    assert ends_well(text[:length])


@few
@given(texts)
@example("©\ufe0f")
@example("ที่")
@example("a 1\ufe0f\u20e3")
def test_no_mark_is_parted_from_its_base(text: str) -> None:
    """Of what waits together."""
    for length in (safe_length(text), word_length(text)):
        assert length == len(text) or not (length > 0 and unicodedata.category(text[length])[0] == "M")


@few
@given(texts, st.sampled_from(["\u0301", "🇩", "👩\u200d", "\u200d", "🏽", "👍\ufe0f\u200d"]), st.integers(0, 200))
def test_what_waits_is_bounded(before: str, part: str, times: int) -> None:
    """At most 64 code points and the white space before them, whatever a model prints."""
    text = before + part * times
    held = text[safe_length(text) :]
    assert len(held.lstrip()) <= BOUND


@few
@given(st.lists(pieces, max_size=20))
def test_holding_back_loses_nothing(chunks: list[str]) -> None:
    """Fed piece by piece, what went and what is left are the text; a piece more never takes anything back."""
    gone = waits = ""
    for chunk in chunks:
        waits += chunk
        length = safe_length(waits)
        gone, waits = gone + waits[:length], waits[length:]
        assert ends_well(gone)
    assert gone + waits == "".join(chunks)


@few
@given(texts, texts)
def test_what_may_go_stays_so(text: str, more: str) -> None:
    """Whatever follows allows a later cut, never only an earlier one."""
    assert safe_length(f"{text}xy{more}") >= len(text) + 1


# --- where an engine has cut the text anywhere


@pytest.mark.parametrize(
    "text",
    [
        "Hello| wor",
        "Hello| world",
        "Hello,| wor",
        "Hello,| ",
        "Hello|,",
        "It is| don't",
        "It is| don\u2019t",
        "line|\n\n  ",
        "a|_b",
        "3|.14",
        "北京|，有",
        "|" + "北京是中国的首都" * 20,
        "|" + "การเดินทางในประเทศไทย" * 10,
        "|" + "हिन्दी" * 30,
        "ประเทศไทย|  " + "ที่นี่มีน้ำ" * 10,
        "|" + "1\ufe0f\u20e3" * 30,
        "|" + "x" * 100,
        "数| 数",
        "see 1\ufe0f\u20e3| x",
        "Hi| 👩🏽\u200d💻",
        "Hi 👩🏽\u200d💻| x",
        "|Hello",
        "| Hello",
        "| \n",
        "|",
    ],
)
def test_a_word_goes_when_it_is_over(text: str) -> None:
    """``|`` is the end of what may go: half a word is no place to go on from, for its tokens are others."""
    before, _, after = text.partition("|")
    assert word_length(before + after) == len(before)


@few
@given(texts)
def test_a_word_ends_at_a_good_place(text: str) -> None:
    """Within the text, not after white space, and never inside what one sees as one character."""
    length = word_length(text)
    assert 0 <= length <= len(text)
    assert ends_well(text[:length])
    if 0 < length < len(text):
        assert text[length] not in "\u200d\ufe0f🏽\u0301"


@few
@given(st.text(alphabet="ab 中\u0301👍", max_size=300))
def test_what_waits_of_a_word_is_bounded(text: str) -> None:
    """A text without an end of a word is cut anyway, far behind all that people write."""
    long = text.replace(" ", "") * 20
    assert len(long) - word_length(long) <= WORD_BOUND + BOUND


@few
@given(st.lists(pieces, max_size=20))
def test_waiting_for_words_loses_nothing(chunks: list[str]) -> None:
    """Fed piece by piece, what went and what is left are the text."""
    gone = waits = ""
    for chunk in chunks:
        waits += chunk
        length = word_length(waits)
        gone, waits = gone + waits[:length], waits[length:]
        assert ends_well(gone)
    assert gone + waits == "".join(chunks)
