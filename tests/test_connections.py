"""The connections of one session: all are told, also when one of them fails, and all can be sent away."""

from __future__ import annotations

from typing import Any

import pytest

from chat_server.core import close_codes
from tests.test_live import FakeConnection, began, ended, put, session, state, text

pytestmark = pytest.mark.pure


class BrokenConnection(FakeConnection):
    """A connection that fails at whatever it is told."""

    def __init__(self) -> None:
        super().__init__()

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("broken")

        self.outbox.push = self.outbox.begin = self.outbox.end = self.outbox.pump = fail  # type: ignore[method-assign]


def test_a_connection_that_fails_is_closed_and_the_others_are_told() -> None:
    """Whatever is told: items, settings, the beginning, text and the end of an answer."""
    for change in (put(10, 11), began(), None):
        live, [one] = session(state(text="Hello") if change is None else None)
        broken = BrokenConnection()
        # Sets have no order: with several healthy ones some are behind the broken one.
        others = [FakeConnection() for _ in range(10)]
        live.connections.update([broken, *others])
        for other in others:
            if live.response is not None:
                other.outbox.begin(live.response)
        if change is not None:
            live.apply(change)
        else:
            live.apply_text(text(5, "!"))
            live.apply(ended(6, "", before=10))
        assert broken.closed
        assert set(broken.closed) == {close_codes.FAULT}
        for connection in (one, *others):
            assert connection.closed == []
            assert connection.socket.frames


def test_all_connections_can_be_sent_away() -> None:
    """Nothing more is told to them; they come back and get what is stored."""
    live, connections = session(state(text="Hello"), connections=2)
    live.connections.close(close_codes.RESTART, "reconnect to go on")
    for connection in connections:
        assert connection.closed == [close_codes.RESTART]
        assert connection.outbox.statistics() == {"events": 0, "event_bytes": 0, "views": 0}
