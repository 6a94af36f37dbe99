"""The store: one atomic operation per script, over the keys of one session. Truth is here and nowhere else.

Every call raises StoreUnavailable when the server can not be reached; the same call with the same ids is then safe to
repeat.
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal

import msgspec

from chat_server.core.items import Item, SessionSettings, decode_item, encode_item, to_wire
from chat_server.core.placement import Binding
from chat_server.core.principal import Principal
from chat_server.core.response import Begun, Outcome, Response, cancelled_in_queue, ended_response
from chat_server.errors import StoreBehind, StoreError, StoreUnavailable
from chat_server.store import keys, messages
from chat_server.store.replies import (
    Added,
    BeginReply,
    CommitReply,
    Cut,
    Held,
    QueuedState,
    RunningState,
    SessionState,
    Snapshot,
    TakenOver,
    TextCommit,
)
from chat_server.store.server import Server

log = logging.getLogger(__name__)

#: milliseconds that a replica is believed to live after its last sign.
LEASE_MS = 4000
#: functions that decide who answers, and what was answered: they count when replicas of the server have them too.
_DURABLE = frozenset({"begin", "take_over", "finish"})


class Store:
    """The sessions in a Redis-protocol server, as one replica sees them.

    ``open`` before anything else, ``close`` at the end.
    """

    def __init__(
        self,
        url: str,
        replica_id: str,
        *,
        ttl_s: int,
        empty_ttl_s: int,
        max_items: int,
        max_session_bytes: int,
        max_connections: int = 64,
        wait_replicas: int = 0,
    ) -> None:
        self.replica_id = replica_id
        self._ttl = ttl_s * 1000
        self._empty_ttl = empty_ttl_s * 1000
        self._max_items = max_items
        self._max_session_bytes = max_session_bytes
        self._server = Server(url, max_connections=max_connections, wait_replicas=wait_replicas)

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
        if reply[0] == b"gone":
            return None
        fields, response = _pairs(reply[1]), _pairs(reply[3])
        return SessionState(
            owner=Principal(fields["tenant"].decode(), fields["user"].decode()),
            created_ms=int(fields["created"]),
            model=fields["model"].decode(),
            settings=msgspec.json.decode(fields["settings"], type=SessionSettings),
            version=int(fields["version"]),
            item_count=reply[2],
            running=_running(response, reply[4], reply[5]) if "id" in response else None,
            queued=_queued(response, reply[6]) if "q_id" in response else None,
            changes=tuple(reply[7]),
        )

    async def unwatch(self, session_id: str) -> None:
        """Stop listening."""
        await self._call(session_id, "unwatch", self.replica_id)

    async def renew_watch(self, session_ids: Sequence[str]) -> list[Held | None]:
        """Go on listening to these sessions; what the store holds of each (version -1: it is gone).

        None, here and below, for one that the store does not answer for now.
        """
        replies = await self._ask_each(session_ids, "renew", *self._ttls, self.replica_id)
        return [_held(reply) for reply in replies]

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
        return [_held(reply) for reply in await self._ask_each(session_ids, "held")]

    async def restore(self, session_id: str, snapshot: Snapshot) -> bool:
        """Write a session again that the store lost; False if it holds that or something newer, or it was deleted."""
        fields = {
            "tenant": snapshot.owner.tenant,
            "user": snapshot.owner.user,
            "model": snapshot.model,
            "settings": to_wire(snapshot.settings),
            "created": snapshot.created_ms,
        }
        items = {item.id: encode_item(item) for item in snapshot.items}
        lists = (fields, items, _replies(snapshot.items), snapshot.response)
        reply = await self._call(
            session_id,
            "session_restore",
            *self._ttls,
            self.replica_id,
            snapshot.version,
            *(value for pairs in lists for value in (len(pairs) * 2, *(x for pair in pairs.items() for x in pair))),
            snapshot.text.encode(),
        )
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
        match reply[0]:
            case b"gone":
                return None
            case b"ok":
                return Added("ok", message=reply[1])
            case b"duplicate":
                return Added("duplicate", previous=_text(reply[1]))
            case kind:
                return Added(kind.decode())

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
        return int(reply[1]), _text(reply[2]), [decode_item(raw) for raw in reply[3] if raw]

    async def answer(self, session_id: str, response_id: str) -> tuple[int, Response | None] | None:
        """A response that ended (None if nothing is known of it), and the version at which it was read."""
        reply = await self._call(session_id, "answer", response_id)
        if reply[0] == b"gone":
            return None
        response = None
        if reply[3]:
            response = ended_response(decode_item(reply[3]), previous=_text(reply[2]), kept=reply[4] == b"1")
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
        match reply[0]:
            case b"gone":
                return None
            case b"ok":
                return BeginReply("ok", tuple(reply[1]), items=_items(reply[3]), binding=_binding(reply[2]))
            case b"queued":
                wish = Cut(int(reply[3])) if reply[3] else None
                return BeginReply("queued", tuple(reply[1]), response_id=reply[2].decode(), wish=wish)
            case b"duplicate":
                response_id, _, item_id = reply[1].decode().partition(" ")
                return BeginReply("duplicate", response_id=response_id, item_id=item_id)
            case b"active":
                return BeginReply("active", response_id=reply[1].decode())
            case kind:
                return BeginReply(kind.decode())

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
        cut: int | None = None,
        known: int = -1,
    ) -> bytes | Cut | Literal["refused", "missing"]:
        """End a response: item, response, text, binding and version change in one step. The message, or why not.

        ``cut`` is the wish to stop that is carried out; while there is another one, nothing is written: it comes back.
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
            "" if cut is None else cut,
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
        if reply[0] != b"ok":
            return None
        return TakenOver(
            message=reply[1],
            text=reply[2].decode(),
            wish=None if reply[3] is None else Cut(int(reply[3])),
            attempts=reply[4],
            binding=_binding(reply[5]),
            items=_items(reply[6]),
        )

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

    # --- running answers, over all sessions

    async def confirm_running(self, session_ids: Sequence[str], now_ms: int) -> None:
        """Say that this replica makes, or is about to make, an answer of each of these sessions."""
        if session_ids:
            await self._server.run("ZADD", keys.RUNNING, *(x for id in session_ids for x in (now_ms, id)))

    async def unconfirmed(self, before_ms: float, most: int) -> list[str]:
        """Sessions that may have a running answer whose owner last said so before then."""
        found = await self._server.run("ZRANGEBYSCORE", keys.RUNNING, "-inf", before_ms, "LIMIT", 0, most)
        return [member.decode() for member in found]

    async def forget_running(self, session_id: str) -> None:
        """Nothing runs in this session. Harmless if that has changed meanwhile: an owner says it again."""
        await self._server.run("ZREM", keys.RUNNING, session_id)

    async def wake(self, session_id: str, now_ms: int) -> None:
        """Ask another replica that lives to look at a session, whose answer nobody makes."""
        found = await self._server.run("ZRANGEBYSCORE", keys.REPLICAS, now_ms - LEASE_MS, "+inf")
        others = [member.decode() for member in found if member.decode() != self.replica_id]
        if others:
            await self._server.run("PUBLISH", keys.inbox(random.choice(others)), messages.wake(session_id))

    # --- replicas

    async def renew_lease(self, now_ms: int) -> None:
        """Say that this replica lives. Raises StoreUnavailable, as a durable call, if too few replicas follow."""
        await self._server.run_many(
            ("SET", keys.replica(self.replica_id), now_ms, "PX", LEASE_MS),
            ("ZADD", keys.REPLICAS, now_ms, self.replica_id),
            ("ZREMRANGEBYSCORE", keys.REPLICAS, "-inf", now_ms - 60_000),
            durable=keys.REPLICAS,
        )

    async def drop_lease(self) -> None:
        """Say that this replica is gone, so that others need not wait for the lease to run out."""
        await self._server.run_many(("DEL", keys.replica(self.replica_id)), ("ZREM", keys.REPLICAS, self.replica_id))

    async def forget_replicas(self) -> None:
        """Every other replica is gone for sure, lease or not: the store is ours alone."""
        gone = [member.decode() for member in await self._server.run("ZRANGE", keys.REPLICAS, 0, -1)]
        if gone:
            await self._server.run_many(
                *(("DEL", keys.replica(replica_id)) for replica_id in gone), ("ZREM", keys.REPLICAS, *gone)
            )

    async def is_alive(self, replica_id: str) -> bool:
        """Whether a replica's lease holds."""
        return bool(await self._server.run("EXISTS", keys.replica(replica_id)))

    def inbox(self) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Hear what other replicas tell this one, from the moment when the block is entered.

        Raises StoreUnavailable when the subscription breaks.
        """
        return self._server.subscribe(keys.inbox(self.replica_id))

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


def _pairs(flat: list[bytes]) -> dict[str, bytes]:
    return {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2)}


def _held(reply: list[Any] | None) -> Held | None:
    return None if reply is None else Held(int(reply[0]), reply[1])


def _text(value: bytes | None) -> str | None:
    return value.decode() if value else None


def _binding(reply: list[bytes | None]) -> Binding | None:
    engine, epoch = reply
    return Binding(engine.decode(), (epoch or b"").decode()) if engine else None


def _items(reply: list[bytes | None]) -> tuple[Item, ...]:
    return tuple(decode_item(raw) for raw in reply if raw)


def _replies(items: Sequence[Item]) -> dict[str, str]:
    """Which item is answered by which response and item, and which item a response left."""
    found = {}
    for item in items:
        if isinstance(item.response_id, str):
            if isinstance(item.in_reply_to, str):
                found[item.in_reply_to] = f"{item.response_id} {item.id}"
            if item.status != "in_progress":
                found[f">{item.response_id}"] = item.id
    return found


def _queued(fields: dict[str, bytes], previous: bytes | None) -> QueuedState:
    begun = msgspec.json.decode(fields["q_begun"], type=Begun)
    return QueuedState(begun, _text(previous), fields["q_token"].decode())


def _running(fields: dict[str, bytes], text: bytes, previous: bytes | None) -> RunningState:
    later = msgspec.json.decode(b"[%b]" % fields.get("later", b""), type=tuple[tuple[str, int], ...])
    return RunningState(
        later_epochs=later,
        begun=msgspec.json.decode(fields["begun"], type=Begun),
        previous=_text(previous),
        token=fields["token"].decode(),
        replica=fields["replica"].decode(),
        text=text.decode(),
        wish=Cut(int(fields["cancel"])) if "cancel" in fields else None,
    )
