"""A socket that does what a test says, and keeps what was written to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.support import events


class FakeSocket:
    """Takes ``room`` frames (None: any number), then none until there is more. What it took may wait in a buffer."""

    def __init__(self, room: int | None = None) -> None:
        self.room = room
        self.is_open = True
        self.close_code: int | None = None
        self.frames: list[bytes] = []
        self.bytes_written = 0
        #: bytes that wait in the buffer and were not taken by the kernel
        self.waiting = 0
        #: the kernel takes nothing
        self.stuck = False
        #: called by every write, as a transport that is writable again at once does
        self.on_write: Callable[[], None] = lambda: None

    @property
    def can_write(self) -> bool:
        return self.is_open and (self.room is None or self.room > 0)

    @property
    def bytes_taken(self) -> int:
        return self.bytes_written - self.waiting

    def write_text(self, payload: bytes) -> None:
        assert self.can_write, "written to a socket that takes nothing"
        if self.room is not None:
            self.room -= 1
        self.bytes_written += len(payload)
        if self.stuck:
            self.waiting += len(payload)
        self.frames.append(payload)
        self.on_write()

    def close(self, code: int, reason: str) -> None:
        self.close_code = code
        self.is_open = False

    @property
    def events(self) -> list[dict[str, Any]]:
        """Everything that was written, judged."""
        told = [json.loads(frame) for frame in self.frames]
        for event in told:
            events.check(event, extensions=True)
        return told

    @property
    def types(self) -> list[str]:
        return [event["type"] for event in self.events]
