"""One client for vLLM's OpenAI server: a streamed chat answer, the models, and the probe.

The token path has no await but the read of a chunk: bytes -> ``SseParser`` -> ``EngineListener`` by plain calls.
Closing the stream aborts the request on the engine, so cancelling ``stream`` is all that a stop needs.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import aiohttp
import orjson

from chat_server.engine.sse import EventTooLarge, SseParser
from chat_server.errors import EngineBusy, EngineError, EngineRefused, EngineUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

#: more tokens than any answer has.
_MOST_TOKENS = 1 << 40
#: bytes of an error body or of ``/metrics`` that are read; vLLM's metrics of one model have 54 KB.
MAX_BODY_BYTES = 4 << 20
#: characters of an engine's own message that are passed on.
MAX_MESSAGE_CHARS = 2000


class EngineNotThere(EngineUnavailable):
    """Nobody listens at the engine's address: it is down, not slow."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What one attempt asks of an engine. ``messages`` hold ``role`` and ``content``, the system's first."""

    model: str
    messages: tuple[dict[str, str], ...]
    #: None: what is left of the window
    max_tokens: int | None
    request_id: str
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    cache_salt: str | None = None
    #: the last message is an assistant's and unfinished: the engine goes on with it
    continue_final: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens, as the engine counted them; ``cached_tokens`` of the input came from its prefix cache."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int

    def of_whole(self, written: int) -> Usage:
        """The usage of a whole answer, out of that of the engine that went on with it after ``written`` tokens.

        They were in its prompt and belong to the answer. What was cached is as this engine had it: those before it
        ended without telling.
        """
        prompt = max(self.input_tokens - written, 0)
        return Usage(prompt, self.output_tokens + written, min(self.cached_tokens, prompt))


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a whole answer. ``reason`` is vLLM's ``finish_reason``: ``stop``, ``length``, ..."""

    reason: str
    usage: Usage | None


class EngineListener(Protocol):
    """Who hears the answer. Plain calls on the token path: they may raise, which ends the stream, but never await."""

    def on_text(self, text: str) -> None:
        """More text of the answer, never empty."""

    def on_thinking(self) -> None:
        """Reasoning text arrived; it is never part of the answer."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that an engine serves, and its context window in tokens where the engine says so."""

    id: str
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class Probe:
    """What a healthy engine reports.

    ``epoch`` is its start (``process_start_time_seconds``, as it is written), or None where it shows none (several API
    processes); ``counted`` is then a counter that falls back only when the engine starts anew.
    """

    epoch: str | None
    running: int
    waiting: int
    counted: float


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds that an engine has for each step of a stream. Generous: a long prefill or a full queue is no hang."""

    connect_s: float = 3.0
    #: to the response's header, after connecting: vLLM tokenizes the prompt before it sends that
    headers_s: float = 30.0
    #: to the first text: the wait for a place and the prefill
    first_s: float = 300.0
    #: between two chunks; they may be preempted for others in between
    silence_s: float = 60.0
    #: for the count of a text's tokens
    count_s: float = 5.0


def open_http(deadlines: Deadlines | None = None) -> aiohttp.ClientSession:
    """A session fit for engines; the caller closes it. The defaults of aiohttp are not: 100 connections, cookies.

    Idle connections are kept shorter than vLLM keeps them (5 s), so that a request is never sent on one that the
    engine is just closing.
    """
    deadlines = deadlines or Deadlines()
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=deadlines.connect_s),
    )


class VllmClient:
    """Speaks to any number of engines through one HTTP session (``open_http``), which the caller owns."""

    def __init__(
        self, http: aiohttp.ClientSession, api_key: str | None = None, *, deadlines: Deadlines | None = None
    ) -> None:
        self._http = http
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._deadlines = deadlines or Deadlines()

    async def stream(self, engine: str, url: str, request: ChatRequest, listener: EngineListener) -> Finish:
        """Ask ``engine`` (its name, for errors) at ``url``; tell ``listener`` the text; return when it is whole.

        Cancelling closes the connection at once, which aborts the request on the engine. Raises EngineRefused (4xx:
        the request's fault, with the engine's message), EngineBusy (429, 503) and EngineUnavailable (no connection,
        5xx, cut before a ``finish_reason``, given up by the engine, silent past a deadline). What the listener raises
        passes through (an OSError would be taken for the connection's).
        """
        reading = _Reading(engine, listener)
        try:
            async with _engine_errors(engine):
                await self._read_stream(url, request, reading)
        except EngineUnavailable:
            # With a finish reason the text is whole; asking again could only repeat it.
            if reading.reason is None:
                raise
        return reading.finish()

    async def _read_stream(self, url: str, request: ChatRequest, reading: _Reading) -> None:
        limits = self._deadlines
        now = asyncio.get_running_loop().time
        headers = {**self._headers, "Content-Type": "application/json", "X-Request-Id": request.request_id}
        # BytesIO: aiohttp sends that in pieces, and warns of large bytes.
        body = BytesIO(orjson.dumps(_body(request)))
        # The deadline moves on with the stream, but at most once a second: a timer per token would cost more than
        # the token.
        async with asyncio.timeout(limits.connect_s + limits.headers_s) as deadline:
            response = await self._http.post(f"{url}/v1/chat/completions", data=body, headers=headers)
            try:
                if response.status != 200:
                    raise _refusal(reading.engine, response.status, await _read(response))
                moved = now()
                deadline.reschedule(moved + limits.first_s)
                async for chunk in response.content.iter_any():
                    for data in reading.parser.feed(chunk):
                        reading.on_event(data)
                    if reading.done:
                        return
                    if reading.begun and (at := now()) > moved + 1.0:
                        moved = at
                        deadline.reschedule(at + limits.silence_s)
            finally:
                # Not release(), which waits. After [DONE] nothing more comes, and a stream that is left before it is
                # closed here and now.
                response.close()

    async def models(self, url: str, *, engine: str | None = None) -> list[ModelInfo]:
        """The models at ``url``, in the engine's order. Raises as ``stream`` does; the caller sets a deadline."""
        data = _json(engine or url, await self._get(engine or url, url + "/v1/models", self._headers))
        cards = data.get("data") if isinstance(data, dict) else None
        found = []
        for card in cards if isinstance(cards, list) else ():
            if isinstance(card, dict) and isinstance(card.get("id"), str):
                length = card.get("max_model_len")
                found.append(ModelInfo(card["id"], length if isinstance(length, int) else None))
        return found

    async def count_tokens(self, url: str, model: str, text: str, *, engine: str | None = None) -> int:
        """How many tokens ``text`` has for ``model``. Raises as ``stream`` does; the deadline is its own."""
        name = engine or url
        body = BytesIO(orjson.dumps({"model": model, "prompt": text, "add_special_tokens": False}))
        headers = {**self._headers, "Content-Type": "application/json"}
        async with (
            _engine_errors(name),
            asyncio.timeout(self._deadlines.count_s),
            self._http.post(f"{url}/tokenize", data=body, headers=headers) as response,
        ):
            answer = await _read(response)
            if response.status != 200:
                raise _refusal(name, response.status, answer, what="POST /tokenize")
        counted = _json(name, answer)
        count = counted.get("count") if isinstance(counted, dict) else None
        if not isinstance(count, int):
            raise _nonsense(name)
        return count

    async def probe(self, url: str, *, engine: str | None = None) -> Probe:
        """Ask for health and load. Raises as ``stream`` does; the caller sets a deadline."""
        await self._get(engine or url, url + "/health", {})
        try:
            metrics = await self._get(engine or url, url + "/metrics", {})
        except EngineRefused:
            metrics = b""  # turned off, or not let through by a proxy: it can be used all the same
        return parse_metrics(metrics.decode("utf-8", "replace"))

    async def _get(self, engine: str, url: str, headers: dict[str, str]) -> bytes:
        async with _engine_errors(engine), self._http.get(url, headers=headers) as response:
            body = await _read(response)
            if response.status != 200:
                raise _refusal(engine, response.status, body, what=f"GET {urlsplit(url).path}")
            return body


def parse_metrics(text: str) -> Probe:
    """The few numbers we need out of Prometheus text; those of several engines behind one address are summed."""
    sums = dict.fromkeys(_METRICS, 0.0)
    epoch: str | None = None
    for line in text.splitlines():
        if line.startswith("vllm:"):
            name = line[:end] if (end := line.find("{")) >= 0 else line.partition(" ")[0]
            if name in sums:
                sums[name] += _number(line.rpartition(" ")[2])
        elif line.startswith("process_start_time_seconds "):
            epoch = line.rpartition(" ")[2]
    running, waiting, counted = (sums[name] for name in _METRICS)
    return Probe(epoch=epoch, running=int(running), waiting=int(waiting), counted=counted)


_METRICS = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:prefix_cache_queries_total")


class _Reading:
    """What has been read of one stream."""

    __slots__ = ("begun", "done", "engine", "listener", "parser", "reason", "usage")

    def __init__(self, engine: str, listener: EngineListener) -> None:
        self.engine = engine
        self.listener = listener
        self.parser = SseParser()
        self.reason: str | None = None
        self.usage: Usage | None = None
        self.begun = False
        self.done = False

    def on_event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        event = _json(self.engine, data)
        try:
            error = event.get("error")
            usage = event.get("usage")
            # One answer is asked for, so there is at most one choice; the event with the usage has none.
            choices = event.get("choices")
            choice = choices[0] if choices else {}
            delta = choice.get("delta") or {}
            text = delta.get("content") or ""
            thinks = delta.get("reasoning") or delta.get("reasoning_content")
            self.reason = choice.get("finish_reason") or self.reason
            if usage:
                self.usage = _usage(usage)
        except (AttributeError, KeyError, TypeError) as wrong:
            raise _nonsense(self.engine) from wrong
        if error is not None:
            raise _refusal(self.engine, _status(error), data)
        if text:
            if not isinstance(text, str):
                raise _nonsense(self.engine)
            self.begun = True
            self.listener.on_text(text)
        elif thinks:
            self.begun = True
            self.listener.on_thinking()

    def finish(self) -> Finish:
        """The end, told by a finish reason. Raises EngineUnavailable without one, or if it tells that there is more."""
        if self.reason is None:
            raise EngineUnavailable(
                f"Engine {self.engine} ended the stream before the answer was whole.", engine=self.engine
            )
        if self.reason == "abort":
            raise EngineUnavailable(f"Engine {self.engine} gave the answer up.", engine=self.engine)
        return Finish(self.reason, self.usage)


def _body(request: ChatRequest) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": request.model,
        "messages": request.messages,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.max_tokens is not None:
        body["max_tokens"] = request.max_tokens
    if request.temperature is not None:
        body["temperature"] = request.temperature
    if request.top_p is not None:
        body["top_p"] = request.top_p
    if request.stop:
        body["stop"] = request.stop
    if request.cache_salt is not None:
        body["cache_salt"] = request.cache_salt
    if request.continue_final:
        body["continue_final_message"] = True
        body["add_generation_prompt"] = False
    return body


@asynccontextmanager
async def _engine_errors(engine: str) -> AsyncIterator[None]:
    """Whatever goes wrong between us and the engine leaves as an EngineError that names it."""
    try:
        yield
    except aiohttp.ClientConnectorError as error:
        number = error.os_error.errno or 0
        reason = os.strerror(number) if number > 0 else str(error.os_error)  # below 0: of a name look-up
        kind = EngineNotThere if number == errno.ECONNREFUSED else EngineUnavailable
        raise kind(f"Engine {engine} can not be reached: {reason}.", engine=engine) from error
    except TimeoutError as error:
        raise EngineUnavailable(f"Engine {engine} was silent for too long.", engine=engine) from error
    except (aiohttp.ClientError, OSError, EventTooLarge) as error:
        raise EngineUnavailable(f"Engine {engine} broke off the connection ({error}).", engine=engine) from error


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The body, cut at ``MAX_BODY_BYTES``."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            response.close()
            break
    return bytes(body[:MAX_BODY_BYTES])


def _refusal(engine: str, status: int, body: bytes, what: str = "the request") -> EngineError:
    """The error for an answer that is no success, in the engine's own words where it has any."""
    code, message = "invalid_request", ""
    try:
        error = orjson.loads(body).get("error")
    except (orjson.JSONDecodeError, AttributeError):
        error = None  # a proxy's page, say
    if isinstance(error, dict):
        message = str(error.get("message") or "")[:MAX_MESSAGE_CHARS]
        code = next((c for c in (error.get("code"), error.get("type")) if isinstance(c, str) and c), code)
    elif isinstance(error, str):
        message = error[:MAX_MESSAGE_CHARS]
    reason = message or f"HTTP status {status}"
    if 400 <= status < 500 and status != 429:
        return EngineRefused(reason, engine=engine, status=status, code=code)
    # Not in the engine's words: they may hold the prompt, and this goes into the log and to people.
    if status in (429, 503):
        return EngineBusy(f"Engine {engine} is busy (HTTP {status}).", engine=engine)
    return EngineUnavailable(f"Engine {engine} failed at {what} (HTTP {status}).", engine=engine)


def _status(error: object) -> int:
    """The status inside an error object of a stream."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 500


def _usage(usage: dict[str, Any]) -> Usage:
    details = usage.get("prompt_tokens_details")
    return Usage(
        input_tokens=_count(usage.get("prompt_tokens")),
        output_tokens=_count(usage.get("completion_tokens")),
        cached_tokens=_count(details.get("cached_tokens") if isinstance(details, dict) else None),
    )


def _count(value: object) -> int:
    """A number of tokens; 0 for what is none, for it is stored and read again as one."""
    return value if type(value) is int and 0 <= value < _MOST_TOKENS else 0


def _json(engine: str, data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as wrong:
        raise _nonsense(engine) from wrong


def _nonsense(engine: str) -> EngineUnavailable:
    return EngineUnavailable(f"Engine {engine} sent something that is no answer of a vLLM server.", engine=engine)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if math.isfinite(number) else 0.0
