"""What was done and seen: counts, latencies, and the verdict."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadtest.chaos_model import FROM_BEFORE, GOES_ON, TAKE_OVERS, TAKEN_BACK_BY_CUT, TAKEN_BACK_BY_LOSS
from loadtest.chaos_plan import Fates, Pace, Wanted
from loadtest.chaos_texts import Violation
from loadtest.chaos_world import GRACE_S

#: What is counted of the faults that were made; some say more behind a comma.
CANCELS = "cancels"
DUPLICATES = "duplicate sends"
READERS: dict[Pace, str] = {"slow": "windows that read slowly", "frozen": "windows that stop reading for seconds"}
DROPPED = "windows that stopped reading and were dropped"
KILLS = "replicas killed"
ROLLS = "rolling restarts"
RESTARTS = "Redis restarts"
LOSSES = "Redis restarts that lost the last second"
DOUBLES = "double faults: a replica killed, and the last second lost"
STORMS = "storms: all sockets cut at once"
#: Cuts that are not among the wanted ones.
IN_A_STORM = "in a storm over all clients"
UNHEARD = "unheard, after a loss"

CANCEL_SAME = "cancel sent -> engine idle, same replica"
CANCEL_ACROSS = "cancel sent -> engine idle, across replicas"
AFTER_DONE = "stopped answer: its end told -> engine idle"
RESUME = "reconnect -> first missing text"
FIRST_TEXT = "asked -> first text"
TAKE_OVER = "kill -9 of its replica -> next text"
RESTART_PAUSE = "Redis back -> text goes on"
STOP = "SIGTERM -> a replica has ended"

#: latency -> (the part of them that must be under, seconds); that of STOP is the grace time
LIMITS: dict[str, tuple[float, float]] = {
    CANCEL_SAME: (0.99, 0.25),
    CANCEL_ACROSS: (0.99, 0.5),
    AFTER_DONE: (0.99, 0.05),
    RESUME: (0.95, 0.2),
    TAKE_OVER: (1.0, 6.0),
    RESTART_PAUSE: (1.0, 1.0),
}
#: what is wanted -> its count
MADE: dict[str, str] = {
    "cancels": CANCELS,
    "duplicates": DUPLICATES,
    "slow": READERS["slow"],
    "frozen": READERS["frozen"],
    "kills": KILLS,
    "rolls": ROLLS,
    "redis_restarts": RESTARTS,
    "redis_losses": LOSSES,
    "double_faults": DOUBLES,
    "storms": STORMS,
}
#: latency -> (the fault that it needs, from how many of them on it must have been measured: few may miss it by chance)
MEASURED = {
    CANCEL_SAME: ("cancels", 50),
    CANCEL_ACROSS: ("cancels", 50),
    AFTER_DONE: ("cancels", 20),
    RESUME: ("cuts", 20),
    TAKE_OVER: ("kills", 1),
    RESTART_PAUSE: ("redis_restarts", 1),
    STOP: ("rolls", 1),
}
#: from so many windows that stop reading on, one at least must have been dropped; of fewer, it is a matter of chance
#: whether an answer goes on for long enough behind one (one of twenty in the worst of many runs: none).
MANY_FROZEN = 50
#: of so many wanted cuts, the part that must be in mid-answer; of fewer, it is a matter of chance.
IN_THE_MIDDLE = 0.6
MANY_CUTS = 300
TURNS = "turns"
#: counts that are told also if they are 0.
ALWAYS = (GOES_ON, FROM_BEFORE, TAKE_OVERS, TAKEN_BACK_BY_CUT, TAKEN_BACK_BY_LOSS)
#: violations that are shown with their events.
MOST_SHOWN = 5
#: of so many resumes in mid-answer, the part that must go on from their offset; of fewer, one loss hits too many.
WENT_ON = 0.99
MANY_RESUMES = 500


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
    #: seconds within which a replica that is told to stop has to end
    grace_s: float = GRACE_S

    @property
    def went_on(self) -> float:
        """The part of the resumes in mid-answer that went on from their offset, wanted cuts aside."""
        return self.counts[GOES_ON] / self.resumes if self.resumes else 1.0

    @property
    def resumes(self) -> int:
        """Those in mid-answer, wanted cuts aside."""
        return self.counts[GOES_ON] + self.counts[FROM_BEFORE]

    def made(self, wanted: str) -> int:
        """How many faults of a kind were made."""
        if wanted == "cuts":
            return sum(self._own_cuts().values())
        return sum(n for name, n in self.counts.items() if name == MADE[wanted] or name.startswith(f"{MADE[wanted]}, "))

    @property
    def in_the_middle(self) -> float:
        """The part of the wanted cuts that were in mid-answer."""
        cuts = self._own_cuts()
        middle = sum(count for state, count in cuts.items() if state.endswith("text"))
        return middle / sum(cuts.values()) if cuts else 1.0

    @property
    def own_cuts(self) -> int:
        """How many cuts hit one client, each at a moment that was chosen for it."""
        return sum(self._own_cuts().values())

    def _own_cuts(self) -> dict[str, int]:
        return {state: n for state, n in self.cuts.items() if not state.startswith((IN_A_STORM, UNHEARD))}

    @property
    def over(self) -> list[str]:
        """The latencies that are over their limit."""
        return [name for name in self.latencies if self.is_over(name)]

    def limit(self, name: str) -> tuple[float, float]:
        """The part of these latencies that must be under, and seconds."""
        return (1.0, self.grace_s) if name == STOP else LIMITS.get(name, (1.0, math.inf))

    def is_over(self, name: str) -> bool:
        """Whether too many of these latencies are too long."""
        part, most = self.limit(name)
        values = self.latencies[name]
        return bool(values) and percentile(values, part) > most


@dataclass(frozen=True, slots=True)
class Demand:
    """What a run must have made before it proves anything. ``strict``: latencies decide too."""

    wanted: Wanted
    fates: Fates
    strict: bool = False


def why_broken(tally: Tally, demand: Demand) -> list[str]:
    """Why the run does not show that every guarantee holds; nothing if it does."""
    kinds = Counter(failure.violation.kind for failure in tally.failures)
    why = [f"{count} {kind}" for kind, count in kinds.items()]
    if tally.went_on < WENT_ON and tally.resumes >= MANY_RESUMES:
        why.append(f"{tally.went_on:.1%} of the resumes went on")
    if not tally.counts[TURNS]:
        why.append("no turn came to its end")
    wants = asdict(demand.wanted) | asdict(demand.fates)
    why += [f"{made} of {count} {name}" for name, count in wants.items() if (made := tally.made(name)) < count]
    if tally.in_the_middle < IN_THE_MIDDLE and tally.own_cuts >= MANY_CUTS:
        why.append(f"{tally.in_the_middle:.0%} of the cuts in mid-answer")
    for name, (fault, least) in MEASURED.items():
        if wants[fault] >= least and not tally.latencies.get(name):
            why.append(f"never measured: {name}")
    if demand.wanted.frozen >= MANY_FROZEN and not tally.counts[DROPPED]:
        why.append("no window was dropped that stopped reading")
    return why + [f"over its limit: {name}" for name in tally.over if demand.strict]


def percentile(values: list[float], part: float) -> float:
    """The least value that ``part`` of them do not exceed."""
    ranked = sorted(values)
    return ranked[max(math.ceil(part * len(ranked)) - 1, 0)]


def show(tally: Tally, console: Console) -> None:
    """Print all of it; first what went wrong, one of each kind at least."""
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


def conclude(tally: Tally, console: Console, demand: Demand, *, seed: int, seconds: float) -> bool:
    """Print the verdict; whether every guarantee held."""
    if why := why_broken(tally, demand):
        console.print(f"[bold red]Broken[/]: {'; '.join(why)}. Repeat it with --seed {seed}.")
        return False
    # Without ``strict`` they are told beside the verdict: they depend on the machine.
    over = (
        f"[bold yellow]{len(tally.over)} latencies over their limit[/]" if tally.over else "no latency over its limit"
    )
    console.print(
        f"[bold green]Every guarantee held[/] in {seconds:.0f} s: nothing lost, repeated, mixed or wrong, no orphan, "
        f"every answer ended once, {tally.went_on:.1%} of the resumes went on; {over}. Seed {seed}."
    )
    return True


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
        part, most = tally.limit(name)
        if most < math.inf:
            which = "all" if part == 1.0 else f"p{part * 100:.0f}"
            limit = f"{which} < {most * 1000:.0f}" + (" [red]over[/]" if tally.is_over(name) else " [green]ok[/]")
        table.add_row(name, str(len(values)), *cells, limit)
    return table
