"""One WebSocket of ``/v1/realtime``: its handshake, its read loop, its end.

Reading and writing go side by side: the loop here only reads and carries out, the outbox writes from plain calls. A
handler that does not read while it streams misses the stop, and loses the connection to an unread pong.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import assert_never

from msgspec import UNSET
from starlette.websockets import WebSocket, WebSocketDisconnect

from chat_server.commands import Commands
from chat_server.core import close_codes
from chat_server.core.client_events import (
    AnyClientEvent,
    Flush,
    ItemCreate,
    ItemDelete,
    ItemRetrieve,
    ItemTruncate,
    Ping,
    ResponseCancel,
    ResponseCreate,
    SessionPatch,
    SessionUpdate,
)
from chat_server.core.codec import BadEvent, decode
from chat_server.core.server_events import Error, ErrorBody, Pong
from chat_server.core.session import check_flush
from chat_server.edge.gate import Asked, Gate
from chat_server.edge.http import error_response
from chat_server.edge.outbox import Outbox
from chat_server.edge.socket import SCOPE_KEY, SocketProtocol
from chat_server.errors import ClientError, StoreError, StoreUnavailable
from chat_server.hub import Hub, now_ms
from chat_server.live import Gap, LiveSession
from chat_server.private import PrivateAnswers
from chat_server.settings import Settings
from chat_server.turn import Conductor

log = logging.getLogger(__name__)

#: seconds that a connection which was let in waits for a store that is away, and between its tries.
_JOIN_S = 30.0
_JOIN_RETRY_S = 0.25


class Connection:
    """One WebSocket that was let in."""

    def __init__(self, socket: SocketProtocol, outbox: Outbox, private: PrivateAnswers, flush: Flush) -> None:
        self.outbox = outbox
        self.private = private
        self.flush = flush
        self.complained_of_audio_at = float("-inf")
        self._socket = socket
        socket.on_writable = outbox.pump

    def close(self, code: int, reason: str) -> None:
        self._socket.close(code, reason)


class Realtime:
    """The endpoint."""

    def __init__(self, settings: Settings, gate: Gate, hub: Hub, commands: Commands, conductor: Conductor) -> None:
        self._settings = settings
        self._gate = gate
        self._hub = hub
        self._commands = commands
        self._conductor = conductor

    async def serve(self, websocket: WebSocket) -> None:
        """The WebSocket endpoint."""
        try:
            asked = self._gate.check(websocket, websocket.scope["subprotocols"])
        except ClientError as error:
            await websocket.send_denial_response(error_response(error))
            return
        self._gate.enter(asked.principal)  # no await since it was checked that there is room
        try:
            live = await self._gate.open(asked)
            try:
                await self._serve(websocket, asked, live)
            finally:
                await self._hub.close(live)
        except ClientError as error:
            await websocket.send_denial_response(error_response(error))
        except WebSocketDisconnect:
            pass  # it left while we looked
        except asyncio.CancelledError:
            pass  # the server stops at once; uvicorn would call this a fault
        finally:
            self._gate.exit(asked.principal)

    async def _serve(self, websocket: WebSocket, asked: Asked, live: LiveSession) -> None:
        await websocket.accept(subprotocol=asked.subprotocol)
        socket: SocketProtocol = websocket.scope["extensions"][SCOPE_KEY]
        outbox = Outbox(
            socket,
            extensions=asked.extensions,
            heartbeat_s=self._settings.heartbeat_s,
            send_timeout_s=self._settings.limits.send_timeout_s,
            now=time.monotonic(),
        )
        connection = Connection(socket, outbox, PrivateAnswers(self._conductor, outbox), asked.flush)
        log.info("Session %s: a connection of %s opened", live.id, asked.principal.key)
        try:
            if asked.model_given and asked.model != live.model:
                await self._commands.update(live, model=asked.model)
            resumed = asked.session_id is not None
            await self._join(live, connection, asked, resumed=resumed)
            await self._read(websocket, live, connection)
        except Gap:
            connection.close(close_codes.RESTART, "reconnect to go on")
        except StoreUnavailable:
            connection.close(close_codes.OVERLOADED, "the store is away")
        except ClientError as error:  # the session went while we joined it
            connection.close(close_codes.POLICY, error.message[:120])
        except Exception:
            log.exception("Session %s: a connection failed", live.id)
            connection.close(close_codes.FAULT, "fault in the server")
        finally:
            self._hub.leave(live, connection)
            await connection.private.close()
            log.info("Session %s: a connection of %s closed", live.id, asked.principal.key)

    async def _join(self, live: LiveSession, connection: Connection, asked: Asked, *, resumed: bool) -> None:
        """Join, as soon as the store can be read; raises StoreUnavailable if it stays away."""
        deadline = time.monotonic() + _JOIN_S
        while True:
            try:
                await self._hub.join(live, connection, resumed=resumed, history=asked.history, held=asked.resume)
                return
            except StoreUnavailable:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_JOIN_RETRY_S)

    async def _read(self, websocket: WebSocket, live: LiveSession, connection: Connection) -> None:
        while True:
            message = await websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            # One segment may hold thousands of frames, and neither `receive` nor all events wait for anything.
            await asyncio.sleep(0)
            text = message.get("text")
            event_id: str | None = None
            try:
                if text is None:
                    raise BadEvent("invalid_frame", "Events are text frames; this one was binary.")
                event = decode(text)
                event_id = event.event_id
                await self._carry_out(live, connection, event)
            except ClientError as error:
                if isinstance(error, BadEvent):
                    event_id = error.event_id
                if not self._is_repeated_audio(connection, error, text):
                    connection.outbox.push(_error(error, event_id))
            except StoreError as error:
                live.doubted = True  # a write may have been done all the same
                connection.outbox.push(_error(_store_failed(error), event_id))

    async def _carry_out(self, live: LiveSession, connection: Connection, event: AnyClientEvent) -> None:
        commands = self._commands
        match event:
            case Ping():
                if connection.outbox.extensions:
                    connection.outbox.push(Pong(t=event.t, now_ms=now_ms()))
            case SessionUpdate():
                await self._update(live, connection, event.session)
            case ItemCreate():
                await commands.add_item(live, connection, event)
            case ItemRetrieve():
                await commands.retrieve_item(live, connection, event.item_id)
            case ItemDelete():
                await commands.delete_item(live, event.item_id)
            case ItemTruncate():
                await commands.truncate_item(live, event)
            case ResponseCreate():
                await commands.respond(live, connection, event)
            case ResponseCancel():
                await commands.cancel(live, connection, event.response_id, event.seen)
            case _:
                assert_never(event)

    async def _update(self, live: LiveSession, connection: Connection, patch: SessionPatch) -> None:
        """``flush`` is the connection's, the rest the session's; an error changes neither."""
        before = connection.flush
        if patch.flush is not UNSET:
            flush = patch.flush or Flush()
            check_flush(flush, "session.flush")
            connection.flush = flush
        try:
            await self._commands.update(live, patch=patch)
        except BaseException:
            connection.flush = before
            raise

    @staticmethod
    def _is_repeated_audio(connection: Connection, error: ClientError, text: str | None) -> bool:
        """A client that streams audio sends many events a second: one complaint a second is enough."""
        if error.code != "unsupported" or error.param != "type" or "input_audio_buffer.append" not in (text or ""):
            return False
        now = time.monotonic()
        if now - connection.complained_of_audio_at < 1.0:
            return True
        connection.complained_of_audio_at = now
        return False


def _store_failed(error: StoreError) -> ClientError:
    if isinstance(error, StoreUnavailable):
        return ClientError("store_unavailable", str(error), type="server_error", retryable=True, retry_after_ms=1000)
    log.error("%s", error)
    return ClientError("internal_error", "The server failed on this event.", type="server_error")


def _error(error: ClientError, event_id: str | None) -> Error:
    return Error(
        error=ErrorBody(
            type=error.type,
            code=error.code,
            message=error.message,
            param=error.param,
            event_id=event_id,
            retryable=error.retryable,
            retry_after_ms=UNSET if error.retry_after_ms is None else error.retry_after_ms,
        )
    )
