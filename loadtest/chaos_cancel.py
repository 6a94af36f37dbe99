"""From a cancel to the idle engine, on an engine with nothing else to do: for a real vLLM beside the simulated ones."""

from __future__ import annotations

import asyncio
import time

import aiohttp

from loadtest.chaos_line import Line
from loadtest.chaos_model import DELTA, Event
from loadtest.chaos_world import Replica

#: deltas that are read before the cancel.
BEFORE = 5
#: seconds for one answer to begin, and for its engine to be idle.
PATIENCE_S = 60.0
#: seconds between two looks at the engine's gauge.
LOOK_S = 0.005


async def measure(
    replicas: list[Replica], engine_url: str, http: aiohttp.ClientSession, count: int
) -> tuple[list[float], list[float]]:
    """Seconds from cancel to idle, ``count`` times on the replica that makes the answer and on another one.

    Raises TimeoutError when an answer does not begin or does not end.
    """
    one = await Line.open(replicas[0].ws_url, {"extensions": "1"})
    session_id = (await one.recv(PATIENCE_S))["session"]["id"]
    two = await Line.open(replicas[1].ws_url, {"extensions": "1", "session_id": session_id})
    same: list[float] = []
    across: list[float] = []
    try:
        for n in range(2 * count):
            text = f"{n}: count from one to five hundred, in words"
            content = [{"type": "input_text", "text": text}]
            await one.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
            await one.send("response.create")
            for _ in range(BEFORE):
                event = await _until(one, DELTA)
            started = time.monotonic()
            await (one if n % 2 == 0 else two).send("response.cancel", response_id=event["response_id"], seen=1)
            async with asyncio.timeout(PATIENCE_S):
                while await _running(engine_url, http):  # noqa: ASYNC110 (it is another process)
                    await asyncio.sleep(LOOK_S)
            (same if n % 2 == 0 else across).append(time.monotonic() - started)
            for line in (one, two):
                await _until(line, "response.done")
    finally:
        await one.close()
        await two.close()
    return same, across


async def _until(line: Line, kind: str) -> Event:
    while (event := await line.recv(PATIENCE_S))["type"] != kind:
        pass
    return event


async def _running(engine_url: str, http: aiohttp.ClientSession) -> float:
    """The engine's own gauge of requests that it runs."""
    async with http.get(f"{engine_url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:num_requests_running"))
