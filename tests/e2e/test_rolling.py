"""Two replicas behind a real nginx are restarted one after the other, while answers run: no word is lost."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from chat_server.engine.simulated import answer_for
from tests.support import ws
from tests.support.held import Held
from tests.support.nginx import nginx
from tests.support.server import QUICK, RunningServer, another, running_server

pytestmark = [pytest.mark.server, pytest.mark.timeout(90)]

CLIENTS = 20
GRACE_S = 2.0
LONG = "Tell me more, in 600 words."
WHOLE = answer_for([{"role": "user", "content": LONG}])
#: an answer takes longer than both restarts
SLOW = replace(QUICK, tokens_per_s=60.0)


async def read_on(url: str, began: asyncio.Barrier, cuts: list[int]) -> None:
    """One client that comes back as often as it must, and holds the whole answer at last."""
    held: Held | None = None
    while held is None or held.done is None:
        with suppress(ConnectionClosed, InvalidStatus):
            if held is None:
                async with ws.connect(url, extensions=1) as client:
                    held = await Held.begin(client, LONG)
                    await held.read(client, deltas=5)
                    await began.wait()
                    await held.read(client)
            else:
                async with held.back(url) as client:
                    active = client.events[0]["active_response"]
                    assert active is None or active["offset"] == len(held.text), "it went on from where it was"
                    await held.read(client)
            continue
        cuts.append(len(held.text) if held else 0)
        await asyncio.sleep(0.05)
    assert held.done["status"] == "completed"
    assert held.text == WHOLE


async def restart(replica: RunningServer) -> float:
    """As a rolling restart does with each; the seconds that it took to stop."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    await replica.drain()
    took = loop.time() - started
    await replica.start()
    return took


async def test_a_rolling_restart_behind_a_proxy_loses_no_word(tmp_path: Path) -> None:
    """Each answer is handed over twice, to whichever replica is there; nginx leads its readers to it."""
    async with (
        running_server(tmp_path, simulated=SLOW, drain_grace_s=GRACE_S) as one,
        another(one) as two,
        nginx(tmp_path / "nginx", one.url, two.url) as url,
    ):
        began, cuts = asyncio.Barrier(CLIENTS + 1), list[int]()
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            for _ in range(CLIENTS):
                tasks.create_task(read_on(url, began, cuts))
            await began.wait()
            for replica in (one, two):
                assert await restart(replica) < GRACE_S
        assert len(cuts) >= CLIENTS, "all of them were at the second one when it stopped"
        assert all(0 < cut < len(WHOLE) for cut in cuts)
