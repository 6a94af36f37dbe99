"""Which engine a session goes to: its binding while that holds, else rendezvous hashing.

Rendezvous (highest random weight; Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998):
every engine gets a score from its id and the session's; the highest wins. An engine that comes or goes moves only the
sessions that it wins or held, the ranking is also the order of failover, and there is no ring to keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import xxhash


@dataclass(frozen=True, slots=True)
class Binding:
    """The engine that holds a session's cached prefix, at one epoch (one start) of it."""

    engine: str
    epoch: str


class Candidate(Protocol):
    """What placement wants to know of an engine."""

    @property
    def id(self) -> str: ...
    @property
    def epoch(self) -> str: ...


E = TypeVar("E", bound=Candidate)


def rank(session_id: str, engines: Iterable[E]) -> list[E]:
    """The engines in the session's own order of preference. The order of ``engines`` does not matter."""

    def score(engine: E) -> tuple[int, str]:
        # The length keeps ("ab", "c") and ("a", "bc") apart; the id breaks a tie.
        return xxhash.xxh64_intdigest(f"{len(engine.id)}:{engine.id}:{session_id}".encode()), engine.id

    return sorted(engines, key=score, reverse=True)


def place(session_id: str, binding: Binding | None, healthy: Sequence[E]) -> E | None:
    """The engine for the session's next turn, out of those that are healthy and serve its model; None if there is none.

    A binding holds while its engine is healthy and has not restarted since: after a restart its cache is empty, so the
    session is placed anew (which may well give the same engine).
    """
    if binding is not None:
        for engine in healthy:
            if engine.id == binding.engine and engine.epoch == binding.epoch:
                return engine
    return rank(session_id, healthy)[0] if healthy else None
