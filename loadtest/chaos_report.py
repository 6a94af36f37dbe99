"""What was done and seen: counts, latencies, and the verdict."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadtest.chaos_model import FROM_BEFORE, GOES_ON, TAKE_OVERS, TAKEN_BACK_BY_CUT, TAKEN_BACK_BY_LOSS
from loadtest.chaos_texts import Violation

CANCEL_SAME = "cancel sent -> engine idle, same replica"
CANCEL_ACROSS = "cancel sent -> engine idle, across replicas"
RESUME = "reconnect -> first missing text"
FIRST_TEXT = "asked -> first text"
TAKE_OVER = "kill -9 of its replica -> next text"
RESTART_PAUSE = "Redis back -> text goes on"
STOP = "SIGTERM -> a replica has ended"

#: latency -> (the part of them that must be under, seconds)
LIMITS: dict[str, tuple[float, float]] = {
    CANCEL_SAME: (0.99, 0.25),
    CANCEL_ACROSS: (0.99, 0.5),
    RESUME: (0.95, 0.2),
    TAKE_OVER: (1.0, 6.0),
    RESTART_PAUSE: (1.0, 1.0),
    STOP: (1.0, 6.0),
}
#: counts that are told also if they are 0.
ALWAYS = (GOES_ON, FROM_BEFORE, TAKE_OVERS, TAKEN_BACK_BY_CUT, TAKEN_BACK_BY_LOSS)
#: violations that are shown with their events.
MOST_SHOWN = 5
#: of the resumes in mid-answer, the part that must go on from their offset.
WENT_ON = 0.99


@dataclass(frozen=True, slots=True)
class Failure:
    """One violation, and the last events of the client that saw it."""

    who: str
    violation: Violation
    trace: tuple[str, ...] = ()


@dataclass
class Tally:
    """Filled while the run goes on."""

    counts: Counter[str] = field(default_factory=Counter)
    #: cuts by the state that they hit
    cuts: Counter[str] = field(default_factory=Counter)
    latencies: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    failures: list[Failure] = field(default_factory=list)

    @property
    def went_on(self) -> float:
        """The part of the resumes in mid-answer that went on from their offset, wanted cuts aside."""
        resumes = self.counts[GOES_ON] + self.counts[FROM_BEFORE]
        return self.counts[GOES_ON] / resumes if resumes else 1.0

    @property
    def holds(self) -> bool:
        """Whether every guarantee held. Latencies are told beside it: they depend on the machine."""
        return not self.failures and self.went_on >= WENT_ON


def percentile(values: list[float], part: float) -> float:
    """The least value that ``part`` of them do not exceed."""
    ranked = sorted(values)
    return ranked[max(math.ceil(part * len(ranked)) - 1, 0)]


def show(tally: Tally, console: Console, *, seed: int, seconds: float) -> None:
    """Print all of it; first what went wrong, one of each kind at least, so that the verdict stands last."""
    kinds = Counter(failure.violation.kind for failure in tally.failures)
    shown = [next(f for f in tally.failures if f.violation.kind == kind) for kind in kinds]
    shown += [failure for failure in tally.failures if failure not in shown][: max(MOST_SHOWN - len(shown), 0)]
    for failure in shown:
        console.print(f"[bold red]{failure.violation.kind}[/]: {escape(failure.who)}: {escape(str(failure.violation))}")
        for line in failure.trace:
            console.print(f"    {escape(line)}", highlight=False, soft_wrap=True)
    if len(tally.failures) > len(shown):
        console.print(f"... and {len(tally.failures) - len(shown)} more.")
    console.print(_counts(tally))
    console.print(_latencies(tally))
    if tally.holds:
        console.print(
            f"[bold green]Every guarantee held[/] in {seconds:.0f} s: nothing lost, repeated, mixed or wrong, "
            f"no orphan, every answer ended once, {tally.went_on:.1%} of the resumes went on. Seed {seed}."
        )
    else:
        broken = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or f"{tally.went_on:.1%} resumes went on"
        console.print(f"[bold red]Broken[/]: {broken}. Repeat it with --seed {seed}.")


def _counts(tally: Tally) -> Table:
    table = Table(title="What was done and seen", show_header=False)
    for name in sorted({*tally.counts, *ALWAYS}):
        table.add_row(name, str(tally.counts[name]))
    total = sum(tally.cuts.values())
    middle = sum(count for state, count in tally.cuts.items() if state.endswith("text"))
    table.add_row("socket cuts in mid-answer", f"{middle} of {total}")
    for state, count in tally.cuts.most_common():
        table.add_row(f"socket cuts, {state}", f"{count} of {total}")
    return table


def _latencies(tally: Tally) -> Table:
    table = Table("milliseconds", "count", "p50", "p95", "p99", "most", "must be", title="Latencies")
    for name, values in sorted(tally.latencies.items()):
        cells = [f"{percentile(values, part) * 1000:.0f}" for part in (0.5, 0.95, 0.99, 1.0)]
        limit = ""
        if name in LIMITS:
            part, most = LIMITS[name]
            over = percentile(values, part) > most
            which = "all" if part == 1.0 else f"p{part * 100:.0f}"
            limit = f"{which} < {most * 1000:.0f}" + (" [red]over[/]" if over else " [green]ok[/]")
        table.add_row(name, str(len(values)), *cells, limit)
    return table
