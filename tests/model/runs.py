"""A store for the model, and worlds run on it one after the other."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from chat_server.store.embedded import EmbeddedValkey
from tests.model.network import Valkey
from tests.model.world import World

#: lines of the trace that are shown of a world that failed; ``--seed`` shows all.
_SHOWN = 60


@contextmanager
def valkey(folder: Path, edit: Callable[[str], str] = str) -> Iterator[Valkey]:
    """A real Valkey, with its data in a folder; ``edit``: what becomes of the scripts before they are loaded."""
    embedded = EmbeddedValkey(folder)
    with asyncio.Runner() as runner:
        url = runner.run(embedded.start())
        store = Valkey(unquote(urlsplit(url).path), edit)
        try:
            yield store
        finally:
            store.close()
            runner.run(embedded.stop())


def failure(seed: int, store: Valkey, counts: Counter[str]) -> str | None:
    """Run a seed's world; what does not hold in it, with what happened before, or None. Adds to ``counts``."""
    world = World(seed, store)
    try:
        world.run()
    except Exception as error:
        lines = "\n".join(world.lines[-_SHOWN:])
        return f"{lines}\nSeed {seed}: {type(error).__name__}: {error}\nThe whole trace: make model SEED={seed}"
    finally:
        counts.update(world.counts)
    return None


def failures(seeds: Iterable[int]) -> tuple[list[str], Counter[str]]:
    """Run the worlds of many seeds on a store of their own, for a process beside others; what happened, how often."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, valkey(Path(folder)) as store:
        return [found for seed in seeds if (found := failure(seed, store, counts)) is not None], counts


def trace(seed: int, store: Valkey) -> tuple[list[str], str | None]:
    """Run a seed's world: all that happens in it, and what does not hold."""
    world = World(seed, store)
    try:
        world.run()
    except Exception as error:
        return world.lines, f"{type(error).__name__}: {error}"
    return world.lines, None
