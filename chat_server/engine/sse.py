"""Server-sent events, as engines write them: bytes in, the data of whole events out.

The WHATWG event stream format as far as engines use it: lines end in ``\\n`` or ``\\r\\n`` (never in a lone ``\\r``),
comments (keep-alives) and the fields ``event``, ``id`` and ``retry`` are skipped, an event ends at a blank line, and
one that the stream's end cuts short is dropped.
"""

from __future__ import annotations

#: bytes of one event. An engine's chunk has some hundred; the token ids of a long prompt may come along in one.
MAX_EVENT_BYTES = 1 << 20


class EventTooLarge(ValueError):
    """An event, or a line of it, passed the bound. The stream can not be read on."""


class SseParser:
    """Feed it the bytes of one stream, in any pieces.

    ``max_event_bytes`` bounds the data lines of one event together, and each other line; no more waits inside.
    """

    __slots__ = ("_data", "_data_bytes", "_max", "_partial")

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max = max_event_bytes
        #: the line that has not ended yet
        self._partial = bytearray()
        #: values of the data lines of the event that has not ended yet, and the length of these lines
        self._data: list[bytes] = []
        self._data_bytes = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of each event that ends in ``chunk``, in order. Raises EventTooLarge."""
        if self._partial:
            # Appended in place, so that a long line in small pieces costs its length and not the square of it.
            self._partial += chunk
            if b"\n" not in chunk:
                self._check(self._partial)
                return []
            chunk = bytes(self._partial)
            self._partial.clear()
        *lines, rest = chunk.split(b"\n")
        events: list[bytes] = []
        for line in lines:
            self._line(line.removesuffix(b"\r"), events)
        self._check(rest)
        self._partial += rest
        return events

    def _line(self, line: bytes, events: list[bytes]) -> None:
        self._check(line)
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
            self._data_bytes += len(line)
        elif not line and self._data:
            events.append(b"\n".join(self._data))
            self._data.clear()
            self._data_bytes = 0

    def _check(self, line: bytes | bytearray) -> None:
        """Raise if ``line``, whole or so far, does not fit. A ``\\r`` may be half of its end and does not count."""
        if self._data_bytes + len(line) - line.endswith(b"\r") > self._max:
            raise EventTooLarge(f"an event of the stream is larger than {self._max} bytes")
