"""Do others notice slow and frozen readers, and what does a frozen one cost?

Streams at the pace of a model run side by side, and the times between two pieces of text are measured: once with good
readers only, once with some among them that read slowly and one that stops reading. Both kinds of run alternate, with
a second one of the first kind in each round, which shows how much two equal runs differ here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import click
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from chat_server.engine.simulated import answer_for, tokens
from loadtest.processes import NotTested
from loadtest.slow_report import MAX_FREED_S, MAX_FROZEN_BYTES, MAX_RATIO, Measured, Plan, report
from loadtest.slow_world import Part, engine, server
from tests.support.slow_reader import SlowReader, slow_reader

T = TypeVar("T")

PACED, LAGGING = "paced", "lagging"
DELTA = b'{"type":"response.output_text.delta"'
DONE = b'{"type":"response.done"'
TEXT = b'"delta":'
HELD_BACK = re.compile(rb"[^\x00-\x7f]|\\n| (?![A-Za-z0-9])")
#: seconds over which the answers of a run begin, so that they do not come in step
SPREAD_S = 1.0
#: frozen readers whose memory is looked at together: one would be lost in the noise
MEASURED = 50
#: seconds until all buffers before them are full, and less than the server needs to drop them
FULL_S = 7.0
#: seconds in which all readers must be connected
READY_S = 120.0
#: seconds in which something must come for a good reader
PATIENCE_S = 60.0
#: times that one connects before giving up
TRIES = 5
#: bytes of the receive buffer of the slow ones (the kernel doubles it)
SLOW_BUFFER = 4 << 10


class Start:
    """Readers get ready; when all are, they begin, one soon after the other."""

    def __init__(self, readers: int) -> None:
        #: so many connect side by side: a rush of all is another load test.
        self.door = asyncio.Semaphore(20)
        self._awaited = readers
        self._ready = asyncio.Event()
        self._dice = random.Random(readers)

    async def wait(self) -> None:
        """Say that one is ready, wait for the others, and then for its turn."""
        delay = self._dice.uniform(0.0, SPREAD_S)
        self._awaited -= 1
        if self._awaited == 0:
            self._ready.set()
        async with asyncio.timeout(READY_S):
            await self._ready.wait()
        await asyncio.sleep(delay)


# --- readers


def wish(rate: float, seconds: float, mark: int) -> str:
    """A question whose answer takes about so long. ``mark`` makes it another one."""
    return f"Number {mark}, in {max(1, round(rate * seconds / _tokens_per_word()))} words."


@cache
def _tokens_per_word() -> float:
    return len(tokens(answer_for([{"role": "user", "content": "In 1000 words."}]))) / 1000


def item(text: str) -> dict[str, object]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


async def read_well(url: str, model: str, text: str, start: Start) -> list[float]:
    """One answer, read as it comes: the seconds between its pieces.

    Left out are pieces with an emoji or with white space that is not just before a word. They come late by rule:
    text is told only up to where another engine could go on. With them the p99 would be that rule's alone.
    """
    gaps: list[float] = []
    async with contextlib.AsyncExitStack() as stack:
        async with start.door:
            socket = await stack.enter_async_context(_connect(f"{url}?model={model}"))
            await socket.send(json.dumps({"type": "conversation.item.create", "item": item(text)}))
            await _until(socket, b'{"type":"conversation.item.done"')
        await start.wait()
        await socket.send('{"type":"response.create"}')
        last = math.nan
        frame = b"response.create was sent"
        while not (frame := await _next(socket, frame)).startswith(DONE):
            if frame.startswith(DELTA):
                now = time.perf_counter()
                if not HELD_BACK.search(frame, frame.index(TEXT)):
                    gaps.append(now - last)
                last = now
    if b'"status":"completed"' not in frame:
        raise AssertionError(f"an answer did not end well: {frame[:300]!r}")
    return gaps[1:]


@contextlib.asynccontextmanager
async def _connect(url: str) -> AsyncIterator[ClientConnection]:
    """Connect; a server that has no time at the moment (503) is asked again, as it wants."""
    for left in reversed(range(TRIES)):
        try:
            socket = await connect(url, max_size=None, compression=None, proxy=None, open_timeout=60)
        except InvalidStatus as refusal:
            if refusal.response.status_code != 503 or not left:
                raise
            await asyncio.sleep(float(refusal.response.headers.get("Retry-After", "1")))
        else:
            async with socket:
                yield socket
            return


async def _until(socket: ClientConnection, prefix: bytes) -> None:
    frame = b"it connected"
    while not (frame := await _next(socket, frame)).startswith(prefix):
        if frame.startswith(b'{"type":"error"'):
            raise AssertionError(frame.decode())


async def _next(socket: ClientConnection, last: bytes) -> bytes:
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await socket.recv(decode=False)
    except TimeoutError:
        raise AssertionError(f"nothing came for {PATIENCE_S:g} s after {last[:200].decode(errors='replace')}") from None


@contextlib.asynccontextmanager
async def lagging(url: str, text: str, start: Start, buffer: int) -> AsyncIterator[SlowReader]:
    """A reader with a small buffer, whose answer has just begun."""
    async with contextlib.AsyncExitStack() as stack:
        async with start.door:
            reader = await stack.enter_async_context(slow_reader(f"{url}?model={LAGGING}&extensions=1", buffer))
            await reader.send("conversation.item.create", item=item(text))
            await reader.until("conversation.item.done")
        await start.wait()
        await reader.send("response.create")
        await reader.until("response.output_text.delta")
        yield reader


async def read_slowly(url: str, text: str, start: Start, rate: int, measured: Measured) -> None:
    """One answer, read at ``rate`` bytes a second to its end, which must be whole."""
    async with lagging(url, text, start, SLOW_BUFFER) as reader:
        while reader.events[-1]["type"] != "response.done":
            if not await reader.read(rate // 5):
                measured.faults.append(f"a slow reader was dropped ({reader.close_code})")
                return
            await asyncio.sleep(0.2)
        _check(reader, "a slow reader", measured)
        measured.longest = max(measured.longest, *(len(event["delta"]) for event in reader.deltas))


async def freeze(url: str, text: str, start: Start, measured: Measured) -> None:
    """Stop reading in the midst of an answer, wait to be dropped, then come back for the rest."""
    async with lagging(url, text, start, 1) as reader:
        began = time.monotonic()
        while reader.connected and time.monotonic() - began < 2 * MAX_FREED_S:  # noqa: ASYNC110 (the kernel tells)
            await asyncio.sleep(0.1)
        measured.freed_s.append(time.monotonic() - began)
        await reader.read_to_the_end()
    held, last = reader.text, reader.deltas[-1]
    query = (
        f"session_id={reader.events[0]['session']['id']}&extensions=1&response_id={last['response_id']}"
        f"&epoch={last['epoch']}&offset={len(held)}"
    )
    async with slow_reader(f"{url}?{query}", 1 << 20) as again:
        await again.until("response.done")
        again.events = reader.events + again.events
        _check(again, "a frozen reader that came back", measured)


def _check(reader: SlowReader, who: str, measured: Measured) -> None:
    whole = [event["text"] for event in reader.events if event["type"] == "response.output_text.done"]
    if whole != [reader.text]:
        measured.faults.append(f"{who} did not get the whole text: {len(reader.text)} code points of {whole}")


# --- runs


async def run_once(plan: Plan, target: Part, *, lag: bool, on_ended: Callable[[], None]) -> Measured:
    """All streams once; with ``lag`` some of them have bad readers, else these read as well as the others."""
    measured, start = Measured(), Start(plan.streams)
    url = target.url.replace("http", "ws", 1) + "/v1/realtime"
    cpu, began = target.process.cpu_s(), time.monotonic()
    async with asyncio.TaskGroup() as group:

        def begin(reading: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
            task = group.create_task(reading)
            task.add_done_callback(lambda _: on_ended())
            return task

        good = [begin(read_well(url, PACED, wish(plan.rate, plan.seconds, n), start)) for n in range(plan.good)]
        for number in range(plan.slow + plan.frozen):
            text = wish(plan.lag_rate, plan.seconds, number)
            if not lag:
                begin(read_well(url, LAGGING, text, start))
            elif number < plan.slow:
                begin(read_slowly(url, text, start, plan.slow_rate, measured))
            else:
                begin(freeze(url, text, start, measured))
        await asyncio.wait(good)
        measured.server_cpu = (target.process.cpu_s() - cpu) / (time.monotonic() - began)
    measured.gaps = [gap for task in good for gap in task.result()]
    return measured


async def memory_per_reader(target: Part, rate: float, *, frozen: bool) -> tuple[int, int]:
    """Bytes that one reader, with its session and answer, costs the server: in its process, and in the kernel."""
    url = target.url.replace("http", "ws", 1) + "/v1/realtime"
    for number in range(5):  # what is made once, at the first answers
        await read_well(url, LAGGING, f"Number {number}, in 10 words.", Start(1))
    before = target.process.memory(), await kernel_bytes(target.port)
    start = Start(MEASURED)
    async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        opening = [lagging(url, wish(rate, 4 * FULL_S, n), start, 1) for n in range(MEASURED)]
        readers = await asyncio.gather(*(stack.enter_async_context(reader) for reader in opening))
        reading = [group.create_task(reader.read_to_the_end()) for reader in readers if not frozen]
        await asyncio.sleep(FULL_S)
        after = target.process.memory(), await kernel_bytes(target.port)
        for task in reading:
            task.cancel()
        if not all(reader.connected for reader in readers):
            raise AssertionError("readers were dropped before their memory was measured")
    process, kernel = ((new - old) // MEASURED for new, old in zip(after, before, strict=True))
    return process, kernel


async def kernel_bytes(port: int) -> int:
    """What the kernel holds for the server's sockets, with its overhead (see "skmem" in ss(8))."""
    process = await asyncio.create_subprocess_exec(
        *("ss", "--tcp", "--memory", "--numeric", "--no-header", "sport", "=", f":{port}"),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    total = 0
    for memory in output.decode().split("skmem:(")[1:]:
        counts = {name.rstrip("0123456789"): name for name in memory.partition(")")[0].split(",")}
        total += sum(int(counts[name].removeprefix(name)) for name in ("r", "w", "f", "o", "bl"))
    return total


# --- the whole


async def measure(plan: Plan, rounds: int, console: Console) -> int:
    """Run it all and print what came of it. Returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="chat-server-load-") as name, _progress(console) as progress:
        folder = Path(name)
        whole = progress.add_task("starting", total=3 * rounds + 2)
        streams = progress.add_task("answers that ended", total=plan.streams)
        speed = {"prefill_tokens_per_s": 0, "first_token_s": 0, "max_running": plan.streams + MEASURED}
        async with (
            engine(folder, PACED, tokens_per_s=plan.rate, **speed) as paced,
            engine(folder, LAGGING, tokens_per_s=plan.lag_rate, **speed) as fast,
        ):
            flags = ("--max-connections-per-user", "10000", "--max-sessions-per-user", "1000000")
            progress.update(whole, description="memory of a reader")
            memory = {}
            for kind in ("good", "frozen"):  # each on a fresh server: memory that was freed would hide what is taken
                (folder / kind).mkdir()
                async with server(folder / kind, (paced, fast), *flags) as target:
                    memory[kind] = await memory_per_reader(target, plan.lag_rate, frozen=kind == "frozen")
                progress.advance(whole)
            runs: dict[str, list[Measured]] = {"without": [], "the same again": [], "with": []}
            async with server(folder, (paced, fast), *flags) as target:
                for number in range(rounds):
                    kinds = list(runs)
                    for kind in kinds[number % 3 :] + kinds[: number % 3]:
                        progress.update(whole, description=f"round {number + 1}: {kind}")
                        progress.reset(streams)
                        ended = partial(progress.advance, streams)
                        runs[kind].append(await run_once(plan, target, lag=kind == "with", on_ended=ended))
                        progress.advance(whole)
    return report(plan, runs, memory, console)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )


@click.command(
    context_settings={"show_default": True, "max_content_width": 100},
    help=f"""Measure what bad readers do to the others, and what a frozen one costs.

    Starts the server with a store of its own and two simulated engines, each a process; the readers are in this one.
    Each round has three runs, in turns: with good readers only ("without"), the same again (how much two equal runs
    differ here), and "with" slow and frozen ones among them. A slow one reads less than comes, so its deltas grow
    longer; a frozen one stops reading after the first word, is dropped, and comes back for the rest.

    \b
    The exit status is 1 unless
      the others' time between two pieces has a p99 of at most {MAX_RATIO} of that without (medians of all runs)
      a frozen reader costs at most {MAX_FROZEN_BYTES >> 10} KiB on the server's side, the kernel's buffer included
      it is dropped within {MAX_FREED_S:g} s
      slow readers, and frozen ones that came back, have every word

    On a machine with little to spare take a lower --rate: if the first two lines of the table differ by much, the
    third says nothing.
    """,
)
@click.option("--streams", default=500, type=click.IntRange(2), help="Answers side by side, the bad readers' included.")
@click.option("--slow", default=10, type=click.IntRange(0), help="Slow readers among them.")
@click.option("--frozen", default=1, type=click.IntRange(0), help="Frozen readers among them.")
@click.option("--rounds", default=5, type=click.IntRange(1), help="Rounds of three runs.")
@click.option("--rate", default=5.0, type=click.FloatRange(0.5), help="Tokens per second of an answer.")
@click.option("--seconds", default=20.0, type=click.FloatRange(15.0), help="Length of an answer.")
@click.option("--lag-rate", default=60.0, type=click.FloatRange(1.0), help="Tokens per second for the bad readers.")
@click.option("--slow-rate", default=8000, type=click.IntRange(1000), help="Bytes per second that a slow one reads.")
def main(rounds: int, **values: float) -> None:
    plan = Plan(**values)  # type: ignore[arg-type]
    if plan.good < 1:
        raise click.UsageError("At least one of the --streams must have a good reader.")
    if shutil.which("ss") is None:
        raise click.ClickException("ss is missing. Run: sudo apt-get install iproute2")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files < plan.streams + 200:
        raise click.ClickException(f"Too few files may be open ({files}). Run: ulimit -n {2 * plan.streams + 400}")
    try:
        status = uvloop.run(measure(plan, rounds, Console()))
    except NotTested as problem:
        raise click.ClickException(str(problem)) from None
    except ExceptionGroup as failed:  # a run, whose readers end together
        first = failed.exceptions[0]
        raise click.ClickException(f"A run failed: {type(first).__name__}: {first}") from None
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


if __name__ == "__main__":
    main()
