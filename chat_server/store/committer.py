"""Group commit: the text of all running responses goes to the store together; what is stored may be told.

At once after a quiet moment, then at most one pipeline each ``gather_s``, and none before the last is answered. So a
token waits a few milliseconds at most, and a thousand streams cost one round trip, not a thousand.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from chat_server.core.response import Commit, Response
from chat_server.errors import StoreError, StoreUnavailable
from chat_server.store.redis import Store
from chat_server.store.replies import CommitReply, TextCommit

log = logging.getLogger(__name__)

_GATHER_S = 0.005
#: seconds between tries while the store is away.
_RETRY_S = 0.2


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


class Committer:
    """Takes the text of responses to the store. ``add`` is a plain call from the token path; ``run`` does the rest."""

    def __init__(self, store: Store, *, gather_s: float = _GATHER_S) -> None:
        self._store = store
        self._gather_s = gather_s
        self._dirty: dict[Writer, None] = {}
        self._wake = asyncio.Event()
        self._answered = asyncio.Event()

    def add(self, writer: Writer) -> None:
        """The writer's response has text that is not stored."""
        self._dirty[writer] = None
        self._wake.set()

    async def settle(self, writer: Writer) -> None:
        """Wait until no commit of the writer is under way; what is pending then stays with the caller.

        Waits as long as the store is away: the caller sets the deadline.
        """
        while writer.response.in_flight and not writer.lost:
            await self._answered.wait()
        self._dirty.pop(writer, None)  # only now: what the store lost on its way is sent again from there

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
        [reply] = await self._store.commit([_text_commit(writer, response.whole_commit())])
        if reply not in ("ok", "wished"):
            return False
        if response.in_flight:
            self._answer(writer, reply)
        return not writer.lost

    async def run(self) -> None:
        """Commit until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            started = loop.time()
            batch = [(writer, commit) for writer in self._dirty if (commit := self._take(writer)) is not None]
            self._dirty.clear()
            if not batch:
                continue
            replies = await self._store_batch([commit for _, commit in batch], [writer for writer, _ in batch])
            for (writer, _), reply in zip(batch, replies, strict=True):
                self._answer(writer, reply)
            self._tell_answered()
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

    async def _store_batch(self, commits: list[TextCommit], writers: list[Writer]) -> list[CommitReply]:
        """Try until the store took it: each commit says where it is written, so a retry can not double it."""
        waiting = False
        while True:
            try:
                replies = await self._store.commit(commits)
            except StoreUnavailable as error:
                if not waiting:
                    log.warning("Answers wait for the store: %s", error)
                waiting = True
            except StoreError as error:
                log.error("The store does not take text: %s", error)
                waiting = True
            else:
                if waiting:
                    log.warning("The store is back; %d answers go on", len(writers))
                for writer in writers:
                    writer.response.waiting_for_store = False
                return replies
            for writer in writers:
                writer.response.waiting_for_store = True
            await asyncio.sleep(_RETRY_S)

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
