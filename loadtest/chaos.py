"""Chaos: clients talk through two replicas and three simulated engines while sockets, replicas and the store fail.

make chaos CUTS=1000
python -m loadtest.chaos --cuts 30 --seed 7
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.chaos_audit import Audit
from loadtest.chaos_cancel import measure
from loadtest.chaos_client import Scene
from loadtest.chaos_fates import Conductor
from loadtest.chaos_plan import Fates, Pool, Wanted
from loadtest.chaos_report import CANCEL_ACROSS, CANCEL_SAME, TURNS, Demand, Failure, Tally, conclude, show
from loadtest.chaos_talk import Talk
from loadtest.chaos_texts import Violation
from loadtest.chaos_world import GRACE_S, world
from loadtest.processes import NotTested

#: violations after which a run is given up: the rest would only repeat them.
MOST_FAILURES = 20
#: seconds that a run may take per turn of each client, and at least; after that it is stuck.
RUN_S_PER_TURN = 30.0
RUN_S = 180.0
#: answers of a vLLM server that are cancelled, on the replica that makes them and on another one.
VLLM_CANCELS = 20


@dataclass(frozen=True, slots=True)
class Options:
    """One run."""

    seed: int
    clients: int
    replicas: int
    engines: int
    tokens_per_s: float
    words: int
    #: each attempt at an answer writes other text
    vary: bool
    wanted: Wanted
    fates: Fates


async def run(options: Options, tally: Tally, console: Console) -> None:
    """One run in a world of its own; what it sees goes into ``tally``. Raises NotTested if it does not come up."""
    engine = ["--tokens-per-s", str(options.tokens_per_s), "--words", str(options.words), "--max-model-len", "65536"]
    if options.vary:
        engine.append("--vary")
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as http,
            world(
                Path(folder),
                replicas=options.replicas,
                engines=options.engines,
                engine_options=engine,
                http=http,
                grace_s=tally.grace_s,
            ) as running,
        ):
            audit = Audit(running.valkey.url, running.engine_urls, http)
            scene = Scene(running, audit, tally)
            try:
                await _talk(options, scene, http, console)
            finally:
                await audit.close()


async def run_vllm(url: str, tally: Tally) -> None:
    """Measure the cancels of a vLLM server that runs and has nothing else to do."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as http,
            world(Path(folder), replicas=2, engines=0, engine_options=[], http=http, others=(url,)) as running,
        ):
            same, across = await measure(running.replicas, url, http, VLLM_CANCELS)
            tally.latencies[f"{CANCEL_SAME}, vLLM"] += same
            tally.latencies[f"{CANCEL_ACROSS}, vLLM"] += across


async def _talk(options: Options, scene: Scene, http: aiohttp.ClientSession, console: Console) -> None:
    """All clients at once, until all faults were made; then nothing may be left over."""
    seed = f"{options.seed} {'vary' if options.vary else 'known'}"
    pool = Pool(options.wanted)
    talks = [
        Talk(scene, pool, f"client {n}", seed, words=options.words, vary=options.vary)
        for n in range(1, options.clients + 1)
    ]
    conductor = Conductor(scene, talks, pool, http=http, fates=options.fates, seed=seed)
    pool.wait_for(lambda: conductor.left)

    def orphan(violation: Violation) -> None:
        scene.tally.failures.append(Failure("the engines", violation))

    timeout_s = RUN_S + RUN_S_PER_TURN * pool.expected_turns / options.clients
    title = "other text in each attempt" if options.vary else "answers known from the prompt"
    talking = asyncio.gather(*(talk.run() for talk in talks))
    others: list[asyncio.Task[None]] = [
        asyncio.create_task(conductor.run()),
        asyncio.create_task(scene.audit.watch_engines(orphan)),
    ]
    try:
        async with asyncio.timeout(timeout_s), _progress(scene.tally, pool, title, console):
            await _until_done(talking, others, scene.tally)
        if talking.done():  # else it was given up
            await scene.audit.check_idle()
    except Violation as violation:
        orphan(violation)
    except TimeoutError:
        stuck = ", ".join(f"{talk.client.name} in {talk.session_id}" for talk in talks if talk.answer is not None)
        scene.tally.failures.append(Failure(stuck, Violation("stuck", f"the run did not end in {timeout_s:.0f} s")))
    finally:
        talking.cancel()
        for task in others:
            task.cancel()
        await asyncio.gather(talking, *others, return_exceptions=True)


async def _until_done(talking: asyncio.Future[list[None]], others: list[asyncio.Task[None]], tally: Tally) -> None:
    """Wait for the talks; an error of anybody else ends them."""
    waits: set[asyncio.Future[object]] = {talking, *others}  # type: ignore[arg-type]
    while not talking.done() and len(tally.failures) < MOST_FAILURES:
        done, waits = await asyncio.wait(waits, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


@asynccontextmanager
async def _progress(tally: Tally, pool: Pool, title: str, console: Console) -> AsyncIterator[None]:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[seen]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(title, total=1.0, seen="")

        async def update() -> None:
            while True:
                failures = f", [red]{len(tally.failures)} violations[/]" if tally.failures else ""
                seen = f"{tally.counts[TURNS]} turns, {sum(tally.cuts.values())} cuts{failures}"
                progress.update(bar, completed=pool.progress, seen=seen)
                await asyncio.sleep(0.2)

        updating = asyncio.create_task(update())
        try:
            yield
        finally:
            updating.cancel()


def halves(options: Options, mode: str) -> list[Options]:
    """The runs: one for a mode; for both, two with half of the faults each."""
    if mode != "both":
        return [replace(options, vary=mode == "vary")]

    def share(value: Wanted | Fates, second: bool) -> dict[str, int]:
        return {name: (getattr(value, name) + second) // 2 for name in value.__dataclass_fields__}

    return [
        replace(
            options,
            vary=second,
            wanted=Wanted(**share(options.wanted, second)),
            fates=Fates(**share(options.fates, second)),
        )
        for second in (False, True)
    ]


#: of the cuts, if no number is given: one in so many
SHARES = {
    "cancels": 5,
    "duplicates": 20,
    "slow": 50,
    "frozen": 50,
    "kills": 200,
    "rolls": 500,
    "redis_restarts": 333,
    "redis_losses": 500,
}
COUNT = click.IntRange(0)


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--cuts", default=200, type=COUNT, help="Sockets reset by their client, most of them in mid-answer.")
@click.option("--cancels", type=COUNT, help="Answers stopped at random moments.  [default: 1 in 5 cuts]")
@click.option("--duplicates", type=COUNT, help="Messages sent twice.  [default: 1 in 20 cuts]")
@click.option("--slow", type=COUNT, help="Windows that read slowly.  [default: 1 in 50 cuts]")
@click.option("--frozen", type=COUNT, help="Windows that stop reading for seconds.  [default: 1 in 50 cuts]")
@click.option("--storms", default=2, type=COUNT, help="Times when all sockets are reset at once.")
@click.option("--kills", type=COUNT, help="kill -9 of a replica, which comes back.  [default: 1 in 200 cuts]")
@click.option("--rolls", type=COUNT, help="Rolling restarts of all replicas, by SIGTERM.  [default: 1 in 500 cuts]")
@click.option("--redis-restarts", type=COUNT, help="Restarts of Redis that lose nothing.  [default: 1 in 333 cuts]")
@click.option("--redis-losses", type=COUNT, help="Restarts that lose its last second.  [default: 1 in 500 cuts]")
@click.option("--double-faults", default=0, type=COUNT, help="Both at once: only here may a text be taken back.")
@click.option(
    "--mode",
    default="both",
    type=click.Choice(["known", "vary", "both"]),
    help="known: answers are computed from the prompt alone; vary: each attempt writes other text, so that a mixture "
    "of two shows; both: half of the faults each.",
)
@click.option("--clients", default=24, type=click.IntRange(1), help="Clients that talk at the same time.")
@click.option("--replicas", default=2, type=click.IntRange(2), help="Servers.")
@click.option("--engines", default=3, type=click.IntRange(1), help="Simulated engines.")
@click.option("--tokens-per-s", default=100.0, type=click.FloatRange(1), help="Speed of one answer.")
@click.option("--grace", default=GRACE_S, type=click.FloatRange(0.5), help="Seconds in which a replica must stop.")
@click.option("--words", default=110, type=click.IntRange(20), help="Words of an answer.")
@click.option("--vllm", metavar="URL", help="A vLLM server with nothing else to do: its cancels are measured too.")
@click.option("--strict", is_flag=True, help="A latency over its limit breaks the run too.")
@click.option("--seed", type=int, help="Draws the faults; a failed run tells its own.  [default: a random one]")
def main(mode: str, seed: int | None, vllm: str | None, strict: bool, grace: float, **values: Any) -> None:
    """Break sockets, replicas and the store while clients talk, and judge every event that reaches them.

    Each client applies the protocol's offset rule and checks the order of events and that each answer ends once. After
    each turn client and store must hold the same, and so must a second window, in those turns that have one, and in one
    turn of four a new window that asks for the history. The engines are watched for requests that nobody waits for, and
    at the end no answer may be left on an engine or in the store.
    At each cut what is held must be in the store; one round trip later it may have come there since, so only a server
    that writes seldom or never shows here. That nothing is told before it is stored is shown by make model.

    \b
    python -m loadtest.chaos --cuts 30                        half a minute
    python -m loadtest.chaos --cuts 1000                      all of it, in some minutes
    python -m loadtest.chaos --mode vary --cuts 0 --kills 10 --storms 0
    make rolling                                              restarts of both replicas with 200 running streams

    The exit status is 1 if anything was lost, repeated, mixed or wrong, an engine was left at work, an answer has no
    end or two, a session is stuck, or a fault that was wanted was not made; 2 if the system did not come up; 130 if the
    run was stopped by Ctrl-C, which is no verdict.
    """
    console = Console()
    seed = random.randrange(10**6) if seed is None else seed
    cuts = values["cuts"]
    for name, part in SHARES.items():
        if values[name] is None:
            values[name] = round(cuts / part)
    wanted = Wanted(**{name: values.pop(name) for name in Wanted.__dataclass_fields__})
    fates = Fates(**{name: values.pop(name) for name in Fates.__dataclass_fields__})
    options = Options(seed=seed, vary=False, wanted=wanted, fates=fates, **values)
    tally = Tally(grace_s=grace)
    started = time.monotonic()
    console.print(f"Seed {seed}")
    try:
        for half in halves(options, mode):
            asyncio.run(run(half, tally, console))
        if vllm is not None:
            asyncio.run(run_vllm(vllm.rstrip("/"), tally))
    except NotTested as error:
        console.print(f"[red]{error}[/]")
        sys.exit(2)
    except KeyboardInterrupt:
        show(tally, console)
        console.print(f"Stopped before its end: no verdict. Seed {seed}.")
        sys.exit(130)
    show(tally, console)
    held = conclude(tally, console, Demand(wanted, fates, strict), seed=seed, seconds=time.monotonic() - started)
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()
