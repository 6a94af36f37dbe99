"""A simulated engine without its HTTP: what it writes, when, and what it counts."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from chat_server.engine.simulated.engine import BadRequest, Plan, Run, SimulatedEngine
from chat_server.engine.simulated.options import Fault, SimulatedOptions
from chat_server.engine.simulated.text import answer_for, prompt_tokens, tokens

pytestmark = pytest.mark.pure

USER = {"role": "user", "content": "What is a session?"}
AT_ONCE = {"tokens_per_s": 0.0, "prefill_tokens_per_s": 0.0, "first_token_s": 0.0}


def engine(**options: Any) -> SimulatedEngine:
    return SimulatedEngine(SimulatedOptions(**{**AT_ONCE, **options}))


def body(*messages: dict[str, str], **fields: Any) -> dict[str, Any]:
    return {"model": "simulated", "messages": list(messages or (USER,)), **fields}


def going_on(partial: str, **fields: Any) -> dict[str, Any]:
    """A request that asks to go on with ``partial``."""
    last = {"role": "assistant", "content": partial}
    return body(USER, last, continue_final_message=True, add_generation_prompt=False, **fields)


async def write(engine: SimulatedEngine, plan: Plan, leave_after: int | None = None) -> tuple[Run, list[str]]:
    """Run one request; the client leaves after so many pieces."""
    pieces: list[str] = []
    with engine.admit(plan) as run:
        async with aclosing(engine.write(plan, run)) as stream:
            async for _, piece in stream:
                pieces += ["".join(piece)] if piece else []  # the first one has none
                if len(pieces) == leave_after:
                    break
    return run, pieces


# What it writes


def test_the_answer_is_the_known_one() -> None:
    """A test can compute it without the engine."""
    plan = engine().plan(body())
    assert "".join(plan.answer) == answer_for([USER])
    assert (plan.finish_reason, plan.prompt) == ("stop", prompt_tokens([USER]))


@pytest.mark.parametrize("cut", [0, 1, 17, 100, 10_000])
def test_it_goes_on_as_if_never_cut(cut: int) -> None:
    """Another engine goes on with a partial answer, and nobody can tell."""
    whole = answer_for([USER])
    rest = engine().plan(going_on(whole[:cut]))
    assert whole[:cut] + "".join(rest.answer) == whole
    assert rest.finish_reason == "stop"


def test_max_tokens_cut_it() -> None:
    """As many tokens as asked for, and the reason says so."""
    plan = engine().plan(body(max_tokens=5))
    assert (len(plan.answer), plan.finish_reason) == (5, "length")
    assert "".join(plan.answer) == "".join(tokens(answer_for([USER]))[:5])


def test_a_bound_of_nothing_is_no_bound() -> None:
    """``null`` is as if it was not said; the newer name of the field counts too."""
    whole = engine().plan(body(max_tokens=None, max_completion_tokens=None))
    assert whole.finish_reason == "stop"
    assert len(engine().plan(body(max_completion_tokens=5)).answer) == 5


def test_an_answer_that_just_fits_misses_its_end() -> None:
    """The token that ends an answer needs room too."""
    length = len(tokens(answer_for([USER])))
    assert engine().plan(body(max_tokens=length)).finish_reason == "length"
    assert engine().plan(body(max_tokens=length + 1)).finish_reason == "stop"


def test_the_window_bounds_the_answer() -> None:
    """What the prompt leaves of the context window is all there is."""
    prompt = len(prompt_tokens([USER]))
    plan = engine(max_model_len=prompt + 7).plan(body())
    assert (len(plan.answer), plan.finish_reason) == (7, "length")


@pytest.mark.parametrize("stop", ["session", ["nowhere", "session"]])
def test_a_stop_string_ends_it(stop: object) -> None:
    """The answer ends before the string, which is named."""
    plan = engine().plan(body(stop=stop))
    assert "".join(plan.answer) == answer_for([USER]).partition("session")[0]
    assert (plan.finish_reason, plan.stop_reason) == ("stop", "session")


def test_reasoning_comes_first_and_costs_tokens() -> None:
    """But not when a message goes on: then it has been."""
    plan = engine(reasoning_tokens=3).plan(body(max_tokens=5))
    assert (len(plan.reasoning), len(plan.answer)) == (3, 2)
    assert engine(reasoning_tokens=3).plan(going_on("You")).reasoning == []


def test_each_attempt_can_write_other_text() -> None:
    """No two attempts share a word, and one that goes on goes on with the numbers."""
    varied = engine(vary=True, words=5)
    first, second = "".join(varied.plan(body()).answer), "".join(varied.plan(body()).answer)
    assert set(first.split()).isdisjoint(second.split())
    rest = "".join(varied.plan(going_on(" ".join(first.split()[:3]))).answer)
    assert [word.partition("·")[2] for word in rest.split()] == ["4", "5"]


# What it refuses


@pytest.mark.parametrize(
    ("wrong", "status", "said"),
    [
        ({"model": "other"}, 404, "The model `other` does not exist."),
        ({"messages": None}, 400, "body.messages"),
        ({"messages": [{"content": "x"}]}, 400, "body.messages"),
        ({"max_tokens": 0}, 400, "max_tokens must be at least 1, got 0."),
        ({"max_tokens": "9"}, 400, "max_tokens must be at least 1"),
        ({"max_completion_tokens": 0}, 400, "max_tokens must be at least 1"),
        ({"max_tokens": 9000}, 400, "cannot be greater than max_model_len=8192"),
        ({"continue_final_message": True}, 400, "are not compatible"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400, "maximum context length is 8192 tokens"),
    ],
)
def test_a_wrong_request_is_refused_as_by_vllm(wrong: dict[str, Any], status: int, said: str) -> None:
    """With its status and its words, which callers match."""
    with pytest.raises(BadRequest, match=said) as caught:
        engine().plan({**body(), **wrong})
    assert caught.value.status == status
    assert caught.value.body["error"]["code"] == status


# How it runs


async def test_usage_of_the_cache_grows_over_the_turns() -> None:
    """The second turn finds the prompt and the answer of the first."""
    simulated = engine(block_size=4)
    run, pieces = await write(simulated, simulated.plan(body()))
    assert run.cached_tokens == 0
    first = len(prompt_tokens([USER])) + len(pieces)
    again = {"role": "assistant", "content": "".join(pieces)}
    run, _ = await write(simulated, simulated.plan(body(USER, again, {"role": "user", "content": "And a view?"})))
    assert run.cached_tokens == first // 4 * 4


async def test_salts_do_not_share() -> None:
    """Another tenant finds nothing of the first one's."""
    simulated = engine(block_size=4)
    for salt, cached in (("one", 0), ("two", 0), ("one", len(prompt_tokens([USER])) // 4 * 4)):
        run, _ = await write(simulated, simulated.plan(body(cache_salt=salt)))
        assert run.cached_tokens == cached


async def test_a_client_that_leaves_is_an_abort() -> None:
    """Its place is free at once, and what was written stays cached."""
    simulated = engine(block_size=4)
    run, _ = await write(simulated, simulated.plan(body()), leave_after=9)
    assert (simulated.running, simulated.counters.aborted, simulated.counters.finished) == (0, 1, 0)
    assert (run.sent, simulated.counters.generated_tokens) == (9, 9)
    assert simulated.cache.usage == 0.0
    assert simulated.cache.cached == (len(prompt_tokens([USER])) + 9) // 4


async def test_a_whole_answer_is_none() -> None:
    """Who hears it to the end has not left."""
    simulated = engine()
    await write(simulated, simulated.plan(body()))
    assert (simulated.counters.aborted, simulated.counters.finished) == (0, 1)


async def test_places_are_bounded_and_the_rest_waits() -> None:
    """First come, first served; the gauges tell both."""
    simulated = engine(max_running=2, first_token_s=0.01)
    tasks = [asyncio.create_task(write(simulated, simulated.plan(body(max_tokens=3)))) for _ in range(5)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (simulated.running, simulated.waiting) == (2, 3)
    await asyncio.gather(*tasks)
    assert (simulated.running, simulated.waiting, simulated.counters.finished) == (0, 0, 5)


async def test_who_leaves_while_waiting_holds_no_place() -> None:
    """A cancelled wait gives back what it had."""
    simulated = engine(max_running=1, first_token_s=60)
    tasks = [asyncio.create_task(write(simulated, simulated.plan(body()))) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (simulated.running, simulated.waiting, simulated.counters.aborted) == (0, 0, 3)
    assert simulated.cache.usage == 0.0


async def test_a_full_engine_refuses() -> None:
    """With the status and words of vLLM's own admission control."""
    simulated = engine(max_running=1, max_unfinished=1, first_token_s=60)
    task = asyncio.create_task(write(simulated, simulated.plan(body())))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(BadRequest, match="currently busy") as caught, simulated.admit(simulated.plan(body())):
        raise AssertionError("it was let in")
    assert (caught.value.status, simulated.counters.refused) == (503, 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_it_keeps_its_pace() -> None:
    """So many tokens per second, by the clock since the first, in chunks of the size asked for."""
    simulated = engine(tokens_per_s=1000.0, tokens_per_chunk=5)
    started = asyncio.get_running_loop().time()
    _, pieces = await write(simulated, simulated.plan(body(max_tokens=100)))
    took = asyncio.get_running_loop().time() - started
    assert len(pieces) == 20
    assert 0.098 <= took < 1.0


async def test_prefills_queue_up() -> None:
    """Two cold prompts at once take as long as both after each other; a cached one takes none of it."""
    simulated = engine(prefill_tokens_per_s=500.0, block_size=4)
    prompts = [{"role": "user", "content": letter + " word" * 100} for letter in "ab"]
    loop = asyncio.get_running_loop()

    async def first_token_after(prompt: dict[str, str]) -> float:
        started = loop.time()
        await write(simulated, simulated.plan(body(prompt, max_tokens=1)))
        return loop.time() - started

    one, two = await asyncio.gather(*map(first_token_after, prompts))
    assert 0.2 <= one < two
    assert two >= 0.4
    assert await first_token_after(prompts[0]) < 0.2


# Faults


def test_a_fault_is_used_up() -> None:
    """It hits as many requests as it says; one without a number hits all until cleared."""
    simulated = engine(faults=(Fault("cut", times=2), Fault("status", times=None)))
    assert [f.kind if (f := simulated.fault("cut")) else None for _ in range(3)] == ["cut", "cut", None]
    assert all(simulated.fault("status") for _ in range(5))
    simulated.clear_faults()
    assert simulated.fault("status") is None


def test_faults_come_in_their_order() -> None:
    """The first that fits, so a test can write a script."""
    simulated = engine()
    simulated.add_fault(Fault("cut"))
    simulated.add_fault(Fault("hang"))
    kinds = [f.kind if (f := simulated.fault("hang", "cut")) else None for _ in range(3)]
    assert kinds == ["cut", "hang", None]
