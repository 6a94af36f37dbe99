"""Pointed at engines that run, the server is ready at once: one command, no set-up."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from chat_server.engine.simulated import simulated_server
from tests.support.server import QUICK, server_process

pytestmark = pytest.mark.server


async def test_serve_with_two_engines_is_ready_soon(tmp_path: Path) -> None:
    """``chat-server serve --engine A --engine B --port P`` answers 200 on ``/readyz``: engines probed, store up.

    It fails after ten seconds, on a machine that does much else besides; the time is printed (``pytest -s``).
    """
    async with simulated_server(QUICK) as one, simulated_server(QUICK) as two:
        started = time.monotonic()
        async with server_process(tmp_path, "--engine", one.url, "--engine", two.url) as server:
            report = await server.ready(timeout_s=10)
            print(f"ready after {time.monotonic() - started:.2f} s")
    assert report["store"] == "up"
    assert [engine["state"] for engine in report["engines"]] == ["healthy", "healthy"]
    assert report["simulated"] is False
