"""Worker processes and their parent, with a real store. What clients see is in ``tests/e2e/test_workers.py``."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import redis.asyncio

from chat_server import workers as workers_module
from chat_server.core.principal import Principal
from chat_server.engine.simulated import simulated_server
from chat_server.errors import StartError
from chat_server.process import start_error
from chat_server.settings import EngineAddress, Secret, Settings
from chat_server.store.embedded import EmbeddedValkey
from chat_server.workers import Workers
from tests.support.processes import children, command_line, wait_until_gone
from tests.support.server import QUICK, free_port

pytestmark = pytest.mark.server


class Parent:
    """``Workers`` in this process. ``said`` is what they had said, in order."""

    def __init__(self, settings: Settings, redis_url: str, lines: dict[str, str]) -> None:
        self.said: list[str] = []
        self.lines = lines
        self.stop = asyncio.Event()
        workers = Workers(
            settings,
            log_level=None,
            redis_url=redis_url,
            engines=settings.engines,
            startup=lambda: dict(lines),
            on_listening=self.said.append,
            on_ready=lambda: self.said.append("ready"),
        )
        self.running = asyncio.create_task(workers.run(self.stop))

    @property
    def pids(self) -> set[int]:
        return {pid for pid in children(os.getpid()) if "chat_server.workers" in command_line(pid)}

    async def until(self, found: Callable[[], bool], within_s: float = 15.0) -> None:
        async with asyncio.timeout(within_s):
            while not found():
                assert not self.running.done(), self.running.exception()
                await asyncio.sleep(0.02)

    async def ready(self) -> set[int]:
        """The processes, when all are ready."""
        await self.until(lambda: "ready" in self.said)
        return self.pids


@asynccontextmanager
async def parent_of(
    folder: Path, *, count: int = 2, acl: str = "", lines: dict[str, str] | None = None
) -> AsyncIterator[Parent]:
    """Workers with a simulated engine; the store is used as its user ``acl`` if given."""
    valkey = EmbeddedValkey(folder)
    async with simulated_server(QUICK) as engine:
        settings = Settings(
            port=0,
            workers=count,
            engines=(
                EngineAddress(engine.url, "engine-1"),
                EngineAddress(f"http://127.0.0.1:{free_port()}", "engine-2"),  # it never comes
            ),
            engine_api_key=Secret("hush-engine"),
            redis_url=Secret("redis://:hush-redis@store"),
            api_keys=((Secret("hush-user"), Principal("default", "ann")),),
            drain_grace_s=0.0,
        )
        parent: Parent | None = None
        try:
            url = await valkey.start()
            if acl:
                async with redis.asyncio.Redis.from_url(url) as client:
                    await client.execute_command("ACL", "SETUSER", "default", *acl.split())  # type: ignore[no-untyped-call]
            parent = Parent(settings, url, lines or {})
            yield parent
        finally:
            if parent is not None:
                parent.running.cancel()
                await asyncio.wait({parent.running})
                assert await asyncio.to_thread(wait_until_gone, parent.pids, within_s=1.0) == set()
            await valkey.stop()


async def test_they_start_say_where_once_and_stop_together(tmp_path: Path) -> None:
    """The address comes when all listen, and ``ready`` when all are; told to stop they end by themselves."""
    async with parent_of(tmp_path, count=3) as parent:
        pids = await parent.ready()
        assert len(pids) == 3
        assert len(parent.said) == 2
        assert parent.said[0].startswith("http://127.0.0.1:")
        parent.stop.set()
        async with asyncio.timeout(5):
            await parent.running
        assert await asyncio.to_thread(wait_until_gone, pids, within_s=1.0) == set()


async def test_secrets_are_not_in_the_list_of_processes(tmp_path: Path) -> None:
    """Whatever kind they are of; the command line says which worker it is."""
    async with parent_of(tmp_path) as parent:
        shown = sorted(command_line(pid) for pid in await parent.ready())
        environments = [Path(f"/proc/{pid}/environ").read_bytes() for pid in parent.pids]
    assert [f"worker-{number}" in line for number, line in enumerate(shown, 1)] == [True, True]
    assert "hush" not in "".join(shown)
    assert b"hush" not in b"".join(environments)


async def test_they_know_how_far_the_engines_are(tmp_path: Path) -> None:
    """What the parent says of an engine that is not there yet is what ``/readyz`` of each worker shows."""
    async with parent_of(tmp_path, lines={"engine-2": "loading the model"}) as parent:
        await parent.ready()
        await until_all_say(parent.said[0], "loading the model")
        parent.lines["engine-2"] = "loading its tokenizer"
        await until_all_say(parent.said[0], "loading its tokenizer")


async def until_all_say(url: str, detail: str) -> None:
    """Until ten answers in a row, each on a connection of its own, have this line."""
    in_a_row = 0
    async with asyncio.timeout(5), aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        while in_a_row < 10:
            async with http.get(f"{url}/readyz") as answer:
                engines = {engine["name"]: engine["detail"] for engine in (await answer.json())["engines"]}
            in_a_row = in_a_row + 1 if engines["engine-2"] == detail else 0


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
async def test_one_that_ends_is_started_again(tmp_path: Path, signum: int) -> None:
    """Also if somebody asked it to end, as one restarts them one by one; the others go on."""
    async with parent_of(tmp_path) as parent:
        before = await parent.ready()
        ended = min(before)
        os.kill(ended, signum)
        await parent.until(lambda: len(parent.pids - before) == 1 and ended not in parent.pids)
        assert len(parent.pids & before) == 1
        assert not parent.running.done()


async def test_one_that_ends_again_and_again_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a message that says which one and how."""
    monkeypatch.setattr(workers_module, "_MAX_ENDS", 1)
    async with parent_of(tmp_path, count=1) as parent:
        [first] = await parent.ready()
        os.kill(first, signal.SIGKILL)
        await parent.until(lambda: bool(parent.pids - {first}))
        [second] = parent.pids
        os.kill(second, signal.SIGKILL)
        await asyncio.wait({parent.running}, timeout=10)
        error = parent.running.exception()
        assert error is not None
    assert "worker-1 ended 2 times" in str(start_error(error))
    assert "status -9" in str(start_error(error))


async def test_one_that_can_not_start_says_why(tmp_path: Path) -> None:
    """Its reason is the parent's, once, and nobody waits for more tries."""
    async with parent_of(tmp_path, acl="-function") as parent:
        async with asyncio.timeout(15):
            await asyncio.wait({parent.running})
        error = start_error(parent.running.exception() or AssertionError("it did not fail"))
    assert isinstance(error, StartError)
    assert "The store does not take our functions" in str(error)


async def test_without_its_parent_a_worker_ends_at_once(tmp_path: Path) -> None:
    """Cancelled, the parent does not wait for answers."""
    async with parent_of(tmp_path) as parent:
        pids = await parent.ready()
        parent.running.cancel()
        async with asyncio.timeout(4):
            await asyncio.wait({parent.running})
        assert await asyncio.to_thread(wait_until_gone, pids, within_s=0.5) == set()
