"""A session stays on its engine, and no other session moves when an engine comes or goes."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

import pytest

from chat_server.core.placement import Binding, place, rank

pytestmark = pytest.mark.pure

SESSIONS = [f"sess_{number:032x}" for number in range(20_000)]


@dataclass(frozen=True)
class Engine:
    id: str
    epoch: str = "1"


ENGINES = [Engine(f"engine-{number}") for number in range(16)]


@cache
def placed(count: int, sessions: int = 4000) -> list[str]:
    """Where each of the first sessions goes with so many engines and no binding."""
    engines = ENGINES[:count]
    return [rank(session, engines)[0].id for session in SESSIONS[:sessions]]


def held(session: str, engine: Engine) -> Binding:
    """The binding after the session was served there."""
    assert place(session, None, [engine]) is engine
    return Binding(engine.id, engine.epoch)


def test_sessions_spread_evenly() -> None:
    """20 000 over 16 engines: none is more than an eighth from the mean (the deviation of chance is 34 of 1250)."""
    counts = Counter(placed(16, len(SESSIONS)))
    assert set(counts) == {engine.id for engine in ENGINES}
    assert all(abs(count - 1250) < 1250 / 8 for count in counts.values()), counts


def test_similar_names_spread_as_well() -> None:
    """Operators name engines as they like; the hash does not care."""
    engines = [Engine(id) for id in ("a", "aa", "aaa", "b", "http://10.0.0.1:8000", "http://10.0.0.1:8001")]
    counts = Counter(rank(session, engines)[0].id for session in SESSIONS[:6000])
    assert all(abs(count - 1000) < 1000 / 6 for count in counts.values()), counts


def test_an_engine_that_goes_moves_only_its_own_sessions() -> None:
    """To all of the others, for each has its own second choice."""
    lost = ENGINES[15].id
    moved = [(before, after) for before, after in zip(placed(16), placed(15), strict=True) if before != after]
    assert all(before == lost for before, _ in moved)
    assert len(moved) == placed(16).count(lost)
    assert len({after for _, after in moved}) == 15


def test_an_engine_that_comes_takes_only_its_share() -> None:
    """A sixteenth of the sessions move, all of them to it."""
    new = ENGINES[15].id
    moved = [after for before, after in zip(placed(15), placed(16), strict=True) if before != after]
    assert set(moved) == {new}
    assert abs(len(moved) - 250) < 250 / 4


def test_the_order_of_the_engines_does_not_matter() -> None:
    """Replicas may know them in any order and must agree."""
    shuffled = list(ENGINES)
    for seed in range(5):
        random.Random(seed).shuffle(shuffled)
        for session in SESSIONS[:50]:
            assert rank(session, shuffled) == rank(session, ENGINES)
            assert place(session, None, shuffled) == place(session, None, ENGINES)


def test_the_ranking_is_the_order_of_failover() -> None:
    """When the first is gone the second is first, and so on: nothing else changes."""
    for session in SESSIONS[:20]:
        order = rank(session, ENGINES)
        assert sorted(engine.id for engine in order) == sorted(engine.id for engine in ENGINES)
        for gone in range(len(order)):
            assert place(session, None, order[gone:]) == order[gone]
            assert rank(session, reversed(order[gone:])) == order[gone:]


def test_sessions_have_different_orders() -> None:
    """So a lost engine's sessions spread over all that are left."""
    assert len({tuple(engine.id for engine in rank(session, ENGINES[:4])) for session in SESSIONS[:1000]}) == 24


def test_where_a_session_goes_is_the_same_in_every_process() -> None:
    """And in every version of ours: replicas of an old and a new one run side by side."""
    order = rank("sess_1", [Engine("a"), Engine("b"), Engine("c")])
    assert [engine.id for engine in order] == ["c", "a", "b"]


def test_ids_of_engine_and_session_are_kept_apart() -> None:
    """What is one's end is not the other's beginning: ``a`` for ``bc`` is not ``ab`` for ``c``."""
    ab, a = Engine("ab"), Engine("a")
    one = [rank(f"c{n}", [ab, ENGINES[0]])[0] is ab for n in range(64)]
    other = [rank(f"bc{n}", [a, ENGINES[0]])[0] is a for n in range(64)]
    assert one != other


def test_a_binding_holds_against_the_ranking() -> None:
    """The engine that has the session's prefix serves it, whoever else is there."""
    for session in SESSIONS[:20]:
        last = rank(session, ENGINES)[-1]
        assert place(session, held(session, last), ENGINES) is last


def test_a_binding_holds_when_others_come_and_go() -> None:
    """Only its own engine counts."""
    session = SESSIONS[0]
    binding = held(session, ENGINES[3])
    for count in range(4, 17):
        assert place(session, binding, ENGINES[:count]) is ENGINES[3]


def test_a_binding_falls_with_its_engine() -> None:
    """The session is placed as if it had none."""
    for session in SESSIONS[:20]:
        first, *others = rank(session, ENGINES)
        assert place(session, held(session, first), others) is others[0]


def test_a_binding_falls_when_its_engine_restarts() -> None:
    """The cache is empty then, so the session goes where it belongs, which may be the same engine."""
    for session in SESSIONS[:20]:
        order = rank(session, ENGINES)
        binding = held(session, order[-1])
        restarted = [replace(engine, epoch="2") for engine in ENGINES]
        assert place(session, binding, restarted) == replace(order[0], epoch="2")


def test_a_restart_moves_no_session_that_is_where_it_belongs() -> None:
    """The ranking knows no epochs: a restart of all engines changes nothing."""
    restarted = [replace(engine, epoch="2") for engine in ENGINES]
    for session in SESSIONS[:100]:
        before = rank(session, ENGINES)[0]
        after = place(session, Binding(before.id, before.epoch), restarted)
        assert after == replace(before, epoch="2")


@pytest.mark.parametrize("binding", [None, Binding("engine-0", "1"), Binding("gone", "1")])
def test_without_a_healthy_engine_there_is_no_place(binding: Binding | None) -> None:
    """The caller waits for one."""
    assert place("sess_1", binding, []) is None
    assert rank("sess_1", []) == []


def test_a_binding_to_an_engine_that_nobody_knows_is_no_binding() -> None:
    """The operator may have taken it away for good."""
    assert place(SESSIONS[0], Binding("gone", "1"), ENGINES) == rank(SESSIONS[0], ENGINES)[0]
