"""What probes make of the engines, and who is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from chat_server.engine.fleet import Engine, Fleet, Watch, engine_id
from chat_server.engine.simulated import Fault, SimulatedOptions, simulated_server
from chat_server.engine.vllm import EngineNotThere, ModelInfo, Probe, VllmClient, open_http
from chat_server.errors import EngineRefused, EngineUnavailable, StartError
from chat_server.settings import EngineAddress

pytestmark = pytest.mark.server

MODELS = [ModelInfo("m", 8192)]
SICK = EngineUnavailable("it answers 500")
DOWN = EngineNotThere("connection refused")


def probe(epoch: str | None = "1", counted: float = 0.0, running: int = 0, waiting: int = 0) -> Probe:
    return Probe(epoch, running=running, waiting=waiting, counted=counted)


def state(watch: Watch) -> str:
    return watch.engine.state


def watch() -> Watch:
    """An engine that was healthy at 10 s."""
    watch = Watch(Engine("e", "http://e"))
    assert watch.good(probe(), MODELS, began=10.0)
    return watch


# One engine: what a probe means, by an invented clock


def test_a_good_probe_makes_it_healthy() -> None:
    """With its models, load and start."""
    engine = Engine("e", "http://e")
    assert engine.state == "starting"
    Watch(engine).good(probe("7", running=3, waiting=2), [ModelInfo("a", 8192), ModelInfo("b", 4096)], 1.0)
    assert (engine.state, engine.epoch, engine.running, engine.waiting) == ("healthy", "7", 3, 2)
    assert (engine.models, engine.max_model_len) == (("a", "b"), 4096)


def test_a_refused_connection_is_the_end_at_once() -> None:
    """Nobody listens: no patience helps."""
    w = watch()
    assert w.bad(DOWN, now=11.0)
    assert (w.engine.state, w.engine.detail) == ("unhealthy", "connection refused")


def test_other_failures_need_two_seconds() -> None:
    """One slow or broken answer of a busy engine is not its end; two seconds without a good one are."""
    w = watch()
    assert not w.bad(SICK, now=11.0)
    assert state(w) == "healthy"
    assert w.bad(SICK, now=12.0)
    assert state(w) == "unhealthy"


def test_a_good_probe_renews_the_patience() -> None:
    """Every second probe failing is a busy engine, not a dead one."""
    w = watch()
    for second in range(11, 30):
        if second % 2:
            w.bad(SICK, now=second)
        else:
            w.good(probe(), None, began=second)
    assert state(w) == "healthy"


def test_it_comes_back_with_a_good_probe() -> None:
    """Unhealthy is no verdict for ever."""
    w = watch()
    w.bad(DOWN, now=11.0)
    assert w.good(probe("2"), MODELS, began=12.0)
    assert (w.engine.state, w.engine.epoch) == ("healthy", "2")


def test_an_unhealthy_engine_shows_no_load() -> None:
    """What it reported when it lived says nothing now."""
    w = watch()
    w.good(probe(running=5, waiting=1), None, began=11.0)
    w.bad(DOWN, now=12.0)
    assert (w.engine.running, w.engine.waiting) == (0, 0)


def test_what_was_not_there_yet_is_starting() -> None:
    """An engine that was never seen healthy is awaited, whatever its port says; people read why."""
    w = Watch(Engine("e", "http://e"))
    assert not w.bad(DOWN, now=1.0)
    assert not w.bad(SICK, now=100.0)
    assert (w.engine.state, w.engine.detail) == ("starting", "it answers 500")


def test_a_refusal_is_no_start() -> None:
    """A wrong key is not mended by waiting."""
    w = Watch(Engine("e", "http://e"))
    assert w.bad(EngineRefused("Unauthorized", status=401), now=1.0)
    assert (w.engine.state, w.engine.detail) == ("unhealthy", "Unauthorized")


def test_what_a_stream_saw_holds_until_a_later_probe() -> None:
    """A probe that was under way when the stream broke can not have seen it."""
    w = watch()
    assert w.failed("reset in an answer", now=11.5)
    assert (w.engine.state, w.engine.detail) == ("unhealthy", "reset in an answer")
    assert not w.good(probe(), None, began=11.4)
    assert state(w) == "unhealthy"
    assert w.good(probe(), None, began=12.0)
    assert state(w) == "healthy"


def test_a_counter_that_falls_back_is_a_new_start() -> None:
    """Without a start time in the metrics the counter betrays an empty cache."""
    w = Watch(Engine("e", "http://e"))
    epochs = []
    for counted in (0.0, 50.0, 50.0, 90.0, 10.0, 20.0):
        w.good(probe(None, counted), MODELS, began=1.0)
        epochs.append(w.engine.epoch)
    assert len(set(epochs[:4])) == 1
    assert len(set(epochs[4:])) == 1
    assert epochs[3] != epochs[4]


def test_new_models_are_told() -> None:
    """Who waits for a model hears of it, though the state is the same."""
    w = watch()
    assert not w.good(probe(), MODELS, began=11.0)
    assert w.good(probe(), [*MODELS, ModelInfo("adapter", None)], began=12.0)


def test_probes_of_a_start_begin_dense_and_thin_out() -> None:
    """A start is seen within a moment; one that takes a minute is not hammered."""
    w = Watch(Engine("e", "http://e"))
    waits = [w.wait(1.0) for _ in range(100)]
    assert waits[:3] == [0.05, 0.1, 0.2]
    assert waits[-1] == 1.0
    w.good(probe(), MODELS, began=1.0)
    assert w.wait(1.0) == 1.0


def test_a_change_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """One line when the state changes, none per probe."""
    caplog.set_level(logging.DEBUG)
    w = watch()
    for second in range(11, 20):
        w.good(probe(), None, began=second)
    for second in range(20, 30):
        w.bad(DOWN, now=second)
    assert [r.getMessage() for r in caplog.records] == [
        "engine e at http://e: starting -> healthy (healthy)",
        "engine e at http://e: healthy -> unhealthy (connection refused)",
    ]


def test_ids_are_the_same_on_every_replica() -> None:
    """The operator's name, else made from the URL alone."""
    assert engine_id(EngineAddress("http://10.0.0.5:8000", "left")) == "left"
    assert engine_id(EngineAddress("http://10.0.0.5:8000")) == "engine-73f125f7"


def test_two_engines_of_one_name_are_refused() -> None:
    """They could not be told apart; the operator hears what to do."""
    with pytest.raises(StartError, match="give each --engine its own"):
        Fleet([EngineAddress("http://a", "x"), EngineAddress("http://b", "x")], Scripted())


# The fleet


class Scripted(VllmClient):
    """A client whose engines answer as the test says: by URL, a function that returns or raises."""

    def __init__(self, **answers: Callable[[], Probe | Awaitable[Probe]]) -> None:
        self.answers = {f"http://{name}": answer for name, answer in answers.items()}
        self.probes: list[str] = []
        self.served: dict[str, Sequence[str]] = {}

    async def probe(self, url: str, *, engine: str | None = None) -> Probe:
        self.probes.append(url)
        answer = self.answers[url]()
        return answer if isinstance(answer, Probe) else await answer

    async def models(self, url: str, *, engine: str | None = None) -> list[ModelInfo]:
        return [ModelInfo(name, 8192) for name in self.served.get(url, ("m",))]


@asynccontextmanager
async def running(
    client: VllmClient, *urls: str, interval_s: float = 0.01, patience_s: float = 2.0
) -> AsyncIterator[Fleet]:
    """A fleet that probes."""
    fleet = Fleet([EngineAddress(url) for url in urls], client, probe_interval_s=interval_s, patience_s=patience_s)
    task = asyncio.create_task(fleet.run())
    try:
        yield fleet
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def down() -> Probe:
    raise DOWN


async def never() -> Probe:
    await asyncio.Event().wait()
    raise AssertionError


async def test_the_healthy_ones_of_a_model_are_given() -> None:
    """Those that serve it, in the operator's order; the first model of the first engine is the default."""
    client = Scripted(a=probe, b=probe, c=down)
    client.served = {"http://a": ("m", "x"), "http://b": ("n", "m")}
    async with running(client, "http://a", "http://b", "http://c") as fleet:
        await fleet.wait_healthy("x", 1)
        await fleet.wait_healthy("n", 1)
        assert [e.url for e in fleet.healthy("m")] == ["http://a", "http://b"]
        assert [e.url for e in fleet.healthy("n")] == ["http://b"]
        assert fleet.healthy("unknown") == []
        assert fleet.healthy() == await fleet.wait_healthy(None, 1) == [*fleet.healthy("m")]
        assert fleet.models() == ["m", "x", "n"]
        assert [e.state for e in fleet.engines] == ["healthy", "healthy", "starting"]


async def test_models_of_an_engine_that_is_away_are_still_known() -> None:
    """A restart of the only engine must not turn its model into an unknown one."""
    client = Scripted(a=probe)
    async with running(client, "http://a") as fleet:
        await fleet.wait_healthy("m", 1)
        client.answers["http://a"] = down
        while fleet.healthy("m"):
            await asyncio.sleep(0.001)
        assert fleet.models() == ["m"]


async def test_a_silent_engine_does_not_hold_up_the_others() -> None:
    """Each has its own probe."""
    client = Scripted(a=never, b=probe)
    async with running(client, "http://a", "http://b") as fleet:
        await fleet.wait_healthy("m", 1)
        async with asyncio.timeout(1):
            while client.probes.count("http://b") < 5:
                await asyncio.sleep(0.001)
        assert client.probes.count("http://a") == 1


async def test_an_engine_that_goes_silent_is_unhealthy() -> None:
    """A probe has a deadline, and what it was is said."""
    client = Scripted(a=probe)
    async with running(client, "http://a", patience_s=0.05) as fleet:
        await fleet.wait_healthy("m", 1)
        client.answers["http://a"] = never
        while fleet.healthy("m"):
            await asyncio.sleep(0.005)
        assert fleet.engines[0].detail == "no answer within 0.05 s"


async def test_who_waits_is_woken() -> None:
    """By the probe that makes it healthy, not by a clock of its own."""
    client = Scripted(a=down)
    async with running(client, "http://a") as fleet:
        waits = asyncio.create_task(fleet.wait_healthy("m", 5))
        await asyncio.sleep(0.02)
        assert not waits.done()
        client.answers["http://a"] = probe
        assert [e.url for e in await asyncio.wait_for(waits, 1)] == ["http://a"]


async def test_waiting_has_an_end() -> None:
    """Nobody waits longer than asked."""
    async with running(Scripted(a=down), "http://a") as fleet:
        with pytest.raises(TimeoutError):
            await fleet.wait_healthy("m", 0.02)


async def test_a_failure_seen_by_a_stream_counts_at_once() -> None:
    """Before any probe; the next good one lifts it. An unknown engine changes nothing."""
    async with running(Scripted(a=probe), "http://a", interval_s=0.03) as fleet:
        (engine,) = await fleet.wait_healthy("m", 1)
        fleet.failed("nobody", "x")
        assert engine.state == "healthy"
        fleet.failed(engine.id, "reset in an answer")
        assert (engine.state, engine.detail) == ("unhealthy", "reset in an answer")
        assert await fleet.wait_healthy("m", 1) == [engine]


async def test_models_are_asked_again_after_a_restart() -> None:
    """Another start may serve another model."""
    epochs = ["1"]
    client = Scripted(a=lambda: probe(epochs[0]))
    async with running(client, "http://a") as fleet:
        await fleet.wait_healthy("m", 1)
        client.served = {"http://a": ("new",)}
        await asyncio.sleep(0.03)
        assert fleet.models() == ["m"]
        epochs[0] = "2"
        await fleet.wait_healthy("new", 1)
        assert fleet.engines[0].epoch == "2"


# With engines on sockets


async def test_two_engines_are_found_within_a_moment() -> None:
    """Both are healthy well before half a second has gone."""
    options = SimulatedOptions(model="m")
    async with simulated_server(options) as a, simulated_server(options) as b, open_http() as http:
        started = asyncio.get_running_loop().time()
        async with running(VllmClient(http), a.url, b.url, interval_s=1.0) as fleet:
            while len(fleet.healthy("m")) < 2:
                await asyncio.sleep(0.001)
            assert asyncio.get_running_loop().time() - started < 0.4
            engine = fleet.engines[0]
            assert (engine.max_model_len, engine.epoch) == (8192, str(a.engine.started))


async def test_an_engine_that_dies_and_one_that_is_sick_are_seen() -> None:
    """Of real sockets too: one refuses, one answers 503 on its health."""
    options = SimulatedOptions(model="m")
    async with (
        simulated_server(options) as a,
        simulated_server(options) as b,
        open_http() as http,
        running(VllmClient(http), a.url, b.url, patience_s=0.5) as fleet,
    ):
        while len(fleet.healthy("m")) < 2:
            await asyncio.sleep(0.001)
        a.die()
        b.engine.add_fault(Fault("health", times=None))
        while fleet.healthy("m"):
            await asyncio.sleep(0.005)
        assert "Connection refused" in fleet.engines[0].detail
        assert "503" in fleet.engines[1].detail
        b.engine.clear_faults()
        assert await fleet.wait_healthy("m", 1) == [fleet.engines[1]]


async def test_a_wrong_key_is_told_to_the_operator() -> None:
    """The engine is there and healthy, and of no use: the detail says why."""
    async with simulated_server(SimulatedOptions(model="m", api_key="right")) as a, open_http() as http:
        async with running(VllmClient(http, "wrong"), a.url) as fleet:
            while fleet.engines[0].state == "starting":
                await asyncio.sleep(0.001)
            assert "Unauthorized" in fleet.engines[0].detail
        async with running(VllmClient(http, "right"), a.url) as fleet:
            assert await fleet.wait_healthy("m", 1)
