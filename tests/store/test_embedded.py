"""The embedded Valkey: a real one, started, killed, started again."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import stat
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import redis.asyncio

from chat_server.errors import StartError
from chat_server.store import embedded
from chat_server.store.embedded import EmbeddedValkey, find_binary, ping
from tests.support.processes import descendants, wait_until_gone

pytestmark = pytest.mark.valkey

#: A server in miniature, to be killed.
SERVER = """
import asyncio, sys
from pathlib import Path
from chat_server.store.embedded import EmbeddedValkey

async def main():
    print(await EmbeddedValkey(Path(sys.argv[1])).start(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[tuple[EmbeddedValkey, redis.asyncio.Redis]]:
    """A Valkey with its data in ``folder``, and a client of it."""
    store = EmbeddedValkey(folder)
    client = redis.asyncio.Redis.from_url(await store.start(), decode_responses=True)
    try:
        yield store, client
    finally:
        await client.aclose()
        await store.stop()


def valkey_pid(store: EmbeddedValkey) -> int:
    """The server itself, below the process that watches over it."""
    assert store.pid is not None
    (pid,) = descendants(store.pid)
    return pid


async def test_it_is_a_real_server_that_keeps_what_it_is_told(tmp_path: Path) -> None:
    """Append-only file, synced each second; never an eviction; no port."""
    async with started(tmp_path) as (_, client):
        config = await client.config_get("append*", "maxmemory-policy", "port")
        assert await client.info("server") is not None
    assert (config["appendonly"], config["appendfsync"]) == ("yes", "everysec")
    assert config["maxmemory-policy"] == "noeviction"
    assert config["port"] == "0"


async def test_it_is_up_soon(tmp_path: Path) -> None:
    """An empty one takes a tenth of a second; a slow machine gets three."""
    begin = time.monotonic()
    async with started(tmp_path):
        assert time.monotonic() - begin < 3.0


async def test_data_survives_a_restart(tmp_path: Path) -> None:
    """What was written is there after a stop and a start on the same folder."""
    async with started(tmp_path) as (_, client):
        await client.set("word", "kept")
    async with started(tmp_path) as (_, client):
        assert await client.get("word") == "kept"


async def test_nobody_else_on_the_machine_can_read_it(tmp_path: Path) -> None:
    """Data, log and socket are for the own user only."""
    async with started(tmp_path) as (store, _):
        socket = Path(unquote(urlsplit(store.url).path))
        for path in (tmp_path / "valkey", store.log, socket):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


async def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    """The second one is refused at once, with the id of the first and a way out; the first does not notice."""
    async with started(tmp_path) as (_, client):
        begin = time.monotonic()
        with pytest.raises(StartError, match=rf"process {os.getpid()}\b.*--data-dir"):
            await EmbeddedValkey(tmp_path).start()
        assert time.monotonic() - begin < 1.0
        assert await client.ping()


async def test_after_kill_9_the_next_start_finds_everything(tmp_path: Path) -> None:
    """The Valkey of a killed server goes by itself, and the next server starts on its data."""
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert server.stdout is not None
    client = redis.asyncio.Redis.from_url((await server.stdout.readline()).decode().strip())
    await client.set("word", "kept")
    await client.aclose()
    tree = descendants(server.pid)
    assert len(tree) == 2
    server.kill()
    await server.wait()
    async with started(tmp_path) as (_, again):
        assert await again.get("word") == "kept"
    assert wait_until_gone(tree) == set()


async def test_a_leftover_that_still_saves_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an old Valkey holds the data a new server waits; it gives up with a message that says what to do."""
    monkeypatch.setattr(embedded, "LEFTOVER_S", 0.2)
    async with started(tmp_path) as (store, _):
        # as if our process was gone and only its Valkey was left
        assert store._server_lock is not None
        os.close(store._server_lock)
        store._server_lock = None
        with pytest.raises(StartError, match="earlier server left behind"):
            await EmbeddedValkey(tmp_path).start()


async def test_a_crash_is_mended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A Valkey that is killed while we run comes back with its data, on the same URL, and the log says so."""
    caplog.set_level(logging.WARNING)
    async with started(tmp_path) as (store, client):
        watching = asyncio.create_task(store.watch())
        await client.set("word", "kept")
        before = valkey_pid(store)
        os.kill(before, signal.SIGKILL)
        async with asyncio.timeout(10):
            while "runs again" not in caplog.text:
                await asyncio.sleep(0.01)
        assert valkey_pid(store) != before
        assert await client.get("word") == "kept"
        watching.cancel()
    assert "ended with status 137" in caplog.text


async def test_crash_after_crash_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Valkey that ends again and again is not started for ever; the message names its log."""
    monkeypatch.setattr(embedded, "MAX_CRASHES", 1)
    async with started(tmp_path) as (store, _):
        watching = asyncio.create_task(store.watch())
        async with asyncio.timeout(10):
            while not watching.done():
                if pids := descendants(store.pid or 0):
                    os.kill(pids.pop(), signal.SIGKILL)
                await asyncio.sleep(0.05)
        with pytest.raises(StartError, match=str(store.log)):
            await watching


async def test_data_that_can_not_be_read_is_said_so(tmp_path: Path) -> None:
    """With broken data the start fails, with Valkey's own words and its log."""
    async with started(tmp_path) as (_, client):
        await client.set("word", "kept")
    (manifest,) = (tmp_path / "valkey" / "appendonlydir").glob("*.manifest")
    manifest.write_text("nonsense\n")
    with pytest.raises(StartError, match=r"did not start(.|\n)*manifest(.|\n)*valkey\.log"):
        await EmbeddedValkey(tmp_path).start()


async def test_a_folder_that_can_not_be_made_is_said_so(tmp_path: Path) -> None:
    """A data folder that is a file gives a message with the flag to use, not a traceback."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match="--data-dir"):
        await EmbeddedValkey(tmp_path / "file").start()


async def test_a_deep_folder_has_its_socket_elsewhere(tmp_path: Path) -> None:
    """Socket paths are short by nature; data in a deep folder, with any characters, works all the same."""
    deep = tmp_path / ("ü %" * 20) / ("y" * 40)
    async with started(deep) as (store, client):
        await client.set("word", "kept")
        socket = Path(unquote(urlsplit(store.url).path))
        assert socket.is_socket()
        assert not socket.is_relative_to(deep)
    assert not socket.parent.exists()
    async with started(deep) as (_, client):
        assert await client.get("word") == "kept"


async def test_nobody_answers_on_a_socket_that_is_not_there(tmp_path: Path) -> None:
    """A ping without a server is an empty answer, not an error."""
    assert await ping(tmp_path / "none") == b""


def test_without_a_binary_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the package is told to give a store of its own."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(StartError, match="--redis URL"):
        find_binary()
