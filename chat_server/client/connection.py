"""One session over one WebSocket, one question at a time: what the terminal chat needs of the protocol.

Use::

    connection = await Connection.open("http://127.0.0.1:8000", api_key="local")
    try:
        answer = await connection.ask("Hello", on_text=print)
    finally:
        await connection.close()
"""

from __future__ import annotations

import asyncio
import json
import secrets
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit, urlunsplit

import websockets.asyncio.client
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from chat_server.errors import ChatServerError

#: Seconds to connect and to be let in. A server that is there answers in milliseconds; TLS over a slow line does not.
OPEN_TIMEOUT_S = 15.0

Event = dict[str, Any]


class ChatError(ChatServerError):
    """The server could not be reached or refused, in words for the person in front of the terminal."""


class ConnectionLost(ChatError):
    """The connection ended while it was needed. What was said is stored: the session can be opened again."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How an answer ended. ``problem`` is what the server said if it ended ``failed``."""

    text: str
    status: str
    problem: str | None
    engine: str | None
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ms: int | None
    total_ms: int | None


@dataclass(slots=True)
class _Question:
    """The question under way. ``event_ids``: the client events that an error about it names."""

    item_id: str
    event_ids: tuple[str, ...]
    on_text: Callable[[str], None]
    answered: asyncio.Future[Answer]
    response_id: str | None = None
    text: str = ""


class Connection:
    """Open with ``Connection.open``; afterwards ``close`` must be awaited.

    The websockets library's own pings end a dead connection within 40 s, so nothing here waits for ever.
    """

    def __init__(self, socket: websockets.asyncio.client.ClientConnection, created: Event) -> None:
        self.session_id: str = created["session"]["id"]
        self.model: str = created["session"]["model"]
        #: messages that the session already had.
        self.item_count: int = created.get("item_count", 0)
        self._socket = socket
        self._question: _Question | None = None
        self._reader = asyncio.create_task(self._read(), name="chat-reader")

    @classmethod
    async def open(
        cls, url: str, *, api_key: str | None = None, session_id: str | None = None, model: str | None = None
    ) -> Connection:
        """Connect and wait for ``session.created``. Raises ChatError with what to do."""
        query = {"extensions": "1", "session_id": session_id, "model": model}
        target = realtime_url(url) + "?" + urlencode({name: value for name, value in query.items() if value})
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            socket = await websockets.asyncio.client.connect(
                target, additional_headers=headers, open_timeout=OPEN_TIMEOUT_S, max_size=None
            )
        except (OSError, InvalidHandshake, InvalidURI) as error:
            raise ChatError(_why_not(error, url)) from error
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                created = json.loads(await socket.recv())
            return cls(socket, created)
        except (TimeoutError, ConnectionClosed, ValueError, KeyError) as error:
            await socket.close()
            raise ChatError(f"{url} let us in, but does not speak the Realtime protocol.") from error

    async def ask(self, text: str, on_text: Callable[[str], None]) -> Answer:
        """Say ``text`` and wait for the end of the answer; ``on_text`` gets each piece of it at once.

        Raises ChatError if the server refuses, ConnectionLost if the connection ends meanwhile.
        """
        assert self._question is None, "one question at a time"
        ids = (f"event_{secrets.token_hex(8)}", f"event_{secrets.token_hex(8)}")
        item_id = f"item_{secrets.token_hex(16)}"
        question = _Question(item_id, ids, on_text, asyncio.get_running_loop().create_future())
        self._question = question
        content = [{"type": "input_text", "text": text}]
        item = {"id": item_id, "type": "message", "role": "user", "content": content}
        try:
            await self._send({"type": "conversation.item.create", "event_id": ids[0], "item": item})
            await self._send({"type": "response.create", "event_id": ids[1], "in_reply_to": item_id})
            return await question.answered
        finally:
            self._question = None

    async def cancel(self) -> None:
        """Stop the answer under way; ``ask`` then returns what there is. Does nothing if it just ended."""
        if self._question is not None:
            await self._send({"type": "response.cancel"})

    async def close(self) -> None:
        """Leave. The session stays on the server."""
        await self._socket.close()
        await self._reader

    async def _send(self, event: Event) -> None:
        try:
            await self._socket.send(json.dumps(event))
        except ConnectionClosed as end:
            raise _lost(end) from end

    async def _read(self) -> None:
        """Take every event as it comes, also while nobody asks: a socket that is not read stops answering pings."""
        try:
            while True:
                self._take(json.loads(await self._socket.recv()))
        except ConnectionClosed as end:
            self._fail(_lost(end))
        except Exception as error:
            self._fail(ConnectionLost(f"The server sent something that this client does not understand: {error!r}"))
            await self._socket.close()

    def _fail(self, error: ChatError) -> None:
        if self._question is not None and not self._question.answered.done():
            self._question.answered.set_exception(error)

    def _take(self, event: Event) -> None:
        question = self._question
        if question is None or question.answered.done():
            return
        match event:
            case {"type": "error", "error": {"event_id": event_id, "message": message}}:
                if event_id in question.event_ids:
                    question.answered.set_exception(ChatError(message))
            case {"type": "response.created", "in_reply_to": question.item_id, "response": {"id": response_id}}:
                question.response_id = response_id
            case {"type": "response.output_text.delta", "response_id": question.response_id}:
                self._take_text(question, question.text[: event["offset"]] + event["delta"])
            case {"type": "response.done", "response": {"id": question.response_id} as response}:
                question.answered.set_result(_answer(question.text, response))

    @staticmethod
    def _take_text(question: _Question, text: str) -> None:
        """Pass on what is new. Text that was taken back can not be unprinted: the whole is told again on a new line."""
        before, question.text = question.text, text
        if before.startswith(text):
            return
        try:
            question.on_text(text[len(before) :] if text.startswith(before) else "\n" + text)
        except Exception as error:
            question.answered.set_exception(error)  # the caller's own fault goes to the caller


def realtime_url(url: str) -> str:
    """``http(s)://host[/prefix][/v1]`` or the same with ws(s) -> the WebSocket URL. Raises ChatError if neither."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    scheme = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}.get(parts.scheme)
    if scheme is None or not parts.hostname:
        raise ChatError(f"{url!r} is no address of a server. Example: http://127.0.0.1:8000")
    path = parts.path.rstrip("/").removesuffix("/realtime").removesuffix("/v1")
    return urlunsplit((scheme, parts.netloc, f"{path}/v1/realtime", "", ""))


def _answer(text: str, response: Event) -> Answer:
    usage = response.get("usage") or {}
    timing = response.get("timing") or {}
    details = response.get("status_details") or {}
    error = details.get("error") or {}
    return Answer(
        text=text,
        status=response["status"],
        problem=error.get("message"),
        engine=response.get("engine"),
        input_tokens=usage.get("input_tokens") or 0,
        cached_tokens=(usage.get("input_token_details") or {}).get("cached_tokens") or 0,
        output_tokens=usage.get("output_tokens") or 0,
        ttft_ms=timing.get("ttft_ms"),
        total_ms=timing.get("total_ms"),
    )


def _why_not(error: Exception, url: str) -> str:
    """What a failed connect means, and what to do about it."""
    if isinstance(error, InvalidStatus):
        status = error.response.status_code
        try:
            reason = str(json.loads(error.response.body or b"")["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return f"{url} answered HTTP {status}: no chat server seems to be there."
        return f"{reason} (HTTP {status})"
    if isinstance(error, ssl.SSLError):
        return f"No secure connection to {url}: {error.reason or error}"
    if isinstance(error, ConnectionRefusedError) or (
        isinstance(error, OSError) and "Connect call failed" in str(error)
    ):
        return f"Nothing listens at {url}. Is the server running? Start it with: chat-server serve"
    if isinstance(error, TimeoutError):
        return f"{url} did not answer within {OPEN_TIMEOUT_S:.0f} s."
    return f"Can not connect to {url}: {error}"


def _lost(end: ConnectionClosed) -> ConnectionLost:
    code = end.rcvd.code if end.rcvd else 1006
    why = {
        1008: "the credential is no longer valid",
        1012: "the server restarts",
        1013: "the server is overloaded, or this connection was too slow",
    }.get(code, (end.rcvd.reason if end.rcvd else "") or "the connection broke")
    return ConnectionLost(f"The connection was lost: {why} (close code {code}).")
