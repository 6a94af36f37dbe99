"""The HTTP side of sessions: their end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
import pytest
import pytest_asyncio

from tests.support.server import QUICK, RunningServer, two_replicas
from tests.support.ws import refused

pytestmark = [pytest.mark.server, pytest.mark.asyncio(loop_scope="module")]

DELTA = "response.output_text.delta"
LONG = "Tell me more, in 300 words."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replicas(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[RunningServer]]:
    """Two replicas on one store and the same engines."""
    slow = replace(QUICK, tokens_per_s=600.0)
    async with two_replicas(tmp_path_factory.mktemp("talk"), simulated=slow) as replicas:
        yield replicas


async def delete(server: RunningServer, session_id: str) -> int:
    async with aiohttp.ClientSession() as http, http.delete(f"{server.url}/v1/sessions/{session_id}") as answer:
        return answer.status


@pytest.mark.parametrize("replica", [0, 1])
async def test_a_deleted_session_is_gone_for_everybody(replicas: list[RunningServer], replica: int) -> None:
    """Its answer is cancelled first, connections close as done, and a new one is refused like to an unknown session."""
    async with (
        replicas[0].connect(extensions=1) as one,
        replicas[1].connect(session_id=one.session["id"], extensions=1) as two,
    ):
        session_id = one.session["id"]
        await one.say(LONG)
        await one.send("response.create")
        await two.until(DELTA)
        await one.send("response.create", if_active="queue")
        await two.until("response.queued")
        assert await delete(replicas[replica], session_id) == 200
        for tab in (one, two):
            assert await tab.closed() == 1000
            assert [tab.types.count(kind) for kind in ("response.created", "response.done")] == [2, 2]
    assert not any(engine.engine.running for engine in replicas[0].engines)
    for server in replicas:
        assert await delete(server, session_id) == 404
        assert (await refused(server.ws_url, session_id=session_id)).status == 404


async def test_only_its_owner_deletes_a_session(replicas: list[RunningServer]) -> None:
    """What is no id, or nobody's session, is not found; without a key there is one user only."""
    assert await delete(replicas[0], "sess_" + "0" * 32) == 404
    assert await delete(replicas[0], "..%2f") == 404
