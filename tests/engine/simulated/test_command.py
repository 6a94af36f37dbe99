"""The simulated engine as a process of its own."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from click.testing import CliRunner

from chat_server.engine.simulated.command import simulate_engine

pytestmark = pytest.mark.server

REQUEST = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": True}


@asynccontextmanager
async def process(*flags: str) -> AsyncIterator[tuple[Process, str]]:
    """The process, and the URL that it names."""
    args = ("-m", "chat_server.engine.simulated", "--port", "0", "--model", "m", *flags)
    engine = await asyncio.create_subprocess_exec(sys.executable, *args, stdout=PIPE, stderr=PIPE)
    assert engine.stdout is not None
    try:
        line = (await engine.stdout.readline()).decode()
        assert line.startswith("Simulated engine (m) on http://127.0.0.1:")
        yield engine, line.split()[-1]
    finally:
        if engine.returncode is None:
            engine.kill()
        await engine.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_at_once_with_a_stream_open(number: signal.Signals) -> None:
    """The stream would last for minutes; the end takes none of that, and makes no noise."""
    async with (
        process("--tokens-per-s", "1") as (engine, url),
        aiohttp.ClientSession() as http,
        http.post(url + "/v1/chat/completions", json=REQUEST) as response,
    ):
        await response.content.readline()
        engine.send_signal(number)
        out, err = await asyncio.wait_for(engine.communicate(), 10)
        assert (engine.returncode, out, err) == (0, b"", b"")


async def test_the_fault_die_ends_the_process() -> None:
    """With a status that is none of success, in the middle of a stream."""
    async with (
        process("--fault", '{"kind": "die", "after_tokens": 3}') as (engine, url),
        aiohttp.ClientSession() as http,
    ):
        with pytest.raises(aiohttp.ClientError):
            async with http.post(url + "/v1/chat/completions", json=REQUEST) as response:
                await response.read()
        _, err = await asyncio.wait_for(engine.communicate(), 10)
        assert (engine.returncode, err) == (1, b"the simulated engine died, as it was told to.\n")


async def test_a_port_in_use_is_said() -> None:
    """One line for the person, no traceback."""
    async with process() as (_, url):
        port = url.rpartition(":")[2]
        args = ("-m", "chat_server.engine.simulated", "--port", port)
        second = await asyncio.create_subprocess_exec(sys.executable, *args, stderr=PIPE)
        _, err = await asyncio.wait_for(second.communicate(), 10)
    assert second.returncode == 1
    assert err.decode() == f"Error: Cannot listen on 127.0.0.1:{port}: Address already in use.\n"


@pytest.mark.parametrize("value", ["cut", '{"kind": "explode"}'])
def test_a_wrong_fault_is_said(value: str) -> None:
    """With an example of a right one."""
    result = CliRunner().invoke(simulate_engine, ["--fault", value])
    assert result.exit_code == 2
    assert '--fault \'{"kind": "cut", "after_tokens": 5}\'' in " ".join(result.output.split())


def test_help_shows_defaults() -> None:
    """What a flag is and what it is without it."""
    result = CliRunner().invoke(simulate_engine, ["--help"])
    assert result.exit_code == 0
    assert "default: 40.0" in result.output
