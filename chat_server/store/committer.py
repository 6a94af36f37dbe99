"""Group commit: the text of all running responses goes to the store together; what is stored may be told.

At once after a quiet moment, then at most one pipeline each ``gather_s``, and none before the last is answered. So a
token waits a few milliseconds at most, and a thousand streams cost one round trip, not a thousand. In a cluster that
is so for each of its servers: one that is away keeps no text of the others waiting.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from chat_server.core.response import Commit, Response
from chat_server.errors import StoreError, StoreUnavailable
from chat_server.store.redis import Store
from chat_server.store.replies import CommitReply, TextCommit

log = logging.getLogger(__name__)

_GATHER_S = 0.005
#: seconds between tries while the store is away.
_RETRY_S = 0.2


@dataclass(eq=False, slots=True)
class Lane:
    """The writers whose sessions lie on one server of the store, when they begin: they go to it together."""

    name: str
    #: those that have text which is not stored.
    dirty: dict[Writer, None] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    #: commits that the store did not answer; each says where it is written, so sent again it can not double text.
    again: dict[Writer, TextCommit] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Writer:
    """One running response as its owner writes it.

    ``on_stored`` is called after its text was stored: more may be told. ``on_wish`` when the store says that somebody
    wants it stopped. ``on_refused`` when the store does not take its text (another owner, or the store lost the
    response): nothing more of it is written until ``resume`` or ``lose`` is called. ``on_lost`` when it was lost.
    """

    session_id: str
    token: str
    response: Response
    on_stored: Callable[[], None]
    on_wish: Callable[[], None]
    on_refused: Callable[[CommitReply], None]
    on_lost: Callable[[], None]
    lost: bool = False
    #: the store does not take its text at the moment.
    waits: bool = False
    #: the store lost some of its text: all of it is to be written.
    whole: bool = False
    lane: Lane | None = None


class Committer:
    """Takes the text of responses to the store. ``add`` is a plain call from the token path; ``run`` does the rest."""

    def __init__(self, store: Store, *, gather_s: float = _GATHER_S) -> None:
        self._store = store
        self._gather_s = gather_s
        self._lanes: dict[str, Lane] = {}
        self._new_lanes: asyncio.Queue[Lane] = asyncio.Queue()
        self._answered = asyncio.Event()

    def add(self, writer: Writer) -> None:
        """The writer's response has text that is not stored."""
        lane = writer.lane or self._enter(writer)
        lane.dirty[writer] = None
        lane.wake.set()

    def _enter(self, writer: Writer) -> Lane:
        name = self._store.shard(writer.session_id)
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = Lane(name)
            self._new_lanes.put_nowait(lane)
        writer.lane = lane
        return lane

    async def settle(self, writer: Writer) -> None:
        """Wait until no commit of the writer is under way; what is pending then stays with the caller.

        Waits as long as the store is away: the caller sets the deadline.
        """
        while writer.response.in_flight and not writer.lost:
            await self._answered.wait()
        if writer.lane is not None:
            writer.lane.dirty.pop(writer, None)  # only now: what the store lost on its way is sent again from there

    def resume(self, writer: Writer) -> None:
        """The store holds what it held before, and takes more: what was on its way is sent again."""
        writer.waits = False
        writer.whole = writer.response.in_flight
        self.add(writer)

    def lose(self, writer: Writer) -> None:
        """Nothing more of it will be stored."""
        writer.lost = True
        try:
            writer.on_lost()
        except Exception:
            log.exception("A response that was lost could not be ended in order")
        self._tell_answered()

    def _tell_answered(self) -> None:
        self._answered.set()
        self._answered = asyncio.Event()

    async def store_rest(self, writer: Writer) -> bool:
        """Store all that another engine can go on from, of a response that gets no more text. Only when settled.

        From its beginning: whoever takes it over goes on from what the store holds, which may have lost some unnoticed.
        False if the store does not take it. Raises StoreError.
        """
        response = writer.response
        response.take_commit()
        reply = await self.store_whole(writer)
        if reply not in ("ok", "wished"):
            return False
        if response.in_flight:
            self._answer(writer, reply)
        return not writer.lost

    async def store_whole(self, writer: Writer) -> CommitReply:
        """Store once more what was stored, and what is under way: the store may have lost some of it.

        Harmless if the response is not ours any more. Raises StoreUnavailable.
        """
        [reply] = await self._store.commit([_text_commit(writer, writer.response.whole_commit())])
        if isinstance(reply, StoreUnavailable):
            raise reply
        return reply

    async def run(self) -> None:
        """Commit until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                lane = await self._new_lanes.get()
                tasks.create_task(self._serve(lane), name=f"commits to {lane.name or 'the store'}")

    async def _serve(self, lane: Lane) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await lane.wake.wait()
            lane.wake.clear()
            started = loop.time()
            batch = {writer: commit for writer, commit in lane.again.items() if not writer.lost}
            for writer in lane.dirty:
                if writer not in batch and (commit := self._take(writer)) is not None:
                    batch[writer] = commit
            lane.dirty.clear()
            if not batch:
                lane.again.clear()
                continue
            await self._store_batch(lane, batch)
            self._tell_answered()
            if lane.again:
                lane.wake.set()
                await asyncio.sleep(_RETRY_S)
                continue
            rest = self._gather_s - (loop.time() - started)
            if rest > 0:
                await asyncio.sleep(rest)

    @staticmethod
    def _take(writer: Writer) -> TextCommit | None:
        response = writer.response
        if writer.waits or writer.lost:
            return None
        commit = response.whole_commit() if writer.whole else response.take_commit()
        if commit is None:
            return None
        return _text_commit(writer, commit)

    async def _store_batch(self, lane: Lane, batch: dict[Writer, TextCommit]) -> None:
        """Send commits, and carry the replies out; what the store did not answer is sent again."""
        replies: Sequence[CommitReply | StoreError]
        try:
            replies = await self._store.commit(list(batch.values()))
        except StoreError as error:
            replies = [error] * len(batch)
        except Exception as error:
            if not lane.again:
                log.exception("The text of answers could not be sent; it is sent again")
            replies = [StoreError(type(error).__name__)] * len(batch)
        waited, lane.again = len(lane.again), {}
        trouble = None
        for (writer, commit), reply in zip(batch.items(), replies, strict=True):
            writer.response.waiting_for_store = isinstance(reply, StoreError)
            if isinstance(reply, StoreError):
                trouble = reply
                lane.again[writer] = commit
            else:
                self._answer(writer, reply)
        if trouble is not None and not waited:
            log.warning("Answers wait for the store: %s", trouble)
        elif trouble is None and waited:
            log.warning("The store is back; %d answers go on", waited)

    def _answer(self, writer: Writer, reply: CommitReply) -> None:
        """Carry one reply out. A callback that raises ends its own response, nobody else's."""
        if writer.lost:
            return  # the response may be made by somebody else now, perhaps here
        try:
            match reply:
                case "ok" | "wished":
                    writer.whole = False
                    writer.response.stored_in_flight()
                    if reply == "wished":
                        writer.on_wish()
                    writer.on_stored()
                    if writer.response.has_pending:
                        self.add(writer)
                case "short":
                    writer.whole = True
                    self.add(writer)
                case "refused" | "missing":
                    writer.waits = True
                    writer.on_refused(reply)
        except Exception:
            log.exception("A response failed while its text was told; it ends")
            self.lose(writer)


def _text_commit(writer: Writer, commit: Commit) -> TextCommit:
    return TextCommit(
        session_id=writer.session_id,
        response_id=writer.response.id,
        token=writer.token,
        epoch=writer.response.epoch,
        byte_offset=commit.byte_offset,
        offset=commit.offset,
        data=commit.data,
    )
