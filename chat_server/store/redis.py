"""The store: one atomic operation per script, over the keys of one session. Truth is here and nowhere else.

Every call raises StoreUnavailable when the server can not be reached; the same call with the same ids is then safe to
repeat.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

from chat_server.core.items import Item, SessionSettings, decode_item, encode_item, to_wire
from chat_server.core.placement import Binding
from chat_server.core.principal import Principal
from chat_server.core.response import Outcome, Response, cancelled_in_queue, ended_response
from chat_server.errors import StoreBehind, StoreError, StoreUnavailable
from chat_server.store import keys, messages
from chat_server.store.replicas import Replicas
from chat_server.store.replies import (
    Added,
    BeginReply,
    CommitReply,
    Cut,
    Held,
    SessionState,
    Snapshot,
    TakenOver,
    TextCommit,
    text_of,
)
from chat_server.store.server import Server

log = logging.getLogger(__name__)

#: functions that decide who answers, and what was answered: they count when replicas of the server have them too.
_DURABLE = frozenset({"begin", "take_over", "finish"})


class Store:
    """The sessions in a Redis-protocol server, as one replica sees them.

    ``open`` before anything else, ``close`` at the end.
    """

    def __init__(
        self,
        server: Server,
        replica_id: str,
        *,
        ttl_s: int,
        empty_ttl_s: int,
        max_items: int,
        max_session_bytes: int,
    ) -> None:
        self.replica_id = replica_id
        #: what this replica and the others know of each other.
        self.replicas = Replicas(server, replica_id)
        self._ttl = ttl_s * 1000
        self._empty_ttl = empty_ttl_s * 1000
        self._max_items = max_items
        self._max_session_bytes = max_session_bytes
        self._server = server

    async def open(self) -> None:
        """Load the functions. Raises StoreUnavailable, or StoreError if the server is too old for them."""
        await self._server.open()

    async def close(self) -> None:
        await self._server.close()

    async def ping(self) -> None:
        """Raises StoreUnavailable if the store does not answer."""
        await self._server.run("PING")

    def shard(self, session_id: str) -> str:
        """The server of the store that holds a session, by name: sessions with the same one are away together."""
        return self._server.shard(keys.session_keys(session_id)[0])

    # --- sessions

    async def create_session(self, session_id: str, owner: Principal, model: str, settings: SessionSettings) -> None:
        """Store a new session, under an id that is new."""
        reply = await self._call(
            session_id, "session_create", *self._ttls, owner.tenant, owner.user, model, to_wire(settings)
        )
        if reply != b"ok":
            raise StoreError("A session with this new id is there already.")

    async def watch(self, session_id: str, *, changes: bool = False) -> SessionState | None:
        """Listen to a session from now on, and get its state as of now; None if there is none.

        With ``changes`` the last messages come too, for who missed some.
        """
        reply = await self._call(session_id, "watch", *self._ttls, self.replica_id, int(changes))
        return None if reply[0] == b"gone" else SessionState.of(reply)

    async def unwatch(self, session_id: str) -> None:
        """Stop listening."""
        await self._call(session_id, "unwatch", self.replica_id)

    async def renew_watch(self, session_ids: Sequence[str]) -> list[Held | None]:
        """Go on listening to these sessions; what the store holds of each (version -1: it is gone).

        None, here and below, for one that the store does not answer for now.
        """
        replies = await self._ask_each(session_ids, "renew", *self._ttls, self.replica_id)
        return [None if reply is None else Held.of(reply) for reply in replies]

    async def unwatched_ms(self, session_ids: Sequence[str]) -> list[int | None]:
        """For how long nobody has listened to each of these sessions, on any replica; -1 if somebody does."""
        replies = await self._ask_each(session_ids, "unwatched")
        return [None if reply is None else int(reply) for reply in replies]

    async def update_session(
        self, session_id: str, version: int, model: str, settings: SessionSettings
    ) -> bytes | Literal["stale", "gone"]:
        """Change settings or model of the session as it was at ``version``; the message that says so, or why not.

        Raises StoreBehind.
        """
        reply = await self._call(
            session_id,
            "session_update",
            *self._ttls,
            self.replica_id,
            version,
            model,
            to_wire(settings),
            to_wire(model),
        )
        if reply[0] == b"ok":
            return bytes(reply[1])
        return "stale" if reply[0] == b"stale" else "gone"

    async def held(self, session_ids: Sequence[str]) -> list[Held | None]:
        """What the store holds of each session (version -1: it is not there)."""
        replies = await self._ask_each(session_ids, "held")
        return [None if reply is None else Held.of(reply) for reply in replies]

    async def restore(self, session_id: str, snapshot: Snapshot) -> bool:
        """Write a session again that the store lost; False if it holds that or something newer, or it was deleted."""
        reply = await self._call(session_id, "session_restore", *self._ttls, self.replica_id, *snapshot.arguments())
        return bool(reply[0] == b"ok")

    async def holds(self, session_id: str, token: str) -> bool:
        """Whether the session's running response is that of this token."""
        held = await self._server.run("HGET", keys.session_keys(session_id)[3], "token")
        return bool(held == token.encode())

    async def was_deleted(self, session_id: str) -> bool:
        """Whether a session that is not there was deleted, and not lost."""
        return bool(await self._server.run("EXISTS", keys.session_keys(session_id)[8]))

    async def delete_session(self, session_id: str, owner: Principal, *, known: int = -1) -> bytes | None:
        """Delete a session and all that is in it; the message, or None if it is gone already.

        One that the caller knows is deleted also if the store lost it: nobody writes it again then.
        """
        await self._server.run("ZREM", keys.user_sessions(owner), session_id)
        reply = await self._call(session_id, "session_delete", self.replica_id, known)
        return bytes(reply[1]) if reply[0] == b"ok" else None

    async def session_count(self, principal: Principal, now_ms: int) -> int:
        """How many sessions with items the user has; those that ended their life are forgotten first."""
        key = keys.user_sessions(principal)
        _, count = await self._server.run_many(("ZREMRANGEBYSCORE", key, "-inf", now_ms - self._ttl), ("ZCARD", key))
        return int(count)

    async def note_session(self, principal: Principal, session_id: str, now_ms: int) -> None:
        """Put a session into its user's index, or move it to the front."""
        await self._server.run("ZADD", keys.user_sessions(principal), now_ms, session_id)

    # --- items

    async def add_item(self, session_id: str, item: Item, previous: str | None, *, known: int = -1) -> Added | None:
        """Put an item into the conversation; None if the session is gone. Raises StoreBehind.

        ``known`` is the caller's version of the session here and below: the store must not hold an older one.
        """
        reply = await self._call(
            session_id,
            "item_add",
            *self._ttls,
            self.replica_id,
            self._max_items,
            item.id,
            encode_item(item),
            previous or "",
            known,
            self._max_session_bytes,
        )
        return None if reply[0] == b"gone" else Added.of(reply)

    async def get_item(self, session_id: str, item_id: str) -> Item | None:
        """One item as it is stored."""
        raw = await self._server.run("HGET", keys.session_keys(session_id)[1], item_id)
        return decode_item(raw) if isinstance(raw, bytes) else None

    async def delete_item(self, session_id: str, item: Item, *, known: int = -1) -> bytes | Literal["busy", "gone"]:
        """Take an item out; the message, or why not. Raises StoreBehind."""
        in_reply_to = item.in_reply_to if isinstance(item.in_reply_to, str) else ""
        response_id = item.response_id if isinstance(item.response_id, str) else ""
        reply = await self._call(
            session_id, "item_delete", *self._ttls, self.replica_id, item.id, in_reply_to, response_id, known
        )
        if reply[0] == b"ok":
            return bytes(reply[1])
        return "busy" if reply[0] == b"busy" else "gone"

    async def get_items(self, session_id: str, item_ids: Sequence[str]) -> list[Item | None]:
        """Items as they are stored, in this order; None for one that is not there."""
        if not item_ids:
            return []
        found = await self._server.run("HMGET", keys.session_keys(session_id)[1], *item_ids)
        return [decode_item(raw) if isinstance(raw, bytes) else None for raw in found]

    async def truncate_item(
        self, session_id: str, read: Item, new: Item, text_end: int, *, known: int = -1
    ) -> bytes | Literal["busy", "gone", "stale"]:
        """Put the shortened item in the place of the one that was ``read``; the message, or why not.

        Raises StoreBehind.
        """
        reply = await self._call(
            session_id,
            "item_replace",
            *self._ttls,
            self.replica_id,
            read.id,
            encode_item(read),
            encode_item(new),
            messages.truncated_body(new, text_end),
            known,
        )
        if reply[0] == b"ok":
            return bytes(reply[1])
        kind: Literal["busy", "gone", "stale"] = reply[0].decode()
        return kind

    async def last_items(self, session_id: str, count: int) -> tuple[int, str | None, list[Item]] | None:
        """The last ``count`` items (0: all): the version they were read at, the id before the first, the items."""
        reply = await self._call(session_id, "items_last", count)
        if reply[0] == b"gone":
            return None
        return int(reply[1]), text_of(reply[2]), [decode_item(raw) for raw in reply[3] if raw]

    async def answer(self, session_id: str, response_id: str) -> tuple[int, Response | None] | None:
        """A response that ended (None if nothing is known of it), and the version at which it was read."""
        reply = await self._call(session_id, "answer", response_id)
        if reply[0] == b"gone":
            return None
        response = None
        if reply[3]:
            response = ended_response(decode_item(reply[3]), previous=text_of(reply[2]), kept=reply[4] == b"1")
        return int(reply[1]), response

    # --- responses

    async def begin(
        self,
        session_id: str,
        response: Response,
        token: str,
        *,
        if_active: Literal["reject", "queue", "interrupt"] = "reject",
        cuts: str = "",
        cut: int = 0,
        known: int = -1,
    ) -> BeginReply | None:
        """Begin a response, or queue it; None if the session is gone. With the same token it may be asked again.

        ``interrupt`` stops the running one: cut to ``cut`` if it is the one that ``cuts`` names, else as it is. Behind
        one that is being stopped it is queued in any case. Raises StoreBehind.
        """
        begun = response.begun
        in_reply_to = begun.in_reply_to if isinstance(begun.in_reply_to, str) else ""
        ended_item, outcome = cancelled_in_queue(response)
        reply = await self._call(
            session_id,
            "begin",
            *self._ttls,
            self.replica_id,
            self._max_items,
            begun.id,
            begun.item_id,
            in_reply_to,
            token,
            encode_item(response.item()),
            to_wire(begun),
            if_active,
            cuts,
            cut,
            encode_item(ended_item),
            messages.end_body(begun.id, 0, "", outcome),
            known,
            self._max_session_bytes,
        )
        return None if reply[0] == b"gone" else BeginReply.of(reply)

    async def bind(self, session_id: str, read: Binding | None, new: Binding) -> Binding | None:
        """Bind the session to ``new`` if its binding is still ``read``; the binding that holds now."""
        old = (read.engine, read.epoch) if read else ("", "")
        reply = await self._call(session_id, "bind", *old, new.engine, new.epoch)
        if reply[0] == b"gone" or not reply[1]:
            return None
        return Binding(reply[1].decode(), reply[2].decode())

    async def commit(self, commits: Sequence[TextCommit]) -> list[CommitReply | StoreUnavailable]:
        """Store text of many responses in one round trip. Raises StoreUnavailable if all is to be tried again.

        A single one that is, is a StoreUnavailable among the replies.
        """
        replies = await self._server.call_many(
            [
                (
                    *(c.session_id, "commit", self.replica_id),
                    *(c.response_id, c.token, c.epoch, c.byte_offset, c.offset, c.data),
                )
                for c in commits
            ]
        )
        return [self._commit_reply(reply) for reply in replies]

    @staticmethod
    def _commit_reply(reply: Any) -> CommitReply | StoreUnavailable:
        """One session's broken keys are that session's trouble."""
        if isinstance(reply, StoreUnavailable):
            return reply
        if isinstance(reply, StoreError):
            log.error("The text of a response was not stored: %s", reply)
            return "missing"
        kind: CommitReply = reply[0].decode()
        return kind

    async def end(
        self,
        session_id: str,
        response_id: str,
        token: str,
        item: Item,
        *,
        rest_offset: int,
        rest: str,
        outcome: Outcome,
        wish: Cut | None = None,
        known: int = -1,
    ) -> bytes | Cut | Literal["refused", "missing"]:
        """End a response: item, response, text, binding and version change in one step. The message, or why not.

        ``wish`` is the wish to stop that the caller knows of; while there is another one, nothing is written: it comes
        back.
        Raises StoreBehind.
        """
        in_reply_to = item.in_reply_to if isinstance(item.in_reply_to, str) else ""
        expected = outcome.usage.total_tokens if outcome.usage else 0
        reply = await self._call(
            session_id,
            "finish",
            *self._ttls,
            self.replica_id,
            response_id,
            token,
            item.id,
            encode_item(item),
            in_reply_to,
            expected,
            messages.end_body(response_id, rest_offset, rest, outcome),
            int(outcome.keeps_item),
            "" if wish is None else wish.length,
            known,
        )
        if reply[0] == b"ok":
            return bytes(reply[1])
        if reply[0] == b"cancelled":
            return Cut(int(reply[1]))
        return "refused" if reply[0] == b"refused" else "missing"

    async def cancel(self, session_id: str, response_id: str, cut: int, *, known: int = -1) -> Cut | bytes | None:
        """Wish a running response stopped, and its text cut to ``cut`` code points; None if it does not run.

        The first wish counts: it is what comes back. The owner carries it out, whoever that is by then. A queued one
        has nobody at work: it ends at once, and the message comes back. Raises StoreBehind.
        """
        reply = await self._call(session_id, "cancel", *self._ttls, self.replica_id, response_id, cut, known)
        match reply[0]:
            case b"wished":
                return Cut(int(reply[1]))
            case b"ended":
                return bytes(reply[1])
        return None

    async def take_over(
        self, session_id: str, read_token: str, new_token: str, new_epoch: str, reason: str
    ) -> TakenOver | None:
        """Become the owner of a response whose owner is gone; None if somebody else was quicker."""
        reply = await self._call(
            session_id, "take_over", *self._ttls, self.replica_id, read_token, new_token, new_epoch, reason
        )
        return TakenOver.of(reply) if reply[0] == b"ok" else None

    async def note_attempt(
        self, session_id: str, token: str, attempts: int, length: int, reason: str, *, known: int = -1
    ) -> bytes | None:
        """Another attempt of the owner, the text being ``length`` code points long; None if it is not the owner.

        Raises StoreBehind.
        """
        reply = await self._call(
            session_id, "attempt", *self._ttls, self.replica_id, token, attempts, length, reason, known
        )
        return bytes(reply[1]) if reply[0] == b"ok" else None

    async def hand_over(self, session_id: str, token: str, new_token: str, *, known: int = -1) -> bytes | None:
        """Leave a response to whoever takes it over with ``new_token``; None if it is not ours (any more).

        Raises StoreBehind.
        """
        reply = await self._call(session_id, "hand_over", *self._ttls, self.replica_id, token, new_token, known)
        return bytes(reply[1]) if reply[0] == b"ok" else None

    # --- private

    @property
    def _ttls(self) -> tuple[int, int]:
        return self._ttl, self._empty_ttl

    async def _ask_each(self, session_ids: Sequence[str], function: str, *args: Any) -> list[Any]:
        """The same question about many sessions in one round trip; None for one that the store does not answer for."""
        calls = [(session_id, function, *args) for session_id in session_ids]
        replies = await self._server.call_many(calls) if calls else []
        for session_id, reply in zip(session_ids, replies, strict=True):
            if isinstance(reply, StoreError):
                log.debug("Session %s: %s", session_id, reply)
        return [None if isinstance(reply, StoreError) else reply for reply in replies]

    async def _call(self, session_id: str, function: str, *args: Any) -> Any:
        reply = await self._server.call(session_id, function, *args, durable=function in _DURABLE)
        if isinstance(reply, list) and reply[0] == b"behind":
            raise StoreBehind("The store lost changes of this session.")
        return reply
