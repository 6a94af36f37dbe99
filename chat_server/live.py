"""A session as this replica knows it while somebody here listens to it, or an answer of it is made here.

It changes in one way only: a message of the store is applied, the same whether we wrote it or another replica did, and
told to all connections. So the store is never behind a client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import assert_never

from chat_server.connections import Connection, Connections
from chat_server.core import close_codes
from chat_server.core.conversation import Conversation
from chat_server.core.items import SessionSettings
from chat_server.core.principal import Principal
from chat_server.core.response import Response, ResumePoint, State
from chat_server.core.server_events import (
    ActiveResponse,
    ItemAdded,
    ItemDeleted,
    ItemDone,
    ItemTruncated,
    ResponseMigrated,
    ResponseQueued,
    SessionCreated,
    SessionObject,
    SessionUpdated,
    encode,
)
from chat_server.store import messages
from chat_server.store.messages import (
    AnyChange,
    Change,
    ItemGone,
    ItemPut,
    Next,
    ResponseBegan,
    ResponseEnded,
    ResponseMoved,
    SessionDeleted,
    SettingsChanged,
    Text,
)
from chat_server.store.replies import Cut, Held, SessionState
from chat_server.turn import Turn

log = logging.getLogger(__name__)


#: messages that wait for one before them.
_MAX_HELD = 100


class Gap(Exception):
    """A message is missing: what we know of the session is not what the store holds."""


class LiveSession:
    """One session on this replica. ``lock`` keeps this replica's writes to it in their order."""

    def __init__(self, session_id: str) -> None:
        self.id = session_id
        self.lock = asyncio.Lock()
        self.connections = Connections()
        #: how many have it open: connections, also those that are about to join, and who looks after an answer.
        self.guests = 0
        self.owner: Principal
        self.model = ""
        self.settings = SessionSettings()
        self.version = -1  # not loaded
        #: the last version of which we know everything, loaded or not.
        self.known = -1
        self.created_ms = 0
        #: all items, while an answer is made here: what the store may lose.
        self.conversation: Conversation | None = None
        self.item_count = 0
        self.response: Response | None = None
        #: the response that waits behind it.
        self.queued: Response | None = None
        self.queued_token = ""
        #: the replica that makes the response (none: ""), and the token that it held when we looked.
        self.response_owner = ""
        self.response_token = ""
        #: the making of the response, if it is made here.
        self.turn: Turn | None = None
        #: what somebody wanted stopped last: a response's id, and where. It may be heard before we make that.
        self.wish: tuple[str, Cut] | None = None
        #: messages that came before one that they follow: the answer to a write of ours and what other replicas tell
        #: come on two ways, and either may be the quicker. Since when there are any (monotonic, as all times here).
        self.held: list[AnyChange | Text] = []
        self.held_since = 0.0
        #: its state is being read: all messages are held until it is there.
        self.reading = False
        #: a write of ours was not answered: the store may hold what we do not know.
        self.doubted = False
        #: when the store was asked last whether it is as we know it, and when something was heard of it.
        self.asked_at = 0.0
        self.heard_at = 0.0
        #: what the store held when it was asked last, if that was not what we knew.
        self.behind: Held | None = None
        #: the store did not answer when it was asked last.
        self.away = False
        #: since when the store is behind what we know.
        self.lost_since: float | None = None
        #: this replica is among its watchers in the store.
        self.watched = False
        #: it was left: whoever waits for its lock looks it up again.
        self.closed = False

    def load(self, state: SessionState) -> None:
        """Take over what ``watch`` found. An answer that is made here stays: nobody knows it better."""
        self._check_owner(state)
        self.owner = state.owner
        self.model = state.model
        self.settings = state.settings
        self.version = self.known = state.version
        self.created_ms = state.created_ms
        self.item_count = state.item_count
        self._heed(state)
        queued = state.queued
        self.queued = None
        if queued is not None:
            self.queued, self.queued_token = Response(queued.begun, previous_item_id=queued.previous), queued.token
        if self.turn is not None:
            return
        self.response = None
        if state.running is not None:
            running = state.running
            self.response = Response(
                running.begun, previous_item_id=running.previous, later_epochs=running.later_epochs
            )
            self.response_owner, self.response_token = running.replica, running.token
            self._stored(self.response, running.text, len(running.text.encode()))

    def _check_owner(self, state: SessionState) -> bool:
        """Whether an answer that is made here is still ours; one that is not is left.

        A store that lost changes says nothing about that.
        """
        turn = self.turn
        if turn is None or state.version < self.known:
            return True
        if turn.response.outcome is not None:  # its end was told; only the store's answer to who wrote it is missing
            turn.lose()
            return True
        if state.running is not None and state.running.token == turn.writer.token:
            return True
        turn.lose()
        return False

    def _heed(self, state: SessionState) -> None:
        if state.running is not None and state.running.wish is not None:
            self.stop(state.running.begun.id, state.running.wish)

    def stop(self, response_id: str, cut: Cut) -> None:
        """Somebody wants an answer stopped: if it is made here, that is done; if it will be, it is remembered."""
        self.wish = response_id, cut
        if self.turn is not None and self.turn.response.id == response_id:
            self.turn.stop(cut)

    def unload(self) -> None:
        """It has to be read again. An answer that is made here stays, with what the store may lose of its session."""
        self.version = -1
        self.held = []

    def drop(self) -> None:
        """What we know of it is not what is stored: its clients come back and get what is.

        An answer that is made here goes on; the session is read again when somebody joins.
        """
        self.connections.close(close_codes.RESTART, "reconnect to go on")
        self.unload()

    def keep_queued(self, item_id: str | None) -> bool:
        """Forget the queued answer unless it is that of this item. False if one waits that we do not know."""
        if self.queued is not None and self.queued.item_id != item_id:
            self.queued = None
        return item_id is None or self.queued is not None

    def catch_up(self, state: SessionState) -> bool:
        """Take what ``watch`` found after messages may have been missed; False if that can not be told any more."""
        self._heed(state)
        if state.version != self.version or not self._check_owner(state):
            return False
        if self.response is not None and self.turn is None:
            running = state.running
            if running is None or running.begun.id != self.response.id:
                return False
            self.response_owner, self.response_token = running.replica, running.token
            return self.take_text(running.text)
        return True

    def lacks(self, change: Change) -> int | None:
        """The length that the text must have before a change can be told, if we have less of it."""
        response = self.response
        match change:
            case ResponseEnded(response=told, needs=length) | ResponseMoved(response=told, epoch=(_, length)):
                follows = change.before == self.version
                if follows and response is not None and response.id == told and response.length < length:
                    return length
        return None

    def take_text(self, text: str) -> bool:
        """The running response's text as the store holds it; False if that is less than we have told."""
        response = self.response
        if response is None or len(text) < response.length:
            return False
        rest = text[response.length :]
        self._stored(response, rest, len(rest.encode()))
        self.connections.pump()
        return True

    @property
    def loaded(self) -> bool:
        return self.version >= 0

    # --- messages of the store

    @contextmanager
    def being_read(self) -> Iterator[None]:
        """While its state is read: what is told meanwhile is applied after it, for it may be newer."""
        self.held = []
        self.reading = True
        try:
            yield
        finally:
            self.reading = False
            held, self.held = self.held, []
        for message in held if self.loaded else ():
            self.take(message)

    def take(self, message: AnyChange | Text) -> None:
        """Apply a message, and those that waited for it; one that follows a message not seen yet waits.

        The caller sets the deadline for those in ``held``, from ``held_since`` on.
        """
        self.heard_at, self.away = time.monotonic(), False
        waited = bool(self.held)
        waiting = [*self.held, message]
        before = len(waiting) + 1
        while waiting and len(waiting) < before and not self.reading:
            before = len(waiting)
            self.held = []
            for waits in waiting:
                try:
                    self._apply_any(waits)
                except Gap:
                    self.held.append(waits)
            waiting = self.held
        self.held = waiting[:_MAX_HELD]
        self.doubted = self.doubted or len(waiting) > _MAX_HELD  # what is left out may be the last of it
        if self.held and not waited:
            self.held_since = time.monotonic()

    def waits(self, message: AnyChange | Text) -> bool:
        """Whether a message that was taken waits for one before it."""
        return any(held is message for held in self.held)

    def _apply_any(self, message: AnyChange | Text) -> None:
        if not isinstance(message, Text):
            self.apply(message)
        elif self.held or (self.response is not None and self.response.id == message.response):
            self.apply_text(message)
        else:
            self.doubted = True  # of an answer that ended before we began to listen, or whose beginning was missed

    def apply(self, change: AnyChange) -> None:
        """Apply a change and tell it. Raises Gap if one before it is missing; one that we have already is left out."""
        if change.version <= self.version:
            return
        if self.loaded and change.before != self.version:
            raise Gap
        follows = change.before == self.known
        if not follows and not self._is_of_running(change):
            return  # nobody listens here: what was missed before it is read when it is needed, and this with it
        if self.conversation is not None and follows:
            _keep(self.conversation, change)
        match change:
            case ItemPut():
                self.item_count += 1
                self._follow(change.previous, change.item.id)
                self.connections.tell(encode(ItemAdded(previous_item_id=change.previous, item=change.item)))
                self.connections.tell(encode(ItemDone(previous_item_id=change.previous, item=change.item)))
            case ItemGone():
                self._gone(change.item_id, change.previous)
                self.connections.tell(encode(ItemDeleted(item_id=change.item_id)))
            case messages.ItemTruncated():
                self.connections.tell(encode(ItemTruncated(item_id=change.item.id, text_end=change.text_end)))
            case SettingsChanged():
                self.model, self.settings = change.model, change.settings
                self.connections.each(self._tell_settings)
            case ResponseBegan():
                self._begin(change)
            case ResponseMoved():
                self._move(change)
            case ResponseEnded():
                response = self._end(change)
                if self.conversation is not None and follows:
                    _keep_ended(self.conversation, response)
            case SessionDeleted():
                self.connections.close(close_codes.DONE, "the conversation was deleted")
                if self.turn is not None:
                    self.turn.lose()
            case _:
                assert_never(change)
        if self.loaded:
            self.version = self.known = change.version
        elif follows:
            self.known = change.version

    def _is_of_running(self, change: AnyChange) -> bool:
        """Whether a change decides about the answer that runs, or begins one: whoever makes it has to know."""
        match change:
            case ResponseBegan():
                return not change.queued
            case ResponseEnded():
                return self.queued is None or self.queued.id != change.response
            case ResponseMoved() | SessionDeleted():
                return True
        return False

    def _tell_settings(self, connection: Connection) -> None:
        connection.outbox.push(SessionUpdated(session=self.object(connection)))

    def _begin(self, change: ResponseBegan) -> None:
        self.item_count += 1
        response = Response(change.begun, previous_item_id=change.previous)
        if change.queued:
            self.queued, self.queued_token = response, change.token
        else:
            self.response = response
            self.response_owner, self.response_token = change.begun.replica, change.token
        self.connections.each(lambda connection: connection.outbox.begin(response))
        if change.queued:
            self.connections.tell_extended(ResponseQueued(response_id=response.id, position=1))

    def _move(self, change: ResponseMoved) -> None:
        response = self.response
        if response is None or response.id != change.response:
            raise Gap
        if change.epoch is not None:
            if change.epoch[1] != response.length:
                raise Gap
            response.migrate(change.epoch)
        self.response_owner, self.response_token = change.owner, change.token
        if self.turn is not None and change.token != self.turn.writer.token:
            self.turn.lose()
        if change.reason:
            self.connections.tell_extended(ResponseMigrated(response_id=response.id, reason=change.reason))

    def apply_text(self, message: Text) -> None:
        """Text of an answer that another replica makes was stored. Raises Gap if some before it is missing."""
        response = self.response
        if response is None or response.id != message.response or message.offset > response.length:
            raise Gap
        rest = message.text[response.length - message.offset :]
        if not rest:
            return  # we have it: it came with the state that we read
        if message.epoch != response.epoch:
            raise Gap  # another owner wrote it
        self._stored(response, rest, len(rest.encode()) if len(rest) < len(message.text) else message.size)
        self.connections.pump()

    def _end(self, change: ResponseEnded) -> Response:
        in_queue = self.queued is not None and self.queued.id == change.response
        response = self.queued if in_queue else self.response
        starts = change.next
        if response is None or response.id != change.response or change.needs > response.length:
            raise Gap
        if starts is not None and self.loaded and (self.queued is None or self.queued.id != starts.response):
            raise Gap
        rest = change.rest[response.length - change.offset :]
        if rest:
            response.on_stored(rest, len(rest.encode()))
        response.end(change.outcome)
        if in_queue:
            self.queued = None
        else:
            self._start_next(starts)
        if not change.outcome.keeps_item:
            self._gone(response.item_id, response.previous_item_id)
        self.connections.each(lambda connection: connection.outbox.end(response))
        return response

    def _start_next(self, starts: Next | None) -> None:
        """The queued response, if there is one (and we heard of it), is the running one now."""
        queued, self.response, self.queued = self.queued, None, None
        if starts is not None and queued is not None and queued.id == starts.response:
            self.response = queued
        if starts is not None:
            self.response_owner, self.response_token = starts.replica, starts.token

    def _gone(self, item_id: str, previous: str | None) -> None:
        self.item_count -= 1
        self._follow(item_id, previous)

    def _follow(self, before: str | None, now: str | None) -> None:
        """What stood behind one item, or at the start, stands behind another one now."""
        for response in (self.response, self.queued):
            if response is not None and response.previous_item_id == before:
                response.previous_item_id = now

    @staticmethod
    def _stored(response: Response, text: str, size: int) -> None:
        if not text:
            return
        if response.state is State.QUEUED:  # a mirror hears of text only, not of what came before it
            response.move(State.PREFILL)
        response.move(State.STREAMING)
        response.on_stored(text, size)

    # --- what it looks like

    def tick(self, now: float, now_ms: int, *, store_away: bool) -> None:
        """Time passes: see ``Outbox.tick``. ``store_away``: nothing is heard of what others write."""
        response = self.response
        if response is None:
            state = "idle"
        elif self.turn is None and store_away:
            state = "waiting"
        else:
            state = response.heartbeat_state
        response_id = response.id if response is not None else None
        self.connections.each(lambda connection: connection.outbox.tick(now, now_ms, state, response_id))

    def object(self, connection: Connection) -> SessionObject:
        """The session as one connection sees it (``flush`` is the connection's own)."""
        settings = self.settings
        return SessionObject(
            id=self.id,
            model=self.model,
            instructions=settings.instructions,
            max_output_tokens=settings.max_output_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            stop=settings.stop,
            flush=connection.flush,
            heartbeat_interval_ms=connection.outbox.heartbeat_interval_ms,
        )

    def created(self, connection: Connection, *, resumed: bool, held: ResumePoint | None = None) -> SessionCreated:
        """The first event of a connection."""
        response = self.response
        active = None
        if response is not None:
            active = ActiveResponse(
                id=response.id,
                item_id=response.item_id,
                state=response.heartbeat_state,
                epoch=response.epoch,
                offset=response.resume_at(held) if held is not None and held.response_id == response.id else 0,
            )
        return SessionCreated(
            session=self.object(connection), resumed=resumed, item_count=self.item_count, active_response=active
        )


def _keep(conversation: Conversation, change: AnyChange) -> None:
    """What a change makes of the items. The answer that is made here is known better where it is made."""
    match change:
        case ItemPut():
            conversation.put(change.item, change.previous)
        case messages.ItemTruncated():
            conversation.put(change.item, None)
        case ItemGone():
            conversation.remove(change.item_id)
        case ResponseBegan():
            conversation.put(Response(change.begun, previous_item_id=None).item(), change.previous)


def _keep_ended(conversation: Conversation, response: Response) -> None:
    """An answer that ended stays as it is now, or leaves no item."""
    assert response.outcome is not None, "it ended"
    if response.outcome.keeps_item:
        conversation.put(response.item(), response.previous_item_id)
    else:
        conversation.remove(response.item_id)
