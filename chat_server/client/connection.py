"""One session, one question at a time, over a WebSocket that comes back: what the terminal chat needs of the protocol.

Use::

    connection = await Connection.open("http://127.0.0.1:8000", api_key="local")
    try:
        answer = await connection.ask("Hello", on_text=print)
    finally:
        await connection.close()
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from chat_server.errors import ChatServerError

#: Seconds to connect and to be let in. A server that is there answers in milliseconds; TLS over a slow line does not.
OPEN_TIMEOUT_S = 15.0
#: Seconds in which a lost connection must be back; then the question under way fails. A restart takes some of them.
PATIENCE_S = 60.0
#: Seconds that it may be away before whoever waits for an answer is told: most are back before a person would notice.
NOTICE_S = 1.0
#: Seconds before the first try to come back, if the server named none, and the most before any.
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.2, 3.0
#: Close codes after which coming back helps nobody: it is done, or we are at fault, or may not be there.
_STAY_AWAY = frozenset({1000, 1002, 1003, 1007, 1008, 1009, 1010})

Event = dict[str, Any]


class ChatError(ChatServerError):
    """The server could not be reached or refused, in words for the person in front of the terminal."""


class Refused(ChatError):
    """The server does not let us in, and waiting would not help."""


class ConnectionLost(ChatError):
    """The connection ended and did not come back. What was said is stored: the session can be opened again."""


class SessionGone(ConnectionLost):
    """The session is not there any more: there is nothing to come back to."""


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

    said: str
    item_id: str
    event_ids: tuple[str, str]
    on_text: Callable[[str], None]
    on_lost: Callable[[], None]
    answered: asyncio.Future[Answer]
    response_id: str | None = None
    epoch: str = ""
    text: str = ""
    #: it is to stop where it was when that was asked for: no more text is passed on.
    stopped: bool = False


class _Rejoin(Exception):
    """Something of the answer is missing: a new connection is told it."""


@dataclass(frozen=True, slots=True)
class _Door:
    """The way into the server."""

    url: str
    api_key: str | None
    model: str | None

    async def enter(self, **query: str | None) -> tuple[ClientConnection, Event]:
        """Connect and wait for ``session.created``. Raises ChatError with what to do."""
        wanted = {"extensions": "1", "model": self.model, **query}
        target = realtime_url(self.url) + "?" + urlencode({name: value for name, value in wanted.items() if value})
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            socket = await connect(target, additional_headers=headers, open_timeout=OPEN_TIMEOUT_S, max_size=None)
        except (OSError, InvalidHandshake, InvalidURI) as error:
            raise _why_not(error, self.url) from error
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                created = json.loads(await socket.recv())
            if created["type"] != "session.created":
                raise ValueError(created["type"])
            return socket, created
        except (TimeoutError, ConnectionClosed, ValueError, KeyError, TypeError) as error:
            await socket.close()
            raise ChatError(f"{self.url} let us in, but does not speak the Realtime protocol.") from error
        except asyncio.CancelledError:
            await socket.close()
            raise


class Connection:
    """Open with ``Connection.open``; afterwards ``close`` must be awaited.

    A connection that breaks comes back by itself, and the answer under way goes on from what was passed on of it. The
    websockets library's own pings end a dead connection within 40 s, so nothing here waits for ever.
    """

    def __init__(self, door: _Door, socket: ClientConnection, created: Event, patience_s: float) -> None:
        self.session_id: str = created["session"]["id"]
        self.model: str = created["session"]["model"]
        #: messages that the session already had.
        self.item_count: int = created.get("item_count", 0)
        self._door = door
        self._socket = socket
        self._patience_s = patience_s
        self._retry_after_s: float | None = None
        #: it has been away for longer than NOTICE_S.
        self._is_missed = False
        self._question: _Question | None = None
        self._end: ChatError | None = None
        self._reader = asyncio.create_task(self._read(), name="chat-reader")

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        api_key: str | None = None,
        session_id: str | None = None,
        model: str | None = None,
        patience_s: float = PATIENCE_S,
    ) -> Connection:
        """Connect. ``patience_s`` is how long it may take to come back later. Raises ChatError with what to do."""
        door = _Door(url, api_key, model)
        socket, created = await door.enter(session_id=session_id)
        return cls(door, socket, created, patience_s)

    async def ask(
        self, text: str, on_text: Callable[[str], None], on_lost: Callable[[], None] = lambda: None
    ) -> Answer:
        """Say ``text`` and wait for the end of the answer; ``on_text`` gets each piece of it at once.

        ``on_lost`` is called each time that the connection goes meanwhile and is not back in a moment. Raises ChatError
        if the server refuses, ConnectionLost if the connection is gone and does not come back.
        """
        assert self._question is None, "one question at a time"
        if self._end is not None:
            raise self._end
        ids = (f"event_{secrets.token_hex(8)}", f"event_{secrets.token_hex(8)}")
        item_id = f"item_{secrets.token_hex(16)}"
        question = _Question(text, item_id, ids, on_text, on_lost, asyncio.get_running_loop().create_future())
        self._question = question
        try:
            if self._is_missed:
                on_lost()
            await self._deliver(question)
            return await question.answered
        finally:
            self._question = None

    async def cancel(self) -> None:
        """Stop the answer under way; ``ask`` then returns what there is. Does nothing if it just ended.

        It is a wish that is kept: without a connection it is told to the next one.
        """
        if self._question is not None:
            self._question.stopped = True
            await self._stop(self._question)

    async def close(self) -> None:
        """Leave. The session stays on the server."""
        self._reader.cancel()
        await asyncio.wait({self._reader})
        await self._socket.close()

    async def _deliver(self, question: _Question) -> None:
        """Tell the question. A second time is harmless: one item id makes one item, and one item one answer."""
        content = [{"type": "input_text", "text": question.said}]
        item = {"id": question.item_id, "type": "message", "role": "user", "content": content}
        create, ask = question.event_ids
        await self._send({"type": "conversation.item.create", "event_id": create, "item": item})
        await self._send({"type": "response.create", "event_id": ask, "in_reply_to": question.item_id})

    async def _stop(self, question: _Question) -> None:
        """Ask for the stop, if it is known of what."""
        if question.response_id is not None:
            seen = len(question.text)
            await self._send({"type": "response.cancel", "response_id": question.response_id, "seen": seen})

    async def _send(self, event: Event) -> None:
        """What is lost with the connection is told again by the next one."""
        with contextlib.suppress(ConnectionClosed):
            await self._socket.send(json.dumps(event))

    async def _read(self) -> None:
        """Take every event as it comes, also while nobody asks: a socket that is not read stops answering pings."""
        try:
            while True:
                try:
                    await self._take(json.loads(await self._socket.recv()))
                except ConnectionClosed as end:
                    if _code(end) in _STAY_AWAY:
                        raise _lost(end) from end
                    await self._come_back(_lost(end))
                except _Rejoin:
                    await self._socket.close()
                    await self._come_back(ConnectionLost("The connection was lost: a part of the answer was missing."))
        except ChatError as error:
            self._fail(error)
        except Exception as error:
            self._fail(ConnectionLost(f"The server sent something that this client does not understand: {error!r}"))
            await self._socket.close()

    async def _come_back(self, lost: ConnectionLost) -> None:
        """Connect again, with what we hold of the answer under way. Raises ChatError if that can not be."""
        delay = _FIRST_DELAY_S if self._retry_after_s is None else self._retry_after_s
        self._retry_after_s = None
        notice = asyncio.get_running_loop().call_later(NOTICE_S, self._miss)
        try:
            async with asyncio.timeout(self._patience_s):
                while True:
                    await asyncio.sleep(delay)
                    try:
                        self._socket, created = await self._door.enter(**self._held())
                        break
                    except SessionGone:
                        raise
                    except Refused as error:
                        message = f"The connection was lost, and the server refuses a new one: {error}"
                        raise ConnectionLost(message) from error
                    except ChatError:  # it is not there yet
                        delay = min(2 * delay + _FIRST_DELAY_S, _LONGEST_DELAY_S) * random.uniform(0.5, 1)
        except TimeoutError:
            raise ConnectionLost(f"{lost} It did not come back within {self._patience_s:.0f} s.") from None
        finally:
            notice.cancel()
            self._is_missed = False
        await self._rejoined(created)

    def _miss(self) -> None:
        self._is_missed = True
        if self._question is not None and not self._question.answered.done():
            self._call(self._question, self._question.on_lost)

    def _held(self) -> dict[str, str | None]:
        question = self._question
        if question is None or question.response_id is None:
            return {"session_id": self.session_id}
        point = {"response_id": question.response_id, "epoch": question.epoch, "offset": str(len(question.text))}
        return {"session_id": self.session_id, **point}

    async def _rejoined(self, created: Event) -> None:
        """A new connection: what was sent on the one before may not have arrived."""
        question = self._question
        if question is None:
            return
        if question.response_id is None:
            await self._deliver(question)
            return
        if question.stopped:
            await self._stop(question)
        active = created.get("active_response") or {}
        if active.get("id") != question.response_id:
            # It ended: its rest is told before the answer to this, if anything is known of it.
            await self._send({"type": "ping", "t": question.item_id})

    def _fail(self, error: ChatError) -> None:
        self._end = error
        if self._question is not None and not self._question.answered.done():
            self._question.answered.set_exception(error)

    async def _take(self, event: Event) -> None:
        """Raises _Rejoin if text is missing."""
        if event["type"] == "server.draining":
            self._retry_after_s = event["retry_after_ms"] / 1000
        question = self._question
        if question is None or question.answered.done():
            return
        match event:
            case {"type": "error", "error": {"event_id": event_id, "message": message}}:
                if event_id in question.event_ids:
                    question.answered.set_exception(ChatError(message))
            case {"type": "response.created", "in_reply_to": question.item_id, "response": {"id": response_id}}:
                question.response_id = response_id
                if event.get("duplicate"):
                    raise _Rejoin  # it ended while we were away, and we have nothing of it
                if question.stopped:
                    await self._stop(question)
            case {"type": "response.output_text.delta", "response_id": question.response_id}:
                self._take_delta(question, event)
            case {"type": "response.done", "response": {"id": question.response_id} as response}:
                question.answered.set_result(_answer(question.text, response))
            case {"type": "pong", "t": question.item_id}:
                question.answered.set_exception(ChatError("The server has lost this answer. Ask again."))

    def _take_delta(self, question: _Question, event: Event) -> None:
        if question.stopped:
            return
        if event["offset"] > len(question.text):
            raise _Rejoin
        question.epoch = event["epoch"]
        self._take_text(question, question.text[: event["offset"]] + event["delta"])

    @staticmethod
    def _take_text(question: _Question, text: str) -> None:
        """Pass on what is new. Text that was taken back can not be unprinted: the whole is told again on a new line."""
        before, question.text = question.text, text
        if before.startswith(text):
            return
        new = text[len(before) :] if text.startswith(before) else "\n" + text
        Connection._call(question, question.on_text, new)

    @staticmethod
    def _call(question: _Question, told: Callable[..., None], *arguments: str) -> None:
        try:
            told(*arguments)
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


def _why_not(error: Exception, url: str) -> ChatError:
    """What a failed connect means, and what to do about it."""
    if isinstance(error, InvalidStatus):
        status = error.response.status_code
        kind = Refused if status < 500 and status != 429 else ChatError
        try:
            told = json.loads(error.response.body or b"")["error"]
            reason = f"{told['message']} (HTTP {status})"
        except (ValueError, KeyError, TypeError):
            return kind(f"{url} answered HTTP {status}: no chat server seems to be there.")
        return SessionGone(reason) if told.get("code") == "session_not_found" else kind(reason)
    if isinstance(error, ssl.SSLError):
        return Refused(f"No secure connection to {url}: {error.reason or error}")
    if isinstance(error, ConnectionRefusedError) or (
        isinstance(error, OSError) and "Connect call failed" in str(error)
    ):
        return ChatError(f"Nothing listens at {url}. Is the server running? Start it with: chat-server serve")
    if isinstance(error, TimeoutError):
        return ChatError(f"{url} did not answer within {OPEN_TIMEOUT_S:.0f} s.")
    return ChatError(f"Can not connect to {url}: {error}")


def _code(end: ConnectionClosed) -> int:
    return end.rcvd.code if end.rcvd else 1006


def _lost(end: ConnectionClosed) -> ConnectionLost:
    code = _code(end)
    why = {
        1008: "the credential is no longer valid",
        1012: "the server restarts",
        1013: "the server is overloaded, or this connection was too slow",
    }.get(code, (end.rcvd.reason if end.rcvd else "") or "the connection broke")
    kind = SessionGone if code == 1000 else ConnectionLost
    return kind(f"The connection was lost: {why} (close code {code}).")
