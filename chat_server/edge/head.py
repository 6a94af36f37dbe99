"""uvicorn's HTTP protocol with bounds for the head of a request, before anybody's credential is known.

The h11 one, for it bounds the head's bytes (httptools takes an endless header); we add the time. Given to uvicorn as
``http=``.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

#: bytes of the request line and all headers together; above it the answer is 400. As nginx's four buffers of 8 KiB,
#: twice.
MAX_HEAD_BYTES = 64 << 10


class HttpProtocol(H11Protocol):
    """One HTTP connection. ``head_s``: seconds in which the head of a request must be there, else it is dropped."""

    head_s = 10.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._late = self.loop.call_later(self.head_s, self._drop)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._cancel()
        elif self._late is None:  # the next request's head began, and is not whole
            self._late = self.loop.call_later(self.head_s, self._drop)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def _cancel(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _drop(self) -> None:
        log.info("Dropped a peer that sent no whole request in %.0f s", self.head_s)
        self.transport.abort()
