"""The client of vLLM's API, against bytes as an engine, a proxy or a broken network sends them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import orjson
import pytest

from chat_server.engine.vllm import (
    ChatRequest,
    Deadlines,
    EngineNotThere,
    Finish,
    ModelInfo,
    Probe,
    Usage,
    VllmClient,
    open_http,
    parse_metrics,
)
from chat_server.errors import EngineBusy, EngineError, EngineRefused, EngineUnavailable
from tests.engine import wire
from tests.engine.wire import DONE, STOP, End, chunked, saying, text

pytestmark = pytest.mark.server

REQUEST = ChatRequest("m", ({"role": "user", "content": "Hello"},), max_tokens=10, request_id="r1")


class Listener:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts = 0
        self.heard = asyncio.Event()

    def on_text(self, text: str) -> None:
        self.texts.append(text)
        self.heard.set()

    def on_thinking(self) -> None:
        self.thoughts += 1
        self.heard.set()


@pytest.fixture
async def client() -> AsyncIterator[VllmClient]:
    async with open_http() as http:
        yield VllmClient(http, deadlines=Deadlines(headers_s=5, first_s=5, silence_s=5))


async def ask(client: VllmClient, pieces: Sequence[bytes], end: End = "close") -> tuple[list[str], Finish]:
    """The texts and the end of one answer that comes as ``pieces``."""
    listener = Listener()
    async with saying(pieces, end) as engine:
        finish = await client.stream("e1", engine.url, REQUEST, listener)
    return listener.texts, finish


async def test_an_answer_is_told_as_it_comes(client: VllmClient) -> None:
    """Each event's text by itself, in order, the empty ones left out; then its end, with the usage."""
    numbers = wire.usage(prompt_tokens=32, completion_tokens=4, prompt_tokens_details={"cached_tokens": 16})
    texts, finish = await ask(client, chunked(text(""), text("Hel"), text("lo"), STOP, numbers, DONE))
    assert texts == ["Hel", "lo"]
    assert finish == Finish("stop", Usage(input_tokens=32, output_tokens=4, cached_tokens=16))


@pytest.mark.parametrize("odd", [5.5, -1, True, "many", [5], {"n": 5}, 1 << 62, 1e30, None])
async def test_an_odd_count_of_tokens_is_none(client: VllmClient, odd: object) -> None:
    """It is stored with the answer and read again with each turn: what is no count must not get there."""
    numbers = wire.usage(prompt_tokens=odd, completion_tokens=odd, prompt_tokens_details={"cached_tokens": odd})
    _, finish = await ask(client, chunked(text("Hello"), STOP, numbers, DONE))
    assert finish == Finish("stop", Usage(0, 0, 0))
    numbers = wire.usage(prompt_tokens=3, completion_tokens=2, prompt_tokens_details=odd)
    _, finish = await ask(client, chunked(text("Hello"), STOP, numbers, DONE))
    assert finish == Finish("stop", Usage(3, 2, 0))


async def test_text_and_reason_may_come_in_one_event(client: VllmClient) -> None:
    """vLLM does so at ``max_tokens``."""
    texts, finish = await ask(client, chunked(text("a"), wire.event({"content": "b"}, finish_reason="length"), DONE))
    assert (texts, finish) == (["a", "b"], Finish("length", None))


async def test_characters_cut_by_the_network_are_whole(client: VllmClient) -> None:
    """A chunk may end in the middle of a character's bytes, in a line end, anywhere."""
    raw = text("数👩🏽‍💻é") + STOP + DONE
    texts, _ = await ask(client, chunked(*(raw[i : i + 1] for i in range(len(raw)))))
    assert texts == ["数👩🏽‍💻é"]


async def test_many_events_in_one_chunk_are_all_told(client: VllmClient) -> None:
    """After a pause much comes at once."""
    texts, _ = await ask(client, chunked(b"".join(text(str(i)) for i in range(500)) + STOP + DONE))
    assert texts == [str(i) for i in range(500)]


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_reasoning_is_never_told_as_text(client: VllmClient, field: str) -> None:
    """It shows that the engine thinks, and is no part of the answer."""
    listener = Listener()
    pieces = chunked(wire.event({field: "hmm"}), wire.event({field: "so"}), text("Yes"), STOP, DONE)
    async with saying(pieces) as engine:
        await client.stream("e1", engine.url, REQUEST, listener)
    assert (listener.texts, listener.thoughts) == (["Yes"], 2)


async def test_the_request_says_all_that_was_asked() -> None:
    """Fields, key and id as vLLM wants them."""
    request = ChatRequest(
        "m",
        (
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "half"},
        ),
        max_tokens=7,
        request_id="resp_1",
        temperature=0.0,
        top_p=0.9,
        stop=("END",),
        cache_salt="tenant",
        continue_final=True,
    )
    async with open_http() as http, saying(chunked(STOP, DONE)) as engine:
        await VllmClient(http, "key").stream("e1", engine.url, request, Listener())
        ((head, body),) = engine.requests
    lines = head.split("\r\n")
    assert lines[0] == "POST /v1/chat/completions HTTP/1.1"
    assert "Authorization: Bearer key" in lines
    assert "X-Request-Id: resp_1" in lines
    assert orjson.loads(body) == {
        "model": "m",
        "messages": list(request.messages),
        "max_tokens": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "top_p": 0.9,
        "stop": ["END"],
        "cache_salt": "tenant",
        "continue_final_message": True,
        "add_generation_prompt": False,
    }


async def test_what_was_not_asked_is_not_sent(client: VllmClient) -> None:
    """The engine's own defaults hold; no key, no header."""
    async with saying(chunked(STOP, DONE)) as engine:
        await client.stream("e1", engine.url, REQUEST, Listener())
        ((head, body),) = engine.requests
    assert set(orjson.loads(body)) == {"model", "messages", "max_tokens", "stream", "stream_options"}
    assert "authorization" not in head.lower()


async def test_a_large_prompt_is_sent(client: VllmClient) -> None:
    """Some megabytes go through without a warning of the HTTP library."""
    big = ChatRequest("m", ({"role": "user", "content": "数" * 1_000_000},), max_tokens=10, request_id="r")
    async with saying(chunked(STOP, DONE)) as engine:
        await client.stream("e1", engine.url, big, Listener())
        assert orjson.loads(engine.requests[0][1])["messages"] == list(big.messages)


# How it ends


@pytest.mark.parametrize(("whole", "end"), [(True, "close"), (False, "close"), (False, "reset")])
async def test_a_finish_reason_makes_it_whole(client: VllmClient, whole: bool, end: End) -> None:
    """Cut after its last text, before usage and [DONE]: asking again could only repeat a whole answer."""
    texts, finish = await ask(client, chunked(text("All"), STOP, whole=whole), end)
    assert (texts, finish) == (["All"], Finish("stop", None))


@pytest.mark.parametrize(
    ("pieces", "end"),
    [
        (chunked(text("Hal")), "close"),
        (chunked(text("Hal"), whole=False), "close"),
        (chunked(text("Hal"), whole=False), "reset"),
        (chunked(text("Hal"), DONE), "close"),
        (chunked(text("Hal"), b'data: {"choi', whole=False), "reset"),
    ],
    ids=["ended", "closed", "reset", "done without a reason", "cut in an event"],
)
async def test_a_cut_answer_is_an_unavailable_engine(client: VllmClient, pieces: list[bytes], end: End) -> None:
    """What came was told; the rest may come from another engine."""
    listener = Listener()
    async with saying(pieces, end) as engine:
        with pytest.raises(EngineUnavailable) as caught:
            await client.stream("e1", engine.url, REQUEST, listener)
    assert listener.texts == ["Hal"]
    assert caught.value.engine == "e1"
    assert not isinstance(caught.value, EngineBusy)


@pytest.mark.parametrize(
    "data",
    [
        b"not json",
        b"[1]",
        b'{"choices":[7]}',
        b'{"choices":{"a":1}}',
        b'{"choices":[{"delta":{"content":["x"]}}]}',
        b'{"usage":"many"}',
    ],
)
async def test_nonsense_is_an_unavailable_engine(client: VllmClient, data: bytes) -> None:
    """Whatever answers there, it is no vLLM: an error that says so, and no traceback."""
    with pytest.raises(EngineUnavailable, match="no answer of a vLLM server"):
        await ask(client, chunked(b"data: " + data + b"\n\n", STOP, DONE))


async def test_an_endless_line_is_an_unavailable_engine(client: VllmClient) -> None:
    """No buffer grows without bound."""
    with pytest.raises(EngineUnavailable, match="larger than"):
        await ask(client, chunked(*[b"x" * 60_000] * 20))


@pytest.mark.parametrize(
    ("status", "body", "kind", "said", "code"),
    [
        (
            400,
            b'{"error":{"message":"This model\'s maximum context length is 8192 tokens.","type":"BadRequestError",'
            b'"param":"input_tokens","code":400}}',
            EngineRefused,
            "This model's maximum context length is 8192 tokens.",
            "BadRequestError",
        ),
        (
            404,
            b'{"error":{"message":"The model `x` does not exist.","type":"NotFoundError","param":"model","code":404}}',
            EngineRefused,
            "The model `x` does not exist.",
            "NotFoundError",
        ),
        (401, b'{"error":"Unauthorized"}', EngineRefused, "Unauthorized", "invalid_request"),
        (413, b"<html>too large</html>", EngineRefused, "HTTP status 413", "invalid_request"),
        (400, b'{"error":{"code":"bad","message":""}}', EngineRefused, "HTTP status 400", "bad"),
        (503, b'{"error":{"message":"The engine is currently busy"}}', EngineBusy, "HTTP 503", None),
        (429, b"", EngineBusy, "HTTP 429", None),
        (500, b'{"error":{"message":"it broke"}}', EngineUnavailable, "HTTP 500", None),
        (502, b"<html>bad gateway</html>", EngineUnavailable, "502", None),
    ],
)
async def test_a_refusal_says_what_the_engine_said(
    *, client: VllmClient, status: int, body: bytes, kind: type[EngineError], said: str, code: str | None
) -> None:
    """4xx is the request's fault, told in the engine's words; 429 and 503 are busy, the rest is the engine's own.

    The words of those two may hold the prompt, and go to people and into the log: only the status is said.
    """
    with pytest.raises(EngineError, match=said) as caught:
        await ask(client, wire.answer(status, body))
    assert type(caught.value) is kind
    assert "it broke" not in str(caught.value)
    if isinstance(caught.value, EngineRefused):
        assert (caught.value.status, caught.value.code) == (status, code)


@pytest.mark.parametrize(
    ("code", "kind"), [(400, EngineRefused), (503, EngineBusy), (500, EngineUnavailable), (None, EngineUnavailable)]
)
async def test_an_error_inside_the_stream_is_an_error(
    client: VllmClient, code: int | None, kind: type[EngineError]
) -> None:
    """vLLM puts an error into a stream that has begun."""
    error = b"data: " + orjson.dumps({"error": {"message": "it broke", "type": "X", "code": code}}) + b"\n\n"
    listener = Listener()
    async with saying(chunked(text("Hal"), error, DONE)) as engine:
        with pytest.raises(EngineError) as caught:
            await client.stream("e1", engine.url, REQUEST, listener)
    assert type(caught.value) is kind
    assert ("it broke" in str(caught.value)) == (kind is EngineRefused), "other words may hold the prompt"
    assert listener.texts == ["Hal"]


async def test_nobody_there_is_said_as_such(client: VllmClient) -> None:
    """A refused connection is an engine that is down."""
    async with saying([]) as engine:
        pass
    with pytest.raises(EngineNotThere, match=r"e1 can not be reached: Connection refused\."):
        await client.stream("e1", engine.url, REQUEST, Listener())


async def test_a_listener_that_raises_ends_the_stream(client: VllmClient) -> None:
    """Its error comes out as it is, and the engine is told by the closed connection."""

    class Broken(Listener):
        def on_text(self, text: str) -> None:
            raise LookupError(text)

    async with saying(chunked(text("Hal"), whole=False), "hang") as engine:
        with pytest.raises(LookupError, match="Hal"):
            await client.stream("e1", engine.url, REQUEST, Broken())
        await asyncio.wait_for(engine.left.wait(), 1)


@pytest.mark.parametrize("end", ["close", "reset"])
async def test_an_answer_that_the_engine_gave_up_is_an_unavailable_engine(client: VllmClient, end: End) -> None:
    """``abort`` is a finish reason by name only: the answer is not whole, and may go on elsewhere."""
    listener = Listener()
    abort = wire.event({"content": ""}, finish_reason="abort")
    async with saying(chunked(text("Hal"), abort, DONE), end) as engine:
        with pytest.raises(EngineUnavailable, match="gave the answer up"):
            await client.stream("e1", engine.url, REQUEST, listener)
    assert listener.texts == ["Hal"]


# Deadlines and stopping


@pytest.mark.parametrize(
    ("pieces", "deadlines"),
    [
        ([], Deadlines(connect_s=0, headers_s=0.05)),
        (chunked(text(""), whole=False), Deadlines(first_s=0.05)),
        (chunked(text("Hal"), whole=False), Deadlines(first_s=0.05, silence_s=9)),
    ],
    ids=["before the header", "before the first text", "after it"],
)
async def test_silence_past_its_deadline_is_an_unavailable_engine(pieces: list[bytes], deadlines: Deadlines) -> None:
    """Each wait has an end; then the connection is closed too."""
    async with open_http() as http, saying(pieces, "hang") as engine:
        with pytest.raises(EngineUnavailable, match="silent"):
            await VllmClient(http, deadlines=deadlines).stream("e1", engine.url, REQUEST, Listener())
        await asyncio.wait_for(engine.left.wait(), 1)


async def test_a_stream_that_goes_on_outlives_its_first_deadline() -> None:
    """The deadline is for silence and moves with the text."""
    deadlines = Deadlines(first_s=1.2, silence_s=1.2)
    async with open_http() as http:
        client = VllmClient(http, deadlines=deadlines)
        started = asyncio.get_running_loop().time()
        pieces = chunked(*[text("a")] * 1500, STOP, DONE)
        texts, _ = await ask(client, pieces)
    assert len(texts) == 1500
    assert asyncio.get_running_loop().time() - started > 1.3


@pytest.mark.parametrize(
    "pieces",
    [[], chunked(text(""), whole=False), chunked(text("Hal"), whole=False)],
    ids=["before the header", "before the first text", "amid the text"],
)
async def test_cancelling_closes_the_connection_at_once(client: VllmClient, pieces: list[bytes]) -> None:
    """That is how the engine hears of a stop, so it must not wait for anything."""
    listener = Listener()
    async with saying(pieces, "hang") as engine:
        task = asyncio.create_task(client.stream("e1", engine.url, REQUEST, listener))
        while not engine.requests:
            await asyncio.sleep(0.001)
        if len(pieces) > 1 and b"Hal" in pieces[1]:
            await listener.heard.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(engine.left.wait(), 0.5)


async def test_nothing_is_told_after_a_cancel(client: VllmClient) -> None:
    """Text that lies in the buffer when the stop comes stays there."""
    listener = Listener()
    async with saying(chunked(*[text("a")] * 50, whole=False), "hang") as engine:
        task = asyncio.create_task(client.stream("e1", engine.url, REQUEST, listener))
        await listener.heard.wait()
        task.cancel()
        heard = len(listener.texts)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(listener.texts) == heard


async def test_the_end_does_not_wait_for_the_connection(client: VllmClient) -> None:
    """After [DONE] the answer is whole, even if the engine never closes the response."""
    async with saying(chunked(text("All"), STOP, DONE, whole=False), "hang") as engine:
        assert await asyncio.wait_for(client.stream("e1", engine.url, REQUEST, Listener()), 1) == Finish("stop", None)


# Models and the probe

METRICS = """\
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
process_start_time_seconds 1.79619452055e+09
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b"} 3.0
vllm:num_requests_waiting{engine="0",model_name="a b"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="a b",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="a b"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="a b"} 64.0
vllm:prefix_cache_queries_created{engine="0",model_name="a b"} 1.7961945925989542e+09
vllm:prefix_cache_hits_total{engine="0",model_name="a b"} 32.0
"""


def test_metrics_are_read() -> None:
    """By their exact names, with labels or without."""
    expected = Probe("1.79619452055e+09", running=3, waiting=2, counted=64.0)
    assert parse_metrics(METRICS) == expected
    assert parse_metrics("vllm:num_requests_running 4\n").running == 4


def test_engines_behind_one_address_are_summed() -> None:
    """Data parallel: one line per engine, and several processes show no start."""
    text = 'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 4.0\n'
    assert parse_metrics(text) == Probe(None, running=7, waiting=0, counted=0.0)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "x", ""])
def test_numbers_that_are_none_count_as_nothing(value: str) -> None:
    """A metric that makes no sense must not end the probing."""
    assert parse_metrics(f"vllm:num_requests_running{{}} {value}\n").running == 0


async def test_models_are_listed(client: VllmClient) -> None:
    """With the window, where the engine tells it; what is no model is left out."""
    body = b'{"data":[{"id":"a","max_model_len":8192},{"id":"b"},{"no":"id"},7]}'
    async with saying(wire.answer(200, body)) as engine:
        assert await client.models(engine.url) == [ModelInfo("a", 8192), ModelInfo("b", None)]


async def test_tokens_are_counted() -> None:
    """Of the text by itself, with the model's name and the key."""
    async with open_http() as http, saying(wire.answer(200, b'{"count":3,"tokens":[1,2,3]}')) as engine:
        assert await VllmClient(http, "key").count_tokens(engine.url, "m", "Hal👍") == 3
        ((head, body),) = engine.requests
    assert head.startswith("POST /tokenize HTTP/1.1\r\n")
    assert "Authorization: Bearer key" in head
    assert orjson.loads(body) == {"model": "m", "prompt": "Hal👍", "add_special_tokens": False}


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        (wire.answer(404, b"<html>no such page</html>"), EngineRefused),
        (wire.answer(503, b""), EngineBusy),
        (wire.answer(200, b"[]"), EngineUnavailable),
        (wire.answer(200, b'{"count":"many"}'), EngineUnavailable),
        ([], EngineUnavailable),
    ],
)
async def test_an_engine_that_does_not_count_is_an_error(pieces: list[bytes], kind: type[EngineError]) -> None:
    """Also one that keeps silent: the count has a deadline."""
    async with open_http() as http, saying(pieces, "hang") as engine:
        with pytest.raises(kind) as caught:
            await VllmClient(http, deadlines=Deadlines(count_s=0.2)).count_tokens(engine.url, "m", "Hal", engine="e1")
    assert (type(caught.value), caught.value.engine) == (kind, "e1")


def test_the_usage_of_a_whole_answer() -> None:
    """What was written before is the answer's, not the prompt's, and no more than the prompt was cached."""
    assert Usage(30, 5, 16).of_whole(0) == Usage(30, 5, 16)
    assert Usage(30, 5, 16).of_whole(10) == Usage(20, 15, 16)
    assert Usage(30, 5, 28).of_whole(10) == Usage(20, 15, 20)
    assert Usage(30, 5, 28).of_whole(40) == Usage(0, 45, 0)


async def test_a_probe_asks_for_health_and_metrics(client: VllmClient) -> None:
    """Both, without the key, as vLLM guards only /v1."""
    async with open_http() as http, saying(wire.answer(200, METRICS.encode())) as engine:
        probe = await VllmClient(http, "key").probe(engine.url)
        assert [head.split("\r\n")[0] for head, _ in engine.requests] == [
            "GET /health HTTP/1.1",
            "GET /metrics HTTP/1.1",
        ]
        assert not any("key" in head for head, _ in engine.requests)
    assert probe.running == 3


async def test_a_sick_engine_fails_its_probe(client: VllmClient) -> None:
    """vLLM answers 503 on /health when its core is dead."""
    async with saying(wire.answer(503, b"")) as engine:
        with pytest.raises(EngineUnavailable, match="503"):
            await client.probe(engine.url, engine="e1")


async def test_a_wrong_key_is_said(client: VllmClient) -> None:
    """The engine's refusal comes out of the list of models."""
    async with saying(wire.answer(401, b'{"error":"Unauthorized"}')) as engine:
        with pytest.raises(EngineRefused, match="Unauthorized"):
            await client.models(engine.url)
