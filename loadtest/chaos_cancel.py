"""From a cancel to the idle engine, on an engine with nothing else to do: for a real vLLM beside the simulated ones."""

from __future__ import annotations

import asyncio
import time

import aiohttp

from loadtest.chaos_line import Line
from loadtest.chaos_model import DELTA, Event
from loadtest.chaos_world import Replica
from loadtest.processes import NotTested

ASKED = "Tell me a very long story about a fox and a river."
#: deltas that are read before the cancel.
BEFORE = 5
#: seconds for one answer: to begin, for its engine to be idle, and for everybody to hear of the end.
PATIENCE_S = 60.0
#: seconds between two looks at the engine's gauge.
LOOK_S = 0.005


async def measure(
    replicas: list[Replica], engine_url: str, http: aiohttp.ClientSession, count: int
) -> tuple[list[float], list[float]]:
    """Seconds from cancel to idle, ``count`` times on the replica that makes the answer and on another one.

    Raises NotTested when an answer does not begin, ends by itself before its cancel, or does not end.
    """
    same: list[float] = []
    across: list[float] = []
    try:
        for _ in range(count):
            same.append(await _cancel(replicas, engine_url, http, across=False))
            across.append(await _cancel(replicas, engine_url, http, across=True))
    except TimeoutError:
        raise NotTested(f"An answer of {engine_url} did not begin or end within {PATIENCE_S:.0f} s.") from None
    return same, across


async def _cancel(replicas: list[Replica], engine_url: str, http: aiohttp.ClientSession, *, across: bool) -> float:
    """One answer of a session of its own: behind answers of a word or two a model writes no long one."""
    one = await Line.open(replicas[0].ws_url, {"extensions": "1"})
    lines = [one]
    try:
        async with asyncio.timeout(PATIENCE_S):
            session_id = (await one.recv(PATIENCE_S))["session"]["id"]
            lines.append(await Line.open(replicas[1].ws_url, {"extensions": "1", "session_id": session_id}))
            content = [{"type": "input_text", "text": ASKED}]
            await one.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
            await one.send("response.create")
            for _ in range(BEFORE):
                event = await _until(one, DELTA)
            started = time.monotonic()
            await lines[across].send("response.cancel", response_id=event["response_id"], seen=1)
            while await _running(engine_url, http):  # noqa: ASYNC110 (it is another process)
                await asyncio.sleep(LOOK_S)
            seconds = time.monotonic() - started
            for line in lines:
                await _until(line, "response.done")
            return seconds
    finally:
        for line in lines:
            await line.close()


async def _until(line: Line, kind: str) -> Event:
    while (event := await line.recv(PATIENCE_S))["type"] != kind:
        if event["type"] == "response.done":
            raise NotTested(f"An answer ended by itself before its cancel ({event['response']['status']}).")
    return event


async def _running(engine_url: str, http: aiohttp.ClientSession) -> float:
    """The engine's own gauge of requests that it runs."""
    async with http.get(f"{engine_url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:num_requests_running"))
