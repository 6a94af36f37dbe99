"""That this replica lives, as the others see it; and whether another one does.

One lease for all that a replica runs. One that ran out permits others to take its answers over, and ends nothing by
itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from chat_server.errors import StoreError
from chat_server.store.replicas import LEASE_MS, Replicas

log = logging.getLogger(__name__)

#: seconds after trouble with the store in which no other replica is taken for dead: first they get to renew.
_GRACE_S = LEASE_MS / 1000
#: seconds after which an answer of the store is trouble: others may have waited longer.
_SLOW_S = 0.5


class Lease:
    """This replica's lease. ``renew`` must be called about once a second."""

    def __init__(self, replicas: Replicas, *, alone: bool) -> None:
        """``alone``: no other replica can be at work, so none is given time to come back."""
        self._replicas = replicas
        #: whether the store has it.
        self.holds = False
        #: since when it has not (monotonic).
        self.lost_at = time.monotonic()
        #: when the store was last seen to be in trouble (monotonic).
        self.trouble_at = float("-inf")
        #: since when we look: trouble before that was not seen.
        self._began_at = float("-inf") if alone else time.monotonic()

    def trouble(self) -> None:
        """Something was wrong with the store: others may have had it too."""
        self.trouble_at = time.monotonic()

    async def renew(self, now_ms: int) -> None:
        """Say that we live. Raises StoreError."""
        held = self.holds
        try:
            async with self._timed():
                await self._replicas.renew_lease(now_ms)
        except StoreError as error:
            if held:
                self.lost_at = time.monotonic()
                log.warning("The store is away: %s", error)
            self.holds = False
            raise
        self.holds = True
        if not held:
            log.info("The store is up")

    async def lives(self, replica_id: str) -> bool:
        """Whether another replica may live: its lease holds, or the store's trouble may have kept it from renewing.

        Raises StoreError: a lease that can not be read is not gone.
        """
        async with self._timed():
            alive = await self._replicas.is_alive(replica_id)
        return alive or time.monotonic() - max(self.trouble_at, self._began_at) < _GRACE_S

    @asynccontextmanager
    async def _timed(self) -> AsyncIterator[None]:
        began = time.monotonic()
        try:
            yield
        except StoreError:
            self.trouble()
            raise
        if time.monotonic() - began > _SLOW_S:
            self.trouble()
