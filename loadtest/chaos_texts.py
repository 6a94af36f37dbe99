"""What is wrong with a text, if anything: code points lost, repeated, mixed from two attempts, or simply wrong."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

Kind = Literal[
    "lost",  # code points of the answer are missing
    "repeated",  # they came twice
    "mixed",  # of two attempts at the answer
    "wrong",  # others than the engine wrote
    "taken back",  # the client had them, and nobody wanted them cut
    "order",  # an event that can not come here
    "end",  # an answer without its end, with two, or with one that can not be
    "told first",  # told before it was stored
    "duplicate",  # one message or one answer became two
    "orphan",  # an engine works on an answer that has ended, or two work on one
    "refused",  # an event or a connection was refused or closed without a reason
    "stuck",  # nothing comes any more
]

_WORD = re.compile(r"([0-9a-z]+)·(\d+)")


class Violation(Exception):
    """A guarantee does not hold. ``kind`` is which, the text says how it showed."""

    def __init__(self, kind: Kind, what: str) -> None:
        super().__init__(what)
        self.kind: Kind = kind


def check_same(have: str, want: str, who: str) -> None:
    """Raise the Violation that says how ``have`` differs from ``want``, if it does."""
    if have == want:
        return
    at = next((n for n, (a, b) in enumerate(zip(have, want, strict=False)) if a != b), min(len(have), len(want)))
    more = len(have) - len(want)
    if more < 0 and want.endswith(have[at:]):
        raise Violation("lost", f"{who}: {-more} code points are missing at {at}: {_show(want[at : at - more])}")
    if more > 0 and have.endswith(want[at:]) and have[at : at + more] in have[:at]:
        raise Violation("repeated", f"{who}: {more} code points come again at {at}: {_show(have[at : at + more])}")
    raise Violation("wrong", f"{who}: at {at} there is {_show(have[at:])} in place of {_show(want[at:])}")


def check_marked(text: str, *, whole: int | None, starts: Collection[int]) -> None:
    """Judge a text of an engine that marks each word with its attempt and its number (``--vary``).

    ``whole`` is how many words there must be; None for a text that was cut, anywhere. Another attempt may go on only
    at one of ``starts`` (code points), and never comes back. Raises Violation.
    """
    at, number = 0, 0
    marks: list[str] = []
    while at < len(text):
        number += 1
        gap = "" if number == 1 else "\n\n" if number % 40 == 1 else " "
        word = _WORD.match(text, at + len(gap)) if text.startswith(gap, at) else None
        if word is not None and word.end() == len(text) and whole is None and word[2] != str(number):
            word = None  # its number may be cut off
        if word is None:
            mark = marks[-1] if marks else None
            begun = text.startswith(gap, at) and _begins(text[at + len(gap) :], mark, number)
            cut = gap.startswith(text[at:]) or begun
            if whole is None and cut:
                return
            raise Violation("wrong", f"word {number} at {at} is {_show(text[at:])}")
        _check_word(word[1], int(word[2]), marks, number=number, at=at, starts=starts)
        at = word.end()
    if whole is not None and number != whole:
        raise Violation("lost", f"it ends after word {number} of {whole}")


def _check_word(mark: str, has: int, marks: list[str], *, number: int, at: int, starts: Collection[int]) -> None:
    if not marks or mark != marks[-1]:
        if mark in marks:
            raise Violation("mixed", f"attempt {mark} comes back at {at}")
        if marks and at not in starts:
            raise Violation("mixed", f"attempt {mark} goes on at {at}, where no making of the text began ({starts})")
        marks.append(mark)
    if has > number:
        raise Violation("lost", f"words {number} to {has - 1} are missing at {at}")
    if has < number:
        raise Violation("repeated", f"word {has} comes again at {at}, in place of {number}")


def _begins(rest: str, mark: str | None, number: int) -> bool:
    """Whether ``rest`` is the beginning of word ``number`` of some attempt (None: the first one, not known)."""
    if mark is not None and f"{mark}·{number}".startswith(rest):
        return True
    found = re.fullmatch(r"[0-9a-z]+(?:·(\d*))?", rest)
    # Another attempt may have gone on just here; its word is cut off like any other.
    return found is not None and str(number).startswith(found[1] or "")


def _show(text: str) -> str:
    return repr(text[:60] + ("…" if len(text) > 60 else ""))
