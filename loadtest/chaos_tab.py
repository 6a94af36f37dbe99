"""A second window on a session, on another replica, which may read slowly or stop reading for seconds."""

from __future__ import annotations

import asyncio
import time

from loadtest.chaos_client import Client
from loadtest.chaos_model import DELTA, Answer
from loadtest.chaos_plan import Pace
from loadtest.chaos_texts import Violation
from loadtest.chaos_world import Replica

#: seconds for this window to be told an end that another one was told, slow and frozen as it may be.
TOLD_S = 40.0
#: seconds for which a frozen window stops reading: first shorter than the server bears, then longer.
FREEZES = ((1.0, 4.0), (15.0, 15.0))
#: how likely it is at each delta that the next one comes: early in an answer, so that the socket gets full.
FREEZE = 0.1


class Tab:
    """A second window on the session, at its own pace; it reads on its own until ``close``."""

    def __init__(self, client: Client, pace: Pace | None) -> None:
        self.client = client
        self._pace = pace
        self._task: asyncio.Task[None] | None = None

    async def open(self, apart: Replica | None) -> None:
        """Connect to another replica than ``apart`` and begin to read."""
        await self.client.connect(apart=apart)
        await self.client.next()
        self._task = asyncio.create_task(self._read(), name=self.client.name)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self.client.leave()

    async def until_ended(self, answer: Answer) -> Answer:
        """This window's copy of an answer, when its end was told here too. Raises Violation if that does not come."""
        deadline = time.monotonic() + TOLD_S
        while time.monotonic() < deadline:
            if self._task is not None and self._task.done():
                self._task.result()  # a violation
            copy = self.client.reader.answers.get(answer.id)
            if copy is not None and copy.status:
                return copy
            await asyncio.sleep(0.02)
        raise Violation("stuck", f"another window was not told the end of {answer.id} within {TOLD_S:.0f} s")

    async def _read(self) -> None:
        client, choose = self.client, self.client.choose
        freezes = list(FREEZES) if self._pace == "frozen" else []
        while True:
            event = await client.next()
            if event is None:
                answers = list(client.reader.answers.values())
                unfinished = answers[-1] if answers and not answers[-1].status else None
                await client.connect(resume=unfinished, history=unfinished is None)
            elif self._pace == "slow" and event["type"] == DELTA:
                await asyncio.sleep(choose.uniform(0, 0.02))
            elif freezes and event["type"] == DELTA and choose.random() < FREEZE:
                client.note("= frozen")
                await asyncio.sleep(choose.uniform(*freezes.pop(0)))
