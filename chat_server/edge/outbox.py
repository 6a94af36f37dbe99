"""The only writer of a socket. It holds small events in order, and views of answers; text is never queued.

``pump`` writes while the socket takes bytes: first what stands in the queue (an event, or the beginning or the end of
an answer, frame by frame), then what running answers have more. It is a plain call, made when something happened or
the socket takes bytes again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from chat_server.core import close_codes
from chat_server.core.response import Response, ResumePoint
from chat_server.core.server_events import Heartbeat, ServerEvent, encode
from chat_server.core.view import Stage, View

log = logging.getLogger(__name__)

#: A source of frames, one a call, until None.
Source = Callable[[], bytes | None]

#: Events of items that wait for one socket. A reader that is so far behind reconnects and gets the state instead.
MAX_EVENTS = 1000
#: The same in bytes.
MAX_EVENT_BYTES = 4 << 20
#: seconds between heartbeats while an answer waits for its first text.
_BUSY_HEARTBEAT_S = 2.0


class Socket(Protocol):
    """What the outbox needs of a socket (``edge/socket.py``)."""

    @property
    def can_write(self) -> bool: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def bytes_taken(self) -> int: ...
    @property
    def bytes_written(self) -> int: ...
    def write_text(self, payload: bytes) -> None: ...
    def close(self, code: int, reason: str) -> None: ...


class Outbox:
    """Everything that one connection has to be told, and how far that is."""

    def __init__(
        self, socket: Socket, *, extensions: bool, heartbeat_s: float, send_timeout_s: float, now: float
    ) -> None:
        self.extensions = extensions
        self._socket = socket
        self._heartbeat_s = heartbeat_s
        self._send_timeout_s = send_timeout_s
        self._queue: deque[bytes | Source] = deque()
        self._queued_bytes = 0
        self._views: dict[str, View] = {}  # all that are not finished
        self._live: dict[str, View] = {}  # those whose beginning was told and whose end has not come
        self._sent_at = now
        self._wrote = False
        self._taken = 0
        self._taken_at = now
        self._pumping = False

    @property
    def heartbeat_interval_ms(self) -> int:
        return round(self._heartbeat_s * 1000)

    # --- what there is to tell

    def push(self, event: ServerEvent | bytes) -> None:
        """Tell a small event, behind those that wait."""
        frame = event if isinstance(event, bytes) else encode(event)
        if not self._queue and not self._pumping and self._socket.can_write:
            self._write(frame)
            return
        self._queued_bytes += len(frame)
        self._enqueue(frame)

    def push_source(self, source: Source) -> None:
        """Tell a series of frames that are made one by one, as the socket takes them."""
        self._enqueue(source)

    def _enqueue(self, told: bytes | Source) -> None:
        self._queue.append(told)
        self.pump()
        if len(self._queue) > MAX_EVENTS or self._queued_bytes > MAX_EVENT_BYTES:
            log.info("A reader is %d events behind; it is dropped and can resume", len(self._queue))
            self._drop()

    def begin(self, response: Response, held: ResumePoint | None = None) -> None:
        """Tell of an answer: all that is stored of it now and was not ``held`` before, and what comes."""
        view = View(response, takes_cuts=self.extensions, held=held)
        self._views[response.id] = view

        def head() -> bytes | None:
            frame = view.next_head()
            if frame is None and response.id in self._views:
                self._live[response.id] = view
            return frame

        self.push_source(head)

    def end(self, response: Response) -> None:
        """Tell the rest of an answer, and its end."""
        view = self._views.get(response.id)
        if view is None:
            return

        def tail() -> bytes | None:
            self._live.pop(response.id, None)
            frame = view.next_tail()
            if view.stage is Stage.FINISHED:
                self._views.pop(response.id, None)
            return frame

        self.push_source(tail)

    def tell_ended(self, response: Response, held: ResumePoint | None) -> None:
        """Tell the rest of an answer that ended before this connection came."""
        self.begin(response, held)
        self.end(response)

    def told(self, response_id: str) -> int | None:
        """How many code points of a running answer were sent; None if this connection is not told of it."""
        view = self._views.get(response_id)
        return None if view is None else view.cursor

    def last_told(self) -> str | None:
        """The answer that this connection was told of last, of those that have not ended."""
        for response_id, view in reversed(self._views.items()):
            if view.stage is not Stage.CREATED and view.response.outcome is None:
                return response_id
        return None

    @property
    def settled(self) -> bool:
        """Whether all was told that there is, and no answer goes on."""
        return not self._queue and not self._views and self._socket.can_write

    # --- telling it

    def pump(self) -> None:
        """Write what there is, while the socket takes bytes."""
        if self._pumping:
            return  # a source or a write came back here; the loop below goes on with it
        self._pumping = True
        try:
            while self._socket.can_write:
                frame = self._next()
                if frame is None:
                    return
                self._write(frame)
        finally:
            self._pumping = False

    def _next(self) -> bytes | None:
        while self._queue:
            head = self._queue[0]
            if isinstance(head, bytes):
                self._queue.popleft()
                self._queued_bytes -= len(head)
                return head
            frame = head()
            if frame is not None:
                return frame
            self._queue.popleft()
        for view in self._live.values():
            frame = view.next_text()
            if frame is not None:
                return frame
        return None

    def _write(self, frame: bytes) -> None:
        self._socket.write_text(frame)
        self._wrote = True

    # --- time

    def tick(self, now: float, now_ms: int, state: str, response_id: str | None) -> None:
        """Called about once a second: heartbeats, and the deadline of a socket that takes nothing.

        ``state`` is what the session is doing, as the heartbeat says it.
        """
        if self._wrote:
            self._wrote = False
            self._sent_at = now
        taken = self._socket.bytes_taken
        if taken > self._taken or taken == self._socket.bytes_written:
            self._taken = taken
            self._taken_at = now
        elif now - self._taken_at >= self._send_timeout_s:
            self._drop()
            return
        interval = _BUSY_HEARTBEAT_S if state in ("queued", "prefill") else self._heartbeat_s
        # Half a tick early rather than half a tick late.
        if self.extensions and now - self._sent_at >= interval - 0.5 and self._socket.can_write:
            self.push(Heartbeat(now_ms=now_ms, state=state, response_id=response_id))  # type: ignore[arg-type]
            self._sent_at, self._wrote = now, False

    def _drop(self) -> None:
        self.close()
        self._socket.close(close_codes.OVERLOADED, "too slow a reader; reconnect to go on")

    def close(self) -> None:
        """Forget what waits: nothing more is told."""
        self._queue.clear()
        self._queued_bytes = 0
        self._views.clear()
        self._live.clear()

    def statistics(self) -> dict[str, int]:
        """What waits: events, their bytes, and views that are not finished."""
        return {"events": len(self._queue), "event_bytes": self._queued_bytes, "views": len(self._views)}
