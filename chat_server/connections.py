"""The connections of one session on this replica: all are told the same, and one that fails harms no other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from chat_server.core import close_codes
from chat_server.core.client_events import Flush
from chat_server.core.server_events import ServerEvent, encode
from chat_server.edge.outbox import Outbox

log = logging.getLogger(__name__)


class Connection(Protocol):
    """One WebSocket, as the session sees it (``edge/realtime.py``)."""

    outbox: Outbox
    flush: Flush

    def close(self, code: int, reason: str) -> None: ...


class Connections(set[Connection]):
    """Those that are open now."""

    def each(self, tell: Callable[[Connection], None]) -> None:
        """Tell each connection something; one that fails is closed, and the others are told all the same."""
        for connection in list(self):
            try:
                tell(connection)
            except Exception:
                log.exception("A connection failed while it was told something; it is closed")
                connection.close(close_codes.FAULT, "fault in the server")

    def pump(self) -> None:
        """More may be told: to whoever takes it."""
        self.each(lambda connection: connection.outbox.pump())

    def tell(self, frame: bytes) -> None:
        """Tell all of them an event."""
        self.each(lambda connection: connection.outbox.push(frame))

    def tell_extended(self, event: ServerEvent) -> None:
        """Tell those that asked for events which the API does not have."""
        frame = encode(event)
        self.each(lambda connection: connection.outbox.push(frame) if connection.outbox.extensions else None)

    def close(self, code: int, reason: str) -> None:
        """Send all of them away; nothing more is told to them."""
        for connection in list(self):
            connection.outbox.close()
            connection.close(code, reason)
