"""The verdict of a run, and what is printed of it."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from loadtest.chaos_model import FROM_BEFORE, GOES_ON
from loadtest.chaos_plan import Fates, Wanted
from loadtest.chaos_report import (
    AFTER_DONE,
    CANCEL_ACROSS,
    CANCEL_SAME,
    CANCELS,
    DROPPED,
    IN_A_STORM,
    KILLS,
    LOSSES,
    READERS,
    RESTARTS,
    RESUME,
    TAKE_OVER,
    TURNS,
    Demand,
    Failure,
    Tally,
    conclude,
    percentile,
    show,
    why_broken,
)
from loadtest.chaos_texts import Violation

pytestmark = pytest.mark.pure

DEMAND = Demand(Wanted(cuts=20, cancels=50, duplicates=0, slow=0, frozen=1), Fates(kills=1))


def good() -> Tally:
    """All that is demanded was made and seen."""
    tally = Tally()
    tally.counts.update({TURNS: 30, f"{CANCELS}, text": 45, f"{CANCELS}, asked": 5, READERS["frozen"]: 1, KILLS: 1})
    tally.cuts.update({"text": 10, "in a storm of one client, text": 2, "ending": 8, f"{IN_A_STORM}, idle": 50})
    for name in (CANCEL_SAME, CANCEL_ACROSS, AFTER_DONE, RESUME, TAKE_OVER):
        tally.latencies[name] = [0.01] * 99
    return tally


def printed(tally: Tally, demand: Demand = DEMAND) -> str:
    output = io.StringIO()
    console = Console(file=output, width=120)
    show(tally, console)
    assert conclude(tally, console, demand, seed=4711, seconds=12.0) == (not why_broken(tally, demand))
    return output.getvalue()


def test_one_violation_breaks_the_run() -> None:
    """It is named, with the seed and the last events of who saw it."""
    tally = good()
    assert "Every guarantee held" in printed(tally)
    tally.failures.append(Failure("client 3", Violation("lost", "1 code point is missing"), ("1.0 < a [delta]",)))
    told = printed(tally)
    for part in ("lost: client 3", "1 code point is missing", "< a [delta]", "Broken: 1 lost.", "4711"):
        assert part in told


def test_resumes_that_start_again_break_the_run() -> None:
    """More than 1 of 100, even if the store lost data."""
    tally = good()
    tally.counts[GOES_ON], tally.counts[FROM_BEFORE] = 990, 10
    assert why_broken(tally, DEMAND) == []
    tally.counts[FROM_BEFORE] = 20
    assert why_broken(tally, DEMAND) == ["98.0% of the resumes went on"]
    tally.counts[GOES_ON], tally.counts[FROM_BEFORE] = 400, 20
    assert why_broken(tally, DEMAND) == [], "so few may all be those of one loss, which each event was judged by"


def test_a_run_that_did_nothing_proves_nothing() -> None:
    """Neither if little was wanted."""
    assert why_broken(Tally(), Demand(Wanted(0, 0, 0, 0, 0), Fates())) == ["no turn came to its end"]


@pytest.mark.parametrize(
    ("less", "why"),
    [
        (f"{CANCELS}, text", "49 of 50 cancels"),
        (READERS["frozen"], "0 of 1 frozen"),
        (KILLS, "0 of 1 kills"),
    ],
)
def test_what_is_wanted_must_be_made(less: str, why: str) -> None:
    """One less of a kind is no verdict; whatever a count says behind its name."""
    tally = good()
    tally.counts[less] -= 1
    assert why_broken(tally, DEMAND) == [why]


def test_a_loss_is_no_restart() -> None:
    """Each is a fault of its own, though one name begins with the other."""
    tally = good()
    tally.counts[LOSSES] = 1
    assert [tally.made(name) for name in ("redis_losses", "redis_restarts")] == [1, 0]
    tally.counts[RESTARTS] = 2
    assert tally.made("redis_restarts") == 2


def test_cuts_must_be_enough_and_in_mid_answer() -> None:
    """Storms over all clients hit whatever there is, and do not count."""
    tally = good()
    tally.cuts["ending"] -= 1
    assert why_broken(tally, DEMAND) == ["19 of 20 cuts"]
    tally.cuts.update({"ending": 2})
    assert why_broken(tally, DEMAND) == [], "of so few it is a matter of chance"
    tally.cuts.update({"text": 188, "ending": 142})
    assert why_broken(tally, DEMAND) == ["57% of the cuts in mid-answer"]


def test_who_stops_reading_must_be_dropped_at_times() -> None:
    """Else none was frozen for long enough to show anything."""
    tally, demand = good(), replace(DEMAND, wanted=replace(DEMAND.wanted, frozen=50))
    tally.counts[READERS["frozen"]] = 50
    assert why_broken(tally, demand) == ["no window was dropped that stopped reading"]
    tally.counts[DROPPED] = 1
    assert why_broken(tally, demand) == []


@pytest.mark.parametrize("name", [CANCEL_SAME, CANCEL_ACROSS, AFTER_DONE, RESUME, TAKE_OVER])
def test_each_limit_must_be_measured(name: str) -> None:
    """If its fault was wanted, and not too few of it for chance."""
    tally = good()
    del tally.latencies[name]
    assert why_broken(tally, DEMAND) == [f"never measured: {name}"]
    few = Demand(Wanted(cuts=19, cancels=19, duplicates=0, slow=0, frozen=0), Fates())
    assert why_broken(tally, few) == []


def test_a_latency_over_its_limit_is_told_beside_the_verdict() -> None:
    """It depends on the machine; ``strict`` lets it decide."""
    tally = good()
    assert "no latency over its limit" in printed(tally)
    tally.latencies[CANCEL_SAME] += [0.3, 0.3]
    told = printed(tally)
    assert "Every guarantee held" in told
    assert "1 latencies over their limit" in told
    assert why_broken(tally, replace(DEMAND, strict=True)) == [f"over its limit: {CANCEL_SAME}"]


def test_a_percentile_is_one_of_the_values() -> None:
    """The least that so many do not exceed."""
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, part) for part in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
    assert percentile([3.0], 0.5) == 3.0
