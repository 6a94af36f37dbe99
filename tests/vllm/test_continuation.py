"""Going on with an answer on real vLLM: exactly as if it had never been cut, wherever text may have been told."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import ANY
from urllib.parse import urlsplit

import pytest

from chat_server.core.response import Outcome
from chat_server.engine.vllm import VllmClient, open_http
from chat_server.errors import EngineError
from chat_server.settings import EngineAddress
from chat_server.store.committer import Writer
from tests.support.server import server_for
from tests.turns import Script

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

ASKED = {
    "prose": "Tell me a story about a fox and a river, in long sentences.",
    "list": "List ten things to do in Paris, as a Markdown list with bold names.",
    "code": "Write a Python class for a bank account with deposit, withdraw and a main function.",
    "chinese": "用中文介绍一下北京的历史和文化。请写得长一点。",
    "japanese": "日本の四季について、日本語で詳しく教えてください。",
    "emoji": "Name twenty animals and fruits, each with its emoji, like 🐱 cat 🍕 pizza 👩🏽‍💻 coder 🇨🇭 flag.",
    "table": "Make a Markdown table with ten countries, their capitals, populations and areas.",
}
#: Tokens of a whole answer, and of what is written on from a cut: some 60 characters of English.
LENGTH, AHEAD = 160, 16
#: Cuts of each answer; drawn anew by each run.
CUTS = 12
#: Side by side. The size of a batch may change the last bits of a sum; no answer was seen to become another by it.
AT_A_TIME = 32


@dataclass(frozen=True)
class Asking:
    """A real engine, and how it is asked for an answer or for the rest of one: by our conductor."""

    url: str
    client: VllmClient
    model: str

    async def whole(self, asked: str, stop: tuple[str, ...]) -> Whole:
        script = Watched(engines=[self.url], client=self.client, model=self.model)
        text, outcome = await self._run(script, asked, "", LENGTH, stop)
        return Whole(asked, stop, text, outcome.status == "completed", sorted(script.places))

    async def differs(self, answer: Whole, cut: int) -> str | None:
        """How the text that is written on from ``cut`` is another than that of the whole answer."""
        script = Script(engines=[self.url], client=self.client, model=self.model)
        # Counted, for a character of Chinese or an emoji may be several tokens and comes in one piece.
        written = await self.client.count_tokens(self.url, self.model, answer.text[:cut])
        text, outcome = await self._run(script, answer.asked, answer.text[:cut], written + AHEAD, answer.stop)
        if outcome.status == "completed":
            same = answer.ended and text == answer.text
        else:
            same = outcome.status == "incomplete" and (answer.text.startswith(text) or text.startswith(answer.text))
        if same and (len(text) > cut or cut == len(answer.text)):
            return None
        return f"{answer.text[:cut][-20:]!r} goes on with {text[cut:]!r}, not with {answer.text[cut:][: AHEAD * 4]!r}"

    async def _run(
        self, script: Script, asked: str, stored: str, tokens: int, stop: tuple[str, ...]
    ) -> tuple[str, Outcome]:
        """The text of an answer of so many tokens, which may be ``stored`` in part, and its end."""
        turn = script.turn(asked=asked, stored=stored, max_output_tokens=tokens, temperature=0.0, stop=stop)
        end = await script.run(turn)
        return script.ends[-1]["item"].text, end.outcome


@dataclass(frozen=True)
class Whole:
    """An answer that nothing interrupted."""

    asked: str
    stop: tuple[str, ...]
    text: str
    ended: bool
    #: the lengths that its text had when it was told
    places: list[int]


class Watched(Script):
    """Notes after each piece of text how much of it may be told."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.places: set[int] = set()

    def add(self, writer: Writer) -> None:
        super().add(writer)
        if writer.response.length:
            self.places.add(writer.response.length)


@pytest.fixture
async def asking(vllm_engines: tuple[EngineAddress, ...]) -> AsyncIterator[list[Asking]]:
    """Both engines."""
    async with open_http() as http:
        client = VllmClient(http)
        (model,) = await client.models(vllm_engines[0].url)
        yield [Asking(engine.url, client, model.id) for engine in vllm_engines]


#: vLLM looks out for it, and so sends text that ends inside words.
STOP = ("NEVER SAID",)


@pytest.mark.parametrize("stop", [(), STOP], ids=["no stop string", "a stop string"])
async def test_an_answer_goes_on_exactly_from_any_place(asking: list[Asking], stop: tuple[str, ...]) -> None:
    """Prose, a list, code, Chinese, Japanese, emoji, a table: begun on one engine, gone on with on the other.

    Cut at places to which their text was told, the words that follow are those of the uninterrupted answer.
    """
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    limits = [asyncio.Semaphore(AT_A_TIME) for _ in asking]

    async def at(kind: str, place: int, answer: Whole, cut: int) -> str | None:
        async with limits[place]:
            wrong = await asking[place].differs(answer, cut)
        return wrong and f"{kind} at {cut}: {wrong}"

    begun = [asking[number % 2].whole(asked, stop) for number, asked in enumerate(ASKED.values())]
    cuts = [
        at(kind, 1 - number % 2, answer, cut)
        for number, (kind, answer) in enumerate(zip(ASKED, await asyncio.gather(*begun), strict=True))
        for cut in chance.sample(answer.places, min(CUTS, len(answer.places)))
    ]
    assert [wrong for wrong in await asyncio.gather(*cuts) if wrong] == []


async def test_an_engine_that_is_killed_in_mid_answer_costs_no_word(
    vllm_engines: tuple[EngineAddress, ...], asking: list[Asking], tmp_path: Path
) -> None:
    """Kill -9, through the whole server: at temperature 0 the other engine writes on what the first would have."""
    settings = {"temperature": 0.0, "max_output_tokens": 100}
    async with server_for(tmp_path, vllm_engines) as server:
        async with server.connect(extensions=1) as client:
            whole = await client.turn(ASKED["prose"], **settings)
        try:
            async with server.connect(extensions=1) as client:
                await client.say(ASKED["prose"])
                await client.send("response.create", response=settings)
                for _ in range(15):
                    await client.until("response.output_text.delta")
                loads = [await engine.client.probe(engine.url) for engine in asking]
                (place,) = [place for place, probe in enumerate(loads) if probe.running]
                os.kill(process_of(asking[place].url), signal.SIGKILL)
                response = (await client.until("response.done"))["response"]
                assert response["engine"] == vllm_engines[1 - place].name
                assert response["status_details"] == whole.response["status_details"], "it ends as the whole one"
                assert client.texts[response["output"][0]["id"]] == whole.text
                assert response["usage"] == {**whole.response["usage"], "input_token_details": ANY}
        finally:
            await both_up(asking)


def process_of(url: str) -> int:
    """The process of the engine that listens there."""
    port = str(urlsplit(url).port).encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"--port" in words and words[words.index(b"--port") + 1] == port:
                return int(folder.name)
    raise AssertionError(f"nobody listens at {url}")


async def both_up(asking: list[Asking]) -> None:
    """The engine that was killed starts again, for the tests that come after."""
    async with asyncio.timeout(600):
        for engine in asking:
            while True:
                with suppress(EngineError):
                    await engine.client.probe(engine.url)
                    break
                await asyncio.sleep(0.5)
