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
from chat_server.core.items import Item, to_wire
from chat_server.core.placement import Binding
from chat_server.core.response import Response, State, cancelled_in_queue
from chat_server.errors import ClientError, StoreBehind, StoreError, StoreUnavailable
from chat_server.hub import Hub, now_ms
from chat_server.live import LiveSession
from chat_server.settings import Limits
from chat_server.store.committer import Committer, Writer
from chat_server.store.messages import Change, ResponseEnded, decode, end_body
from chat_server.store.redis import LEASE_MS, Store
from chat_server.store.replies import Cut, Held, Snapshot
from chat_server.turn import Conductor, Turn

log = logging.getLogger(__name__)

#: seconds between looks at answers whose owner may be gone: those that somebody here reads, and all.
_LOOK_S = 0.5
_LOOK_EVERYWHERE_S = 1.0
#: seconds between two signs of ours that we make an answer; milliseconds without one after which others look at it.
_CONFIRM_S = 1.0
_UNCONFIRMED_MS = LEASE_MS + 500
#: answers that are looked at in one go.
_MOST = 1000
#: seconds for which an end is kept to be written again, and for which a store that is away is waited for.
_KEEP_ENDED_S = 5.0
_RESTORE_S = 600.0
#: seconds between two rounds of leaving what runs here: some answers are about to end.
_LEAVE_LOOK_S = 0.05
#: seconds that others have to take an answer that we left.
_TAKE_BACK_S = 1.0
#: more code points than any text has: all of it is kept.
_ALL = 1 << 53


class Answers:
    """Owns the turns of this replica. ``run`` must be running."""

    def __init__(self, *, hub: Hub, store: Store, committer: Committer, conductor: Conductor, limits: Limits) -> None:
        self._hub = hub
        self._store = store
        self._committer = committer
        self._conductor = conductor
        self._limits = limits
        self._confirmed_at = 0.0
        self._looked_at = 0.0
        #: sessions whose answer ended a moment ago, since when (monotonic), and as they were then.
        self._ended: dict[str, tuple[float, Snapshot]] = {}
        hub.when_back = self.check_kept
        #: when we left answers that nobody has taken yet (monotonic).
        self._left: dict[str, float] = {}

    async def run(self) -> None:
        """Look after answers until cancelled: confirm ours, find those that nobody makes any more."""
        await self._hub.every(_LOOK_S, self._look, sooner=self._hub.look_now)

    # --- beginning and ending

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
            self._hub.drop(live)
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
            on_stored=lambda: None if turn.stopped else live.pump(),
            on_wish=lambda: turn.stop(None),
            on_refused=lambda reply: self._refused(live, turn, reply),
            on_lost=lambda: self._lost(live, turn),
        )
        assert live.conversation is not None, "all items came with it"
        turn: Turn = Turn(
            session_id=live.id,
            principal=live.owner,
            response=response,
            writer=writer,
            prompt=(
                live.conversation.before(response.item_id)
                if response.begun.input is UNSET
                else tuple(response.begun.input)
            ),
            binding=binding,
            committer=self._committer,
            attempts=attempts,
            on_migrate=lambda reason: self._note_attempt(live, turn, reason),
            restore=lambda: self._restore(live, turn),
            known=lambda: self._know(live),
        )
        live.turn = turn
        if wish is not None:
            turn.stop(wish)
        self._hub.spawn(self._run(live, turn), name=f"turn {response.id}")

    async def _run(self, live: LiveSession, turn: Turn) -> None:
        async def ended(message: bytes) -> None:
            change = await self._hub.apply_own(live, message)
            assert isinstance(change, ResponseEnded), "it is the end"
            # Else somebody changed what we do not know, or the turn was left and its items are not here any more.
            if live.known == change.version and live.conversation is not None:
                self._ended[live.id] = (time.monotonic(), _snapshot(live, None))
            self._release(live, turn)
            if change.next is not None and not live.closed:  # else it is found where the session is open now
                if not live.loaded:  # nobody here listens: we did not hear what is next
                    await self._hub.look(live)
                await self._take_over(live, "")

        try:
            await self._conductor.run(turn, ended, live.lock)
        except Exception:
            log.exception("A turn failed; its session is read again")
            self._release(live, turn)
            self._hub.drop(live)
        finally:
            if not turn.left:  # else it is being handed over
                self._release(live, turn)
            await self._hub.close_if_idle(live)

    async def _note_attempt(self, live: LiveSession, turn: Turn, reason: str) -> None:
        """Another engine goes on: the attempts count for whoever may take the answer over, and clients are told."""
        response = turn.response
        try:
            async with live.lock:
                message = await self._store.note_attempt(
                    live.id, turn.writer.token, turn.attempts + 1, response.length, reason, known=live.known
                )
                if message is not None:
                    await self._hub.apply_own(live, message)
        except StoreError as error:  # it only counts
            log.info("Session %s: an attempt was not noted: %s", live.id, error)

    def _lost(self, live: LiveSession, turn: Turn) -> None:
        """The store takes no more of an answer from us: somebody else has it, or the session is gone."""
        log.warning("Session %s: the store does not take our answer; we leave it", live.id)
        turn.abandon()
        self._release(live, turn)
        self._hub.drop(live)

    @staticmethod
    def _release(live: LiveSession, turn: Turn) -> None:
        if live.turn is turn:  # else another one was begun meanwhile
            live.turn = None
            live.conversation = None

    # --- writing again what the store lost

    def _refused(self, live: LiveSession, turn: Turn, reply: str) -> None:
        log.info("Session %s: the store says %r to our answer", live.id, reply)
        self._hub.spawn(self._write_again(live, turn), name=f"restore {live.id}")

    async def _write_again(self, live: LiveSession, turn: Turn) -> None:
        """Find out whether an answer is somebody else's now, or the store lost it: then it gets it back."""
        deadline = time.monotonic() + _RESTORE_S
        while not turn.writer.lost and time.monotonic() < deadline:
            try:
                async with live.lock:
                    if await self._restore(live, turn):
                        self._committer.resume(turn.writer)
                        return
                    break
            except StoreUnavailable:
                await asyncio.sleep(_LOOK_S)
            except Exception:
                log.exception("Session %s: it could not be written again", live.id)
                break
        self._committer.lose(turn.writer)

    async def _restore(self, live: LiveSession, turn: Turn) -> bool:
        """Write the session again, if the store holds an older one. Holds the session's lock.

        False if the answer is not ours any more.
        """
        if live.turn is not turn:
            return False
        return await self._restore_as(live.id, _snapshot(live, turn)) or await self._store.holds(
            live.id, turn.writer.token
        )

    async def _restore_as(self, session_id: str, snapshot: Snapshot) -> bool:
        restored = await self._store.restore(session_id, snapshot)
        if restored:
            log.warning("Session %s: the store had lost changes; it is written again", session_id)
            live = self._hub.find(session_id)
            if live is not None:
                self._hub.doubt(live)  # that we listen to it may be lost too
        return restored

    async def _know(self, live: LiveSession) -> int:
        """The version of the session that we know all of: what changed while nobody here listened is read."""
        if not live.loaded:
            [held] = await self._store.held([live.id])
            if held is not None and held.version > live.known:
                await self._hub.look(live)
        return live.known

    async def write_again(self, live: LiveSession) -> bool:
        """Write a session again that the store holds an older copy of, if we can. Holds the session's lock."""
        if live.turn is not None:
            return await self._restore(live, live.turn)
        if live.id in self._ended:
            return await self._restore_as(live.id, self._ended[live.id][1])
        return False

    async def check_kept(self) -> None:
        """Whether the store still holds our answers, and those that ended a moment ago.

        An end is kept until it was found in the store when it was old enough: a store that is away may come back
        without it.
        """
        now = time.monotonic()
        makes = {live.id: (live, live.turn) for live in self._hub.sessions if live.turn is not None}
        ended = dict(self._ended)
        known = {session_id: Held(snapshot.version, 0) for session_id, (_, snapshot) in ended.items()}
        known |= {live.id: Held(live.known, turn.response.byte_length) for live, turn in makes.values()}
        held = dict(zip(known, await self._store.held(list(known)), strict=True))
        lost = {id for id, holds in held.items() if holds is not None and holds.version < known[id].version}
        for live, turn in makes.values():
            holds = held[live.id]
            if live.id in lost:
                async with live.lock:
                    if live.turn is turn and not await self._restore(live, turn):
                        self._committer.lose(turn.writer)
            elif holds is not None and holds.size < known[live.id].size:
                await self._committer.store_again(turn.writer)
        for session_id, kept in ended.items():
            if session_id in lost and session_id not in makes:
                await self._restore_as(session_id, kept[1])
            old = now - kept[0] > _KEEP_ENDED_S and held[session_id] is not None
            if old and self._ended.get(session_id) is kept:
                del self._ended[session_id]

    # --- going on with what nobody makes any more

    async def _look(self) -> None:
        now = time.monotonic()
        if not self._hub.ready:
            return
        alive: dict[str, bool] = {}

        async def mind(session_id: str) -> None:
            async with mirrored[session_id].lock:
                await self._go_on(mirrored[session_id], alive)

        async def visit(session_id: str) -> None:
            await self._visit(session_id, alive)

        loaded = [live for live in self._hub.sessions if live.loaded]
        mirrored = {live.id: live for live in loaded if live.response is not None and live.turn is None}
        await self._hub.each(mirrored, mind)
        asked_for = list(self._hub.asked_for)
        self._hub.asked_for.clear()  # one that can not be visited now is found below, later
        await self._hub.each(asked_for, visit)
        if now - self._confirmed_at > _CONFIRM_S:
            self._confirmed_at = now
            await self.check_kept()
            await self._abandon_unwatched()
            await self._store.confirm_running([live.id for live in self._hub.sessions if live.turn], now_ms())
        if now - self._looked_at > _LOOK_EVERYWHERE_S:
            # The first time all of them: their owners may be gone for longer than we are here.
            before = now_ms() - _UNCONFIRMED_MS if self._looked_at else now_ms()
            self._looked_at = now
            await self._hub.each(await self._store.unconfirmed(before, _MOST), visit)

    async def _visit(self, session_id: str, alive: dict[str, bool]) -> None:
        """Look at a session that perhaps nobody here listens to."""
        try:
            live = await self._hub.open_for_work(session_id)
        except StoreUnavailable:
            raise
        except Exception as error:  # it is gone, or broken
            if not isinstance(error, ClientError):
                log.warning("Session %s: it can not be read (%s)", session_id, type(error).__name__)
            await self._store.forget_running(session_id)
            return
        try:
            async with live.lock:
                await self._go_on(live, alive)
            if live.response is None or not live.loaded:
                await self._store.forget_running(session_id)
        finally:
            await self._hub.close(live)

    async def _go_on(self, live: LiveSession, alive: dict[str, bool]) -> None:
        """Go on with an answer that nobody makes any more. Holds the session's lock.

        ``alive``: what was found out about replicas in this round.
        """
        if live.response is None or live.turn is not None or live.closed or not live.loaded:
            return
        owner = live.response_owner
        if not owner:
            if time.monotonic() - self._left.get(live.id, float("-inf")) > _TAKE_BACK_S:
                self._left.pop(live.id, None)
                await self._take_over(live, "replica_drained")
        elif owner == self._store.replica_id:
            # Without a turn: the store lost its end, or it was begun by a write that we gave up, or follows one that we
            # ended.
            if await self.write_again(live):
                self._hub.drop(live)
            else:
                await self._take_over(live, "replica_lost")
        else:
            if owner not in alive:
                alive[owner] = await self._hub.lease.lives(owner)
            if not alive[owner]:
                await self._take_over(live, "replica_lost")

    async def _take_over(self, live: LiveSession, reason: str) -> None:
        """Take the running response over, and make the rest of it here. Holds the session's lock."""
        response = live.response
        if response is None or live.turn is not None:
            return
        reason = reason if response.length else ""  # nothing was made of it that could move
        token = new_id("token")
        live.doubted = True  # until it is done: each step may stay without an answer
        taken = await self._store.take_over(live.id, live.response_token, token, new_id("epoch"), reason)
        if taken is None:
            return
        response.forget_unstored()  # what an earlier owner of ours had under way is stored, or is no more
        if not live.take_text(taken.text):
            self._hub.drop(live)  # the store lost some: what we told is not what we would go on from
            return
        live.conversation = Conversation(taken.items)
        await self._hub.apply_own(live, taken.message)
        live.doubted = False
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

    async def _abandon_unwatched(self) -> None:
        """Stop the answers of sessions that nobody has been connected to for too long; what is stored stays."""
        alone = [live for live in self._hub.sessions if live.turn is not None and not live.connections]
        since = await self._store.unwatched_ms([live.id for live in alone])
        window_ms = self._limits.resume_window_s * 1000
        left_alone = {
            live.id: live.turn
            for live, unwatched in zip(alone, since, strict=True)
            if live.turn is not None and unwatched is not None and unwatched >= window_ms
        }

        async def abandon(session_id: str) -> None:
            turn = left_alone[session_id]
            wish = None if turn.stopped else await self._store.cancel(session_id, turn.response.id, _ALL)
            if isinstance(wish, Cut):
                log.info("Session %s: nobody came back for an answer; it is stopped", session_id)
                turn.stop(wish)

        await self._hub.each(left_alone, abandon)

    # --- leaving them to others

    async def hand_over(self) -> None:
        """Leave all running answers to other replicas, until none is here. The caller sets the deadline."""

        async def leave(session_id: str) -> None:
            try:
                await self._leave(lives[session_id])
            except StoreUnavailable as error:
                log.warning("Session %s: an answer could not be handed over: %s", session_id, error)
                raise

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
                if message is None and await self._restore(live, turn):  # the store had lost it
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
        await self._store.wake(live.id, now_ms())

    async def _store_and_leave(self, live: LiveSession, writer: Writer) -> bytes | None:
        """The message that says that nobody makes the answer now; None if the store does not know it as ours."""
        try:
            if await self._committer.store_rest(writer):
                return await self._store.hand_over(live.id, writer.token, new_id("token"), known=live.known)
        except StoreBehind:
            pass
        return None


def _waiting(items: tuple[Item, ...], made: Response | None) -> str | None:
    """The item of the answer that waits behind the one that is made, if one does."""
    made_id = None if made is None else made.item_id
    return next((item.id for item in items if item.status == "in_progress" and item.id != made_id), None)


def _snapshot(live: LiveSession, turn: Turn | None) -> Snapshot:
    """The session as this replica knows it, with the answer that is made here."""
    fields: dict[str, str | bytes] = {}
    text = ""
    response = turn.response if turn is not None else live.response
    if response is not None:
        token = turn.writer.token if turn is not None else live.response_token
        fields = _fields(response, token) | {"replica": live.response_owner}
        later = response.epochs[len(response.begun.epochs) :]
        if later:
            fields["later"] = to_wire(later)[1:-1]
        if turn is not None and turn.cut is not None:
            fields["cancel"] = str(turn.cut.length)
        # With what is under way: it may be told by an answer of the store that comes only after this.
        text = response.text_under_way()
    queued = live.queued
    if queued is not None:
        item, outcome = cancelled_in_queue(queued)
        waits = _fields(queued, live.queued_token) | {
            "ended_item": to_wire(item),
            "end": end_body(queued.id, 0, "", outcome),
        }
        fields |= {f"q_{name}": value for name, value in waits.items()}
    made = {one.item_id for one in (response, queued) if one is not None}
    items = live.conversation.items if live.conversation is not None else ()
    return Snapshot(
        version=live.known,
        owner=live.owner,
        model=live.model,
        settings=live.settings,
        created_ms=live.created_ms,
        items=tuple(item for item in items if item.status != "in_progress" or item.id in made),
        response=fields,
        text=text,
    )


def _fields(response: Response, token: str) -> dict[str, str | bytes]:
    """What the response hash holds of a response (``store/lua/_queue.lua``)."""
    begun = response.begun
    return {
        "id": response.id,
        "item_id": response.item_id,
        "in_reply_to": begun.in_reply_to if isinstance(begun.in_reply_to, str) else "",
        "token": token,
        "begun": to_wire(begun),
        "message": "",
    }
