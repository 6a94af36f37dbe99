"""What the load test of slow readers makes of what it measured."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from loadtest.slow_readers import HELD_BACK
from loadtest.slow_report import Measured, Plan, report

pytestmark = pytest.mark.pure

PLAN = Plan(streams=500, slow=10, frozen=1, rate=5.0, seconds=20.0, lag_rate=60.0, slow_rate=8000)
GOOD = Measured(gaps=[0.2] * 99 + [0.25], longest=200, freed_s=[14.0])


def reported(*, memory: int = 200 << 10, **bad: Any) -> tuple[int, str]:
    """The exit status and what was printed, if the runs with bad readers differ from good ones in this."""
    runs = {"without": [GOOD] * 3, "the same again": [GOOD] * 3, "with": [replace(GOOD, **bad)] * 3}
    output = io.StringIO()
    status = report(PLAN, runs, {"good": (90 << 10, 0), "frozen": (memory, 0)}, Console(file=output, width=200))
    return status, output.getvalue()


def test_all_that_is_promised_holds() -> None:
    """The exit status says so; the table has each kind of run."""
    status, output = reported()
    assert status == 0
    assert "MISSED" not in output
    assert all(kind in output for kind in ("without", "the same again", "with"))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"gaps": [0.2] * 90 + [0.31] * 10}, "p99"),
        ({"memory": 257 << 10}, "257 KiB"),
        ({"freed_s": [14.0, 35.5]}, "35.5"),
        ({"faults": ["a slow reader was dropped"]}, "a slow reader was dropped"),
    ],
)
def test_each_promise_can_be_missed(bad: dict[str, Any], said: str) -> None:
    """Then the exit status is 1, and the line of that promise alone says so."""
    status, output = reported(**bad)
    assert status == 1
    [missed] = [line for line in output.splitlines() if line.startswith("MISSED")]
    assert said in missed


def test_one_bad_run_of_several_does_not_decide() -> None:
    """Medians do: a machine may be busy with something else for a moment."""
    runs = {"without": [GOOD] * 3, "with": [GOOD, replace(GOOD, gaps=[9.0]), GOOD]}
    assert report(PLAN, runs, {"good": (0, 0), "frozen": (0, 0)}, Console(file=io.StringIO())) == 0


def held_back(text: str) -> bool:
    return HELD_BACK.search(f'"delta":"{text}","event_id":"x"}}'.encode()) is not None


@pytest.mark.parametrize("text", [r"\n", r"end.\n\nNew", " ", " -", "👩🏽‍💻", " naïve"])
def test_pieces_that_are_held_back_by_rule_do_not_count(text: str) -> None:
    """Those with white space that is not just before a word, or with a code point that may be part of a longer sign."""
    assert held_back(text)


@pytest.mark.parametrize("text", ["word", " word", " word and", " 42", "."])
def test_other_pieces_count(text: str) -> None:
    """Also if there are several words in one: then the one before was late."""
    assert not held_back(text)


def test_a_percentile_is_one_of_what_was_measured() -> None:
    """The smallest that so many are not above."""
    measured = Measured(gaps=[n / 100 for n in range(100, 0, -1)])
    assert [measured.percentile(percent) for percent in (1, 50, 99, 100)] == [0.01, 0.5, 0.99, 1.0]
