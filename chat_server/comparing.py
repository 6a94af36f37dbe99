"""Whether a session is as the store holds it: messages may be lost on their way, and the store may lose writes.

What was missed is read, and told. A session of which that can not be done is dropped: its clients come back.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Sequence

from chat_server.errors import StoreUnavailable
from chat_server.live import Gap, LiveSession
from chat_server.store import messages
from chat_server.store.messages import Change
from chat_server.store.redis import Store
from chat_server.store.replies import Held, SessionState

#: seconds in which the owner of an answer writes again what the store lost.
RESTORE_S = 4.0
#: seconds between questions whether a session is as we know it, and after which silence of a running answer that
#: another replica makes is a reason to ask.
_ASK_S = 15.0
_SILENCE_S = 2.0
#: sessions whose state is asked for in one round trip: a thousand make others wait for milliseconds.
_MOST_ASKED_OF = 500


def due(sessions: Iterable[LiveSession], now: float) -> list[LiveSession]:
    """Those whose state it is time to ask for: the ones that wait longest; after an outage all are due at once."""
    waiting = [live for live in sessions if live.watched and live.loaded and _is_due(live, now)]
    return heapq.nsmallest(_MOST_ASKED_OF, waiting, key=lambda live: live.asked_at)


def _is_due(live: LiveSession, now: float) -> bool:
    if live.behind is not None or now - live.asked_at > _ASK_S:
        return True
    mirrors = live.response is not None and live.turn is None
    return mirrors and now - max(live.asked_at, live.heard_at) > _SILENCE_S


async def ask(store: Store, sessions: Sequence[LiveSession]) -> None:
    """Ask for the state of many sessions at once; one that is still another one at the next look is doubted.

    This also says that we are still among their watchers.
    """
    known = [_known(live) for live in sessions]
    held = await store.renew_watch([live.id for live in sessions])
    for live, knew, holds in zip(sessions, known, held, strict=True):
        live.asked_at = time.monotonic()
        live.away = holds is None
        if holds is None:
            continue
        # At the first look a difference may be a message that is on its way.
        if live.behind is not None and (_known(live) < live.behind or holds < knew):
            live.doubted = True
        live.behind = holds if holds != knew else None


def _known(live: LiveSession) -> Held:
    """What we know of a session, as the store would say it."""
    response = live.response
    return Held(live.version, 0 if response is None else response.byte_length)


async def read_missed(store: Store, live: LiveSession) -> None:
    """Watch a session again, and tell what was missed; drop it if that can not be told. Holds the session's lock.

    While the store does not say, it stays in doubt. Raises StoreUnavailable.
    """
    live.doubted = False
    if live.closed or not live.loaded:
        return
    try:
        with live.being_read():
            state = await store.watch(live.id, changes=True)
            if state is None:
                keep = not await store.was_deleted(live.id) and _await_restored(live)
                live.doubted = keep  # it is to be watched again too
            else:
                keep = await _catch_up(store, live, state)
            if not keep:
                live.drop()
    except StoreUnavailable:
        live.doubted = True
        raise


async def _catch_up(store: Store, live: LiveSession, state: SessionState) -> bool:
    """Tell what was missed; False if that can not be told any more."""
    if state.version < live.version:
        return _await_restored(live)
    live.lost_since = None
    try:
        for raw in state.changes:
            change = messages.decode(raw)
            assert isinstance(change, Change), "text is not kept among the changes"
            length = live.lacks(change)
            if length is not None and not live.take_text((await _text(store, live, state))[:length]):
                return False
            live.apply(change)
    except Gap:
        return False
    return live.catch_up(state)


async def _text(store: Store, live: LiveSession, state: SessionState) -> str:
    """What is stored of the response that we tell: it runs still, or left an item."""
    response, running = live.response, state.running
    if response is None:
        return ""
    if running is not None and running.begun.id == response.id:
        return running.text
    item = await store.get_item(live.id, response.item_id)
    return "" if item is None else item.text


def _await_restored(live: LiveSession) -> bool:
    """The store lost changes: who makes the answer, or made the last one, writes them again. False: nobody did."""
    now = time.monotonic()
    live.lost_since = live.lost_since or now
    live.doubted = live.turn is None and now - live.lost_since < RESTORE_S
    return live.doubted or live.turn is not None
