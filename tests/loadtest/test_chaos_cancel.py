"""The measure of cancels, on a simulated engine: it speaks vLLM's gauge."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from chat_server.engine.simulated import SimulatedOptions
from loadtest.chaos_cancel import measure
from loadtest.chaos_world import Replica
from loadtest.processes import Process
from tests.support.server import another, running_server

pytestmark = pytest.mark.server


async def test_each_cancel_is_measured(tmp_path: Path) -> None:
    """Half on the replica that makes the answer, half on the other; each well under a second."""
    slow = SimulatedOptions(tokens_per_s=100.0, words=300)
    async with running_server(tmp_path, engines=1, simulated=slow) as one, another(one) as two:
        replicas = [Replica(Process("test", [], tmp_path), server.url) for server in (one, two)]
        async with aiohttp.ClientSession() as http:
            same, across = await measure(replicas, one.engines[0].url, http, 2)
        assert one.engines[0].engine.counters.aborted == 4
    assert [len(same), len(across)] == [2, 2]
    assert all(0 < seconds < 1 for seconds in (*same, *across))
