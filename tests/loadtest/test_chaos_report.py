"""The verdict of a run, and what is printed of it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from loadtest.chaos_model import FROM_BEFORE, GOES_ON
from loadtest.chaos_report import CANCEL_SAME, Failure, Tally, percentile, show
from loadtest.chaos_texts import Violation

pytestmark = pytest.mark.pure


def printed(tally: Tally) -> str:
    output = io.StringIO()
    show(tally, Console(file=output, width=120), seed=4711, seconds=12.0)
    return output.getvalue()


def test_one_violation_breaks_the_run() -> None:
    """It is named, with the seed and the last events of who saw it."""
    tally = Tally()
    assert tally.holds
    tally.failures.append(Failure("client 3", Violation("lost", "1 code point is missing"), ("1.0 < a [delta]",)))
    assert not tally.holds
    told = printed(tally)
    for part in ("lost: client 3", "1 code point is missing", "< a [delta]", "Broken", "4711"):
        assert part in told


def test_resumes_that_start_again_break_the_run() -> None:
    """More than 1 of 100, even if the store lost data."""
    tally = Tally()
    tally.counts[GOES_ON], tally.counts[FROM_BEFORE] = 99, 1
    assert tally.holds
    tally.counts[FROM_BEFORE] = 2
    assert not tally.holds


def test_a_latency_over_its_limit_is_marked() -> None:
    """It is told beside the verdict: it depends on the machine."""
    tally = Tally()
    tally.latencies[CANCEL_SAME] = [0.01] * 99
    assert "ok" in printed(tally)
    tally.latencies[CANCEL_SAME] += [0.3, 0.3]
    assert "over" in printed(tally)
    assert tally.holds


def test_a_percentile_is_one_of_the_values() -> None:
    """The least that so many do not exceed."""
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, part) for part in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
    assert percentile([3.0], 0.5) == 3.0
