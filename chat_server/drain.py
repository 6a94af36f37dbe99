"""The orderly end of a replica: running answers finish, everybody is told, and nobody comes back in step.

Nobody new is let in any more (``Gate.closed``). Who has no answer under way leaves soon, each at a moment of its own;
the others when their answer was told to its end. What still runs towards the end of the grace time is handed over.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from chat_server.connections import Connection
from chat_server.core import close_codes
from chat_server.core.server_events import ServerDraining

log = logging.getLogger(__name__)

#: connections without an answer that leave in a second: each is a handshake somewhere else. At a terminal there are a
#: few, and the end is not felt; thousands take a while, at most this part of the grace time.
_LEAVE_PER_S = 500.0
_LEAVE_SHARE = 0.5
#: seconds within which those that left are asked to come back, each at its own moment.
_COME_BACK_S = 2.0
#: seconds between two looks at who can leave.
_LOOK_S = 0.05
#: seconds before the end of the grace time when what still runs is handed over, at most this part of it.
_HAND_OVER_S = 5.0
_HAND_OVER_SHARE = 0.6
#: of these, what is left for the end of the process, at most this part of them.
_END_S = 1.5
_END_SHARE = 0.5
#: seconds beyond the grace time after which a stop is cut short: it is over before that, unless something hangs.
AFTER_GRACE_S = 5.0

#: seconds for sockets that do not close when they are told to: this part of the grace time, at most.
_CLOSE_SHARE = 0.2
_CLOSE_S = 1.0

_REASON = "this server stops: reconnect to go on"


class Sessions(Protocol):
    """What there is to be ended (``hub.py``)."""

    def connections(self) -> list[Connection]: ...
    def statistics(self) -> dict[str, int]: ...


class Leaving:
    """Which connection leaves when. ``chance`` gives numbers from 0 to 1."""

    def __init__(self, *, grace_s: float, chance: Callable[[], float]) -> None:
        self._longest_s = grace_s * _LEAVE_SHARE
        self._chance = chance
        self._spread_s: float | None = None
        self._due: dict[Connection, float] = {}

    def plan(self, connections: Sequence[Connection], now: float) -> list[tuple[Connection, int]]:
        """Give each connection its moment. Returns those that are new here, and the ms after which to come back."""
        if self._spread_s is None:
            self._spread_s = min(len(connections) / _LEAVE_PER_S, self._longest_s)
        new = [connection for connection in connections if connection not in self._due]
        for connection in new:
            self._due[connection] = now + self._chance() * self._spread_s
        return [(connection, round(self._chance() * _COME_BACK_S * 1000)) for connection in new]

    def may_go(self, connection: Connection, now: float) -> bool:
        """Whether the moment of a planned connection came, and nothing more has to be told to it."""
        return now >= self._due[connection] and connection.outbox.settled


def close_s(grace_s: float) -> float:
    """Seconds that sockets get to close, after ``drain`` told them to."""
    return min(_CLOSE_S, grace_s * _CLOSE_SHARE)


async def drain(sessions: Sessions, hand_over: Callable[[], Awaitable[None]], *, grace_s: float) -> None:
    """End all connections and answers within ``grace_s``; ``hand_over`` is called for those that need longer.

    Nobody must be let in meanwhile.
    """
    count = sessions.statistics()
    if count["connections"] or count["responses"]:
        log.info("Draining %d connections; %d answers run", count["connections"], count["responses"])
    hand_over_s = min(_HAND_OVER_S, grace_s * _HAND_OVER_SHARE)
    deadline = time.monotonic() + grace_s - hand_over_s
    leaving = Leaving(grace_s=grace_s, chance=random.random)
    while True:
        now = time.monotonic()
        connections = sessions.connections()
        for connection, retry_after_ms in leaving.plan(connections, now):
            if connection.outbox.extensions:
                connection.outbox.push(ServerDraining(retry_after_ms=retry_after_ms))
        for connection in connections:
            if leaving.may_go(connection, now):
                connection.close(close_codes.RESTART, _REASON)
        if now >= deadline or not (connections or sessions.statistics()["responses"]):
            break
        await asyncio.sleep(_LOOK_S)
    # Before the hand-over: whoever stays could ask for more. Who comes back elsewhere gets the text from where it was.
    for connection in sessions.connections():
        connection.close(close_codes.RESTART, _REASON)
    running = sessions.statistics()["responses"]
    if running:
        log.info("The grace time ends; %d answers are handed over", running)
        try:
            async with asyncio.timeout(hand_over_s - min(_END_S, hand_over_s * _END_SHARE)):
                await hand_over()
        except TimeoutError:
            log.warning("Not all answers could be handed over; they go on when our lease is gone")
        except Exception:
            log.exception("Answers could not be handed over; they go on when our lease is gone")
