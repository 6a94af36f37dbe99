"""What the store and the engines themselves say: a client's word is compared with theirs."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
import orjson
import redis.asyncio as redis_asyncio
from redis.exceptions import RedisError

from chat_server.store import keys
from loadtest.chaos_model import Answer
from loadtest.chaos_texts import Violation

#: seconds that an engine may take to notice that its request was closed.
NOTICE_S = 0.5
#: seconds between two looks: at all engines for requests that should not be there, and for one that is to go.
LOOK_S = 0.25
CLOSE_LOOK_S = 0.005
#: seconds in which the store must answer, restarts included.
STORE_S = 30.0


@dataclass(frozen=True, slots=True)
class Stored:
    """A session as its keys hold it. ``running`` is the response being made, ``owner`` the replica that makes it."""

    items: list[dict[str, Any]]
    running: str
    owner: str
    text: str


class Audit:
    """Reads the store's keys and the engines' lists. ``close`` at the end."""

    def __init__(self, redis_url: str, engine_urls: list[str], http: aiohttp.ClientSession) -> None:
        self._redis = redis_asyncio.Redis.from_url(redis_url)
        self._engines = engine_urls
        self._http = http
        #: responses whose end was told, and when.
        self.ended: dict[str, float] = {}

    async def close(self) -> None:
        await self._redis.aclose()

    # --- the store

    async def stored(self, session_id: str) -> Stored:
        """The session's keys, read in one step. Waits for a store that is away; raises Violation if it stays so."""
        _, items, order, response, text = keys.session_keys(session_id)[:5]
        deadline = time.monotonic() + STORE_S
        while True:
            try:
                async with asyncio.timeout(STORE_S):
                    pipe = self._redis.pipeline(transaction=True)
                    pipe.lrange(order, 0, -1)
                    pipe.hgetall(items)
                    pipe.hmget(response, "id", "replica")
                    pipe.get(text)
                    ids, by_id, running, so_far = await pipe.execute()
                break
            except (RedisError, OSError, TimeoutError):
                if time.monotonic() > deadline:
                    raise Violation("stuck", f"the store did not answer for {STORE_S:.0f} s") from None
                await asyncio.sleep(0.05)
        decoded = [orjson.loads(by_id[item_id]) for item_id in ids if item_id in by_id]
        response_id, owner = ((value or b"").decode() for value in running)
        return Stored(decoded, response_id, owner, (so_far or b"").decode())

    async def check_stored(self, session_id: str, answer: Answer) -> None:
        """Whatever a client holds of an answer is stored, a round trip later: a gross fault shows. Raises Violation."""
        held = answer.text
        stored = await self.stored(session_id)
        asked = answer.asked
        if asked.stops or asked.loss:
            return  # it may be cut by now
        if stored.running == answer.id:
            text = stored.text
        else:
            text = next((_text(item) for item in stored.items if item.get("response_id") == answer.id), "")
        if not text.startswith(held):
            raise Violation("told first", f"{len(held)} code points of {answer.id} were told, {len(text)} are stored")

    async def owner(self, session_id: str, response_id: str) -> str:
        """The replica that makes a response; nothing if nobody does."""
        stored = await self.stored(session_id)
        return stored.owner if stored.running == response_id else ""

    # --- the engines

    async def on_engines(self) -> Counter[str]:
        """The responses that engines work on, and on how many of them."""
        answers = await asyncio.gather(*map(self._unfinished, self._engines))
        return Counter(response_id for ids in answers for response_id in ids)

    async def _unfinished(self, url: str) -> list[str]:
        async with self._http.get(f"{url}/simulate") as answer:
            found: list[str] = (await answer.json())["unfinished"]
            return found

    async def until_gone(self, response_id: str, timeout_s: float) -> float | None:
        """When the engines were first seen without this response, for good; None if that did not come in time."""
        gone: float | None = None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            now = time.monotonic()
            if response_id in await self.on_engines():
                gone = None
            elif gone is None:
                gone = now
            if gone is not None and response_id in self.ended:
                return gone
            await asyncio.sleep(CLOSE_LOOK_S)
        return None

    def forget_ends(self, since: float) -> None:
        """The store lost the ends that were told since then, and who could have written them again is dead."""
        self.ended = {response_id: at for response_id, at in self.ended.items() if at < since}

    async def watch_engines(self, found: Callable[[Violation], None]) -> None:
        """Look for requests that nobody waits for, until cancelled; each is told once."""
        suspects: set[str] = set()
        named: set[str] = set()
        while True:
            await asyncio.sleep(LOOK_S)
            looked = time.monotonic()
            working = await self.on_engines()
            late = {rid for rid in working if rid in self.ended and looked - self.ended[rid] > NOTICE_S}
            now = late | {rid for rid, engines in working.items() if engines > 1}
            for response_id in now & suspects - named:
                named.add(response_id)
                why = "which has ended" if response_id in late else "at the same time"
                found(Violation("orphan", f"{working[response_id]} engines work on {response_id}, {why}"))
            suspects = now

    async def check_idle(self, within_s: float = 10.0) -> None:
        """No engine works on anything any more, and the store knows of no answer in the making. Raises Violation."""
        deadline = time.monotonic() + within_s
        while left := await self.on_engines():
            if time.monotonic() > deadline:
                raise Violation("orphan", f"engines still work on {sorted(left)}")
            await asyncio.sleep(LOOK_S)
        while unended := await self._unended():
            if time.monotonic() > deadline:
                raise Violation("end", f"no end is stored of the answers in {unended}")
            await asyncio.sleep(LOOK_S)

    async def _unended(self) -> list[str]:
        """The keys in which the store has answers that run or wait."""
        sessions = cast("list[bytes]", await self._redis.zrange(keys.RUNNING, 0, -1))
        responses = self._redis.scan_iter(match=keys.session_keys("*")[3], count=1000)
        found = [key async for key in responses if any(await self._redis.hmget(key, "id", "q_id"))]
        return [f"{keys.RUNNING}: {name.decode()}" for name in sessions] + [key.decode() for key in found]


def _text(item: dict[str, Any]) -> str:
    return "".join(part["text"] for part in item["content"])
