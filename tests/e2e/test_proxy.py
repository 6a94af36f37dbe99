"""Behind a real nginx that cuts connections on which nothing came for a while, as it does by itself after 60 s."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support import ws
from tests.support.nginx import nginx
from tests.support.server import RunningServer, another, running_server
from tests.support.ws import WsClient

pytestmark = [pytest.mark.server, pytest.mark.asyncio(loop_scope="module")]

#: Seconds of silence after which this nginx cuts a connection.
CUT_S = 2.0
#: The real proportion: a ping each 15 s, a cut after 60.
PING_S = CUT_S / 4
#: Seconds for which a connection that must live is left alone.
IDLE_S = 2.5 * CUT_S
NEVER_S = 3600.0


@asynccontextmanager
async def behind_nginx(server: RunningServer, folder: Path, *, ping_s: float, heartbeat_s: float) -> AsyncIterator[str]:
    """One more server beside ``server``, with these signs of life, behind an nginx of its own."""
    model = RunningServer(replace(server.settings, ping_s=ping_s, heartbeat_s=heartbeat_s), server.redis_url)
    async with another(model) as replica, nginx(folder, replica.url, cut_s=CUT_S) as url:
        yield url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    async with running_server(tmp_path_factory.mktemp("proxy"), engines=1) as running:
        yield running


async def cut(client: WsClient) -> float:
    """Wait until the connection is over; after how many seconds, and it was without a close frame."""
    began = time.monotonic()
    assert await client.closed() == 1006
    return time.monotonic() - began


async def idle(client: WsClient) -> None:
    """Do nothing for longer than nginx allows, then have a question answered on the same connection."""
    await asyncio.sleep(IDLE_S)
    assert (await client.turn("Are you still there?")).response["status"] == "completed"


async def test_an_idle_connection_lives_through_a_proxy(server: RunningServer, tmp_path: Path) -> None:
    """With and without extensions, by the settings that the server has of itself, in proportion."""
    async with (
        behind_nginx(server, tmp_path / "nginx", ping_s=PING_S, heartbeat_s=PING_S) as url,
        ws.connect(url) as strict,
        ws.connect(url, extensions=1) as ours,
    ):
        await asyncio.gather(idle(strict), idle(ours))
        assert "heartbeat" not in strict.types
        assert ours.types.count("heartbeat") >= 2


async def test_heartbeats_alone_keep_a_connection_alive(server: RunningServer, tmp_path: Path) -> None:
    """For a proxy that does not let pings through; the connection beside it shows that this one cuts."""
    async with (
        behind_nginx(server, tmp_path / "nginx", ping_s=NEVER_S, heartbeat_s=PING_S) as url,
        ws.connect(url, extensions=1) as ours,
        ws.connect(url) as strict,
    ):
        silence, _ = await asyncio.gather(cut(strict), idle(ours))
        assert CUT_S - 0.5 < silence < CUT_S + 1.5


async def test_the_pings_are_what_keeps_a_connection_alive(server: RunningServer, tmp_path: Path) -> None:
    """Without any sign of life the proxy cuts, so the tests above can fail; the client comes back and all is there."""
    async with behind_nginx(server, tmp_path / "nginx", ping_s=NEVER_S, heartbeat_s=NEVER_S) as url:
        async with ws.connect(url, extensions=1) as client:
            turn = await client.turn("Hello")
            assert await cut(client) < CUT_S + 1.5
        async with ws.connect(url, session_id=client.session["id"], history="all") as again:
            assert (await again.until("conversation.item.done"))["item"] == turn.user_item
            assert (await again.until("conversation.item.done"))["item"] == turn.response["output"][0]
