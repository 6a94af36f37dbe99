"""What clients ask of a session: each is one operation of the store, whose message is then applied and told."""

from __future__ import annotations

import asyncio
import logging
from typing import TypeVar

from chat_server.core import session
from chat_server.core.client_events import ItemCreate, ResponseCreate, SessionPatch
from chat_server.core.ids import new_id
from chat_server.core.items import ResponseObject, item_from_client
from chat_server.core.response import Response
from chat_server.core.server_events import ItemAdded, ItemDone, ItemRetrieved, ResponseCreated
from chat_server.errors import ClientError, StoreUnavailable
from chat_server.hub import Hub, now_ms
from chat_server.live import Connection, LiveSession
from chat_server.settings import Limits
from chat_server.store.committer import Committer, Writer
from chat_server.store.redis import Store
from chat_server.store.replies import BeginReply, Cut
from chat_server.turn import Conductor, Turn

log = logging.getLogger(__name__)

#: tries to change settings while other replicas change the session, and seconds between them.
_UPDATE_TRIES = 100
_UPDATE_WAIT_S = 0.02

T = TypeVar("T")


class Commands:
    """Carries client events out. All raise ClientError for what can not be, StoreUnavailable if the store is away."""

    def __init__(self, *, hub: Hub, store: Store, committer: Committer, conductor: Conductor, limits: Limits) -> None:
        self._hub = hub
        self._store = store
        self._committer = committer
        self._conductor = conductor
        self._limits = limits

    async def update(self, live: LiveSession, *, patch: SessionPatch | None = None, model: str | None = None) -> None:
        """Change the session's settings or its model. Raises ClientError for what can not be."""
        async with live.lock:
            for _ in range(_UPDATE_TRIES):
                settings = session.patched(live.settings, patch) if patch else live.settings
                reply = await self._store.update_session(live.id, live.version, model or live.model, settings)
                if reply != "stale":
                    await self._hub.apply_own(live, _present(None if reply == "gone" else reply))
                    return
                # Another replica changed the session; what it changed is on its way, and ours goes on top of it.
                await asyncio.sleep(_UPDATE_WAIT_S)
            raise StoreUnavailable("The session is changing too quickly.")

    async def add_item(self, live: LiveSession, connection: Connection, event: ItemCreate) -> None:
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
        await self._store.note_session(live.owner, live.id, now_ms())
        async with live.lock:
            added = _present(await self._store.add_item(live.id, item, event.previous_item_id))
            match added.kind:
                case "ok":
                    await self._hub.apply_own(live, added.message)
                case "duplicate":
                    for kind in (ItemAdded, ItemDone):
                        connection.outbox.push(kind(previous_item_id=added.previous, item=item, duplicate=True))
                case "conflict":
                    message = f"There is another item with the id {item.id}."
                    raise ClientError("item_id_conflict", message, param="item.id")
                case "no_previous":
                    raise _no_item(event.previous_item_id, "previous_item_id")
                case "full":
                    raise _full(self._limits.max_items)

    async def retrieve_item(self, live: LiveSession, connection: Connection, item_id: str) -> None:
        """Tell a connection an item as it is stored. Raises ClientError."""
        item = await self._store.get_item(live.id, item_id)
        if item is None:
            raise _no_item(item_id, "item_id")
        connection.outbox.push(ItemRetrieved(item=item))

    async def delete_item(self, live: LiveSession, item_id: str) -> None:
        """Take an item out of the conversation. Raises ClientError."""
        async with live.lock:
            item = await self._store.get_item(live.id, item_id)
            reply = await self._store.delete_item(live.id, item) if item else "gone"
            if reply == "gone":
                raise _no_item(item_id, "item_id")
            if reply == "busy":
                message = "This item is an answer that is being made. Cancel it first."
                raise ClientError("item_in_progress", message, param="item_id")
            await self._hub.apply_own(live, reply)

    async def respond(self, live: LiveSession, connection: Connection, event: ResponseCreate) -> None:
        """Begin an answer. Raises ClientError."""
        params = session.check_response_create(event)
        token = new_id("token")
        async with live.lock:
            begun = session.begun(
                params,
                live.settings,
                response_id=new_id("resp"),
                item_id=new_id("item"),
                epoch=new_id("epoch"),
                replica=self._store.replica_id,
                model=live.model,
                in_reply_to=event.in_reply_to,
                token_limit=self._limits.max_output_tokens,
                now_ms=now_ms(),
            )
            in_progress = Response(begun, previous_item_id=None).item()
            reply = _present(await self._store.begin(live.id, begun, in_progress, token))
            match reply.kind:
                case "ok":
                    await self._hub.apply_own(live, reply.message)
                    if live.response is None or live.response.id != begun.id:
                        # Messages were lost and the connections start again; the answer is made all the same.
                        live.unload()
                        self._hub.apply(live, reply.message)
                    self._start_turn(live, token, reply)
                case "active":
                    raise ClientError(
                        "conversation_already_has_active_response",
                        f"Response {reply.response_id} is in progress. Wait until it is done, or cancel it.",
                    )
                case "ended":
                    raise StoreUnavailable("The store was too slow for this answer. Ask again.")
                case "duplicate":
                    await self._tell_again(live, connection, reply)
                case "no_item":
                    raise _no_item(event.in_reply_to, "in_reply_to")
                case "full":
                    raise _full(self._limits.max_items)

    async def _tell_again(self, live: LiveSession, connection: Connection, reply: BeginReply) -> None:
        """Somebody asked for the answer to an item that has one. A running one is told to everybody as it is."""
        if live.response is not None and live.response.id == reply.response_id:
            return
        item = await self._store.get_item(live.id, reply.item_id)
        if item is None:
            raise _no_item(reply.item_id, "in_reply_to")
        told = ResponseObject(id=reply.response_id, status="in_progress", output=[])
        connection.outbox.push(ResponseCreated(response=told, in_reply_to=item.in_reply_to, duplicate=True))

    async def cancel(
        self, live: LiveSession, connection: Connection, response_id: str | None, seen: int | None
    ) -> None:
        """Stop the running answer, whichever replica makes it; its end is told when the engine's stream is closed.

        First the wish is stored, so that the answer never comes back, whoever dies meanwhile.
        """
        response = live.response
        wanted = response_id or (response.id if response is not None else None)
        if wanted is None:
            raise _not_active()
        cut = seen if seen is not None else connection.outbox.told(wanted) or 0
        turn = live.turn if live.turn is not None and live.turn.response.id == wanted else None
        try:
            wish = await self._store.cancel(live.id, wanted, cut)
        except StoreUnavailable:
            if turn is None:
                raise
            wish = Cut(cut)  # the engine need not wait for the store; the end does
        if wish is None:
            raise _not_active()
        if turn is not None:
            turn.stop(wish)

    # --- answers

    def _start_turn(self, live: LiveSession, token: str, reply: BeginReply) -> None:
        assert live.response is not None, "it was just begun"
        writer = Writer(
            session_id=live.id,
            token=token,
            response=live.response,
            # What was told when somebody stops the answer is the last of it: the text is cut there.
            on_stored=lambda: None if turn.stopped else live.pump(),
            on_wish=lambda: turn.stop(None),
            on_lost=lambda reply: self._lost(live, turn, reply),
        )
        turn = Turn(
            session_id=live.id,
            principal=live.owner,
            response=live.response,
            writer=writer,
            prompt=reply.items,
            binding=reply.binding,
            committer=self._committer,
        )
        live.turn = turn
        self._hub.spawn(self._run_turn(live, turn), name=f"turn {turn.response.id}")

    async def _run_turn(self, live: LiveSession, turn: Turn) -> None:
        try:
            await self._conductor.run(turn, lambda message: self._hub.apply_own(live, message), live.lock)
        except Exception:
            log.exception("A turn failed; its session is read again")
            self._release(live, turn)
            self._hub.drop(live)
        finally:
            self._release(live, turn)
            await self._hub.close_if_idle(live)

    def _lost(self, live: LiveSession, turn: Turn, reply: str) -> None:
        """The store takes no more of an answer from us: somebody else has it, or it is gone."""
        log.warning("Session %s: the store says %r to our answer; we leave it", live.id, reply)
        turn.abandon()
        self._release(live, turn)
        self._hub.drop(live)

    @staticmethod
    def _release(live: LiveSession, turn: Turn) -> None:
        if live.turn is turn:  # else another one was begun meanwhile
            live.turn = None


def _present(value: T | None) -> T:
    if value is None:
        raise ClientError("session_not_found", "The session is gone.", status=404)
    return value


def _no_item(item_id: str | None, param: str) -> ClientError:
    return ClientError("item_not_found", f"There is no item {item_id}.", param=param)


def _full(most: int) -> ClientError:
    return ClientError("too_many_items", f"The conversation has {most} items, which is the limit. Start a new one.")


def _not_active() -> ClientError:
    return ClientError("response_cancel_not_active", "There is no such response in progress.")
