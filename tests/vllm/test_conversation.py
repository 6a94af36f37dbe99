"""The main job on the real thing: two vLLM engines, and conversations that stay where their prefix is."""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from chat_server.settings import EngineAddress
from tests.support.server import RunningServer, server_for
from tests.support.ws import Turn

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

TURNS = 4
#: At least this many sessions, and more until both engines were used; the last of MAX_SESSIONS fails once in a million.
SESSIONS, MAX_SESSIONS = 5, 20

#: Another process reads a session's items from the store: nothing but redis-py and the names of the keys.
READ_STORE = """
import json, sys, redis
from chat_server.store.keys import session_keys
url, session_id = sys.argv[1:]
_, items, order, *_ = session_keys(session_id)
store = redis.Redis.from_url(url)
print(json.dumps([json.loads(store.hget(items, item_id)) for item_id in store.lrange(order, 0, -1)]))
"""


def question(session: int, turn: int) -> str:
    """Longer than a block of the prefix cache (32 tokens), so that each turn adds at least one."""
    return (
        f"This is question number {turn} of conversation number {session}. Please think of a small town by the sea, "
        f"of its harbour, its market and the people who live there, and tell me one thing about house number {turn}."
    )


async def converse(server: RunningServer, number: int) -> tuple[str, list[Turn]]:
    """A session of its own with some turns; returns its id and the turns."""
    async with server.connect(extensions=1) as client:
        # The number comes first: no other session's prefix is this one's.
        instructions = f"Conversation {number}. You answer in one short and friendly sentence."
        await client.send("session.update", session={"instructions": instructions, "max_output_tokens": 40})
        await client.expect("session.updated")
        turns = [await client.turn(question(number, turn)) for turn in range(TURNS)]
        return client.session["id"], turns


async def stored_items(redis_url: str, session_id: str) -> list[dict[str, Any]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", READ_STORE, redis_url, session_id), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    items: list[dict[str, Any]] = json.loads(out)
    return items


async def test_each_session_stays_on_its_engine_and_finds_its_prefix_there(
    vllm_engines: tuple[EngineAddress, ...], tmp_path: Path
) -> None:
    """Sessions of four turns until both engines were used: one engine each, ever more from its cache, all stored."""
    used: set[str] = set()
    async with server_for(tmp_path, vllm_engines) as server:
        number = 0
        while number < SESSIONS or len(used) < 2:
            number += 1
            assert number <= MAX_SESSIONS, f"all {MAX_SESSIONS} sessions were on {used}"
            session_id, turns = await converse(server, number)

            engines = {turn.response["engine"] for turn in turns}
            assert len(engines) == 1, f"session {number} moved: {[turn.response['engine'] for turn in turns]}"
            used |= engines

            cached = [turn.cached_tokens for turn in turns]
            assert all(before < after for before, after in pairwise(cached)), cached

            items = await stored_items(server.redis_url, session_id)
            assert [item["role"] for item in items] == ["user", "assistant"] * TURNS
            assert [item["content"][0]["text"] for item in items[1::2]] == [turn.text for turn in turns]
            assert all(turn.text for turn in turns)
    assert len(used) == 2
