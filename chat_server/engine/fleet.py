"""The engines we know: where they are, whether they can be used, what they serve, how busy they are.

Each engine has a task that probes it once a second; the slow probe of one never delays another's. ``Watch`` decides
what a probe means, by plain calls that take the time as an argument; ``Fleet`` does the asking and the waking.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import xxhash

from chat_server.engine.vllm import EngineNotThere
from chat_server.errors import EngineError, EngineRefused, StartError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chat_server.engine.vllm import ModelInfo, Probe, VllmClient
    from chat_server.settings import EngineAddress

logger = logging.getLogger(__name__)

#: Seconds without a good probe after which an engine counts as unhealthy, and that one probe may take. A busy engine
#: answers late and is not dead; a refused connection is, at once.
PATIENCE_S = 2.0
#: Seconds after which the models are asked for again: adapters can be loaded while an engine runs.
MODELS_EVERY_S = 15.0
#: The first wait between two probes of an engine that has not started yet; it doubles up to the interval.
FIRST_WAIT_S = 0.05

State = Literal["starting", "healthy", "unhealthy"]


@dataclass(slots=True)
class Engine:
    """One engine, as last seen. Read it at any time; only the fleet writes it, but for ``in_flight``."""

    #: the same on every replica: the operator's name for it, else made from the URL
    id: str
    url: str
    #: ``starting``: it was never seen healthy
    state: State = "starting"
    #: its start; another epoch means that its cache is empty. Empty: not known yet
    epoch: str = ""
    models: tuple[str, ...] = ()
    #: tokens of its context window (the least of its models), if it says so
    max_model_len: int | None = None
    #: requests that it runs, and that wait in it, from everybody
    running: int = 0
    waiting: int = 0
    #: requests of this replica; whoever sends one counts it here
    in_flight: int = 0
    #: what is wrong with it, or what it waits for, for people
    detail: str = "not asked yet"


@dataclass(slots=True)
class Watch:
    """What the probes of one engine add up to."""

    engine: Engine
    #: when the last good probe began; what began before ``failed_at`` says nothing any more
    good_at: float | None = None
    failed_at: float = float("-inf")
    models_at: float = float("-inf")
    counted: float = 0.0
    #: starts that only a counter betrayed
    restarts: int = 0
    #: probes while it was starting
    tries: int = 0
    patience_s: float = PATIENCE_S

    def good(self, probe: Probe, models: Sequence[ModelInfo] | None, began: float) -> bool:
        """A probe that began at ``began`` went well; ``models`` if they were asked. Whether state or models changed."""
        engine = self.engine
        if began < self.failed_at:
            return False
        models_before = engine.models
        if models is not None:
            engine.models = tuple(model.id for model in models)
            engine.max_model_len = min((m.max_model_len for m in models if m.max_model_len), default=None)
            self.models_at = began
        self.good_at = began
        if probe.epoch is None and probe.counted < self.counted:
            self.restarts += 1
        self.counted = probe.counted
        engine.epoch = probe.epoch or f"counted-{self.restarts}"
        engine.running, engine.waiting = probe.running, probe.waiting
        return self._set("healthy", "healthy") or engine.models != models_before

    def bad(self, error: Exception, now: float) -> bool:
        """A probe failed. Whether the state changed."""
        if self.engine.state == "starting":
            # Not started yet is no fault; no to our key is one, and no waiting mends it.
            return self._set("unhealthy" if isinstance(error, EngineRefused) else "starting", str(error))
        late = self.good_at is None or now - self.good_at >= self.patience_s
        if isinstance(error, EngineNotThere) or late:
            return self._set("unhealthy", str(error))
        return False

    def failed(self, reason: str, now: float) -> bool:
        """A live stream saw it fail. Whether the state changed."""
        self.failed_at = now
        return self._set("unhealthy", reason)

    def models_due(self, now: float) -> bool:
        return self.engine.state != "healthy" or now - self.models_at >= MODELS_EVERY_S

    def wait(self, interval_s: float) -> float:
        """Seconds to the next probe after this one: short at first, so that a start is seen at once."""
        if self.engine.state != "starting":
            return interval_s
        self.tries += 1
        return min(interval_s, FIRST_WAIT_S * 2.0 ** min(self.tries - 1, 10))

    def _set(self, state: State, detail: str) -> bool:
        engine = self.engine
        before, engine.state, engine.detail = engine.state, state, detail
        if state != "healthy":
            engine.running = engine.waiting = 0
        if before == state:
            return False
        level = logging.INFO if state == "healthy" else logging.WARNING
        logger.log(level, "engine %s at %s: %s -> %s (%s)", engine.id, engine.url, before, state, detail)
        return True


class Fleet:
    """All engines. ``run`` keeps them up to date until it is cancelled; everything else answers from memory."""

    def __init__(
        self,
        addresses: Sequence[EngineAddress],
        client: VllmClient,
        *,
        probe_interval_s: float = 1.0,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._client = client
        self._interval_s = probe_interval_s
        engines = [Engine(engine_id(address), address.url) for address in addresses]
        self._watches = {engine.id: Watch(engine, patience_s=patience_s) for engine in engines}
        if len(self._watches) < len(engines):
            raise StartError("Two engines have the same name or the same URL: give each --engine its own.")
        self._changed = asyncio.Event()

    @property
    def engines(self) -> tuple[Engine, ...]:
        """All engines, in the operator's order."""
        return tuple(watch.engine for watch in self._watches.values())

    def healthy(self, model: str | None = None) -> list[Engine]:
        """The engines that can answer for ``model`` (None: for any) now."""
        return [e for e in self.engines if e.state == "healthy" and (model is None or model in e.models)]

    def models(self) -> list[str]:
        """Models that are served, the first one is the default; also those of an engine that is away at the moment."""
        return list(dict.fromkeys(model for engine in self.engines for model in engine.models))

    async def wait_healthy(self, model: str | None, timeout_s: float | None) -> list[Engine]:
        """Wait until an engine can answer for ``model``: as ``healthy``, never empty. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not (found := self.healthy(model)):
                await self._changed.wait()
            return found

    def failed(self, engine_id: str, reason: str) -> None:
        """A live stream saw the engine refuse, reset or answer 5xx: unhealthy until a probe that begins after this."""
        watch = self._watches.get(engine_id)
        if watch is not None and watch.failed(reason, asyncio.get_running_loop().time()):
            self._wake()

    async def run(self) -> None:
        """Probe all engines until cancelled."""
        async with asyncio.TaskGroup() as group:
            for watch in self._watches.values():
                group.create_task(self._keep(watch), name=f"probe {watch.engine.id}")

    async def _keep(self, watch: Watch) -> None:
        now = asyncio.get_running_loop().time
        while True:
            began = now()
            if await self._probe(watch, began):
                self._wake()
            await asyncio.sleep(max(0.0, began + watch.wait(self._interval_s) - now()))

    async def _probe(self, watch: Watch, began: float) -> bool:
        name, url = watch.engine.id, watch.engine.url
        try:
            async with asyncio.timeout(watch.patience_s):
                probe = await self._client.probe(url, engine=name)
                due = watch.models_due(began) or probe.epoch not in (None, watch.engine.epoch)
                models = await self._client.models(url, engine=name) if due else None
        except TimeoutError:
            return watch.bad(
                TimeoutError(f"no answer within {watch.patience_s:g} s"), asyncio.get_running_loop().time()
            )
        except EngineError as error:
            return watch.bad(error, asyncio.get_running_loop().time())
        return watch.good(probe, models, began)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def engine_id(address: EngineAddress) -> str:
    """The operator's name for an engine, else ``engine-`` and 8 hex digits of the URL's xxh64."""
    return address.name or f"engine-{xxhash.xxh64_hexdigest(address.url.encode())[:8]}"
