"""vLLM's HTTP API as the simulated engine speaks it, and its faults on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest

from chat_server.engine.simulated import (
    EngineDied,
    Fault,
    SimulatedOptions,
    SimulatedServer,
    answer_for,
    serve_simulated,
    simulated_server,
)
from chat_server.engine.simulated.text import prompt_tokens, token_id

pytestmark = pytest.mark.server

USER = {"role": "user", "content": "What is a session?"}
CHAT = "/v1/chat/completions"
QUICK = SimulatedOptions(tokens_per_s=0, first_token_s=0)


@pytest.fixture
async def engine() -> AsyncIterator[SimulatedServer]:
    async with simulated_server(QUICK) as server:
        yield server


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "simulated", "messages": [USER], "stream": True, **fields}


async def events(response: aiohttp.ClientResponse) -> list[Any]:
    """The events of a stream; ``[DONE]`` as the string."""
    raw = (await response.read()).split(b"\n\n")
    assert raw.pop() == b""
    return [e[6:].decode() if e == b"data: [DONE]" else orjson.loads(e.removeprefix(b"data: ")) for e in raw]


async def test_a_stream_has_the_shape_of_vllms(engine: SimulatedServer, http: aiohttp.ClientSession) -> None:
    """Role, texts, finish reason, usage, [DONE], all with the id of the request."""
    async with http.post(
        engine.url + CHAT,
        json=body(stream_options={"include_usage": True}),
        headers={"X-Request-Id": "abc"},
    ) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        got = await events(response)
    *chunks, usage, done = got
    assert done == "[DONE]"
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-abc"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == answer_for([USER])
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [None, "stop"]
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == len(prompt_tokens([USER]))
    assert usage["usage"]["completion_tokens"] == len(chunks) - 1  # without the role, with the token that ends it


async def test_usage_is_told_only_to_who_asks(engine: SimulatedServer, http: aiohttp.ClientSession) -> None:
    """``stream_options.include_usage``, as on vLLM."""
    async with http.post(engine.url + CHAT, json=body()) as response:
        assert not any("usage" in event for event in (await events(response))[:-1])


async def test_an_answer_comes_whole_too(engine: SimulatedServer, http: aiohttp.ClientSession) -> None:
    """Without ``stream`` it is one object, with its usage."""
    async with http.post(engine.url + CHAT, json=body(stream=False)) as response:
        got = await response.json()
    assert got["object"] == "chat.completion"
    assert got["choices"][0]["message"]["content"] == answer_for([USER])
    assert got["choices"][0]["finish_reason"] == "stop"
    assert got["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_reasoning_has_its_own_field(http: aiohttp.ClientSession, field: Any) -> None:
    """Before the answer, under the name that is set."""
    options = SimulatedOptions(tokens_per_s=0, reasoning_tokens=2, reasoning_field=field)
    async with simulated_server(options) as engine, http.post(engine.url + CHAT, json=body()) as response:
        got = await events(response)
    assert [field in event["choices"][0]["delta"] for event in got[1:5]] == [True, True, False, False]


async def test_refusals_have_vllms_body(engine: SimulatedServer, http: aiohttp.ClientSession) -> None:
    """A status and an error object, for a wrong model and for what is no JSON."""
    url = engine.url + CHAT
    async with http.post(url, json=body(model="other")) as response:
        assert response.status == 404
        assert (await response.json())["error"] == {
            "message": "The model `other` does not exist. Valid aliases: simulated.",
            "type": "NotFoundError",
            "param": "model",
            "code": 404,
        }
    for nonsense in (b'{"model"', b"[]"):
        async with http.post(url, data=nonsense) as response:
            assert response.status == 400


async def test_models_tell_the_window(engine: SimulatedServer, http: aiohttp.ClientSession) -> None:
    """The name and ``max_model_len``."""
    async with http.get(engine.url + "/v1/models") as response:
        (card,) = (await response.json())["data"]
    assert (card["id"], card["max_model_len"]) == ("simulated", 8192)


async def test_tokenize_counts_a_prompt(engine: SimulatedServer, http: aiohttp.ClientSession) -> None:
    """A chat as the answer would be asked, or plain text."""
    async with http.post(engine.url + "/tokenize", json={"model": "simulated", "messages": [USER]}) as response:
        got = await response.json()
    expected = [token_id(token) for token in prompt_tokens([USER])]
    assert got == {"count": len(expected), "max_model_len": 8192, "tokens": expected, "token_strs": None}
    async with http.post(engine.url + "/tokenize", json={"prompt": "a b"}) as response:
        assert (await response.json())["count"] == 2


async def test_a_key_guards_v1_alone(http: aiohttp.ClientSession) -> None:
    """As on vLLM: health and metrics are open."""
    async with simulated_server(SimulatedOptions(api_key="k")) as engine:
        async with http.get(engine.url + "/v1/models") as response:
            assert (response.status, await response.json()) == (401, {"error": "Unauthorized"})
        async with http.get(engine.url + "/v1/models", headers={"Authorization": "Bearer k"}) as response:
            assert response.status == 200
        async with http.get(engine.url + "/health") as response:
            assert response.status == 200


async def gauge(http: aiohttp.ClientSession, engine: SimulatedServer, name: str) -> float:
    async with http.get(engine.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return float(next(line for line in lines if line.startswith(name)).rpartition(" ")[2])


async def test_a_client_that_leaves_is_gone_at_once(http: aiohttp.ClientSession) -> None:
    """The gauge of running requests falls, and the abort is counted: so a test sees a stop arrive."""
    async with simulated_server(SimulatedOptions(tokens_per_s=10)) as engine:
        response = await http.post(engine.url + CHAT, json=body())
        await response.content.readline()
        assert await gauge(http, engine, "vllm:num_requests_running") == 1
        response.close()
        async with asyncio.timeout(1):
            while await gauge(http, engine, "vllm:num_requests_running"):
                await asyncio.sleep(0.001)
        assert await gauge(http, engine, "simulated:aborted_total") == 1
        assert await gauge(http, engine, "process_start_time_seconds") == engine.engine.started


# Faults, set over HTTP


async def set_faults(http: aiohttp.ClientSession, engine: SimulatedServer, *faults: dict[str, Any]) -> None:
    async with http.post(engine.url + "/simulate/faults", json=list(faults)) as response:
        assert response.status == 200


async def lines(response: aiohttp.ClientResponse) -> list[bytes]:
    """What comes of a stream until it ends or breaks, an event each."""
    got: list[bytes] = []
    try:
        while line := await response.content.readline():
            got += [line.strip()] if line.strip() else []
    except aiohttp.ClientError:
        got.append(b"broken")
    return got


@pytest.mark.parametrize(("kind", "last"), [("cut", b"broken"), ("die", b"broken")])
async def test_a_stream_breaks_on_demand(
    engine: SimulatedServer, http: aiohttp.ClientSession, kind: str, last: bytes
) -> None:
    """After so many tokens, by a reset, without finish reason and [DONE]."""
    await set_faults(http, engine, {"kind": kind, "after_tokens": 4})
    async with http.post(engine.url + CHAT, json=body()) as response:
        got = await lines(response)
    assert got[-1] == last
    assert len(got) <= 1 + 4 + 1
    assert not any(b'finish_reason":"' in line or b"[DONE]" in line for line in got)
    assert engine.engine.counters.aborted == 1
    assert engine.died.is_set() is (kind == "die")


async def test_a_stream_ends_too_soon_on_demand(engine: SimulatedServer, http: aiohttp.ClientSession) -> None:
    """As if whole, which only the missing finish reason betrays."""
    await set_faults(http, engine, {"kind": "end", "after_tokens": 4})
    async with http.post(engine.url + CHAT, json=body()) as response:
        got = await lines(response)
    assert len(got) == 1 + 4
    assert not any(b"[DONE]" in line for line in got)


async def test_an_error_comes_inside_the_stream_on_demand(engine: SimulatedServer, http: aiohttp.ClientSession) -> None:
    """As vLLM reports what goes wrong after the header was sent."""
    await set_faults(http, engine, {"kind": "error", "after_tokens": 2, "status": 500, "message": "it broke"})
    async with http.post(engine.url + CHAT, json=body()) as response:
        *_, error, done = await lines(response)
    assert orjson.loads(error.removeprefix(b"data: "))["error"]["message"] == "it broke"
    assert done == b"data: [DONE]"


async def test_an_engine_gives_an_answer_up_on_demand(engine: SimulatedServer, http: aiohttp.ClientSession) -> None:
    """The stream ends in order, and its finish reason says that it is not whole."""
    await set_faults(http, engine, {"kind": "abort", "after_tokens": 4})
    async with http.post(engine.url + CHAT, json=body()) as response:
        *_, last, done = await events(response)
    assert (last["choices"][0]["finish_reason"], done) == ("abort", "[DONE]")
    assert engine.engine.counters.aborted == 1


async def test_a_stream_hangs_on_demand(engine: SimulatedServer, http: aiohttp.ClientSession) -> None:
    """It stays open and silent, and runs on, until the client leaves."""
    await set_faults(http, engine, {"kind": "hang", "after_tokens": 2})
    async with http.post(engine.url + CHAT, json=body()) as response:
        for _ in range(1 + 2):
            assert (await response.content.readuntil(b"\n\n")).startswith(b"data: ")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(response.content.readany(), 0.05)
        assert engine.engine.running == 1
        response.close()
    async with asyncio.timeout(1):
        while engine.engine.running:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("status", [400, 500, 503])
async def test_a_request_is_refused_on_demand(
    engine: SimulatedServer, http: aiohttp.ClientSession, status: int
) -> None:
    """The next one alone, or as many as said."""
    await set_faults(http, engine, {"kind": "status", "status": status, "times": 2})
    got = []
    for _ in range(3):
        async with http.post(engine.url + CHAT, json=body(stream=False)) as response:
            got.append(response.status)
    assert got == [status, status, 200]


async def test_it_looks_sick_on_demand(engine: SimulatedServer, http: aiohttp.ClientSession) -> None:
    """``/health`` says so until the fault is cleared."""
    await set_faults(http, engine, {"kind": "health", "times": None})
    async with http.get(engine.url + "/health") as response:
        assert response.status == 503
    async with http.delete(engine.url + "/simulate/faults"):
        pass
    async with http.get(engine.url + "/health") as response:
        assert response.status == 200


@pytest.mark.parametrize("kind", ["cut", "end", "die"])
async def test_a_whole_answer_breaks_on_demand(engine: SimulatedServer, http: aiohttp.ClientSession, kind: str) -> None:
    """Without ``stream`` the connection is reset before the answer."""
    await set_faults(http, engine, {"kind": kind, "after_tokens": 4})
    with pytest.raises(aiohttp.ClientConnectionError):
        async with http.post(engine.url + CHAT, json=body(stream=False)):
            pass
    assert engine.engine.counters.generated_tokens == 4


async def test_a_whole_answer_fails_on_demand(engine: SimulatedServer, http: aiohttp.ClientSession) -> None:
    """Without ``stream`` an error is a status."""
    await set_faults(http, engine, {"kind": "error", "status": 500})
    async with http.post(engine.url + CHAT, json=body(stream=False)) as response:
        assert response.status == 500


async def test_a_hang_holds_its_place(http: aiohttp.ClientSession) -> None:
    """A stream that went silent in its prefill keeps others out."""
    options = SimulatedOptions(tokens_per_s=0, max_running=1, faults=(Fault("hang"),))
    async with simulated_server(options) as engine, http.post(engine.url + CHAT, json=body()) as first:
        await first.content.readline()
        async with http.post(engine.url + CHAT, json=body()):
            assert (engine.engine.running, engine.engine.waiting) == (1, 1)


async def test_an_unknown_fault_is_refused(engine: SimulatedServer, http: aiohttp.ClientSession) -> None:
    """A typo in a test must not pass for a fault."""
    async with http.post(engine.url + "/simulate/faults", json={"kind": "explode"}) as response:
        assert response.status == 400
        assert "kind is one of" in (await response.json())["error"]["message"]


async def test_what_it_counted_is_told(engine: SimulatedServer, http: aiohttp.ClientSession) -> None:
    """For tests that are another process."""
    async with http.post(engine.url + CHAT, json=body(max_tokens=3)) as response:
        await response.read()
    async with http.get(engine.url + "/simulate") as response:
        got = await response.json()
    assert (got["requests"], got["finished"], got["aborted"], got["generated_tokens"]) == (1, 1, 0, 3)
    assert (got["running"], got["waiting"]) == (0, 0)


async def test_it_names_the_requests_that_are_here(http: aiohttp.ClientSession) -> None:
    """So that somebody outside can tell whose request was left running."""
    async with simulated_server(SimulatedOptions(tokens_per_s=1)) as engine:
        async with http.post(engine.url + CHAT, json=body(), headers={"X-Request-Id": "resp_1"}) as answer:
            await answer.content.readline()
            async with http.get(engine.url + "/simulate") as response:
                assert (await response.json())["unfinished"] == ["resp_1"]
            answer.close()
        while engine.engine.running:
            await asyncio.sleep(0.001)
        assert engine.engine.unfinished == []


# Its life


async def test_it_stops_at_once_with_streams_open(http: aiohttp.ClientSession) -> None:
    """No answer holds it up."""
    async with simulated_server(SimulatedOptions(tokens_per_s=1)) as engine:
        response = await http.post(engine.url + CHAT, json=body())
        await response.content.readline()
        started = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - started < 0.5
    assert engine.engine.running == 0
    response.close()


async def test_serving_ends_when_the_engine_dies(http: aiohttp.ClientSession) -> None:
    """The process that serves it can then end, as a real engine's does."""
    urls: asyncio.Queue[str] = asyncio.Queue()
    options = SimulatedOptions(tokens_per_s=0, faults=(Fault("die", after_tokens=1),))
    task = asyncio.create_task(serve_simulated(options, "127.0.0.1", 0, on_listening=urls.put_nowait))
    url = await urls.get()
    with pytest.raises(aiohttp.ClientError):
        async with http.post(url + CHAT, json=body()) as response:
            await response.read()
    with pytest.raises(EngineDied):
        await asyncio.wait_for(task, 1)


async def test_a_port_in_use_is_an_error() -> None:
    """The caller says it in its own words."""
    async with simulated_server(QUICK) as engine:
        with pytest.raises(OSError, match="in use"):
            async with simulated_server(QUICK, port=int(engine.url.rpartition(":")[2])):
                pass
