"""However messages overtake each other on their two ways, a session ends as if they had come in their order."""

from __future__ import annotations

import json
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_server.live import LiveSession
from chat_server.store.messages import ResponseMoved, Text
from chat_server.store.replies import SessionState
from tests.histories import OPERATIONS, THEM, US, Message, World
from tests.test_live import FakeConnection

pytestmark = pytest.mark.pure

histories = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.sampled_from([US, THEM]), st.integers(0, 11)), min_size=1, max_size=40
)


class Replica:
    """A session as one replica has it, and a connection that is told all of it."""

    def __init__(self) -> None:
        self.live = LiveSession("sess_1")
        self.connection = FakeConnection()

    def read(self, found: SessionState, meanwhile: list[Message]) -> None:
        """Read the state, as the hub does; some messages come before it is there. Then the connection joins."""
        live = self.live
        live.reading = True
        for message in meanwhile:
            self.hear(message)
        live.load(found)
        live.reading = False
        held, live.held = live.held, []
        live.connections.add(self.connection)
        for response in (live.response, live.queued):
            if response is not None:
                self.connection.outbox.begin(response)
        for event in map(json.loads, self.connection.socket.frames):
            assert live.response is None or event.get("epoch", live.response.epoch) == live.response.epoch
        for what in held:
            live.take(what)

    def hear(self, message: Message) -> None:
        """The store's answer to us, or what the other replica told."""
        if message.who == US and isinstance(message.what, Text):
            self.live.apply_text(message.what)  # as the committer does with our own
        else:
            self.live.take(message.what)

    @property
    def knows(self) -> dict[str, Any]:
        """All that it knows of the session."""
        live = self.live
        known: dict[str, Any] = {"version": live.version, "items": live.item_count, "settings": live.settings}
        for name, response in (("running", live.response), ("queued", live.queued)):
            if response is not None:
                known[name] = (response.id, response.text(0), response.epochs, response.previous_item_id)
        if live.response is not None:
            known["owner"] = (live.response_owner, live.response_token)
        return known

    @property
    def told(self) -> list[dict[str, Any]]:
        """What its connection was told, but for text and its beginning, whose place among other events is free."""
        free = ("response.output_text.delta", "response.content_part.added")
        told = [event for event in map(json.loads, self.connection.socket.frames) if event["type"] not in free]
        for event in told:
            del event["event_id"]
        return told

    @property
    def texts(self) -> dict[str, str]:
        """The text of each answer that its connection has by the offset rule."""
        have: dict[str, str] = {}
        for event in map(json.loads, self.connection.socket.frames):
            if event["type"] == "response.output_text.delta":
                before = have.get(event["item_id"], "")
                assert event["offset"] <= len(before), "a gap"
                have[event["item_id"]] = before[: event["offset"]] + event["delta"]
            elif event["type"] == "response.output_text.done":
                assert have.get(event["item_id"], "") == event["text"]
        return have

    def can_hear(self, message: Message) -> bool:
        """We store text of an answer when we heard that it is ours."""
        what, response = message.what, self.live.response
        if message.who == THEM or not isinstance(what, Text):
            return True
        return response is not None and response.epoch == what.epoch and response.length >= what.offset


def hear_in_any_order(replica: Replica, told: list[Message], data: st.DataObject) -> None:
    """Messages come on two ways, each in its order, and each may bring again what it brought.

    Nobody takes an answer over from us before our last text of it was stored and known to be.
    """
    ways = {who: [message for message in told if message.who == who] for who in (US, THEM)}
    heard: list[Message] = []
    while any(ways.values()):
        own = next((message.number for message in ways[US] if isinstance(message.what, Text)), len(told) + 1000)
        can = [way for way in ways.values() if way and replica.can_hear(way[0])]
        can = [way for way in can if not (isinstance(way[0].what, ResponseMoved) and way[0].number > own)]
        assert can, "a message is missing for ever"
        heard.append(data.draw(st.sampled_from(can)).pop(0))
        replica.hear(heard[-1])
        if data.draw(st.integers(0, 9)) == 0:
            again = data.draw(st.sampled_from(heard))
            if again.who == THEM or not isinstance(again.what, Text):
                replica.hear(again)


@settings(max_examples=60)
@given(histories, histories, st.data())
def test_every_order_of_arrival_gives_the_same(
    before: list[tuple[str, str, int]], after: list[tuple[str, str, int]], data: st.DataObject
) -> None:
    """The session, what its connections are told and their texts, from whatever moment on it is listened to."""
    world = World()
    for step in before:
        world.do(*step)
    found, known = world.state(), len(world.told)
    for step in after:
        world.do(*step)
    stale = [message for message in world.told[:known] if not (message.who == US and isinstance(message.what, Text))]
    stale = stale[data.draw(st.integers(0, len(stale))) :]
    in_order, shuffled = Replica(), Replica()
    in_order.read(found, [])
    for message in world.told[known:]:
        in_order.hear(message)
    told = stale + world.told[known:]
    early = [message for message in told if message.who == THEM]
    early = list(takewhile(lambda message: not isinstance(message.what, ResponseMoved), early))
    early = early[: data.draw(st.integers(0, len(early)))]
    shuffled.read(found, early)
    hear_in_any_order(shuffled, [message for message in told if message not in early], data)
    assert shuffled.live.held == []
    assert shuffled.knows == in_order.knows
    assert shuffled.told == in_order.told
    assert shuffled.texts == in_order.texts
    end = Replica()
    end.read(world.state(), [])
    assert in_order.knows == end.knows, "it is not what the store has"


def test_messages_left_out_while_the_state_is_read_are_asked_for() -> None:
    """What is held is bounded; who left out the last one would else never hear of it."""
    world, replica = World(), Replica()
    found = world.state()
    for number in range(150):
        world.do("put", THEM, number)
    replica.read(found, world.told)
    assert replica.live.version < world.version
    assert replica.live.doubted
