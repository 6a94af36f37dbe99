"""The engine of an answer: one that is there in time, and the binding that goes with it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from chat_server import placing
from chat_server.core.placement import Binding
from chat_server.engine.fleet import Engine
from chat_server.errors import StoreUnavailable
from chat_server.placing import NoEngine, Placer
from chat_server.settings import Limits

pytestmark = pytest.mark.pure

ONE, TWO = Binding("engine-1", "1"), Binding("engine-2", "1")


class Script:
    """Stands for the fleet and the store."""

    def __init__(self, *engines: Engine) -> None:
        self.engines = list(engines)
        self.bindings: list[tuple[Binding | None, Binding]] = []
        self.bound: Binding | None = None
        self.away = False
        #: the waits for an engine, and what happens in the next ones
        self.waits: list[float] = []
        self.events: list[Any] = []

    # the fleet
    def healthy(self, model: str) -> list[Engine]:
        return [engine for engine in self.engines if engine.state == "healthy" and model in engine.models]

    async def wait_healthy(self, model: str, timeout_s: float) -> list[Engine]:
        self.waits.append(timeout_s)
        if self.events:
            self.events.pop(0)()
        if not (found := self.healthy(model)):
            raise TimeoutError
        return found

    # the store
    async def bind(self, session_id: str, read: Binding | None, new: Binding) -> Binding | None:
        if self.away:
            raise StoreUnavailable("away")
        self.bindings.append((read, new))
        if self.bound != read:
            return self.bound
        self.bound = new
        return new

    async def place(self, binding: Binding | None = None, tried: tuple[str, ...] = ()) -> tuple[str, Binding | None]:
        part = cast("Any", self)
        engine, binding = await Placer(part, part, Limits(max_queue_s=5.0)).place("s", "m", binding, tried)
        return engine.id, binding


def engine(number: int, state: Any = "healthy", epoch: str = "1") -> Engine:
    return Engine(f"engine-{number}", "http://engine", state=state, epoch=epoch, models=("m",))


async def test_a_binding_that_holds_costs_nothing() -> None:
    """The store is not asked."""
    script = Script(engine(1), engine(2))
    assert await script.place(TWO) == ("engine-2", TWO)
    assert script.bindings == []


async def test_a_session_without_a_binding_gets_one() -> None:
    """The next turn goes to the same engine."""
    script = Script(engine(1))
    assert await script.place() == ("engine-1", ONE)
    assert script.bound == ONE


async def test_a_binding_that_somebody_else_made_meanwhile_holds() -> None:
    """If its engine can be used; else the session is bound anew, over theirs and not blindly."""
    script = Script(engine(1), engine(2))
    other = {"engine-1": TWO, "engine-2": ONE}[(await script.place())[0]]
    script.bound = other
    assert await script.place() == (other.engine, other)
    gone = script.bound = Binding("engine-0", "9")
    script.bindings.clear()
    name, binding = await script.place()
    assert (binding, script.bound) == (Binding(name, "1"), binding)
    assert [read for read, _ in script.bindings] == [None, gone]


async def test_an_engine_that_was_tried_is_left_out() -> None:
    """Also if the session is bound to it: it is bound to the other one then. The only one is tried again."""
    script = Script(engine(1), engine(2))
    script.bound = TWO
    assert await script.place(TWO, tried=("engine-2",)) == ("engine-1", ONE)
    assert script.bound == ONE
    assert await script.place(ONE, tried=("engine-1", "engine-2")) == ("engine-1", ONE)


async def test_an_engine_is_used_while_the_store_is_away() -> None:
    """The answer waits for the store, not for the place of the next one."""
    script = Script(engine(1))
    script.away = True
    assert await script.place(TWO) == ("engine-1", TWO)


async def test_an_answer_waits_for_an_engine() -> None:
    """As long as the operator says; then it is told that there is none."""
    script = Script(engine(1, "unhealthy"))
    with pytest.raises(NoEngine, match="No engine that serves m came up within 5 s"):
        await script.place()
    assert script.waits == [5.0]
    script.events = [lambda: setattr(script.engines[0], "state", "healthy")]
    assert (await script.place())[0] == "engine-1"


async def test_engines_that_start_are_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who wrote while they load gets an answer; but not for ever."""
    script = Script(engine(1, "starting"))
    script.events = [lambda: None, lambda: None, lambda: setattr(script.engines[0], "state", "healthy")]
    assert (await script.place())[0] == "engine-1"
    assert script.waits == [5.0] * 3
    monkeypatch.setattr(placing, "_STARTING_S", -1.0)
    script.engines[0].state = "starting"
    with pytest.raises(NoEngine):
        await script.place()
