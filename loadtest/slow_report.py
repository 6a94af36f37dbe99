"""What is promised about slow and frozen readers, and whether what was measured holds it."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

#: What is promised.
MAX_RATIO = 1.2
MAX_FROZEN_BYTES = 256 << 10
MAX_FREED_S = 35.0


@dataclass(frozen=True)
class Plan:
    """What runs side by side. ``slow`` and ``frozen`` are among the ``streams``."""

    streams: int
    slow: int
    frozen: int
    rate: float
    seconds: float
    lag_rate: float
    slow_rate: int

    @property
    def good(self) -> int:
        return self.streams - self.slow - self.frozen


@dataclass
class Measured:
    """One run: the seconds between two pieces of text of the good readers, and what became of the others."""

    gaps: list[float] = field(default_factory=list)
    server_cpu: float = 0.0
    #: the longest piece of text that a slow reader got, in code points
    longest: int = 0
    freed_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def percentile(self, percent: float) -> float:
        """In seconds."""
        ordered = sorted(self.gaps)
        return ordered[math.ceil(len(ordered) * percent / 100) - 1]


def report(plan: Plan, runs: dict[str, list[Measured]], memory: dict[str, tuple[int, int]], console: Console) -> int:
    """Print the table and the verdict; 1 if something that is promised does not hold."""
    table = Table(
        title=f"{plan.streams} streams at {plan.rate:g} tokens/s, {len(runs['with'])} runs of each kind, medians",
        caption=f"with: {plan.slow} of them slow and {plan.frozen} frozen (at {plan.lag_rate:g} tokens/s)",
    )
    table.add_column("bad readers", no_wrap=True)
    for column in ("pieces", "p50 ms", "p99 ms", "of each run", "ratio", "CPU"):
        table.add_column(column, justify="right")
    base = _median(runs["without"], 99)
    for kind, measured in runs.items():
        table.add_row(
            kind,
            str(sum(len(one.gaps) for one in measured)),
            f"{_median(measured, 50) * 1000:.1f}",
            f"{_median(measured, 99) * 1000:.1f}",
            " ".join(f"{one.percentile(99) * 1000:.0f}" for one in measured),
            f"{_median(measured, 99) / base:.3f}",
            f"{statistics.median(one.server_cpu for one in measured):.0%}",
        )
    console.print(table)
    freed = [seconds for one in runs["with"] for seconds in one.freed_s]
    faults = [fault for measured in runs.values() for one in measured for fault in one.faults]
    longest = max(one.longest for one in runs["with"])
    ratio, cost = _median(runs["with"], 99) / base, sum(memory["frozen"])
    process, kernel = (value >> 10 for value in memory["frozen"])
    checks = [
        (ratio <= MAX_RATIO, f"others' p99 with bad readers: {ratio:.3f} of that without (at most {MAX_RATIO})"),
        (
            cost <= MAX_FROZEN_BYTES,
            f"a frozen reader costs {cost >> 10} KiB (at most {MAX_FROZEN_BYTES >> 10}): {process} in the server, with "
            f"its session and answer, and {kernel} in the kernel; one who keeps up costs {sum(memory['good']) >> 10}",
        ),
        (
            max(freed, default=0.0) <= MAX_FREED_S,
            f"frozen readers were freed after {', '.join(f'{seconds:.1f}' for seconds in freed)} s "
            f"(at most {MAX_FREED_S:g}), and came back for the rest",
        ),
        (
            not faults,
            "; ".join(faults) or f"slow readers got every word, in pieces of up to {longest} code points",
        ),
    ]
    for held, text in checks:
        console.print("[green]held  [/]" if held else "[red]MISSED[/]", text, highlight=False)
    return 0 if all(held for held, _ in checks) else 1


def _median(measured: list[Measured], percent: float) -> float:
    return statistics.median(one.percentile(percent) for one in measured)
