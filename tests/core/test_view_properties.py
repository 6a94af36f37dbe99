"""A client that applies the offset rule ends with the stored text, wherever it read and whatever became of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_server.core.response import Response, ended_response
from chat_server.core.view import Stage
from tests.core.answers import ORDER, PIECES, Reader, new_response, outcome

pytestmark = pytest.mark.pure

REPLICAS, CLIENTS = 3, 3

Step = tuple[str, int, int]
#: What happens to the store, to replicas that hear of it sooner or later, and to clients that go from one to another.
steps = st.lists(
    st.tuples(
        st.sampled_from(["text", "text", "migrate", "lose", "hear", "hear", "load", "connect", "read", "read"]),
        st.integers(0, 20),
        st.integers(0, 5),
    ),
    min_size=10,
    max_size=60,
)


class World:
    """The store's text and epochs, the replicas' copies of it, and clients that each read from one of them."""

    def __init__(self) -> None:
        self.text = ""
        self.epochs = [("epoch_0", 0)]
        self.made = 0
        #: what was done since the last loss, for the copies
        self.log: list[Callable[[Response], None]] = []
        self.copies: list[Response] = []
        self.heard: list[int] = []
        for _ in range(REPLICAS):
            self.copies.append(new_response())
            self.heard.append(0)
        self.load_all()
        self.readers = [Reader(self.copies[0]) for _ in range(CLIENTS)]
        #: the last connection of each on which it was told something
        self.before: list[Reader | None] = [None] * CLIENTS

    def load_all(self) -> None:
        for at in range(REPLICAS):
            self.load(at)

    def load(self, at: int) -> None:
        """A replica reads what is stored; its connections to what it knew are gone."""
        copy = new_response(epochs=list(self.epochs))
        copy.on_stored(self.text, len(self.text.encode()))
        self.copies[at], self.heard[at] = copy, len(self.log)

    def do(self, step: Step) -> None:
        what, number, count = step
        at, client = number % REPLICAS, number % CLIENTS
        match what:
            case "text":
                piece = PIECES[number % len(PIECES)]
                self.text += piece
                self.log.append(lambda copy: copy.on_stored(piece, len(piece.encode())))
            case "migrate":
                epoch = (self._epoch(), len(self.text))
                self.epochs.append(epoch)
                self.log.append(lambda copy: copy.migrate(epoch))
            case "lose" if count == 0:
                self.text, self.epochs = "", [(self._epoch(), 0)]
                self.log.clear()
                self.load_all()
            case "hear":
                self.hear(at, self.heard[at] + count)
            case "load":
                self.load(at)
            case "connect":
                self.connect(client, self.copies[count % REPLICAS])
            case "read":
                for _ in range(count):
                    self.readers[client].step()

    def hear(self, at: int, upto: int | None = None) -> None:
        for change in self.log[self.heard[at] : upto]:
            change(self.copies[at])
            self.heard[at] += 1

    def connect(self, client: int, response: Response) -> None:
        """It goes to another replica, or comes back, with what it holds."""
        reader = self.readers[client]
        if reader.events:
            self.before[client] = reader
        self.readers[client] = Reader(response, back=self.before[client])

    def _epoch(self) -> str:
        self.made += 1
        return f"epoch_{self.made}"


@settings(max_examples=100)
@given(steps, st.sampled_from(["completed", "cancelled", "failed"]), st.integers(0, 12), steps)
def test_every_client_ends_with_the_stored_text(before: list[Step], status: Any, seen: int, after: list[Step]) -> None:
    """Over replicas that lag, new makings, loss, cuts and reconnects at any moment; the order is the protocol's."""
    world = World()
    for step in before:
        world.do(step)
    whole = new_response(epochs=world.epochs)
    whole.on_stored(world.text, len(world.text.encode()))
    end = outcome(whole, status, cut=seen if status == "cancelled" else None)
    whole.end(end)
    world.log.append(lambda copy: copy.end(end))
    final = world.text[: end.text_length]
    for what, number, count in after:
        if what in ("hear", "connect", "read"):
            world.do((what, number, count))
    again = ended_response(whole.item(), previous="item_1", kept=end.keeps_item)
    for client in range(CLIENTS):
        if world.readers[client].view.stage is not Stage.FINISHED:
            world.connect(client, again if client % 2 else whole)
        reader = world.readers[client]
        reader.read()
        order = ORDER.fullmatch(reader.order)
        assert order, f"{reader.order} is not the order of the protocol"
        assert bool(order["head"]) == (reader.resumed is None)
        assert reader.text == final
        assert reader.named("response.done")["response"]["status"] == status
