"""Somebody else on the same server, to whom an answer is told while a test does its worst, and who must not notice."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from chat_server.engine.simulated import SimulatedOptions
from tests.support.server import RunningServer, running_server
from tests.support.ws import WsClient

DELTA = "response.output_text.delta"
#: Seconds of work between two deltas that it would notice; two hundred tokens come each second.
STALL_S = 1.0


def talkative_server(folder: Path) -> AbstractAsyncContextManager[RunningServer]:
    """A server whose answers are long and take their time, unless a test asks for short ones."""
    pace = SimulatedOptions(tokens_per_s=200.0, first_token_s=0.0, words=4000)
    return running_server(folder, simulated=pace)


class Neighbour:
    """A connection to which an answer is told.

    ``told_at``: when its deltas came, in seconds that the thread of the event loop had worked until then: server and
    tests share it, and what another process takes of the machine says nothing about either.
    """

    def __init__(self, client: WsClient) -> None:
        self.client = client
        self.told_at = [time.thread_time()]
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> dict[str, Any]:
        while (told := await self.client.next())["type"] != "response.done":
            if told["type"] == DELTA:
                self.told_at.append(time.thread_time())
        return told["response"]  # type: ignore[no-any-return]

    @property
    def longest_wait_s(self) -> float:
        return max(after - before for before, after in zip(self.told_at, self.told_at[1:], strict=False))


@asynccontextmanager
async def undisturbed(server: RunningServer) -> AsyncIterator[Neighbour]:
    """It must get its text at its pace, whole and in order (``WsClient`` judges that), and stay connected."""
    async with server.connect(extensions=1) as client:
        await client.say("Tell me more.")
        await client.send("response.create")
        await client.until(DELTA)
        neighbour = Neighbour(client)
        try:
            yield neighbour
            before = len(neighbour.told_at)
            while len(neighbour.told_at) == before:
                assert not neighbour.reading.done(), neighbour.reading
                await asyncio.sleep(0.002)
            await client.send("response.cancel")
            assert (await neighbour.reading)["status"] == "cancelled"
            assert neighbour.longest_wait_s < STALL_S
        finally:
            neighbour.reading.cancel()


@contextmanager
def no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What peers send is no reason for a traceback, nor for a line of asyncio's about what nobody caught."""
    caplog.set_level(logging.INFO)
    yield
    for record in caplog.get_records("call"):
        assert not record.exc_info, record.getMessage()
        assert record.name != "asyncio", record.getMessage()
