"""A connection joins a session: what it is told of the past, and from where it goes on.

It gets the state, and everything after it: nothing is missed, nothing told twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

from chat_server.connections import Connection
from chat_server.core.items import Item
from chat_server.core.response import Response, ResumePoint
from chat_server.core.server_events import ItemAdded, ItemDone, encode
from chat_server.errors import ClientError
from chat_server.live import Gap, LiveSession
from chat_server.store.redis import Store

#: seconds to wait for messages that the store has told but that have not arrived, and between two looks.
_PATIENCE_S = 2.0
_LOOK_S = 0.005
#: seconds to wait for text that the client says it has.
_BEHIND_S = 1.0


async def join(
    store: Store,
    live: LiveSession,
    connection: Connection,
    *,
    resumed: bool,
    history: int | None,
    held: ResumePoint | None,
) -> None:
    """Let a connection join; holds the session's lock.

    ``history`` is how many of the last items it wants first (0: all; None: none); ``held`` what its client has of
    the answer that it was reading, whose rest it gets, also if that ended meanwhile. Raises Gap if what we know of the
    session stays behind the store; ClientError if it is gone.
    """
    previous, items, ended = await _read(store, live, history, held)
    # From here on there is no await: what the store tells next goes to this connection too.
    outbox = connection.outbox
    outbox.push(live.created(connection, resumed=resumed, held=held))
    active = [response for response in (live.response, live.queued) if response is not None]
    if ended is not None and all(item.id != ended.item_id for item in items):
        outbox.tell_ended(ended, held)
        ended = None
    told = {response.item_id: response for response in active}
    if ended is not None:
        told[ended.item_id] = ended
    for response, run in _runs(previous, items, told):
        if response is None:
            outbox.push_source(run)
        elif response is ended:
            outbox.tell_ended(ended, held)
    for response in active:
        outbox.begin(response, held if held is not None and held.response_id == response.id else None)
    live.connections.add(connection)


async def _read(
    store: Store, live: LiveSession, history: int | None, held: ResumePoint | None
) -> tuple[str | None, list[Item], Response | None]:
    """What a joining connection is told of the past, read when this replica knew exactly what the store held.

    The id before the first item, the items, and the answer that the client was reading if that ended. Raises Gap
    if that moment never comes.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while live.loaded and time.monotonic() < deadline:  # else it was dropped while we waited
        if held is not None and _may_be_behind(live, held) and _is_unsure(live):
            await asyncio.sleep(_LOOK_S)
            continue
        version = live.version
        previous, items, ended = None, list[Item](), None
        if history is not None:
            reply = await store.last_items(live.id, history)
            if reply is None:
                raise no_session(live.id)
            read_at, previous, items = reply
            if read_at != live.version:
                await asyncio.sleep(_LOOK_S)  # the message that made the difference is on its way
                continue
        active = {response.id for response in (live.response, live.queued) if response is not None}
        if held is not None and held.response_id not in active:
            answer = await store.answer(live.id, held.response_id)
            if answer is None:
                raise no_session(live.id)
            read_at, ended = answer
            if read_at != live.version:
                await asyncio.sleep(_LOOK_S)
                continue
        if version == live.version:
            return previous, items, ended
    raise Gap


async def wait_for_claimed(live: LiveSession, held: ResumePoint | None, *, least_s: float) -> None:
    """Wait a moment for text that the client says it has; without the lock, for what it says may be wrong.

    ``least_s``: the time that somebody may need to write it again. If it does not come, the session is doubted: the
    message with it may be lost.
    """
    deadline = time.monotonic() + max(_BEHIND_S, least_s)
    while held is not None and live.loaded and _may_be_behind(live, held):
        if time.monotonic() > deadline:
            live.doubted = True
            return
        await asyncio.sleep(_LOOK_S)


def _may_be_behind(live: LiveSession, held: ResumePoint) -> bool:
    """Whether the client was told more of the running answer than this replica has heard: that is on its way."""
    response = live.response
    if response is None or response.id != held.response_id or not held.offset:
        return False
    known = [epoch for epoch, _ in response.epochs]
    return (held.epoch not in known and live.turn is None) or (
        held.epoch == known[-1] and held.offset > response.length
    )


def _is_unsure(live: LiveSession) -> bool:
    """Whether the store has not said yet what it holds of an answer made here, or something is missing of another's."""
    return bool(live.held) or live.doubted or (live.response is not None and live.response.in_flight)


def no_session(session_id: str) -> ClientError:
    return ClientError("session_not_found", f"There is no session {session_id}.", status=404)


def _runs(
    previous: str | None, items: list[Item], told: dict[str, Response]
) -> Iterator[tuple[Response | None, Callable[[], bytes | None]]]:
    """The items in their order: frames of those between, and in its place each answer that is ``told`` by itself."""
    run: list[tuple[str | None, Item]] = []
    for item in items:
        if (response := told.get(item.id)) is not None:
            yield None, _item_frames(run)
            yield response, lambda: None
            run = []
        else:
            run.append((previous, item))
        previous = item.id
    yield None, _item_frames(run)


def _item_frames(run: list[tuple[str | None, Item]]) -> Callable[[], bytes | None]:
    """Frames of stored items, made one by one as the socket takes them."""

    def frames() -> Iterator[bytes]:
        for previous, item in run:
            yield encode(ItemAdded(previous_item_id=previous, item=item))
            yield encode(ItemDone(previous_item_id=previous, item=item))

    made = frames()
    return lambda: next(made, None)
