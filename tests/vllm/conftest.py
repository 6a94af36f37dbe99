"""Real vLLM engines, started once for all tests of this folder."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from chat_server.engine.launch import LocalEngines
from chat_server.settings import EngineAddress, Settings

#: Seconds in which two engines must be ready: half a minute on a quiet machine, and the model may have to be fetched.
START_S = 900.0


@pytest.fixture(scope="session")
def vllm_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineAddress, ...]]:
    """Two engines with the demo model, as ``chat-server serve`` starts them. Each test module sets a longer time limit.

    They run in a thread with an event loop of its own, for each test has another.
    """
    engines = LocalEngines(Settings(engine_count=2, data_dir=tmp_path_factory.mktemp("vllm")))
    stop = threading.Event()
    ready = threading.Event()

    async def run() -> None:
        task = asyncio.create_task(engines.run())
        try:
            while not stop.is_set() and not task.done():
                if engines.all_ready:
                    ready.set()
                await asyncio.sleep(0.1)
            if task.done():
                await task  # raises why they could not be started
        finally:
            ready.set()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(asyncio.run, run())
        try:
            assert ready.wait(START_S), f"the engines were not ready within {START_S} s: {engines.status()}"
            if running.done():
                running.result()
            yield engines.addresses
        finally:
            stop.set()
    running.result()
