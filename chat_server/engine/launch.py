"""Engines on this machine: which command starts them, when they are up, and what to do when one ends.

``LocalEngines`` chooses the ports at once, so the server can listen and look at the engines before they are there;
``run()`` prepares the model, starts all engines side by side, keeps them running, and stops them when it is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from chat_server.children import Child
from chat_server.engine import hardware
from chat_server.engine.demo_model import ensure_demo_model
from chat_server.engine.launch_errors import explain
from chat_server.engine.ports import free_ports
from chat_server.errors import StartError
from chat_server.settings import DEMO_MODEL, EngineAddress

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from chat_server.settings import Settings

logger = logging.getLogger(__name__)

#: seconds that an engine may take to come up: time enough to download a large model from a hub.
START_S = 3 * 3600.0
#: seconds between two looks at an engine that starts, and for one look.
LOOK_EVERY_S = 0.2
LOOK_S = 2.0
#: seconds from SIGTERM to SIGKILL: an engine keeps nothing that is worth more.
GRACE_S = 5.0
#: seconds before a dead engine starts again, doubled with each death in a row up to the second number; one that then
#: ran for the third number begins anew.
BACKOFF_S = (1.0, 60.0, 300.0)

GIB = 1 << 30
#: bytes of memory that vLLM's CPU build takes besides weights and KV cache, per engine (measured: two processes).
CPU_ENGINE_BYTES = 2 * GIB
#: GiB of KV cache per engine on a CPU: 46 000 tokens of the demo model; larger models need more for one context.
KV_CACHE_GIB_DEMO = 1
KV_CACHE_GIB = 4
#: share of a GPU's memory that vLLM takes, its own default.
GPU_SHARE = 0.9
#: not for the eyes of engines
SECRETS = ("CHAT_SERVER_API_KEY", "CHAT_SERVER_ENGINE_API_KEY", "CHAT_SERVER_REDIS", "REDIS_URL")


@dataclass(frozen=True, slots=True)
class Model:
    """What an engine loads: a folder or the name on a model hub, and the name that it is served under."""

    source: str
    served_name: str
    local: bool
    weight_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """The part of the machine that one engine gets."""

    cores: tuple[int, ...] = ()
    #: the GPU's index; None: the CPU computes, or an accelerator that we do not know
    gpu: int | None = None
    gpu_share: float = GPU_SHARE


@dataclass(slots=True)
class Stage:
    """What somebody is doing, for people: ``engine-1: loading the model, 12 s``."""

    who: str
    doing: str
    #: since when (monotonic); None: the time says nothing
    since: float | None = None
    #: the part that is done, 0 to 1; None: nobody knows
    part: float | None = None

    def now(self, doing: str, part: float | None = None, *, timed: bool = True) -> None:
        if doing != self.doing or not timed:
            self.since = time.monotonic() if timed else None
        self.doing, self.part = doing, part

    @property
    def line(self) -> str:
        part = "" if self.part is None else f", {self.part:.0%}"
        return self.doing + part + ("" if self.since is None else f", {time.monotonic() - self.since:.0f} s")


@dataclass(slots=True)
class LocalEngine:
    """One engine that we run."""

    name: str
    port: int
    log: Path
    stage: Stage
    was_ready: bool = False
    deaths: int = 0
    #: held while it starts; engines on one GPU share it, for vLLM measures the free memory and minds a change meanwhile
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    command: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class LocalEngines:
    """The engines of this machine: ``settings.simulate`` simulated ones, else ``settings.engine_count`` of vLLM."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        count = settings.simulate or settings.engine_count
        self._log_dir = settings.data_dir.expanduser() / "logs" / str(settings.port)
        # With a shared store other machines' engines are known there too, so ours need a name of their own.
        prefix = "" if settings.redis_url is None else f"{socket.gethostname()}-{settings.port}-"
        self._engines = tuple(
            LocalEngine(name := f"{prefix}engine-{number}", port, self._log_dir / f"{name}.log", Stage(name, "waiting"))
            for number, port in enumerate(free_ports(count), 1)
        )
        self._model_stage: Stage | None = None
        self.addresses = tuple(EngineAddress(engine.url, engine.name) for engine in self._engines)

    def status(self) -> dict[str, str]:
        """Engine's name -> what it is doing, for people."""
        prepared = self._model_stage
        line = None if prepared is None else f"the model is prepared: {prepared.line}"
        return {engine.name: line or engine.stage.line for engine in self._engines}

    @property
    def stages(self) -> list[Stage]:
        """What is going on now, to be shown line by line."""
        return [self._model_stage] if self._model_stage else [engine.stage for engine in self._engines]

    @property
    def all_ready(self) -> bool:
        """Whether each engine was ready once."""
        return all(engine.was_ready for engine in self._engines)

    async def run(self) -> None:
        """Start the engines and keep them running until cancelled; then stop them all.

        Raises StartError, saying what to do, if they can not be started or one ends before it was ever ready.
        """
        try:
            async with asyncio.TaskGroup() as group, aiohttp.ClientSession() as http:
                await self._plan()
                for engine in self._engines:
                    group.create_task(self._keep(engine, http))
                await asyncio.Event().wait()
        except ExceptionGroup as failures:
            found = failures.subgroup(StartError)
            if found is None:
                raise
            raise found.exceptions[0] from None

    async def _plan(self) -> None:
        """Decide how each engine is started; the model is made ready for that."""
        if self._settings.simulate:
            for engine in self._engines:
                engine.command = simulated_command(engine, self._settings)
                engine.env = environment()
            return
        build = await asyncio.to_thread(require_vllm)
        if build.cpu:  # so that nobody waits for a download only to hear this
            await asyncio.to_thread(check_memory, Model("", self._settings.model, local=True), len(self._engines))
        model = await self._model()
        gpus = () if build.cpu else await asyncio.to_thread(hardware.gpus)
        places = share_gpus(len(self._engines), gpus) if gpus else share_cores(len(self._engines), hardware.cores())
        if build.cpu:
            await asyncio.to_thread(check_memory, model, len(self._engines))
        turns: dict[int, asyncio.Lock] = {}
        for engine, place in zip(self._engines, places, strict=True):
            if place.gpu is not None:
                engine.turn = turns.setdefault(place.gpu, engine.turn)
            engine.command = vllm_command(
                engine.port, model, place, cpu=build.cpu, max_len=self._settings.max_model_len
            )
            engine.env = environment(**vllm_environment(model, place, cpu=build.cpu))

    async def _model(self) -> Model:
        settings = self._settings
        if settings.model != DEMO_MODEL:
            return await asyncio.to_thread(find_model, settings.model)
        self._model_stage = stage = Stage(DEMO_MODEL, "looking for it")
        try:
            path = await ensure_demo_model(settings.cache_dir, self._log_dir, stage.now)
        finally:
            self._model_stage = None
        return await asyncio.to_thread(find_model, str(path))

    async def _keep(self, engine: LocalEngine, http: aiohttp.ClientSession) -> None:
        """Run one engine, and run it again when it ends."""
        while True:
            began = time.monotonic()
            child, up = await self._start(engine, http)
            async with child:
                if up:
                    engine.was_ready = True
                    engine.stage.now(f"ready after {time.monotonic() - began:.0f} s", timed=False)
                    began = time.monotonic()
                    await child.wait()
                timed_out = child.running
                status = await child.stop()
                reason = explain(engine.name, status, await child.last_lines(400), engine.log, timed_out=timed_out)
            if not engine.was_ready:
                raise StartError(reason)
            first, most, calm = BACKOFF_S
            engine.deaths = engine.deaths + 1 if not up or time.monotonic() - began < calm else 1
            delay = min(most, first * 2.0 ** (engine.deaths - 1))
            logger.error("%s\nIt starts again in %.0f s.", reason, delay)
            engine.stage.now(f"ended (status {status}), starts again in {delay:.0f} s", timed=False)
            await asyncio.sleep(delay)

    async def _start(self, engine: LocalEngine, http: aiohttp.ClientSession) -> tuple[Child, bool]:
        """Start the process and wait until it answers; whether it does, or ended or took too long instead."""
        engine.stage.now("waits for its turn")
        async with engine.turn:
            engine.stage.now("starting" if self._settings.simulate else "loading the model")
            child = await Child.start(engine.command, log=engine.log, env=engine.env, grace_s=GRACE_S)
            try:
                return child, await self._until_up(engine, child, http)
            except BaseException:
                await child.stop()
                raise

    async def _until_up(self, engine: LocalEngine, child: Child, http: aiohttp.ClientSession) -> bool:
        """Wait until the engine answers; False if it ended, or took too long."""
        deadline = time.monotonic() + START_S
        while child.running and time.monotonic() < deadline:
            try:
                async with http.get(f"{engine.url}/health", timeout=aiohttp.ClientTimeout(total=LOOK_S)) as answer:
                    if answer.status == 200:
                        return True
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(LOOK_EVERY_S)
        return False


def require_vllm() -> hardware.VllmBuild:
    """The installed vLLM. Raises StartError that says how to get one."""
    build = hardware.vllm_build()
    if build is None:
        extra = "gpu" if hardware.gpus() else "cpu"
        raise StartError(
            "vLLM is not installed, so this machine can not run models itself. "
            f"In the project's folder run `make install-engine` or `pip install '.[{extra}]'`; or give engines that "
            "run elsewhere with --engine URL; or --simulate 2 to try the server without a model."
        )
    return build


def find_model(model: str) -> Model:
    """A folder of this machine, else a name on a model hub. Raises StartError for a folder that is not there."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        weights = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
        return Model(str(folder.absolute()), folder.absolute().name, True, sum(file.stat().st_size for file in weights))
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise StartError(f"There is no model folder {folder}. Give --model a folder, or a name such as ORG/NAME.")
    return Model(model, model, local=False)


def check_memory(model: Model, engines: int) -> None:
    """Raise StartError if the CPU engines do not fit into memory: sooner or later the system would kill one."""
    free = hardware.free_memory()
    need = engines * (CPU_ENGINE_BYTES + kv_cache_gib(model) * GIB + model.weight_bytes)
    if free is not None and free < need:
        raise StartError(
            f"Too little memory: {engines} engine(s) with {model.served_name} need about {need / GIB:.1f} GiB, "
            f"{free / GIB:.1f} GiB are free. Give fewer with --engines 1, close other programs, "
            "or use engines elsewhere with --engine URL."
        )


def kv_cache_gib(model: Model) -> int:
    """GiB of KV cache per CPU engine; vLLM's own variable wins."""
    given = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "")
    if given.isdigit() and int(given):
        return int(given)
    return KV_CACHE_GIB_DEMO if model.served_name == DEMO_MODEL else KV_CACHE_GIB


def share_cores(engines: int, cores: Sequence[int]) -> list[Place]:
    """Each engine its own cores, as many for each; with more engines than cores they take turns."""
    each = max(1, len(cores) // engines)
    return [Place(tuple(cores[(start := number * each % len(cores)) : start + each])) for number in range(engines)]


def share_gpus(engines: int, gpus: Sequence[hardware.Gpu]) -> list[Place]:
    """Engines over GPUs in turn; those that share one share its memory."""
    share = GPU_SHARE / -(-engines // len(gpus))
    return [Place(gpu=gpus[number % len(gpus)].index, gpu_share=share) for number in range(engines)]


def vllm_command(port: int, model: Model, place: Place, *, cpu: bool, max_len: int) -> list[str]:
    """The module, not ``vllm serve``, which looks for a distribution named vllm; the CPU build has another name."""
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model.source, "--served-model-name", model.served_name),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", str(max_len), "--enable-prompt-tokens-details"),
        *("--uvicorn-log-level", "warning"),  # else each probe is a line, and the log holds nothing else
    ]
    if cpu:
        command += ["--enforce-eager", "--block-size", "32"]
    else:
        command += ["--gpu-memory-utilization", f"{place.gpu_share:.2f}"]
    return command


def vllm_environment(model: Model, place: Place, *, cpu: bool) -> dict[str, str]:
    env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if model.local:
        env["HF_HUB_OFFLINE"] = "1"
    if cpu:
        env["VLLM_CPU_KVCACHE_SPACE"] = str(kv_cache_gib(model))
        env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, place.cores))
    elif place.gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = str(place.gpu)
    return env


def simulated_command(engine: LocalEngine, settings: Settings) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "chat_server",
        "simulate-engine",
        "--host",
        "127.0.0.1",
        "--port",
        str(engine.port),
    ]
    if settings.model != DEMO_MODEL:
        command += ["--model", settings.model]
    return command


def environment(**more: str) -> dict[str, str]:
    """Ours without our secrets, and ``more``."""
    return {**{name: value for name, value in os.environ.items() if name not in SECRETS}, **more}
