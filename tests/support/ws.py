"""A WebSocket client for tests that read as a script: send, expect, send, expect.

It judges every event as it comes (``events.check``) and keeps watch over what must hold on any connection: event ids
are unique, text follows the offset rule, the whole text equals the deltas, nothing follows the end of a response.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import websockets.asyncio.client
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.support import events

#: Seconds in which the next event must come; a test that fails by it says what it had seen until then.
PATIENCE_S = 10.0


@dataclass(frozen=True)
class Turn:
    """One message and its answer, as ``WsClient.turn`` saw them."""

    user_item: dict[str, Any]
    response: dict[str, Any]
    text: str

    @property
    def cached_tokens(self) -> int:
        cached = self.response["usage"]["input_token_details"]["cached_tokens"]
        assert isinstance(cached, int)
        return cached


@dataclass(frozen=True)
class Refusal:
    """An HTTP answer in place of the upgrade."""

    status: int
    headers: dict[str, str]
    error: dict[str, Any]


class WsClient:
    """One connection. Everything it received is in ``events``; each item's text so far in ``texts``."""

    def __init__(self, connection: websockets.asyncio.client.ClientConnection, *, extensions: bool) -> None:
        self.connection = connection
        self.extensions = extensions
        self.events: list[dict[str, Any]] = []
        self.texts: dict[str, str] = {}
        self._event_ids: set[str] = set()
        self._ended: set[str] = set()
        self._sent = 0

    async def send(self, type: str, **fields: Any) -> str:
        """Send one event and return its event id, which an ``error`` about it carries."""
        self._sent += 1
        event_id = f"test_{self._sent}"
        await self.connection.send(json.dumps({"type": type, "event_id": event_id, **fields}))
        return event_id

    async def next(self) -> dict[str, Any]:
        """The next event, judged. Raises ConnectionClosed, or fails after PATIENCE_S."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                frame = await self.connection.recv()
        except TimeoutError:
            raise AssertionError(f"nothing came for {PATIENCE_S} s; so far: {self.types}") from None
        assert isinstance(frame, str), "events are text frames"
        event = json.loads(frame)
        self.judge(event)
        self.events.append(event)
        return event  # type: ignore[no-any-return]

    async def expect(self, type: str) -> dict[str, Any]:
        """The very next event (heartbeats aside) must be of this type."""
        event = await self.next()
        while event["type"] == "heartbeat" and type != "heartbeat":
            event = await self.next()
        assert event["type"] == type, f"expected {type}, got {event}"
        return event

    async def until(self, type: str) -> dict[str, Any]:
        """Read on until an event of this type. An ``error`` on the way fails the test."""
        while (event := await self.next())["type"] != type:
            assert event["type"] != "error", f"waiting for {type}: {event['error']}"
        return event

    async def error(self, code: str, *, event_id: str | None = None) -> dict[str, Any]:
        """The next event must be an error with this code, about that event; returns its ``error`` object."""
        error = (await self.expect("error"))["error"]
        assert isinstance(error, dict)
        assert (error["code"], error["event_id"]) == (code, event_id or f"test_{self._sent}"), error
        return error

    async def say(self, text: str, *, role: str = "user", **item: Any) -> dict[str, Any]:
        """Put a message into the conversation and return its item as the server has it."""
        kind = "output_text" if role == "assistant" else "input_text"
        content = [{"type": kind, "text": text}]
        message = {"type": "message", "role": role, "content": content, **item}
        await self.send("conversation.item.create", item=message)
        done = await self.until("conversation.item.done")
        assert done["item"]["content"] == content
        return done["item"]  # type: ignore[no-any-return]

    async def turn(self, text: str, **response: Any) -> Turn:
        """Say something, have it answered, wait for the end."""
        item = await self.say(text)
        await self.send("response.create", **({"response": response} if response else {}))
        done = (await self.until("response.done"))["response"]
        answer = "".join(self.texts.get(item["id"], "") for item in done["output"])
        return Turn(item, done, answer)

    async def closed(self) -> int:
        """Read on until the server closes the connection; the close code (1006 where none was sent)."""
        try:
            while True:
                await self.next()
        except ConnectionClosed as end:
            return end.rcvd.code if end.rcvd else 1006

    @property
    def types(self) -> list[str]:
        """The types of all events so far, in order."""
        return [event["type"] for event in self.events]

    @property
    def session(self) -> dict[str, Any]:
        """The session, as the server described it last."""
        for event in reversed(self.events):
            if event["type"] in ("session.created", "session.updated"):
                return event["session"]  # type: ignore[no-any-return]
        raise AssertionError("no session.created yet")

    def judge(self, event: dict[str, Any]) -> None:
        """Fail unless this event, as the next one on this connection, is right."""
        events.check(event, extensions=self.extensions)
        assert event["event_id"] not in self._event_ids, f"this event id came before: {event}"
        self._event_ids.add(event["event_id"])
        response_id = event.get("response_id") or event.get("response", {}).get("id")
        if event["type"].startswith("response."):
            assert response_id not in self._ended or event.get("duplicate"), f"after response.done: {event}"
        match event:
            case {"type": "response.output_text.delta", "item_id": item_id, "offset": offset, "delta": delta}:
                before = self.texts.get(item_id, "")
                assert 0 <= offset <= len(before), (
                    f"a gap: {len(before)} code points are here, the delta is at {offset}"
                )
                self.texts[item_id] = before[:offset] + delta
            case {"type": "response.output_text.done", "item_id": item_id, "text": text}:
                assert self.texts.get(item_id, "") == text, "the deltas are not the text"
            case {"type": "response.done"}:
                self._ended.add(response_id)


@asynccontextmanager
async def connect(
    url: str,
    *,
    api_key: str | None = "local",
    headers: dict[str, str] | None = None,
    subprotocols: Sequence[str] = (),
    origin: str | None = None,
    **query: Any,
) -> AsyncIterator[WsClient]:
    """Connect to ``url`` (``ws://.../v1/realtime``) with this query and read ``session.created``."""
    headers = dict(headers or {})
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    connecting = websockets.asyncio.client.connect(
        f"{url}?{urlencode(query)}",
        additional_headers=headers,
        subprotocols=[websockets.Subprotocol(name) for name in subprotocols] or None,
        origin=websockets.Origin(origin) if origin else None,
        max_size=None,
        max_queue=None,  # else one that is left with much to read does not hear the end of its close
        proxy=None,
        close_timeout=2,
    )
    async with connecting as connection:
        client = WsClient(connection, extensions=str(query.get("extensions", "0")) == "1")
        await client.expect("session.created")
        yield client


async def refused(url: str, **how: Any) -> Refusal:
    """The HTTP answer to a handshake that must be refused; arguments as for ``connect``."""
    try:
        async with connect(url, **how):
            raise AssertionError("the handshake was accepted")
    except InvalidStatus as refusal:
        response = refusal.response
        error = json.loads(response.body or b"{}")["error"]
        assert {"type", "code", "message"} <= error.keys()
        return Refusal(response.status_code, {k.lower(): v for k, v in response.headers.raw_items()}, error)
