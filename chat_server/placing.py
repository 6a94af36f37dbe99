"""The engine of an answer: one that is there in time, and the session bound to it, so that the next one goes there too.

The choice itself is ``core/placement.py``; here it meets the engines as they are, and the store.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from chat_server.core.placement import Binding, place
from chat_server.engine.fleet import Engine, Fleet
from chat_server.errors import StoreUnavailable
from chat_server.settings import Limits
from chat_server.store.redis import Store

#: seconds that an answer waits for engines that start, beyond the usual wait: a large model loads for minutes.
_STARTING_S = 900.0


class NoEngine(Exception):
    """No engine can take the answer. The text of it is for the caller."""


class Placer:
    """Finds the engine of an answer."""

    def __init__(self, store: Store, fleet: Fleet, limits: Limits) -> None:
        self._store = store
        self._fleet = fleet
        self._limits = limits

    async def place(
        self, session_id: str, model: str, binding: Binding | None, tried: Collection[str] = ()
    ) -> tuple[Engine, Binding | None]:
        """The engine for a session's answer, and its binding now: one that was not ``tried``, if there is one.

        ``binding`` is the one last read. Raises NoEngine if none comes up in time.
        """
        healthy = await self._healthy(model)
        healthy = [engine for engine in healthy if engine.id not in tried] or healthy
        while True:
            engine = place(session_id, binding, healthy)
            assert engine is not None, "one is healthy"
            wanted = Binding(engine.id, engine.epoch)
            if binding == wanted:
                return engine, binding
            # Somebody else may have bound it meanwhile: then theirs holds, if it can be used.
            try:
                holds = await self._store.bind(session_id, binding, wanted)
            except StoreUnavailable:
                return engine, binding  # the answer waits for the store, not for the place of the next one
            if holds is None or holds in (wanted, binding):
                return engine, wanted
            binding = holds

    async def _healthy(self, model: str) -> list[Engine]:
        """The engines that can answer for ``model``; waits for one. Raises NoEngine if none comes up in time.

        Engines that start are waited for, for a while: who wrote while they load gets an answer, not an error.
        """
        if healthy := self._fleet.healthy(model):
            return healthy
        deadline = time.monotonic() + _STARTING_S
        while True:
            try:
                return await self._fleet.wait_healthy(model, self._limits.max_queue_s)
            except TimeoutError:
                starting = any(engine.state == "starting" for engine in self._fleet.engines)
                if not starting or time.monotonic() > deadline:
                    waited = f"within {self._limits.max_queue_s:.0f} s"
                    raise NoEngine(f"No engine that serves {model} came up {waited}.") from None
