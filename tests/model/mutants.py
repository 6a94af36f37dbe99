"""The server broken in known ways: for each some seed of the first ones must fail, or the model does not see it."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import click

from chat_server.answers import Answers
from chat_server.hub import Hub
from chat_server.lease import Lease
from chat_server.restoring import Restorer
from chat_server.store.committer import Committer, Writer
from tests.model import runs

#: what a fault makes of the server, for as long as it lasts
Patch = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Mutant:
    """One way to break it: scripts that read otherwise, or methods that do something else."""

    scripts: tuple[str, str] | None = None
    patch: Patch = nullcontext

    def edit(self, code: str) -> str:
        if self.scripts is None:
            return code
        before, after = self.scripts
        assert before in code, f"the scripts have no {before!r} any more"
        return code.replace(before, after)


def _does(owner: type, name: str, what: Any) -> Patch:
    return lambda: mock.patch.object(owner, name, what, create=True)


async def _no(*_: Any, **__: Any) -> bool:
    return False


async def _nothing(*_: Any, **__: Any) -> None:
    return None


def _told_before_stored(self: Committer, writer: Writer) -> None:
    _ADD(self, writer)
    if writer.response.take_commit() is not None:
        writer.response.stored_in_flight()
        writer.on_stored()


_ADD = Committer.add


class _Nothing:
    """An attribute in which nothing stays."""

    def __get__(self, owner: object, kind: type) -> dict[str, Any]:
        return {}

    def __set__(self, owner: object, value: object) -> None:
        """It is gone."""


MUTANTS = {
    "commits without a look at the token": Mutant(("if held[1] ~= args[4] then return {'refused'} end", "")),
    "a take-over without a look at the token": Mutant(("if held[2] ~= args[5] then return {'refused'} end", "")),
    "a take-over without a look at the lease": Mutant(patch=_does(Lease, "lives", _no)),
    "nobody takes over": Mutant(patch=_does(Answers, "take_over", _nothing)),
    "an owner writes nothing again": Mutant(patch=_does(Restorer, "restore", _no)),
    "an end is not kept": Mutant(patch=_does(Restorer, "_ended", _Nothing())),
    "what is written again has no text": Mutant(
        ("if args[at] ~= '' then redis.call('SET', keys[TEXT], args[at]) end", "")
    ),
    "what is written again gets a new version": Mutant(
        ("'version', args[5], 'bytes', 0", "'version', string.format('%.0f', now_ms()), 'bytes', 0")
    ),
    "writes on top of a loss": Mutant(("return tonumber(version or '-1') < tonumber(known)", "return false")),
    "a wish to stop that is forgotten": Mutant(
        ("if held[3] and held[3] ~= args[13] then return {'cancelled', held[3]} end", "")
    ),
    "text that is told before it is stored": Mutant(patch=_does(Committer, "add", _told_before_stored)),
    "no look at what was missed": Mutant(patch=_does(Hub, "_compare_doubted", _nothing)),
}


def caught(name: str, seeds: int) -> tuple[str, int | None, str]:
    """The mutant, the first seed that fails with it, and why."""
    mutant = MUTANTS[name]
    with tempfile.TemporaryDirectory() as folder, runs.valkey(Path(folder), mutant.edit) as store, mutant.patch():
        for seed in range(seeds):
            if (found := runs.failure(seed, store, Counter())) is not None:
                return name, seed, found.splitlines()[-2]
    return name, None, ""


@click.command()
@click.argument("seeds", type=click.IntRange(min=1), default=300)
def main(seeds: int) -> None:
    """Look for a failure with each mutant among the first SEEDS seeds."""
    started, missed = time.monotonic(), 0
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        jobs = [pool.apply_async(caught, (name, seeds)) for name in MUTANTS]
        for name, seed, why in (job.get() for job in jobs):
            missed += seed is None
            print(f"{name}: {'NOT FOUND' if seed is None else why[:150]}", flush=True)
    print(f"{len(MUTANTS)} mutants, {missed} not found, {time.monotonic() - started:.0f} s")
    raise SystemExit(missed > 0)


if __name__ == "__main__":
    main()
