"""How far one connection has been told of one response: a stage and a cursor into its text, and no queue.

To tell is always the same step, ``next_*() -> frame or None``, taken whenever the socket takes bytes. So the live
stream, a reader that lags (its next delta is longer), a new tab (cursor 0) and the end (the whole-text events one by
one) are one mechanism. The order of the frames is the table of the protocol.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypedDict

from chat_server.core.items import ResponseObject
from chat_server.core.response import Response, ResumePoint
from chat_server.core.server_events import (
    ContentPartAdded,
    ContentPartDone,
    ItemAdded,
    ItemDeleted,
    ItemDone,
    OutputItemAdded,
    OutputItemDone,
    OutputTextDone,
    ResponseCreated,
    ResponseDone,
    WirePart,
    encode,
)


class Stage(IntEnum):
    """What comes next."""

    CREATED = 0
    OUTPUT_ITEM = 1
    ITEM_ADDED = 2
    PART_ADDED = 3  # with the first text
    TEXT = 4
    TEXT_DONE = 5
    PART_DONE = 6
    OUTPUT_ITEM_DONE = 7
    ITEM_DONE = 8
    DONE = 9
    FINISHED = 10


class View:
    """One connection's place in one response. ``held``: what its client has of it, from an earlier connection."""

    __slots__ = ("cursor", "response", "rewind_to", "stage", "takes_cuts")

    def __init__(self, response: Response, *, takes_cuts: bool, held: ResumePoint | None = None) -> None:
        self.response = response
        self.stage = Stage.CREATED
        self.cursor = 0
        #: where the text goes on for a client that holds more than what is still so.
        self.rewind_to: int | None = None
        if held is not None:
            self.stage = Stage.TEXT if held.offset else Stage.PART_ADDED
            self.cursor = held.offset
            at = response.resume_at(held)
            if at != held.offset:
                self.rewind_to = at
        #: whether the connection has extensions, and so follows an empty delta that takes text back.
        self.takes_cuts = takes_cuts

    def next_head(self) -> bytes | None:
        """The frames that say that a response began."""
        response = self.response
        if self.stage is Stage.CREATED:
            self.stage = Stage.OUTPUT_ITEM
            # As it was then: it may have ended since.
            created = ResponseObject(id=response.id, status="in_progress", output=[], metadata=response.begun.metadata)
            return encode(ResponseCreated(response=created, in_reply_to=response.begun.in_reply_to))
        if self.stage is Stage.OUTPUT_ITEM:
            self.stage = Stage.PART_ADDED if response.private else Stage.ITEM_ADDED
            item = response.make_item("in_progress", None)
            return encode(OutputItemAdded(response_id=response.id, output_index=0, item=item))
        if self.stage is Stage.ITEM_ADDED:
            self.stage = Stage.PART_ADDED
            item = response.make_item("in_progress", None)
            return encode(ItemAdded(previous_item_id=response.previous_item_id, item=item))
        return None

    def next_text(self) -> bytes | None:
        """The next frame of text: all that is stored and was not told yet."""
        response = self.response
        if self.stage is Stage.TEXT and self.rewind_to is not None:
            start = min(self.rewind_to, response.length)
            self.cursor, self.rewind_to = response.length, None
            return response.delta(start)
        if self.stage is Stage.TEXT and self.cursor != response.length:
            if self.cursor > response.length and not self.takes_cuts:
                return None  # the final events will say it
            start = min(self.cursor, response.length)
            self.cursor = response.length
            return response.delta(start)
        if self.stage is Stage.PART_ADDED and response.length:
            self.stage = Stage.TEXT
            return self._part_added()
        return None

    def next_tail(self) -> bytes | None:
        """The frames up to the end, of a response that ended."""
        response = self.response
        outcome = response.outcome
        assert outcome is not None, "the tail is told when the response has ended"
        if self.stage is Stage.PART_ADDED and not response.length:
            if not outcome.keeps_item:
                self.stage = Stage.OUTPUT_ITEM_DONE
            else:
                self.stage = Stage.TEXT  # an empty text is a text too
                return self._part_added()
        frame = self.next_text()
        if frame is not None:
            return frame
        if self.stage is Stage.TEXT:
            # A cut took all of the text: the part ends empty, then the item goes.
            self.stage = Stage.TEXT_DONE
        stage = self.stage
        if stage is Stage.TEXT_DONE:
            self.stage = Stage.PART_DONE
            return encode(OutputTextDone(**_place(response), text=response.text(0)))
        if stage is Stage.PART_DONE:
            self.stage = Stage.OUTPUT_ITEM_DONE
            part = WirePart(response.text(0))
            return encode(ContentPartDone(**_place(response), part=part))
        if stage is Stage.OUTPUT_ITEM_DONE:
            self.stage = Stage.DONE if response.private else Stage.ITEM_DONE
            return encode(OutputItemDone(response_id=response.id, output_index=0, item=response.item()))
        if stage is Stage.ITEM_DONE:
            self.stage = Stage.DONE
            if not outcome.keeps_item:
                return encode(ItemDeleted(item_id=response.item_id))
            return encode(ItemDone(previous_item_id=response.previous_item_id, item=response.item()))
        if stage is Stage.DONE:
            self.stage = Stage.FINISHED
            return encode(ResponseDone(response=response.object()))
        return None

    def _part_added(self) -> bytes:
        return encode(ContentPartAdded(**_place(self.response), part=WirePart("")))


class _Place(TypedDict):
    response_id: str
    item_id: str
    output_index: int
    content_index: int


def _place(response: Response) -> _Place:
    """Where the text stands: a response has one output item with one part so far."""
    return {"response_id": response.id, "item_id": response.item_id, "output_index": 0, "content_index": 0}
