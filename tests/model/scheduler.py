"""Time that passes only when nothing else is left to do, and event loops that live in it, one for each replica.

A replica's process is its loop: killed, it is never stepped again; stopped, its callbacks and timers wait while the
clock goes on. So a kill runs no ``finally``, and who wakes up finds all its deadlines passed, as in real life.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, cast


class Clock:
    """Seconds since the start, and what happens outside of all loops: by its time, and in the order of its planning."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._planned: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return 1_800_000_000_000_000_000 + round(self.now * 1e9)

    def after(self, delay: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay, action)

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._planned, (when, next(self._order), action))

    def next(self) -> float:
        return self._planned[0][0] if self._planned else float("inf")

    def run_next(self) -> None:
        when, _, action = heapq.heappop(self._planned)
        self.now = max(self.now, when)
        action()


class Loop:
    """As much of an event loop as tasks, futures, locks and timers need. There is no I/O."""

    def __init__(self, clock: Clock, on_error: Callable[[dict[str, Any]], None]) -> None:
        self.stopped = False
        self._clock = clock
        self._on_error = on_error
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = itertools.count()

    @property
    def itself(self) -> asyncio.AbstractEventLoop:
        """As asyncio takes it: what is not there is not asked for."""
        return cast("asyncio.AbstractEventLoop", self)

    # --- the driver steps it

    def next(self) -> float:
        """When there is something to do; never, while it is stopped."""
        if self.stopped:
            return float("inf")
        if self._ready:
            return self._clock.now
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else float("inf")

    def step(self) -> None:
        """What is ready now, then what is due, as real loops do it."""
        while self._timers and self._timers[0][0] <= self._clock.now:
            self._ready.append(heapq.heappop(self._timers)[2])
        asyncio._set_running_loop(self.itself)
        try:
            for _ in range(len(self._ready)):
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(None)

    def clear(self) -> None:
        """Cancel all tasks and let them end; for a world that is over."""
        self._on_error = lambda context: None
        for _ in range(100):
            tasks = asyncio.all_tasks(self.itself)
            if not tasks:
                return
            for task in tasks:
                task.cancel()
            while self._ready:
                self.step()
        raise AssertionError(f"tasks that can not be cancelled: {asyncio.all_tasks(self.itself)}")

    # --- what asyncio asks of it

    def time(self) -> float:
        return self._clock.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self.itself, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._clock.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self.itself, context)
        heapq.heappush(self._timers, (when, next(self._order), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is left out when it is due."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self.itself)

    def create_task(
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self.itself, name=name, context=context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self._on_error(context)


def step(clock: Clock, loops: list[Loop], random: random.Random) -> None:
    """The next thing that happens anywhere; of loops that are ready at the same moment any may be first."""
    first = min((loop.next() for loop in loops), default=float("inf"))
    if clock.next() <= first:
        clock.run_next()
        return
    assert first < float("inf"), "nothing can ever happen again"
    clock.now = max(clock.now, first)
    random.choice([loop for loop in loops if loop.next() <= clock.now]).step()
