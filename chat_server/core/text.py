"""Where a text may be cut so that an engine goes on from there exactly as if it had never been cut.

Tried on real vLLM with ``continue_final_message``: cuts after trailing white space go wrong (the tokens merge
differently), and so do cuts inside an emoji or combining sequence.
"""

from __future__ import annotations

import unicodedata

_ZWJ = "\u200d"
#: A longer sequence is cut anyway: what waits must be bounded, whatever a model prints.
_MAX_HELD = 64
#: The same for a word: Chinese and Thai have no space for long, and a cut inside their tokens goes on in other words.
_MAX_WORD = 512

_EMOJI_RANGES = (
    (0x203C, 0x203C),
    (0x2049, 0x2049),
    (0x2122, 0x2122),
    (0x2139, 0x2139),
    (0x2190, 0x21FF),
    (0x2300, 0x23FF),
    (0x24C2, 0x24C2),
    (0x25A0, 0x27BF),
    (0x2900, 0x297F),
    (0x2B00, 0x2BFF),
    (0x3030, 0x303D),
    (0x3297, 0x3299),
    (0x1F000, 0x1FAFF),
)


def _is_emoji(char: str) -> bool:
    code = ord(char)
    return char in "©®" or (code >= 0x203C and any(low <= code <= high for low, high in _EMOJI_RANGES))


def _extends(char: str) -> bool:
    """Whether ``char`` belongs to what stands before it: a mark, a joiner, a skin tone, a tag of a flag."""
    code = ord(char)
    return (
        char == _ZWJ or 0x1F3FB <= code <= 0x1F3FF or 0xE0020 <= code <= 0xE007F or unicodedata.category(char)[0] == "M"
    )


def _is_regional(char: str) -> bool:
    return 0x1F1E6 <= ord(char) <= 0x1F1FF


def safe_length(text: str) -> int:
    """How many code points of ``text``, from its start, end at a place where an engine can go on exactly.

    The rest (trailing white space, or a trailing emoji or combining sequence that may still grow) waits for what
    follows or for the end. Never holds back more than 64 code points of a sequence.
    """
    if not text or (text[-1] < "\x7f" and not text[-1].isspace()):
        return len(text)  # nearly every token
    stripped = len(text.rstrip())
    if stripped < len(text):
        return stripped
    end = len(text)
    start = end
    while start > 0 and end - start < _MAX_HELD:
        marked = start
        while start > 0 and end - start < _MAX_HELD and _extends(text[start - 1]):
            start -= 1
        if start > 0 and _is_regional(text[start - 1]):
            # Flags are pairs; which two belong together is known only from the run's start, so the whole run waits.
            while start > 0 and end - start < _MAX_HELD and _is_regional(text[start - 1]):
                start -= 1
        elif start > 0 and (start < marked or _is_emoji(text[start - 1])):
            start -= 1
        if start == 0 or text[start - 1] != _ZWJ:
            break
    # What stands before the sequence may be white space, and no place to go on from either.
    return len(text[:start].rstrip()) if end - start < _MAX_HELD else end


def word_length(text: str) -> int:
    """As ``safe_length``, of text that an engine may have cut anywhere: up to the end of the last word that is over.

    With stop strings vLLM holds back about as many characters as the longest has, so what it sends ends inside a token,
    and going on from there gave other words at every second place tried ("was amaze at"). A word ends before white
    space or, if it is of letters and digits, before anything else but a mark or an apostrophe. One of more than 512
    code points is cut anyway: nobody writes so many without a space or a full stop, a model that repeats itself may.
    """
    for end in range(len(text) - 1, max(len(text) - 1 - _MAX_WORD, 0), -1):
        before, after = text[end - 1], text[end]
        if after.isspace():
            if not before.isspace():
                return end
        elif before.isalnum() and not (after.isalnum() or _extends(after) or after in "'\u2019"):
            return end
    return safe_length(text) if len(text) > _MAX_WORD else 0
