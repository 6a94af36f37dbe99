"""At the end of a turn: the client, the store, and a connection that is new hold the same conversation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from loadtest.chaos_audit import Audit
from loadtest.chaos_client import Client
from loadtest.chaos_model import Asked, judge_conversation
from loadtest.chaos_texts import Violation

#: seconds for a new connection to be told what is stored.
TOLD_S = 20.0
#: seconds until what a store lost must be written again.
AGAIN_S = 10.0

#: (item id or nothing for any, role, text)
Said = list[tuple[str, str, str]]


async def eventually(asked: Asked, check: Callable[[], Awaitable[None]]) -> None:
    """What was told is stored, at once; only a store that lost data gets a moment until it is written again."""
    deadline = time.monotonic() + AGAIN_S
    while True:
        try:
            return await check()
        except Violation:
            if not asked.loss or time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.2)


async def check_store(audit: Audit, session_id: str, said: Said) -> None:
    """The keys hold what was said, and nothing is under way. Raises Violation."""
    stored = await audit.stored(session_id)
    judge_conversation(said, stored.items, "the store")
    if stored.running:
        raise Violation("end", f"the end of the answer was told, and {stored.running} is still running in the store")


async def check_history(client: Client, said: Said) -> None:
    """A new ``client`` that asks for the history is told what was said. Raises Violation."""
    try:
        async with asyncio.timeout(TOLD_S):
            while not await _told_all(client):
                pass  # what ended the connection was judged
        judge_conversation(said, client.reader.history, "the history")
    except TimeoutError:
        raise Violation("stuck", f"the history was not told within {TOLD_S:.0f} s") from None
    finally:
        await client.leave()


async def _told_all(client: Client) -> bool:
    """Whether one connection told as many items as it said that there are."""
    await client.connect(history=True)
    created = await client.next()
    while created is not None and len(client.reader.history) < created["item_count"]:
        if await client.next() is None:
            return False
    return created is not None
