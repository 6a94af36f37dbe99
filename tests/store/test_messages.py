"""What replicas tell each other: who hears it, and how it is written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest

from chat_server.core.items import SessionSettings
from chat_server.store import messages
from chat_server.store.messages import ItemGone, Text
from chat_server.store.redis import Store
from tests.store.sessions import (
    MODEL,
    TEXTS,
    begin,
    change,
    commit,
    end,
    item,
    new_session,
)

pytestmark = [pytest.mark.valkey, pytest.mark.asyncio(loop_scope="module")]


# --- telling others


async def test_changes_and_text_are_told_to_all_that_listen_but_the_writer(stores: Callable[..., Store]) -> None:
    """The same bytes that the writer gets, in the order of the writes; who left or never came hears nothing."""
    writer, one, two, left, stranger = several = [stores() for _ in range(5)]
    session_id = await new_session(writer)
    for store in (writer, one, two, left):
        await store.watch(session_id)
    await left.unwatch(session_id)
    async with AsyncExitStack() as stack:
        inboxes = [await stack.enter_async_context(store.replicas.inbox()) for store in several]
        first = item("Grüezi\n")
        added = await writer.add_item(session_id, first, None)
        asked, begun_ = await begin(writer, session_id)
        await writer.commit([commit(session_id, asked, "Grü\nezi")])
        ended = await end(writer, session_id, asked, "Grü\nezi!", stored="Grü\nezi")
        version = change(ended).version
        updated = await writer.update_session(session_id, version, 'm"', SessionSettings(instructions=TEXTS[5]))
        deleted = await writer.delete_item(session_id, first)
        assert added is not None
        for inbox in inboxes[1:3]:
            heard = [await anext(inbox) for _ in range(6)]
            assert heard[:2] == [added.message, begun_.messages[0]]
            assert heard[3:] == [ended, updated, deleted]
            assert messages.decode(heard[2]) == Text(
                session=session_id, response=asked.id, epoch=asked.epochs[0][0], offset=0, text="Grü\nezi", size=8
            )
        for store, inbox in ((writer, inboxes[0]), (left, inboxes[3]), (stranger, inboxes[4])):
            state = await two.watch(session_id)
            assert state is not None
            await store.watch(session_id)
            marker = await two.update_session(session_id, state.version, MODEL, SessionSettings())
            assert await anext(inbox) == marker  # nothing came before it


# --- how it is written


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"garbage",
        b"\xff\xfe",
        b"{}",
        b'{"kind":"unheard of","session":"s","before":1,"version":2}',
        b'{"kind":"deleted","session":"s","before":1,"version":2}',
        b"text ",
        b"text s r e x\nHello",
        b"text s r e 0 1\nHello",
        b"text s r e 0\n\xff",
    ],
)
async def test_what_is_no_message_is_refused(raw: bytes) -> None:
    """With ValueError, whatever a replica of another version may say."""
    with pytest.raises(ValueError):
        messages.decode(raw)


async def test_fields_of_a_later_version_are_left_out() -> None:
    """A newer replica may say more than this one knows."""
    told = messages.decode(b'{"kind":"deleted","session":"s","before":1,"version":2,"item_id":"i","mood":"good"}')
    assert told == ItemGone(session="s", before=1, version=2, item_id="i")


async def test_text_keeps_every_byte_behind_the_first_line() -> None:
    """Line ends and what looks like a head are text; its size is in bytes, its offset in code points."""
    told = messages.decode(b"text s r e 7\n\ntext a b c 0\nGr\xc3\xbcezi")
    assert told == Text(session="s", response="r", epoch="e", offset=7, text="\ntext a b c 0\nGrüezi", size=21)
