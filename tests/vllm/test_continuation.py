"""Going on with an answer on real vLLM: exactly as if it had never been cut, wherever text may have been told."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from chat_server.core.response import Outcome, Response, State
from chat_server.engine.vllm import VllmClient, open_http
from chat_server.settings import EngineAddress
from chat_server.store.committer import Writer
from tests.turns import Script

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

ASKED = {
    "prose": "Tell me a story about a fox and a river, in long sentences.",
    "list": "List ten things to do in Paris, as a Markdown list with bold names.",
    "code": "Write a Python class for a bank account with deposit, withdraw and a main function.",
    "chinese": "用中文介绍一下北京的历史和文化。请写得长一点。",
    "japanese": "日本の四季について、日本語で詳しく教えてください。",
    "emoji": "Repeat this line ten times: 👩🏽‍💻 loves 🍕 and 🎉, 👍🏿 for the 🇨🇭 🏳️‍🌈 family 👨‍👩‍👧‍👦!",
    "table": "Make a Markdown table with ten countries, their capitals, populations and areas.",
}
#: Tokens of a whole answer, and of what is written on from a cut.
LENGTH, AHEAD = 160, 20
#: Cuts of each answer, at most; continuations at a time.
CUTS, AT_A_TIME = 24, 8


@dataclass
class Whole:
    """An answer that nothing interrupted, and the places where its text may have been cut, each with its tokens."""

    text: str = ""
    ended: bool = False
    places: dict[int, int] = field(default_factory=dict)


async def written_on(
    script: Script, asked: str, stored: str, tokens: int, stop: tuple[str, ...] = ()
) -> tuple[str, Outcome]:
    """The text of an answer of so many tokens that goes on from what is ``stored``, and its end."""
    turn = script.turn(asked=asked, stored=stored, max_output_tokens=tokens, temperature=0.0, stop=stop)
    end = await script.run(turn)
    return script.ends[-1]["item"].text, end.outcome


class Watched(Script):
    """Notes after each piece where the text that may be told ends."""

    def __init__(self, url: str, client: VllmClient, model: str) -> None:
        super().__init__(engines=[url], client=client, model=model)
        self.places: dict[int, int] = {}
        self.pieces = 0

    def add(self, writer: Writer) -> None:
        super().add(writer)
        self.pieces += 1
        if writer.response.length:
            self.places.setdefault(writer.response.length, self.pieces)


async def whole(url: str, client: VllmClient, model: str, asked: str, stop: tuple[str, ...] = ()) -> Whole:
    script = Watched(url, client, model)
    text, outcome = await written_on(script, asked, "", LENGTH, stop)
    return Whole(text, outcome.status == "completed", script.places)


async def differing(
    url: str, client: VllmClient, model: str, asked: str, answer: Whole, cuts: list[int], stop=()
) -> list[tuple[int, str, str]]:
    """Where and how the text that is written on from ``cuts`` is not that of the uninterrupted answer."""
    limit = asyncio.Semaphore(AT_A_TIME)

    async def one(cut: int) -> tuple[int, str, str] | None:
        async with limit:
            script = Script(engines=[url], client=client, model=model)
            text, outcome = await written_on(script, asked, answer.text[:cut], answer.places[cut] + AHEAD, stop)
        if outcome.status == "completed":
            same = answer.ended and text == answer.text
        else:
            same = outcome.status == "incomplete" and (answer.text.startswith(text) or text.startswith(answer.text))
        return None if same else (cut, text[cut - 20 :], answer.text[cut - 20 :][: AHEAD * 4])

    return [found for found in await asyncio.gather(*map(one, cuts)) if found]
