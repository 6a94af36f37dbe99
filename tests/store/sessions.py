"""Sessions in a real store, as the store's tests make and read them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import redis.asyncio

from chat_server.core.conversation import Conversation
from chat_server.core.ids import new_id
from chat_server.core.items import Item, Part, Role, SessionSettings, StatusDetails
from chat_server.core.principal import Principal
from chat_server.core.response import Begun, Outcome, Response
from chat_server.store import keys, messages
from chat_server.store.messages import AnyChange
from chat_server.store.redis import Store
from chat_server.store.replies import BeginReply, Cut, TextCommit
from chat_server.store.server import Server
from tests.core.answers import begun

ANN = Principal("acme", "ann")
MODEL = "m"
TTL_S, EMPTY_TTL_S, MAX_ITEMS = 1000, 100, 8

#: Every kind of text that JSON, Lua or UTF-8 could stumble over.
TEXTS = [
    "plain",
    "",
    "Grüezi, 你好, שלום",
    "👩🏽‍💻 🇨🇭 e\u0301",
    "\x00\x01\x1f\x7f in between \x00",
    "\"quotes\" 'and' \\back\\slashes\\",
    "lines\n\r\t\u2028\u2029\u0085",
    "%d %s %1 {} [[ ]] --",
    "\ufffd\ufffe\uffff\U0010ffff",
    "text a b c 0\ntext",
]


def store_at(
    url: str, replica_id: str | None = None, *, max_connections: int = 64, wait_replicas: int = 0, **limits: Any
) -> Store:
    """A store as one replica sees it."""
    server = Server(url, max_connections=max_connections, wait_replicas=wait_replicas)
    limits = {
        "ttl_s": TTL_S,
        "empty_ttl_s": EMPTY_TTL_S,
        "max_items": MAX_ITEMS,
        "max_session_bytes": 1 << 30,
        **limits,
    }
    return Store(server, replica_id or new_id("replica"), **limits)


async def new_session(store: Store) -> str:
    session_id = new_id("sess")
    await store.create_session(session_id, ANN, MODEL, SessionSettings())
    return session_id


def item(text: str = "Hello", id: str | None = None, role: Role = "user") -> Item:
    part = Part(type="output_text" if role == "assistant" else "input_text", text=text)
    return Item(id=id or new_id("item"), status="completed", role=role, content=[part])


async def add(store: Store, session_id: str, *items: Item) -> AnyChange:
    """Put items in at the end; the change that the last of them is."""
    message = b""
    for one in items:
        added = await store.add_item(session_id, one, None)
        assert added is not None
        assert added.kind == "ok"
        message = added.message
    return change(message)


async def begin(store: Store, session_id: str, token: str = "token_1", **changes: Any) -> tuple[Begun, BeginReply]:
    """Ask for an answer with fresh ids, or those given; of the items that come back, those of the prompt."""
    asked = begun(**{"id": new_id("resp"), "item_id": new_id("item"), "replica": store.replica_id, **changes})
    reply = await store.begin(session_id, Response(asked, previous_item_id=None), token)
    assert reply is not None
    return asked, replace(reply, items=Conversation(reply.items).before(asked.item_id))


def commit(session_id: str, asked: Begun, text: str, at: str = "", token: str = "token_1") -> TextCommit:
    """``text`` of an answer, which begins behind the text ``at``."""
    return TextCommit(
        session_id=session_id,
        response_id=asked.id,
        token=token,
        epoch=asked.epochs[0][0],
        byte_offset=len(at.encode()),
        offset=len(at),
        data=text.encode(),
    )


async def end(
    store: Store,
    session_id: str,
    asked: Begun,
    text: str,
    token: str = "token_1",
    *,
    stored: str = "",
    keep: bool = True,
    cut: int | None = None,
) -> bytes | Cut | str:
    """End an answer with the whole ``text``, of which ``stored`` was committed."""
    details = StatusDetails(type="completed")
    outcome = Outcome(status="completed", details=details, text_length=len(text), epochs=asked.epochs, keeps_item=keep)
    whole = Response(asked, previous_item_id=None).make_item("completed", text, outcome)
    rest = text[len(stored) :]
    return await store.end(
        session_id,
        asked.id,
        token,
        whole,
        rest_offset=len(stored),
        rest=rest,
        outcome=outcome,
        wish=None if cut is None else Cut(cut),
    )


def change(message: bytes | Cut | str | None) -> AnyChange:
    """A change, out of the store's message."""
    assert isinstance(message, bytes), message
    decoded = messages.decode(message)
    assert not isinstance(decoded, messages.Text | messages.Cancel | messages.Wake)
    return decoded


async def ids(store: Store, session_id: str) -> list[str]:
    """The conversation's ids, in order."""
    reply = await store.last_items(session_id, 0)
    assert reply is not None
    return [one.id for one in reply[2]]


async def lives(raw: redis.asyncio.Redis, session_id: str) -> dict[str, int]:
    """Seconds that each key of a session has to live, by the key's last part; -1: for ever."""
    found = {}
    for key in keys.session_keys(session_id)[:8]:
        if await raw.exists(key):
            found[key.rpartition(":")[2]] = await raw.ttl(key)
    return found
