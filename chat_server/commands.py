"""What clients ask of a session: each is one operation of the store, whose message is then applied and told."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from msgspec import UNSET, UnsetType

from chat_server.answers import Answers
from chat_server.connections import Connection
from chat_server.core import session
from chat_server.core.client_events import (
    ItemCreate,
    ItemReference,
    ItemTruncate,
    ResponseCreate,
    ResponseParams,
    SessionPatch,
)
from chat_server.core.conversation import Conversation
from chat_server.core.ids import new_id
from chat_server.core.items import Item, item_from_client
from chat_server.core.response import Begun, Response, ended_response
from chat_server.core.server_events import ItemAdded, ItemDone, ItemRetrieved, ResponseCreated
from chat_server.errors import ClientError, StoreBehind, StoreUnavailable
from chat_server.hub import Hub, now_ms
from chat_server.live import LiveSession
from chat_server.private import PrivateAnswers
from chat_server.restoring import Restorer
from chat_server.settings import Limits
from chat_server.store.redis import Store
from chat_server.store.replies import BeginReply, Cut

#: tries to change settings while other replicas change the session, and seconds between them.
_UPDATE_TRIES = 100
_UPDATE_WAIT_S = 0.02
#: seconds that the deletion of a session waits for the end of its answer.
_ENDS_S = 5.0
#: seconds that a write waits for changes which the store lost to be written again.
_RESTORED_S = 4.0

T = TypeVar("T")


class Caller(Connection, Protocol):
    """The connection that asks, with the answers that belong to it alone."""

    private: PrivateAnswers


class Commands:
    """Carries client events out. All raise ClientError for what can not be, StoreUnavailable if the store is away."""

    def __init__(self, *, hub: Hub, store: Store, answers: Answers, restorer: Restorer, limits: Limits) -> None:
        self._hub = hub
        self._store = store
        self._answers = answers
        self._restorer = restorer
        self._limits = limits

    async def update(self, live: LiveSession, *, patch: SessionPatch | None = None, model: str | None = None) -> None:
        """Change the session's settings or its model. Raises ClientError for what can not be."""
        async with live.lock:
            for _ in range(_UPDATE_TRIES):
                settings = session.patched(live.settings, patch) if patch else live.settings
                update = functools.partial(
                    self._store.update_session, live.id, model=model or live.model, settings=settings
                )
                try:
                    reply = await self._write(live, lambda _, update=update: update(live.version))  # type: ignore[misc]
                except StoreBehind:
                    live.drop()  # our version is not the one that the change could follow
                    raise StoreUnavailable("The store lost changes of this conversation.") from None
                if reply != "stale":
                    await self._hub.apply_own(live, _present(None if reply == "gone" else reply))
                    return
                # Another replica changed the session; what it changed is on its way, and ours goes on top of it.
                await asyncio.sleep(_UPDATE_WAIT_S)
            raise StoreUnavailable("The session is changing too quickly.")

    async def add_item(self, live: LiveSession, connection: Caller, event: ItemCreate) -> None:
        """Put a message into the conversation, once. Raises ClientError."""
        item = item_from_client(event.item, event.item.id or new_id("item"))
        if item.id == "root":
            raise ClientError("invalid_value", "`root` is no id for an item.", param="item.id")
        if len(item.text.encode()) > self._limits.max_message_bytes:
            raise ClientError(
                "string_above_max_length",
                f"The message is longer than {self._limits.max_message_bytes} bytes.",
                param="item.content",
            )
        # It only counts, and may lie on a server of the store that is away while the session's own is there.
        with contextlib.suppress(StoreUnavailable):
            await self._store.note_session(live.owner, live.id, now_ms())
        async with live.lock:
            added = _present(
                await self._write(
                    live,
                    lambda known: self._store.add_item(live.id, item, event.previous_item_id, known=known),
                )
            )
            match added.kind:
                case "ok":
                    await self._hub.apply_own(live, added.message)
                case "duplicate":
                    live.doubted = True  # it may be a write of ours whose answer was lost
                    for kind in (ItemAdded, ItemDone):
                        connection.outbox.push(kind(previous_item_id=added.previous, item=item, duplicate=True))
                case "conflict":
                    message = f"There is another item with the id {item.id}."
                    raise ClientError("item_id_conflict", message, param="item.id")
                case "no_previous":
                    raise _no_item(event.previous_item_id, "previous_item_id")
                case "full" | "too_large":
                    raise _full(self._limits, added.kind)

    async def retrieve_item(self, live: LiveSession, connection: Caller, item_id: str) -> None:
        """Tell a connection an item as it is stored. Raises ClientError."""
        item = await self._store.get_item(live.id, item_id)
        if item is None:
            raise _no_item(item_id, "item_id")
        connection.outbox.push(ItemRetrieved(item=item))

    async def delete_item(self, live: LiveSession, item_id: str) -> None:
        """Take an item out of the conversation. Raises ClientError."""
        async with live.lock:
            item = await self._store.get_item(live.id, item_id)
            if item is None:
                raise _no_item(item_id, "item_id")
            reply = await self._write(live, lambda known: self._store.delete_item(live.id, item, known=known))
            if reply == "gone":
                raise _no_item(item_id, "item_id")
            if reply == "busy":
                raise _in_progress()
            await self._hub.apply_own(live, reply)

    async def truncate_item(self, live: LiveSession, event: ItemTruncate) -> None:
        """Keep only what was seen of an answer. Raises ClientError."""
        async with live.lock:
            for _ in range(_UPDATE_TRIES):
                item = await self._store.get_item(live.id, event.item_id)
                if item is None:
                    raise _no_item(event.item_id, "item_id")
                shorter, text_end = session.truncated(item, event, new_id("epoch"))
                replace = functools.partial(self._store.truncate_item, live.id, item, shorter, text_end)
                reply = await self._write(live, lambda known, replace=replace: replace(known=known))  # type: ignore[misc]
                match reply:
                    case "stale":  # another replica changed it since we read it
                        continue
                    case "gone":
                        raise _no_item(event.item_id, "item_id")
                    case "busy":
                        raise _in_progress()
                    case message:
                        await self._hub.apply_own(live, message)
                        return
            raise StoreUnavailable("The item is changing too quickly.")

    async def delete_session(self, live: LiveSession) -> None:
        """Delete the session. What runs is cancelled first, so that everybody hears of its end."""
        for response in (live.queued, live.response):
            if response is not None and (wish := await self._wish(live, response.id, response.length)):
                await self._wished(live, response.id, wish)
        for _ in range(round(_ENDS_S / _UPDATE_WAIT_S)):
            if live.response is None:
                break
            await asyncio.sleep(_UPDATE_WAIT_S)
        async with live.lock:
            message = await self._store.delete_session(live.id, live.owner, known=live.known)
            if message is not None:
                await self._hub.apply_own(live, message)

    async def respond(self, live: LiveSession, connection: Caller, event: ResponseCreate) -> None:
        """Begin an answer. Raises ClientError."""
        params = session.check_response_create(event)
        asked = await self._input(live, params)
        if params.conversation == "none":
            begun = self._begun(live, event, params, asked)
            items = () if asked is not UNSET else await self._items(live)
            connection.private.start(live.id, live.owner, begun, items)
            return
        await self._store.replicas.confirm_running([live.id], now_ms())
        for _ in range(round(_ENDS_S / _UPDATE_WAIT_S)):
            async with live.lock:
                reply = await self._ask_for(live, connection, event, self._begun(live, event, params, asked))
            if reply.kind != "stopping":
                break
            await asyncio.sleep(_UPDATE_WAIT_S)
        match reply.kind:
            case "active" | "stopping":
                raise ClientError(
                    "conversation_already_has_active_response",
                    f"Response {reply.response_id} is in progress. Wait until it is done, or cancel it.",
                )
            case "ended":
                raise StoreUnavailable("The store was too slow for this answer. Ask again.")
            case "no_item":
                raise _no_item(event.in_reply_to, "in_reply_to")
            case "full" | "too_large":
                raise _full(self._limits, reply.kind)

    async def _ask_for(self, live: LiveSession, connection: Caller, event: ResponseCreate, begun: Begun) -> BeginReply:
        """Begin an answer, and tell it if it has its place, or had. Holds the session's lock."""
        token = new_id("token")
        running = live.response
        told = connection.outbox.told(running.id) if running is not None else None
        cut = event.seen if event.seen is not None else told or 0
        response = Response(begun, previous_item_id=None)
        reply = _present(
            await self._write(
                live,
                lambda known: self._store.begin(
                    live.id,
                    response,
                    token,
                    if_active=event.if_active,
                    cuts=running.id if running is not None else "",
                    cut=cut,
                    known=known,
                ),
            )
        )
        if reply.kind in ("ok", "queued"):
            await self._begin(live, token, reply)
        elif reply.kind == "duplicate":
            await self._tell_again(live, connection, reply)
        return reply

    def _begun(
        self, live: LiveSession, event: ResponseCreate, params: ResponseParams, asked: list[Item] | UnsetType
    ) -> Begun:
        return session.begun(
            params,
            live.settings,
            response_id=new_id("resp"),
            item_id=new_id("item"),
            epoch=new_id("epoch"),
            replica=self._store.replica_id,
            model=live.model,
            in_reply_to=event.in_reply_to,
            input=asked,
            token_limit=self._limits.max_output_tokens,
            now_ms=now_ms(),
        )

    async def _begin(self, live: LiveSession, token: str, reply: BeginReply) -> None:
        """It has its place: tell it, and make it unless it waits behind another one."""
        if reply.wish is not None:
            live.stop(reply.response_id, reply.wish)
        if reply.kind == "ok":
            if live.turn is not None:
                live.turn.lose()  # its end is stored, but we were not told so: whoever listens here reads it again
            live.conversation = Conversation(reply.items)
        if reply.kind == "queued" and not reply.messages:
            live.doubted = True  # it has its place from a write of ours whose answer was lost
        for message in reply.messages:
            await self._hub.apply_own(live, message)
        if reply.kind == "queued":
            return
        self._answers.start(live, token, reply.messages[-1], reply.items, reply.binding)

    async def _write(self, live: LiveSession, write: Callable[[int], Awaitable[T]]) -> T:
        """A write that must not hide that the store lost changes: first they are written again. Holds the lock.

        If nobody does so in time, what is lost is lost.
        """
        for _ in range(round(_RESTORED_S / _UPDATE_WAIT_S)):
            try:
                return await write(live.known)
            except StoreBehind:
                live.doubted = True  # that we listen to it may be lost too
                if not await self._restorer.write_again(live):
                    await asyncio.sleep(_UPDATE_WAIT_S)
        return await write(-1)

    async def _items(self, live: LiveSession) -> tuple[Item, ...]:
        _, _, items = _present(await self._store.last_items(live.id, 0))
        return tuple(items)

    async def _input(self, live: LiveSession, params: ResponseParams) -> list[Item] | UnsetType:
        """The prompt that a response brings along, with the items that it refers to. Raises ClientError."""
        if params.input is None:
            return UNSET
        wanted = list({entry.id: None for entry in params.input if isinstance(entry, ItemReference)})
        found = dict(zip(wanted, await self._store.get_items(live.id, wanted), strict=True))
        items, size = [], 0
        for index, entry in enumerate(params.input):
            param = f"response.input[{index}]"
            item = found[entry.id] if isinstance(entry, ItemReference) else item_from_client(entry, new_id("item"))
            if item is None:
                raise ClientError("item_not_found", f"There is no item {entry.id}.", param=param)
            if item.status == "in_progress":
                raise _in_progress(param)
            size += len(item.text.encode())
            if size > self._limits.max_input_bytes:
                message = f"The input is longer than {self._limits.max_input_bytes} bytes."
                raise ClientError("string_above_max_length", message, param="response.input")
            items.append(item)
        return items

    async def _tell_again(self, live: LiveSession, connection: Caller, reply: BeginReply) -> None:
        """Somebody asked for the answer to an item that has one. One that runs or waits is told to everybody."""
        if any(known is not None and known.id == reply.response_id for known in (live.response, live.queued)):
            return
        item = await self._store.get_item(live.id, reply.item_id)
        if item is None:
            raise _no_item(reply.item_id, "in_reply_to")
        if item.status == "in_progress":  # its beginning is on its way
            return
        told = ended_response(item, previous=None, kept=True).object()
        connection.outbox.push(ResponseCreated(response=told, in_reply_to=item.in_reply_to, duplicate=True))

    async def cancel(self, live: LiveSession, connection: Caller, response_id: str | None, seen: int | None) -> None:
        """Stop the running answer, whichever replica makes it; its end is told when the engine's stream is closed.

        First the wish is stored, so that the answer never comes back, whoever dies meanwhile.
        """
        wanted = response_id or connection.outbox.last_told() or (live.response.id if live.response else None)
        if wanted is None:
            raise _not_active()
        cut = seen if seen is not None else connection.outbox.told(wanted) or 0
        if connection.private.cancel(wanted, Cut(cut)):
            return
        turn = live.turn if live.turn is not None and live.turn.response.id == wanted else None
        try:
            wish = await self._wish(live, wanted, cut)
        except StoreUnavailable:
            if turn is None or live.turn is not turn:
                raise
            turn.stop(Cut(cut), stored=False)  # the engine need not wait for the store; the end does
            return
        if wish is None:
            raise _not_active()
        await self._wished(live, wanted, wish)

    async def _wish(self, live: LiveSession, response_id: str, cut: int) -> Cut | bytes | None:
        """Put the wish to stop a response into the store: see ``Store.cancel``."""
        cancel = functools.partial(self._store.cancel, live.id, response_id, cut)
        try:
            return await cancel(known=live.known)
        except StoreBehind:
            async with live.lock:
                return await self._write(live, lambda known: cancel(known=known))

    async def _wished(self, live: LiveSession, response_id: str, wish: Cut | bytes) -> None:
        """The store has the wish to stop a response; or it was queued, and its end is a message."""
        if isinstance(wish, Cut):
            live.stop(response_id, wish)
            return
        # At once: whoever holds the lock may wait for just this message.
        change = self._hub.apply(live, wish)
        if live.waits(change):
            async with live.lock:
                await self._hub.apply_own(live, wish)


def _present(value: T | None) -> T:
    if value is None:
        raise ClientError("session_not_found", "The session is gone.", status=404)
    return value


def _no_item(item_id: str | None, param: str) -> ClientError:
    return ClientError("item_not_found", f"There is no item {item_id}.", param=param)


def _in_progress(param: str = "item_id") -> ClientError:
    message = "This item is an answer that is being made. Cancel it first."
    return ClientError("item_in_progress", message, param=param)


def _full(limits: Limits, kind: str) -> ClientError:
    if kind == "full":
        most = f"The conversation has {limits.max_items} items"
        return ClientError("too_many_items", f"{most}, which is the limit. Start a new one.")
    most = f"With this the conversation would be larger than {limits.max_session_bytes} bytes"
    return ClientError("session_too_large", f"{most}, which is the limit. Start a new one.")


def _not_active() -> ClientError:
    return ClientError("response_cancel_not_active", "There is no such response in progress.")
