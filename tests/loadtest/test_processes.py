"""The processes of a load test: they end when they are told to, and say why they did not come up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from loadtest.processes import NotTested, Process, free_port
from tests.support.processes import wait_until_gone

pytestmark = pytest.mark.valkey


async def test_a_kill_leaves_nothing(tmp_path: Path) -> None:
    """The process is gone when ``kill`` returns, and can be started again."""
    process = Process("sleeper", ["sh", "-c", "echo $$; exec sleep 60"], tmp_path)
    pids = set()
    for n in (1, 2):
        await process.start()
        log = tmp_path / f"sleeper.{n}.log"
        while not log.exists() or not log.read_text():
            await asyncio.sleep(0.01)
        pids.add(int(log.read_text()))
        await process.kill()
        assert not process.runs
    assert len(pids) == 2
    assert wait_until_gone(pids) == set()


async def test_a_stop_takes_its_time(tmp_path: Path) -> None:
    """SIGTERM, and how long the process took to end by itself."""
    process = Process(
        "stopper", ["sh", "-c", "trap 'sleep 0.3; exit' TERM; echo on; while :; do sleep 0.02; done"], tmp_path
    )
    await process.start()
    log = tmp_path / "stopper.1.log"
    while not log.exists() or not log.read_text():
        await asyncio.sleep(0.01)
    assert 0.3 <= await process.tell_to_stop() < 2.0
    assert not process.runs


async def test_one_that_does_not_come_up_says_why(tmp_path: Path) -> None:
    """At once when it has ended: nothing was tested then."""
    process = Process("server", ["sh", "-c", "echo no engine; exit 1"], tmp_path)
    await process.start()
    async with aiohttp.ClientSession() as http:
        with pytest.raises(NotTested, match="server did not become ready:\nno engine"):
            await process.until_ready(http, f"http://127.0.0.1:{free_port()}")


async def test_what_it_costs_is_read_from_the_kernel(tmp_path: Path) -> None:
    """Of the process itself, not of the tether that holds it."""
    process = Process("worker", ["sh", "-c", "echo on; while :; do :; done"], tmp_path)
    await process.start()
    try:
        log = tmp_path / "worker.1.log"
        async with asyncio.timeout(5):
            while not log.exists() or not log.read_text():
                await asyncio.sleep(0.01)
            while process.cpu_s() < 0.05:
                await asyncio.sleep(0.02)
        assert 0 < process.memory() < 64 << 20
    finally:
        await process.stop()
    assert not process.runs
