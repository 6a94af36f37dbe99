"""Answers of a real engine, the places at which a server may have to leave them, and how they go on from there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chat_server.core.response import Outcome, Response, State
from chat_server.engine.vllm import ChatRequest, EngineListener, Finish, VllmClient
from tests.core.answers import begun
from tests.turns import Script

ASKED = {
    "prose": "Tell me a story about a fox and a river, in long sentences.",
    "list": "List ten things to do in Paris, as a Markdown list with bold names.",
    "code": "Write a Python class for a bank account with deposit, withdraw and a main function.",
    "chinese": "用中文介绍一下北京的历史和文化。请写得长一点。",
    "japanese": "日本の四季について、日本語で詳しく教えてください。",
    "emoji": "Name twenty animals and fruits, each with its emoji, like 🐱 cat 🍕 pizza 👩🏽‍💻 coder 🇨🇭 flag.",
    "emoji in a list": "Repeat this list five times: 🐱 cat, 🍕 pizza, 👩🏽‍💻 coder, 🇨🇭 flag, ❤️ heart, 👍🏽 yes.",
    "marks": "Repeat this line ten times: 1️⃣ 2️⃣ ©️ ®️ ที่นี่มีน้ำ नमस्ते हिन्दी é",
    "table": "Make a Markdown table with ten countries, their capitals, populations and areas.",
}
#: Tokens of a whole answer, and of what is written on from a cut: some 60 characters of English.
LENGTH, AHEAD = 160, 16
#: Side by side. The size of a batch may change the last bits of a sum; no answer was seen to become another by it.
AT_A_TIME = 32
#: vLLM looks out for it, and so sends text that ends inside words.
STOP = ("NEVER SAID",)


@dataclass(frozen=True)
class Whole:
    """An answer that nothing interrupted."""

    asked: str
    stop: tuple[str, ...]
    text: str
    ended: bool
    #: the lengths of its text that the store may hold before its end
    places: list[int]


@dataclass(frozen=True)
class Asking:
    """A real engine, and how it is asked for an answer or for the rest of one: by our conductor."""

    url: str
    client: VllmClient
    model: str

    async def whole(self, asked: str, stop: tuple[str, ...]) -> Whole:
        script = Watched(engines=[self.url], client=self.client, model=self.model)
        text, outcome = await self._run(script, asked, "", LENGTH, stop)
        return Whole(asked, stop, text, outcome.status == "completed", places(script.pieces, stop))

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


def places(pieces: Sequence[str], stop: tuple[str, ...]) -> list[int]:
    """All lengths that the stored text may have when an engine has sent these pieces and no more.

    A commit takes what came since the last one, be it one piece or, while the store is slow, many; what it leaves out
    depends on where it begins. So from each place that can be reached each number of further pieces is tried.
    """
    text = "".join(pieces)
    ends = list(itertools.accumulate(map(len, pieces)))
    reached: dict[int, int] = {0: 0}  # place -> the first piece that is not used up at it
    waits = [0]
    while waits:
        start = waits.pop()
        first = max(reached[start] - 1, 0)  # what a commit left out may go with the next one, without more text
        for number, end in enumerate(ends[first:], first + 1):
            response = Response(begun(stop=stop), previous_item_id=None)
            response.move(State.PREFILL)
            response.on_stored(text[:start], start)
            response.on_text(text[start:end])
            commit = response.take_commit()
            place = start + len(commit.text) if commit else start
            if place > start and number < reached.get(place, len(ends) + 1):
                reached[place] = number
                waits.append(place)
    return sorted(set(reached) - {0})


class Watched(Script):
    """Notes the pieces in which an engine sends its text."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.pieces: list[str] = []

    async def stream(self, engine: str, url: str, request: ChatRequest, listener: EngineListener) -> Finish:
        pieces = self.pieces

        class Noting:
            def on_text(self, text: str) -> None:
                pieces.append(text)
                listener.on_text(text)

            def on_thinking(self) -> None:
                listener.on_thinking()

        return await super().stream(engine, url, request, Noting())
