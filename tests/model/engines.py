"""The engines: each attempt at an answer writes a text of its own, so that any mixture of two shows."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from chat_server.engine.vllm import (
    ChatRequest,
    EngineListener,
    EngineNotThere,
    Finish,
    ModelInfo,
    Probe,
    Usage,
    VllmClient,
)
from chat_server.errors import EngineUnavailable

MODEL = "model"
URLS = ("http://engine-0", "http://engine-1")

#: what follows a token: white space and sequences that may still grow must wait, and bytes are not code points
_TAILS = ("", " ", " ", "  ", "\n\n", "é ", "👩🏽‍💻", "🇨🇭 ", "e\u0301", "你好")


@dataclass
class Attempt:
    """One engine's part of an answer: it went on from ``given`` and wrote ``written``."""

    number: int
    response_id: str
    given: str
    written: str = ""
    #: it came to its own end
    whole: bool = False

    @property
    def text(self) -> str:
        return self.given + self.written


@dataclass
class Engines:
    """The machines, and all that they ever wrote."""

    random: random.Random
    #: told what does not hold
    fail: Callable[[str], None]
    up: dict[str, bool] = field(default_factory=lambda: dict.fromkeys(URLS, True))
    starts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(URLS, 1))
    attempts: list[Attempt] = field(default_factory=list)
    #: (replica, response) of the streams that are open
    streams: list[tuple[str, str]] = field(default_factory=list)
    pace_s: float = 0.05
    breaks: float = 0.0

    def stop(self, url: str) -> None:
        self.up[url] = False

    def start(self, url: str) -> None:
        self.up[url] = True
        self.starts[url] += 1

    def hang_up(self, replica_id: str) -> None:
        """A replica is gone, and its streams with it."""
        self.streams = [stream for stream in self.streams if stream[0] != replica_id]

    def attempts_at(self, response_id: str) -> Sequence[Attempt]:
        return [attempt for attempt in self.attempts if attempt.response_id == response_id]


class EngineClient(VllmClient):
    """One replica's client of the engines."""

    def __init__(self, engines: Engines, replica_id: str) -> None:
        self._engines = engines
        self._replica_id = replica_id

    async def stream(self, engine: str, url: str, request: ChatRequest, listener: EngineListener) -> Finish:
        engines, draw = self._engines, self._engines.random
        self._check(engine, url)
        asked = [message["content"] for message in request.messages if message["role"] == "user"]
        if len(asked) != len(set(asked)):
            engines.fail(f"the prompt repeats what was said once: {asked}")
        given = request.messages[-1]["content"] if request.continue_final else ""
        attempt = Attempt(len(engines.attempts), request.request_id, given)
        engines.attempts.append(attempt)
        stream = (self._replica_id, request.request_id)
        engines.streams.append(stream)
        try:
            await asyncio.sleep(engines.pace_s * draw.random() * 4)
            started = engines.starts[url]
            for number in range(draw.choice((0, 1, 3, 10, 30))):
                await asyncio.sleep(engines.pace_s * draw.random() * draw.choice((0.1, 1, 2)))
                if not engines.up[url] or engines.starts[url] != started or draw.random() < engines.breaks:
                    raise EngineUnavailable(f"Engine {engine} broke off the connection (model).", engine=engine)
                piece = f"{attempt.number}.{number}{draw.choice(_TAILS)}"
                attempt.written += piece
                listener.on_text(piece)
            attempt.whole = True
            return Finish("stop", Usage(10, 10, 0))
        finally:
            if stream in engines.streams:
                engines.streams.remove(stream)

    async def count_tokens(self, url: str, model: str, text: str, *, engine: str | None = None) -> int:
        return len(text.split())

    async def probe(self, url: str, *, engine: str | None = None) -> Probe:
        self._check(engine or url, url)
        return Probe(epoch=str(self._engines.starts[url]), running=0, waiting=0, counted=0.0)

    async def models(self, url: str, *, engine: str | None = None) -> list[ModelInfo]:
        self._check(engine or url, url)
        return [ModelInfo(MODEL, None)]

    def _check(self, engine: str, url: str) -> None:
        if not self._engines.up[url]:
            raise EngineNotThere(f"Engine {engine} can not be reached (model).", engine=engine)
