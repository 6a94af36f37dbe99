"""The model check over many seeds, or one seed with all that happens in it."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections import Counter
from pathlib import Path

import click
from rich.progress import Progress

from tests.model import runs

#: seeds that a process takes at once.
_CHUNK = 20
#: worlds in which all of the following happens, or the schedules do not reach what they are there for.
_ENOUGH = 300
_MUST_HAPPEN = (
    "answers begun",
    "answers cancelled",
    "answers completed",
    "answers queued",
    "attempts",
    "begun late",
    "cuts from the store",
    "drains",
    "engines gone",
    "hand-overs",
    "kills",
    "outages",
    "outages with a loss",
    "owners refused",
    "pauses",
    "put-backs that lost nothing",
    "put-backs with a witness",
    "put-backs without a witness",
    "stops",
    "stops in the queue",
    "subscriptions broken",
    "take-overs",
    "taken when left",
    "texts cut",
    "witnesses lost",
    "written again",
)
#: what is so rare that it takes many more.
_MANY = 5000
_MUST_HAPPEN_ONCE = ("texts taken back", "texts written whole")


@click.command()
@click.argument("seeds", type=click.IntRange(min=1), default=1000)
@click.option("--first", default=0, help="The first seed.")
@click.option("--seed", type=int, help="Run this one only, and print its trace.")
def main(seeds: int, first: int, seed: int | None) -> None:
    """Run the worlds of SEEDS seeds, on all cores."""
    if seed is not None:
        raise SystemExit(_one(seed))
    found, counts = 0, Counter[str]()
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool, Progress() as progress:
        bar = progress.add_task("worlds", total=seeds)
        chunks = [range(at, min(at + _CHUNK, first + seeds)) for at in range(first, first + seeds, _CHUNK)]
        for chunk, (failures, counted) in zip(chunks, pool.imap(runs.failures, chunks), strict=True):
            progress.advance(bar, len(chunk))
            counts.update(counted)
            for failure in failures:
                found += 1
                progress.console.print(failure, markup=False, highlight=False)
    for kind, count in sorted(counts.items()):
        print(f"{count:8} {kind}")
    wanted = (_MUST_HAPPEN if seeds >= _ENOUGH else ()) + (_MUST_HAPPEN_ONCE if seeds >= _MANY else ())
    missing = [kind for kind in wanted if not counts[kind]]
    if missing:
        print(f"Never reached: {', '.join(missing)}")
    print(f"{seeds} worlds, {found} failed")
    raise SystemExit(found > 0 or bool(missing))


def _one(seed: int) -> int:
    with tempfile.TemporaryDirectory() as folder, runs.valkey(Path(folder)) as store:
        lines, failure = runs.trace(seed, store)
    print("\n".join(lines))
    print(f"Seed {seed}: {failure or 'all holds'}")
    return failure is not None


if __name__ == "__main__":
    main()
