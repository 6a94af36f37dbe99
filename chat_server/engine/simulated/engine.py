"""A simulated engine without its HTTP: what it admits, caches, writes and counts."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chat_server.engine.simulated import text
from chat_server.engine.simulated.cache import PrefixCache

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator

    from chat_server.engine.simulated.options import Fault, FaultKind, SimulatedOptions


class BadRequest(Exception):
    """A request that is refused, as vLLM says it."""

    def __init__(self, message: str, *, status: int = 400, type: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": type, "param": param, "code": status}}


class EngineDied(Exception):
    """The fault ``die`` was met: the process has to end."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One answer, known whole before its first token is sent."""

    prompt: list[str]
    reasoning: list[str]
    answer: list[str]
    finish_reason: str
    stop_reason: str | None
    salt: str


@dataclass(slots=True)
class Run:
    """One answer under way."""

    cached_tokens: int = 0
    #: tokens of the answer that were handed out, reasoning included
    sent: int = 0


@dataclass(slots=True)
class Counters:
    """What the engine counted since its start."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    refused: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    generated_tokens: int = 0


class SimulatedEngine:
    """All state of one engine. Faults can be added and taken away at any time."""

    def __init__(self, options: SimulatedOptions) -> None:
        self.options = options
        self.cache = PrefixCache(options.cache_blocks, options.block_size)
        self.counters = Counters()
        self.running = 0
        self.waiting = 0
        #: what its clients call the requests that are here, running and waiting
        self.unfinished: list[str] = []
        self.started = time.time()
        self._faults: list[_Armed] = [_Armed(fault, fault.times) for fault in options.faults]
        self._places = asyncio.Semaphore(options.max_running)
        #: when the prefills that are under way are done, by the loop's clock
        self._prefilled_at = 0.0
        #: in the words of all attempts of this engine, so that no two engines nor two starts of one share a word
        self._mark = secrets.token_hex(3)
        self._attempts = 0

    # What goes wrong

    def add_fault(self, fault: Fault) -> None:
        self._faults.append(_Armed(fault, fault.times))

    def clear_faults(self) -> None:
        self._faults.clear()

    def fault(self, *kinds: FaultKind) -> Fault | None:
        """The first fault of these kinds; it is used up once."""
        for armed in self._faults:
            if armed.fault.kind in kinds:
                if armed.left is not None:
                    armed.left -= 1
                    if armed.left <= 0:
                        self._faults.remove(armed)
                return armed.fault
        return None

    # What it answers

    def plan(self, body: dict[str, Any]) -> Plan:
        """The answer to a chat completion request. Raises BadRequest."""
        options = self.options
        messages = self.messages(body)
        going_on = body.get("continue_final_message") is True
        if going_on and body.get("add_generation_prompt", True):
            raise BadRequest(
                "continue_final_message and add_generation_prompt are not compatible. Use continue_final_message when "
                "you want the model to continue the final message, and add_generation_prompt when you want to add a "
                "header that will prompt it to start a new assistant message instead."
            )
        prompt = text.prompt_tokens(messages, continue_final=going_on)
        room = self._room(body, len(prompt))
        answer = self._answer(messages, going_on)
        answer, stop_reason = _cut_at_stop(answer, body.get("stop"))
        reasoning: list[str] = []
        if options.reasoning_tokens and not going_on:
            reasoning = [" hmm"] * min(options.reasoning_tokens, room)
        tokens = text.tokens(answer)
        room -= len(reasoning)
        # The token that ends an answer needs room too, as on vLLM; a stop string ends it without one.
        whole = len(tokens) + (stop_reason is None) <= room
        return Plan(
            prompt=prompt,
            reasoning=reasoning,
            answer=tokens[:room],
            finish_reason="stop" if whole else "length",
            stop_reason=stop_reason if whole else None,
            salt=str(body.get("cache_salt") or ""),
        )

    def messages(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages of a request for our model. Raises BadRequest."""
        model = body.get("model")
        if model not in (None, self.options.model):
            raise BadRequest(
                f"The model `{model}` does not exist. Valid aliases: {self.options.model}.",
                status=404,
                type="NotFoundError",
                param="model",
            )
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise BadRequest(
                "1 validation error:\n  {'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required'}",
                type="Bad Request",
                param="body.messages",
            )
        return messages

    def _room(self, body: dict[str, Any], prompt_tokens: int) -> int:
        """Tokens that may be written: what is asked for, within the window. Raises BadRequest in vLLM's words."""
        window = self.options.max_model_len
        if prompt_tokens > window:
            raise BadRequest(
                f"This model's maximum context length is {window} tokens. However, your prompt contains at least "
                f"{window + 1} input tokens, which exceeds this limit even without any output tokens. Please reduce "
                f"the length of the input prompt. (parameter=input_tokens, value={window + 1})",
                param="input_tokens",
            )
        asked = body.get("max_tokens") if body.get("max_completion_tokens") is None else body["max_completion_tokens"]
        if asked is not None and (not isinstance(asked, int) or asked < 1):
            raise BadRequest(
                f"max_tokens must be at least 1, got {asked}. (parameter=max_tokens, value={asked})", param="max_tokens"
            )
        if asked is not None and asked > window:
            raise BadRequest(
                f"max_tokens={asked} cannot be greater than max_model_len={window}. Please request fewer output "
                f"tokens. (parameter=max_tokens, value={asked})",
                param="max_tokens",
            )
        return min(asked or window, window - prompt_tokens)

    def _answer(self, messages: list[dict[str, Any]], going_on: bool) -> str:
        partial = text.content(messages[-1]) if going_on and messages else ""
        if self.options.vary:
            self._attempts += 1
            start = text.next_marked(partial)
            count = (self.options.words or text.DEFAULT_WORDS) - start + 1
            return text.attempt_words(f"{self._mark}x{self._attempts}", start, max(count, 0))
        answer = text.answer_for(messages[:-1] if going_on else messages, self.options.words)
        return text.continuation(answer, partial)

    # How it writes

    @contextmanager
    def admit(self, plan: Plan, name: str = "") -> Iterator[Run]:
        """Count the request while it is here; leaving before its last token is an abort. Raises BadRequest if full."""
        bound = self.options.max_unfinished
        if bound and self.running + self.waiting >= bound:
            self.counters.refused += 1
            raise BadRequest(
                "The engine is currently busy and cannot accept new requests. Please try again later or on a "
                "different instance.",
                status=503,
                type="Service Unavailable",
            )
        self.counters.requests += 1
        self.unfinished.append(name)
        run = Run()
        try:
            yield run
        finally:
            self.unfinished.remove(name)
            self.counters.generated_tokens += run.sent
            if run.sent >= len(plan.reasoning) + len(plan.answer):
                self.counters.finished += 1
            else:
                self.counters.aborted += 1

    async def write(self, plan: Plan, run: Run) -> AsyncGenerator[tuple[str, list[str]], None]:
        """Wait for a place and the prefill, then give the tokens in time: (``reasoning`` or ``content``, tokens).

        The first piece has no tokens: it says that the prompt is computed. Close it (``aclosing``): that leaves the
        place.
        """
        loop = asyncio.get_running_loop()
        size, speed = max(self.options.tokens_per_chunk, 1), self.options.tokens_per_s
        async with self._place():
            kept: list[bytes] = []
            try:
                kept = await self._prefill(plan, run)
                yield "content", []
                began = loop.time()
                for kind, tokens in (("reasoning", plan.reasoning), ("content", plan.answer)):
                    for start in range(0, len(tokens), size):
                        piece = tokens[start : start + size]
                        # By the clock since the start, so that lateness does not add up.
                        due = began + (run.sent + len(piece) - 1) / speed if speed else 0.0
                        await asyncio.sleep(max(due - loop.time(), 0))
                        run.sent += len(piece)
                        yield kind, piece
            finally:
                self._keep_written(plan, run, kept)

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """One of the ``max_running`` places, first come, first served."""
        self.waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._places.release()

    async def _prefill(self, plan: Plan, run: Run) -> list[bytes]:
        """Wait for the prompt to be computed, behind those that came before; the blocks that it uses now."""
        options, prompt = self.options, plan.prompt
        hashes = self.cache.hashes(prompt, plan.salt)
        run.cached_tokens = self.cache.hits(hashes, len(prompt))
        self.counters.cache_queries += len(prompt)
        self.counters.cache_hits += run.cached_tokens
        now = asyncio.get_running_loop().time()
        if options.prefill_tokens_per_s:
            work = (len(prompt) - run.cached_tokens) / options.prefill_tokens_per_s
            self._prefilled_at = max(now, self._prefilled_at) + work
        await asyncio.sleep(max(self._prefilled_at - now, 0) + options.first_token_s)
        return self.cache.use(hashes)

    def _keep_written(self, plan: Plan, run: Run, kept: list[bytes]) -> None:
        """What was written is in the cache too, for the next turn's prompt; reasoning is no part of that."""
        written = plan.answer[: max(run.sent - len(plan.reasoning), 0)]
        self.cache.release(self.cache.use(self.cache.hashes([*plan.prompt, *written], plan.salt)))
        self.cache.release(kept)


@dataclass(slots=True)
class _Armed:
    """A fault, and how many times it is still to be."""

    fault: Fault
    left: int | None


def _cut_at_stop(answer: str, stop: object) -> tuple[str, str | None]:
    """``answer`` up to the first stop string, and that string."""
    stops = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    found = [(at, s) for s in stops if isinstance(s, str) and s and (at := answer.find(s)) >= 0]
    if not found:
        return answer, None
    at, first = min(found)
    return answer[:at], first
