"""The answers that this replica makes: begun here, taken over from replicas that are gone, and left to others.

A response has one owner, who holds its token. Whoever is refused with its token stops at once.
"""

from __future__ import annotations

import asyncio
import logging
import time

from msgspec import UNSET

from chat_server.core.conversation import Conversation
from chat_server.core.ids import new_id
from chat_server.core.items import Item
from chat_server.core.placement import Binding
from chat_server.core.response import Response, State
from chat_server.errors import StoreBehind, StoreError, StoreUnavailable
from chat_server.hub import Hub, now_ms
from chat_server.live import LiveSession
from chat_server.restoring import Restorer
from chat_server.store.committer import Committer, Writer
from chat_server.store.messages import Change, ResponseEnded, decode
from chat_server.store.redis import Store
from chat_server.store.replies import Cut
from chat_server.turn import Conductor, Turn

log = logging.getLogger(__name__)

#: seconds between two rounds of leaving what runs here: some answers are about to end.
_LEAVE_LOOK_S = 0.05
#: seconds that others have to take an answer that we left.
_TAKE_BACK_S = 1.0


class Answers:
    """Owns the turns of this replica."""

    def __init__(
        self, *, hub: Hub, store: Store, committer: Committer, restorer: Restorer, conductor: Conductor
    ) -> None:
        self._hub = hub
        self._store = store
        self._committer = committer
        self._conductor = conductor
        self._restorer = restorer
        #: when we left answers that nobody has taken yet (monotonic).
        self._left: dict[str, float] = {}

    # --- making them

    def start(
        self,
        live: LiveSession,
        token: str,
        message: bytes,
        items: tuple[Item, ...],
        binding: Binding | None,
        *,
        attempts: int = 0,
        wish: Cut | None = None,
    ) -> None:
        """Make the session's running response here. Holds the session's lock.

        ``message`` said that it is ours; it was applied, unless messages before it are missing. Before that the caller
        let the session know all ``items``: messages after it may be applied with it. ``attempts`` were made
        before without new text; ``wish``: somebody wants it stopped.
        """
        if live.response is None or live.response_token != token:
            # The connections start again; the answer is made all the same.
            live.drop()
            self._hub.apply(live, message)
        if not live.loaded:
            change = decode(message)
            assert isinstance(change, Change), "it began, or moved here"
            # All items come with it, and only the place of an answer that waits.
            live.conversation = Conversation(items)
            live.known = change.version if live.keep_queued(_waiting(items, live.response)) else -1
        response = live.response
        assert response is not None and live.turn is None, "it was just begun"
        writer = Writer(
            session_id=live.id,
            token=token,
            response=response,
            # What was told when somebody stops the answer is the last of it: the text is cut there.
            on_stored=lambda: None if turn.stopped else live.connections.pump(),
            on_wish=lambda: turn.stop(None),
            on_refused=lambda reply: self._restorer.refused(live, turn, reply),
            on_lost=lambda: self._lost(live, turn),
        )
        assert live.conversation is not None, "all items came with it"
        turn: Turn = Turn(
            session_id=live.id,
            principal=live.owner,
            response=response,
            writer=writer,
            prompt=_prompt(live.conversation, response),
            binding=binding,
            committer=self._committer,
            attempts=attempts,
            on_migrate=lambda reason: self._note_attempt(live, turn, reason),
            restore=lambda: self._restorer.restore(live, turn),
            known=lambda: self._restorer.know(live),
        )
        live.turn = turn
        if wish is not None:
            turn.stop(wish)
        if live.wish is not None and live.wish[0] == response.id:
            turn.stop(live.wish[1])
        self._hub.spawn(self._run(live, turn), name=f"turn {response.id}")

    async def take_over(self, live: LiveSession, reason: str) -> None:
        """Take the running response over, and make the rest of it here. Holds the session's lock."""
        response = live.response
        if response is None or live.turn is not None:
            return
        reason = reason if response.length else ""  # nothing was made of it that could move
        token = new_id("token")
        doubted, live.doubted = live.doubted, True  # it may be done without an answer
        taken = await self._store.take_over(live.id, live.response_token, token, new_id("epoch"), reason)
        if taken is None:
            return
        response.forget_unstored()  # what an earlier owner of ours had under way is stored, or is no more
        if not live.take_text(taken.text):
            live.drop()  # the store lost some: what we told is not what we would go on from
            return
        live.conversation = Conversation(taken.items)
        live.doubted = doubted
        await self._hub.apply_own(live, taken.message)
        log.info("Session %s: this replica goes on with an answer (%s)", live.id, reason or "it was not begun")
        response.move(State.QUEUED)
        self.start(
            live,
            token,
            taken.message,
            taken.items,
            taken.binding,
            attempts=taken.attempts - 1,
            wish=taken.wish,
        )

    async def _run(self, live: LiveSession, turn: Turn) -> None:
        async def ended(message: bytes) -> None:
            change = await self._hub.apply_own(live, message)
            assert isinstance(change, ResponseEnded), "it is the end"
            # Else somebody changed what we do not know, or the turn was left and its items are not here any more.
            if live.known == change.version and live.conversation is not None:
                self._restorer.keep_end(live)
            self._release(live, turn)
            if change.next is not None and not live.closed:  # else it is found where the session is open now
                try:
                    if not live.loaded:  # nobody here listens: we did not hear what is next
                        await self._hub.load(live)
                    await self.take_over(live, "")
                except StoreError as error:  # it is found later, like any that nobody makes
                    log.info("Session %s: the next answer was not begun: %s", live.id, error)

        try:
            await self._conductor.run(turn, ended, live.lock)
        except Exception:
            log.exception("A turn failed; its session is read again")
            self._release(live, turn)
            live.drop()
        finally:
            if not turn.left:  # else it is being handed over
                self._release(live, turn)
            await self._hub.close_if_idle(live)

    async def _note_attempt(self, live: LiveSession, turn: Turn, reason: str) -> None:
        """Another engine goes on: the attempts count for whoever may take the answer over, and clients are told."""
        response = turn.response
        try:
            async with live.lock:
                doubted, live.doubted = live.doubted, True  # it may be done without an answer
                message = await self._store.note_attempt(
                    live.id, turn.writer.token, turn.attempts + 1, response.length, reason, known=live.known
                )
                live.doubted = doubted
                if message is not None:
                    await self._hub.apply_own(live, message)
        except StoreError as error:  # it only counts
            log.info("Session %s: an attempt was not noted: %s", live.id, error)

    def _lost(self, live: LiveSession, turn: Turn) -> None:
        """The store takes no more of an answer from us: it ended, somebody else has it, or the session is gone."""
        turn.abandon()
        if turn.response.outcome is not None:  # what we know is what is stored
            if live.turn is turn and live.conversation is not None:
                self._restorer.keep_end(live)
            self._release(live, turn)
            return
        log.warning("Session %s: the store does not take our answer; we leave it", live.id)
        self._release(live, turn)
        live.drop()

    @staticmethod
    def _release(live: LiveSession, turn: Turn) -> None:
        if live.turn is turn:  # else another one was begun meanwhile
            live.turn = None
            live.conversation = None

    # --- leaving them to others

    def left_lately(self, session_id: str) -> bool:
        """Whether we left the answer of a session a moment ago: others get to take it first."""
        if time.monotonic() - self._left.get(session_id, float("-inf")) <= _TAKE_BACK_S:
            return True
        self._left.pop(session_id, None)
        return False

    async def hand_over(self) -> None:
        """Leave all running answers to other replicas, until none is here. The caller sets the deadline."""

        async def leave(session_id: str) -> None:
            try:
                await self._leave(lives[session_id])
            except StoreUnavailable as error:
                log.warning("Session %s: an answer could not be handed over: %s", session_id, error)
                raise

        self._hub.leaving = True
        while lives := {live.id: live for live in self._hub.sessions if live.turn is not None}:
            await self._hub.each(lives, leave)
            await asyncio.sleep(_LEAVE_LOOK_S)

    async def _leave(self, live: LiveSession) -> None:
        """Store what is there of an answer, and leave it without an owner."""
        turn = live.turn
        if turn is None or not turn.leave():  # it is about to end
            return
        writer = turn.writer
        try:
            await self._committer.settle(writer)
            async with live.lock:
                if writer.lost:
                    return
                self._left[live.id] = time.monotonic()
                message = await self._store_and_leave(live, writer)
                if message is None and await self._restorer.restore(live, turn):  # the store had lost it
                    message = await self._store_and_leave(live, writer)
                if message is None:  # it is somebody else's
                    self._committer.lose(writer)
                    return
                writer.lost = True
                self._release(live, turn)
                await self._hub.apply_own(live, message)
        finally:
            writer.lost = True  # an answer to an old commit is nothing to whoever goes on
            self._release(live, turn)
            await self._hub.close_if_idle(live)
        await self._store.replicas.wake(live.id, now_ms())

    async def _store_and_leave(self, live: LiveSession, writer: Writer) -> bytes | None:
        """The message that says that nobody makes the answer now; None if the store does not know it as ours."""
        try:
            if await self._committer.store_rest(writer):
                return await self._store.hand_over(live.id, writer.token, new_id("token"), known=live.known)
        except StoreBehind:
            pass
        return None


def _prompt(conversation: Conversation, response: Response) -> tuple[Item, ...]:
    """What stands before the answer, or what came with the question in its place."""
    given = response.begun.input
    return conversation.before(response.item_id) if given is UNSET else tuple(given)


def _waiting(items: tuple[Item, ...], made: Response | None) -> str | None:
    """The item of the answer that waits behind the one that is made, if one does."""
    made_id = None if made is None else made.item_id
    return next((item.id for item in items if item.status == "in_progress" and item.id != made_id), None)
