"""Through the whole server on real vLLM: a stop that stops the engine, a deploy in mid-answer that costs no word."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from chat_server.engine.vllm import open_http
from chat_server.settings import EngineAddress
from tests.support.server import RunningServer, another, server_for
from tests.support.ws import WsClient
from tests.vllm.continuation import ASKED

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

DELTA = "response.output_text.delta"
#: Words of a prompt that takes an engine a while to read.
WORDS = "harbour market lighthouse " * 600
#: Seconds in which an engine's gauge must fall: it shows the last step that ended, and a step takes as long as a token.
GAUGE_S = 1.0
SETTINGS = {"temperature": 0.0, "max_output_tokens": 60}


@pytest.fixture
async def server(vllm_engines: tuple[EngineAddress, ...], tmp_path: Path) -> AsyncIterator[RunningServer]:
    async with server_for(tmp_path, vllm_engines, drain_grace_s=3.0) as server:
        yield server


class Gauges:
    """What the engines say of themselves in ``/metrics``, summed over all of them."""

    def __init__(self, http: aiohttp.ClientSession, urls: list[str]) -> None:
        self._http = http
        self._urls = urls

    async def running(self) -> float:
        return await self._sum("vllm:num_requests_running{")

    async def written(self) -> float:
        """Tokens that they wrote, since they started."""
        return await self._sum("vllm:generation_tokens_total{")

    async def until_idle(self) -> None:
        async with asyncio.timeout(GAUGE_S):
            while await self.running():
                await asyncio.sleep(0.01)

    async def _sum(self, name: str) -> float:
        total = 0.0
        for url in self._urls:
            async with self._http.get(f"{url}/metrics") as answer:
                lines = (await answer.text()).splitlines()
            total += sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))
        return total


@pytest.fixture
async def gauges(vllm_engines: tuple[EngineAddress, ...]) -> AsyncIterator[Gauges]:
    async with open_http() as http:
        yield Gauges(http, [engine.url for engine in vllm_engines])


async def ended(client: WsClient) -> dict[str, Any]:
    """Read to the end of the answer."""
    response: dict[str, Any] = (await client.until("response.done"))["response"]
    return response


async def begin(client: WsClient, asked: str) -> str:
    await client.say(asked)
    await client.send("response.create", response={**SETTINGS, "max_output_tokens": 2000})
    response_id: str = (await client.until("response.created"))["response"]["id"]
    return response_id


async def only_the_next_turn_is_made(server: RunningServer, gauges: Gauges, written: float) -> None:
    """Of the stopped answer nothing more was written since ``written``, but a token of the step that was under way."""
    async with server.connect(extensions=1) as client:
        turn = await client.turn("Say yes.", **SETTINGS)
    more = await gauges.written() - written - turn.response["usage"]["output_tokens"]
    assert 0 <= more <= 1


async def test_a_stop_in_mid_text_leaves_the_engine_idle(server: RunningServer, gauges: Gauges) -> None:
    """``vllm:num_requests_running`` falls to 0 as the end is told; the text is cut to what the person saw."""
    async with server.connect(extensions=1) as client:
        response_id = await begin(client, ASKED["prose"])
        for _ in range(10):
            await client.until(DELTA)
        assert await gauges.running() == 1, "the engine is at work"
        await client.send("response.cancel", response_id=response_id, seen=5)
        response = await ended(client)
        await gauges.until_idle()
        assert response["status"] == "cancelled"
        [item] = response["output"]
        assert len(client.texts[item["id"]]) == 5
        await only_the_next_turn_is_made(server, gauges, await gauges.written())


async def test_a_stop_in_prefill_leaves_the_engine_idle(server: RunningServer, gauges: Gauges) -> None:
    """The prompt is being read, no word has come: the engine gives it up, and no item stays."""
    written = await gauges.written()
    async with server.connect(extensions=1) as client:
        # A number of its own, so that no cache has read it before.
        response_id = await begin(client, f"{random.random()}: {WORDS}. {ASKED['prose']}")
        await asyncio.sleep(0.2)  # the engine has the prompt, and is not through with it
        await client.send("response.cancel", response_id=response_id)
        response = await ended(client)
        assert DELTA not in client.types, "the prompt was too short: it was read before the stop"
        assert (response["status"], response["output"]) == ("cancelled", [])
        await only_the_next_turn_is_made(server, gauges, written)
        await gauges.until_idle()


async def test_a_drain_in_mid_answer_costs_no_word(server: RunningServer) -> None:
    """The replica that makes it is told to stop; another one goes on, with the words of the uninterrupted answer."""
    async with server.connect(extensions=1) as client:
        whole = await client.turn(ASKED["prose"], **SETTINGS)
    async with (
        another(server) as other,
        server.connect(extensions=1) as client,
        other.connect(session_id=client.session["id"], extensions=1) as watcher,
    ):
        await client.say(ASKED["prose"])
        await client.send("response.create", response=SETTINGS)
        for _ in range(15):
            await watcher.until(DELTA)
        draining = asyncio.create_task(server.drain())
        try:
            assert (await watcher.until("response.migrated"))["reason"] == "replica_drained"
            response = await ended(watcher)
        finally:
            await draining
        assert watcher.texts[response["output"][0]["id"]] == whole.text
        assert response["status_details"] == whole.response["status_details"]
        assert response["usage"]["output_tokens"] == whole.response["usage"]["output_tokens"]
