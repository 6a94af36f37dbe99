"""What we count on from an engine: the same cases on the simulated engine and on real vLLM.

So tests that run on the simulated one say something about the real one. For the simulated one alone: ``-k simulated``.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import orjson
import pytest

from chat_server.engine.simulated import SimulatedOptions, simulated_server
from chat_server.engine.vllm import ChatRequest, Finish, Usage, VllmClient, open_http
from chat_server.errors import EngineRefused

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

CHAT = "/v1/chat/completions"
WINDOW = 8192
#: Tokens in a block of the prefix cache, on both.
BLOCK = 32
#: Its answer is long on any model, so that ``max_tokens`` ends it.
QUESTION = "Tell me a long story about a fox and a river."
#: Each test gets another beginning of its prompts, so that none finds what another one left in the cache.
numbers = itertools.count(1)


class Heard:
    """The text of one answer, piece by piece."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.first = asyncio.Event()

    def on_text(self, text: str) -> None:
        self.texts.append(text)
        self.first.set()

    def on_thinking(self) -> None:
        raise AssertionError("neither engine was asked to reason")

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(frozen=True)
class EngineUnderTest:
    """An engine, and how a test asks it."""

    url: str
    model: str
    client: VllmClient
    http: aiohttp.ClientSession

    def request(self, *texts: str, **fields: Any) -> ChatRequest:
        """A request of alternating user and assistant messages, at temperature 0, behind a system prompt of its own."""
        system = f"You are helpful. This is conversation {next(numbers)}. " + "Answer in plain words. " * 20
        messages = [{"role": "system", "content": system}]
        messages += [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
        request = ChatRequest(
            self.model, tuple(messages), max_tokens=24, request_id=f"r{next(numbers)}", temperature=0.0
        )
        return replace(request, **fields)

    async def ask(self, request: ChatRequest) -> tuple[Heard, Finish, Usage]:
        heard = Heard()
        finish = await self.client.stream("engine", self.url, request, heard)
        assert finish.usage is not None
        return heard, finish, finish.usage

    async def post(self, path: str, body: Mapping[str, Any], **headers: str) -> tuple[int, bytes]:
        async with self.http.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.read()


@pytest.fixture(params=["simulated", "vllm"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[EngineUnderTest]:
    if request.param == "simulated":
        options = SimulatedOptions(model="m", max_model_len=WINDOW, block_size=BLOCK, tokens_per_s=200.0)
        async with simulated_server(options) as server, open_http() as http:
            yield EngineUnderTest(server.url, options.model, VllmClient(http), http)
    else:
        address = request.getfixturevalue("vllm_engines")[0]
        async with open_http() as http:
            client = VllmClient(http)
            (model,) = await client.models(address.url)
            yield EngineUnderTest(address.url, model.id, client, http)


def turn(request: ChatRequest, answer: str, question: str) -> ChatRequest:
    """The next turn after ``answer``."""
    more = ({"role": "assistant", "content": answer}, {"role": "user", "content": question})
    return replace(request, messages=request.messages + more)


def body(request: ChatRequest, **fields: Any) -> dict[str, Any]:
    """The least that the API wants."""
    return {
        "model": request.model,
        "messages": request.messages,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        **fields,
    }


# The answer


async def test_a_stream_has_its_shape(engine: EngineUnderTest) -> None:
    """Role, texts, one finish reason, usage by itself, [DONE]: all events of one id, that of the request."""
    request = engine.request(QUESTION)
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    status, raw = await engine.post(CHAT, body(request, **fields), **{"X-Request-Id": "abc"})
    assert status == 200
    *events, done, rest = raw.split(b"\n\n")
    assert (done, rest.strip()) == (b"data: [DONE]", b"")
    *chunks, usage = [orjson.loads(event.removeprefix(b"data: ")) for event in events]
    assert {(c["id"], c["object"], c["model"]) for c in chunks} == {
        ("chatcmpl-abc", "chat.completion.chunk", engine.model)
    }
    choices = [c["choices"][0] for c in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "length"
    assert all(c["index"] == 0 for c in choices)
    assert "".join(c["delta"].get("content", "") for c in choices).strip()
    assert usage["choices"] == []
    numbers = usage["usage"]
    assert numbers["total_tokens"] == numbers["prompt_tokens"] + numbers["completion_tokens"]
    assert "cached_tokens" in numbers["prompt_tokens_details"]


async def test_whole_and_streamed_are_the_same(engine: EngineUnderTest) -> None:
    """The same prompt at temperature 0 gives the same text, with ``stream`` or without."""
    request = engine.request(QUESTION)
    heard, finish, _ = await engine.ask(request)
    status, raw = await engine.post(CHAT, body(request))
    choice = orjson.loads(raw)["choices"][0]
    assert (status, choice["message"]["content"], choice["finish_reason"]) == (200, heard.text, finish.reason)


async def test_max_tokens_end_it(engine: EngineUnderTest) -> None:
    """With reason ``length``, and as many tokens as asked for."""
    _, finish, usage = await engine.ask(engine.request(QUESTION, max_tokens=5))
    assert (finish.reason, usage.output_tokens) == ("length", 5)


async def test_a_stop_string_ends_it(engine: EngineUnderTest) -> None:
    """With reason ``stop``, and the text before the string alone, also where it lies across tokens."""
    request = engine.request(QUESTION)
    whole = (await engine.ask(request))[0].text
    stop = whole[20:30]
    heard, finish, _ = await engine.ask(replace(request, stop=(stop,)))
    assert (finish.reason, heard.text) == ("stop", whole[: whole.index(stop)])


async def test_no_piece_holds_half_a_character(engine: EngineUnderTest) -> None:
    """Text of many bytes comes in whole code points."""
    heard, _, _ = await engine.ask(engine.request("Repeat this line: 👩🏽‍💻 数 é 日本語", max_tokens=40))
    assert heard.text
    assert not any("\ufffd" in text for text in heard.texts)


async def test_a_cut_answer_goes_on_exactly(engine: EngineUnderTest) -> None:
    """``continue_final``: from the text so far the rest follows as if nothing had happened, at every safe place."""
    request = engine.request(QUESTION, max_tokens=40)
    heard, finish, _ = await engine.ask(request)
    assert (finish.reason, len(heard.texts)) == ("length", 40)
    for pieces in (1, 4, 9, 17, 26):
        partial = "".join(heard.texts[:pieces]).rstrip()  # behind white space it would not be exact
        last = {"role": "assistant", "content": partial}
        going_on = replace(request, messages=(*request.messages, last), continue_final=True)
        rest, _, _ = await engine.ask(going_on)
        assert (partial + rest.text).startswith(heard.text)


# The cache


async def test_cached_tokens_grow_from_turn_to_turn(engine: EngineUnderTest) -> None:
    """Each turn finds all full blocks of the prompt before it."""
    request = engine.request("I have a dog called Rex.")
    before = 0
    for question in ("What is its name?", "And what kind of animal is it?", "Thank you."):
        heard, _, usage = await engine.ask(request)
        assert usage.cached_tokens >= before // BLOCK * BLOCK
        assert usage.cached_tokens < usage.input_tokens
        assert (before == 0) == (usage.cached_tokens == 0)
        before = usage.input_tokens
        request = turn(request, heard.text, question)


async def test_the_answer_is_cached_too(engine: EngineUnderTest) -> None:
    """A long answer is there for the next turn's prompt, not only the question."""
    request = engine.request(QUESTION, max_tokens=64)
    heard, _, first = await engine.ask(request)
    _, _, second = await engine.ask(turn(request, heard.text, "Thank you."))
    # A block more or less: the text of an answer may be cut into tokens in another way when it is read again.
    assert second.cached_tokens >= first.input_tokens // BLOCK * BLOCK
    assert second.cached_tokens >= (first.input_tokens + first.output_tokens) // BLOCK * BLOCK - 2 * BLOCK


async def test_salts_separate_the_cache(engine: EngineUnderTest) -> None:
    """Another salt finds nothing of what the first one left, the same one does."""
    request = engine.request(QUESTION, max_tokens=2)
    cached = [(await engine.ask(replace(request, cache_salt=salt)))[2].cached_tokens for salt in ("a", "b", "a", "b")]
    assert cached[:2] == [0, 0]
    assert cached[2] == cached[3] > 0


# Stopping, and the numbers that show it


async def test_closing_the_stream_aborts(engine: EngineUnderTest) -> None:
    """The gauge of running requests falls to nothing though the answer had long to go."""
    heard = Heard()
    request = engine.request("Count from one to one thousand, in words.", max_tokens=2000)
    task = asyncio.create_task(engine.client.stream("engine", engine.url, request, heard))
    await heard.first.wait()
    async with asyncio.timeout(20):
        while not (await engine.client.probe(engine.url)).running:
            await asyncio.sleep(0.05)
    assert not task.done()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    async with asyncio.timeout(3):
        while (await engine.client.probe(engine.url)).running:
            await asyncio.sleep(0.01)


async def test_metrics_have_their_names(engine: EngineUnderTest) -> None:
    """Those that placement reads, and counters that count."""

    async def read() -> dict[str, float]:
        async with engine.http.get(engine.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        found = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        return {name.partition("{")[0]: float(value) for name, _, value in found}

    before = await read()
    _, _, usage = await engine.ask(engine.request(QUESTION))
    after = await read()
    assert {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_hits_total",
        "process_start_time_seconds",
    } <= set(after)
    queries = "vllm:prefix_cache_queries_total"
    assert after[queries] - before[queries] == usage.input_tokens
    assert before["process_start_time_seconds"] == after["process_start_time_seconds"]


async def test_a_probe_shows_its_epoch(engine: EngineUnderTest) -> None:
    """The same at each look, until it starts anew."""
    first, second = [await engine.client.probe(engine.url) for _ in range(2)]
    assert first.epoch is not None
    assert first.epoch == second.epoch


async def test_models_tell_the_window(engine: EngineUnderTest) -> None:
    """The name that requests have to use, and the context window."""
    (model,) = await engine.client.models(engine.url)
    assert (model.id, model.max_model_len) == (engine.model, WINDOW)


async def test_tokenize_counts_as_the_answer_does(engine: EngineUnderTest) -> None:
    """A prompt has the same length before it is asked and in the usage after; an unfinished message too."""
    request = engine.request(QUESTION, "First", continue_final=True)
    for asked in (engine.request(QUESTION), request):
        fields: dict[str, Any] = {"model": asked.model, "messages": asked.messages}
        if asked.continue_final:
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        status, raw = await engine.post("/tokenize", fields)
        _, _, usage = await engine.ask(asked)
        counted = orjson.loads(raw)
        assert (status, counted["count"], counted["max_model_len"]) == (200, usage.input_tokens, WINDOW)
        assert len(counted["tokens"]) == counted["count"]


# Refusals


async def test_a_prompt_past_the_window_is_refused(engine: EngineUnderTest) -> None:
    """400, with a message that names the window: it becomes our error to the caller."""
    with pytest.raises(EngineRefused, match=f"maximum context length is {WINDOW} tokens") as caught:
        await engine.ask(engine.request("word " * (WINDOW + 500)))
    assert (caught.value.status, caught.value.code) == (400, "BadRequestError")


async def test_an_unknown_model_is_refused(engine: EngineUnderTest) -> None:
    """404, by name."""
    with pytest.raises(EngineRefused, match="The model `nobody` does not exist") as caught:
        await engine.ask(engine.request(QUESTION, model="nobody"))
    assert (caught.value.status, caught.value.code) == (404, "NotFoundError")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": WINDOW + 1}, f"max_tokens={WINDOW + 1} cannot be greater than max_model_len={WINDOW}"),
        ({"continue_final_message": True}, "are not compatible"),
    ],
)
async def test_a_wrong_request_is_refused(engine: EngineUnderTest, fields: dict[str, Any], said: str) -> None:
    """400, with an error object that says what is wrong."""
    status, raw = await engine.post(CHAT, body(engine.request(QUESTION), **fields))
    error = orjson.loads(raw)["error"]
    assert (status, error["code"], error["type"]) == (400, 400, "BadRequestError")
    assert said in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


async def test_the_window_bounds_an_answer(engine: EngineUnderTest) -> None:
    """More tokens than fit beside the prompt are asked for without harm: the window ends the answer."""
    _, finish, _ = await engine.ask(engine.request("Say yes.", max_tokens=WINDOW, stop=(" ",)))
    assert finish.reason in ("stop", "length")
