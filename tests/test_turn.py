"""One answer from its beginning to its end: which engine makes it, what goes wrong there, and how it ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio

from chat_server import turn as turn_module
from chat_server.engine.simulated import (
    Fault,
    SimulatedEngine,
    SimulatedOptions,
    answer_for,
    prompt_tokens,
    simulated_server,
    tokens,
)
from chat_server.engine.simulated.options import FaultKind
from chat_server.engine.vllm import ChatRequest, Deadlines, EngineListener, Finish, VllmClient, open_http
from chat_server.errors import EngineBusy, EngineRefused, EngineUnavailable, StoreUnavailable
from chat_server.settings import Limits
from chat_server.store.messages import ResponseEnded
from chat_server.store.replies import Cut
from tests.support.server import QUICK, RunningServer, running_server
from tests.support.ws import WsClient
from tests.turns import ASKED, Script

pytestmark = [pytest.mark.server, pytest.mark.asyncio(loop_scope="module")]

LONG = "Tell me more, in 300 words."
#: Answers are thought over first, and one that takes four seconds is left.
THINKING = SimulatedOptions(
    tokens_per_s=2000.0, first_token_s=0.005, words=40, block_size=16, reasoning_tokens=5, max_model_len=4000
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    """One server with two engines for all tests here; each has a session of its own and leaves no fault behind."""
    limits = Limits(max_answer_s=4.0, max_queue_s=5.0)
    async with running_server(tmp_path_factory.mktemp("turn"), simulated=THINKING, limits=limits) as running:
        yield running


@pytest.fixture
def faults(server: RunningServer) -> Any:
    """Give all engines a fault; what is left of it is taken away at the end."""

    def add(fault: Fault) -> None:
        for engine in server.engines:
            engine.engine.add_fault(fault)

    yield add
    for engine in server.engines:
        engine.engine.clear_faults()


AddFault = Callable[[Fault], None]


async def ended(client: WsClient) -> dict[str, Any]:
    """Ask for a long answer and wait for its end."""
    await client.say(LONG)
    await client.send("response.create")
    return (await client.until("response.done"))["response"]  # type: ignore[no-any-return]


# --- what engines do


async def test_reasoning_is_no_part_of_the_answer(server: RunningServer) -> None:
    """What the model thinks is neither told nor stored."""
    async with server.connect() as client:
        turn = await client.turn("Hello")
        assert turn.text == answer_for([{"role": "user", "content": "Hello"}], QUICK.words)


async def test_a_request_that_the_engine_refuses_fails_with_its_reason(server: RunningServer, faults: AddFault) -> None:
    """It is the request's fault: no other engine is asked, nothing is kept, and the session goes on."""
    faults(Fault("status", status=400, message="This prompt is not to my taste.", times=None))
    before = sum(engine.engine.counters.requests for engine in server.engines)
    async with server.connect() as client:
        response = await ended(client)
        assert (response["status"], response["output"]) == ("failed", [])
        error = response["status_details"]["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"] == "This prompt is not to my taste."
        assert "retryable" not in error
        assert client.types[-2:] == ["conversation.item.deleted", "response.done"]
        for engine in server.engines:
            engine.engine.clear_faults()
        assert (await client.turn("Again")).response["status"] == "completed"
    assert sum(engine.engine.counters.requests for engine in server.engines) == before + 1


async def test_a_prompt_longer_than_the_window_fails_with_the_reason(server: RunningServer) -> None:
    """The engine's own words say what to do."""
    async with server.connect() as client:
        await client.say("word " * 4100)
        await client.send("response.create")
        response = (await client.until("response.done"))["response"]
        assert response["status"] == "failed"
        assert "maximum context length is 4000 tokens" in response["status_details"]["error"]["message"]


@pytest.mark.parametrize("status", [500, 503])
async def test_one_failure_before_the_first_word_is_not_noticed(
    server: RunningServer, faults: AddFault, status: int
) -> None:
    """Another attempt is made, and the answer is whole."""
    faults(Fault("status", status=status))
    async with server.connect() as client:
        response = await ended(client)
        assert response["status"] == "completed"
        assert client.texts[response["output"][0]["id"]] == answer_for([{"role": "user", "content": LONG}])


@pytest.mark.parametrize(("status", "code"), [(500, "engine_unavailable"), (503, "overloaded")])
async def test_engines_that_go_on_failing_fail_the_answer(
    server: RunningServer, faults: AddFault, status: int, code: str
) -> None:
    """When all were tried it ends with a code, nothing is kept of it, and trying again later may help."""
    faults(Fault("status", status=status, times=None))
    async with server.connect() as client:
        response = await ended(client)
        assert (response["status"], response["output"]) == ("failed", [])
        error = response["status_details"]["error"]
        assert (error["code"], error["type"], error["retryable"]) == (code, "server_error", True)
        for engine in server.engines:
            engine.engine.clear_faults()
        assert (await client.turn("Again")).response["status"] == "completed"


@pytest.mark.parametrize("kind", ["cut", "end", "error", "abort"])
async def test_an_answer_that_breaks_off_goes_on_elsewhere(server: RunningServer, faults: AddFault, kind: Any) -> None:
    """The text goes on without a gap, and the next prompt holds it whole."""
    faults(Fault(kind, after_tokens=50, status=500))
    async with server.connect() as client:
        response = await ended(client)
        assert response["status"] == "completed"
        [item] = response["output"]
        text = answer_for([{"role": "user", "content": LONG}])
        assert item["content"][0]["text"] == client.texts[item["id"]] == text
        for engine in server.engines:
            engine.engine.clear_faults()
        turn = await client.turn("And now?")
        told = [("user", LONG), ("assistant", text), ("user", "And now?")]
        assert turn.text == answer_for([{"role": role, "content": content} for role, content in told], QUICK.words)


async def test_an_answer_that_nobody_can_end_keeps_its_text(server: RunningServer, faults: AddFault) -> None:
    """Failed, with a code; what was told is what is stored, and what the next prompt holds."""
    faults(Fault("cut", after_tokens=50))
    faults(Fault("cut", times=None))
    async with server.connect() as client:
        response = await ended(client)
        assert response["status"] == "failed"
        error = response["status_details"]["error"]
        assert (error["code"], error["retryable"]) == ("engine_unavailable", True)
        [item] = response["output"]
        text = item["content"][0]["text"]
        assert item["status"] == "incomplete"
        assert client.texts[item["id"]] == text
        assert answer_for([{"role": "user", "content": LONG}]).startswith(text)
        assert len(text) > 50
        for engine in server.engines:
            engine.engine.clear_faults()
        turn = await client.turn("And now?")
        told = [("user", LONG), ("assistant", text), ("user", "And now?")]
        assert turn.text == answer_for([{"role": role, "content": content} for role, content in told], QUICK.words)


async def test_an_answer_has_its_time(server: RunningServer, faults: AddFault) -> None:
    """One that hangs ends incomplete when it is over, with its text, and leaves the engine."""
    faults(Fault("hang", after_tokens=50))
    async with server.connect() as client:
        response = await ended(client)
        assert response["status"] == "incomplete"
        assert response["status_details"]["error"]["code"] == "answer_timeout"
        [item] = response["output"]
        assert client.texts[item["id"]] == item["content"][0]["text"] != ""
        assert [engine.engine.running for engine in server.engines] == [0, 0]


# --- where


async def test_sessions_stay_where_their_prefix_is(server: RunningServer) -> None:
    """Each on its engine over all turns, with more cached each time; together they use both."""
    used = set()
    for number in range(20):
        async with server.connect() as client:
            turns = [await client.turn(f"Number {number}, and words to fill a block of the cache") for _ in range(3)]
        engines = {turn.response["engine"] for turn in turns}
        assert len(engines) == 1
        assert turns[0].cached_tokens < turns[1].cached_tokens < turns[2].cached_tokens
        used |= engines
        if len(used) == 2:
            break
    assert used == {"engine-1", "engine-2"}


async def test_an_engine_that_started_anew_gets_its_sessions_anew(server: RunningServer) -> None:
    """Its cache is empty, so the binding falls; the new one names the new start."""
    store = redis.asyncio.Redis.from_url(server.redis_url, decode_responses=True)
    async with server.connect() as client:
        await client.turn("Hello")
        key = f"chat:{{{client.session['id']}}}:session"
        before = await store.hmget(key, "engine", "engine_epoch")
        for engine in server.engines:
            engine.engine.started += 100.0
        async with asyncio.timeout(10):
            while (after := await store.hmget(key, "engine", "engine_epoch"))[1] == before[1]:
                await client.turn("And now?")  # until a probe has seen the new start
        assert after[0] == before[0]  # the same engine is still the session's first choice
    await store.aclose()


async def test_a_dead_engine_hands_its_sessions_to_the_other(tmp_path: Any) -> None:
    """An engine that dies before the first word costs nothing but time; with none left the answer fails in time."""
    limits = Limits(max_queue_s=0.2)
    async with running_server(tmp_path, limits=limits) as server, server.connect() as client:
        first = await client.turn("Hello")
        names = [address.name for address in server.settings.engines]
        server.engines[names.index(first.response["engine"])].die()
        second = await client.turn("And now?")
        assert second.response["status"] == "completed"
        assert second.response["engine"] != first.response["engine"]
        third = await client.turn("Still?")
        assert third.response["engine"] == second.response["engine"]
        server.engines[names.index(second.response["engine"])].die()
        response = (await client.turn("Anybody?")).response
        assert (response["status"], response["output"]) == ("failed", [])
        error = response["status_details"]["error"]
        assert (error["code"], error["retryable"]) == ("overloaded", True)
        assert error["retry_after_ms"] > 0


async def test_engines_that_are_killed_in_mid_answer_cost_no_word(tmp_path: Any) -> None:
    """One after the other, at a random moment each: the text goes on without a gap or a step back, to its one end."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    pace = replace(QUICK, tokens_per_s=1000.0)
    async with running_server(tmp_path, engines=4, simulated=pace) as server, server.connect() as client:
        names = [address.name for address in server.settings.engines]
        history: list[dict[str, str]] = []
        for _ in range(3):
            history.append({"role": "user", "content": LONG})
            await client.say(LONG)
            seen = len(client.events)
            await client.send("response.create")
            for _ in range(chance.randint(1, 30)):
                await client.until("response.output_text.delta")
            (working,) = [name for name, each in zip(names, server.engines, strict=True) if each.engine.running]
            server.engines[names.index(working)].die()
            response = (await client.until("response.done"))["response"]
            assert (response["status"], response["engine"] != working) == ("completed", True)
            deltas = [e for e in client.events[seen:] if e["type"] == "response.output_text.delta"]
            text = answer_for(history)
            assert "".join(delta["delta"] for delta in deltas) == text
            history.append({"role": "assistant", "content": text})


# --- by itself: a conductor with scripted parts


async def test_the_end_carries_the_engines_counts() -> None:
    """Usage, the engine's name and the whole text, in one write."""
    script = Script()
    end = await script.run(script.turn())
    assert (end.outcome.status, end.outcome.engine, end.outcome.text_length) == ("completed", "engine-1", 5)
    assert end.outcome.usage is not None
    assert (end.outcome.usage.input_tokens, end.outcome.usage.total_tokens) == (3, 5)
    assert script.ends[0]["item"].text == "Hello"


async def test_a_stop_that_comes_as_the_answer_is_whole_cancels_it() -> None:
    """Its text is cut, so it must not call itself completed."""
    script = Script()
    turn = script.turn()
    script.on_settle = lambda: turn.stop(Cut(2))
    end = await script.run(turn)
    assert (end.outcome.status, end.outcome.text_length) == ("cancelled", 2)
    assert script.ends[0]["item"].text == "He"
    assert script.ends[0]["item"].status == "incomplete"


@pytest.mark.parametrize(
    ("stops", "length"),
    [
        ([(4, False), (2, False)], 4),
        ([(4, False), (2, True), (3, False)], 2),
        ([(2, False), (4, True)], 4),
        ([(3, True), (None, True)], 3),
    ],
)
async def test_the_stop_that_the_store_holds_counts(stops: list[tuple[int | None, bool]], length: int) -> None:
    """Whoever wanted it while the store was away; before it holds one, the first counts."""
    script = Script()
    turn = script.turn()

    def stop() -> None:
        for cut, stored in stops:
            turn.stop(None if cut is None else Cut(cut), stored=stored)

    script.on_settle = stop
    assert (await script.run(turn)).outcome.text_length == length


async def test_an_end_waits_for_a_store_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written when the store is back, once, and told then; meanwhile heartbeats say ``waiting``."""
    monkeypatch.setattr(turn_module, "_END_RETRY_S", 0.0)
    script = Script()
    script.away = 3
    turn = script.turn()
    end = await script.run(turn)
    assert (end.outcome.status, len(script.ends)) == ("completed", 1)
    assert turn.response.heartbeat_state == "waiting"


async def test_an_end_that_was_told_is_not_written_again() -> None:
    """Whatever fails after that: what would be written is another text by then."""
    script = Script()
    turn = script.turn()

    def fail(end: ResponseEnded) -> None:
        turn.response.end(end.outcome)
        raise StoreUnavailable("away")

    script.on_told = fail
    async with asyncio.timeout(5):
        await script.run(turn)
    assert len(script.ends) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [(RuntimeError("secret text"), "internal_error"), (EngineUnavailable("gone"), "engine_unavailable")],
)
async def test_any_fault_has_an_end(error: Exception, code: str) -> None:
    """Also one of our own, which tells nothing of its inside."""
    script = Script([error])
    end = await script.run(script.turn())
    assert end.outcome.status == "failed"
    assert end.outcome.details is not None
    assert end.outcome.details.error.code == code  # type: ignore[union-attr]
    assert "secret" not in end.outcome.details.error.message  # type: ignore[union-attr]


# --- going on: an engine is lost in mid-answer

LOST = EngineUnavailable("gone")
BUSY = EngineBusy("full")


async def test_another_engine_goes_on_with_the_text_so_far() -> None:
    """It is asked with the text as the last, unfinished message; those who listen are told before its text comes."""
    script = Script(["Once", " upon ", LOST], [" a time"], engines=["http://a", "http://b"])
    end = await script.run(script.turn(instructions="Be kind."))
    assert (end.outcome.status, script.ends[0]["item"].text) == ("completed", "Once upon a time")
    (first, begun), (second, going_on) = script.requests
    assert first != second == end.outcome.engine
    assert (begun.continue_final, going_on.continue_final) == (False, True)
    assert going_on.messages == (*begun.messages, {"role": "assistant", "content": "Once upon"})
    assert script.migrations == [("engine_lost", "Once upon")]
    assert script.failures == [first]


async def test_an_answer_that_had_no_text_starts_anew() -> None:
    """Also when white space came: nothing was told that it could go on from, and nobody is told of the loss."""
    script = Script([LOST], ["\n ", LOST], ["Hello"])
    end = await script.run(script.turn())
    assert (end.outcome.status, script.ends[0]["item"].text) == ("completed", "Hello")
    assert [request.continue_final for _, request in script.requests] == [False, False, False]
    assert script.migrations == []


async def test_an_answer_that_is_taken_over_goes_on_at_once() -> None:
    """Its stored text is the beginning; the engine's count of it is out of the budget, and in the usage."""
    script = Script([" a time"])
    end = await script.run(script.turn(stored="Once upon", max_output_tokens=20))
    assert script.ends[0]["item"].text == "Once upon a time"
    [(_, request)] = script.requests
    assert (request.continue_final, request.max_tokens) == (True, 20 - len("Once upon"))
    assert script.migrations == [], "who took it over tells it"
    assert end.outcome.usage is not None
    assert (end.outcome.usage.input_tokens, end.outcome.usage.output_tokens) == (0, 2 + len("Once upon"))


async def test_a_request_that_ends_all_that_touches_it_fails() -> None:
    """After three attempts without new text, and what there is stays."""
    script = Script(["Once", LOST], [LOST])
    end = await script.run(script.turn())
    assert (end.outcome.status, script.ends[0]["item"].text) == ("failed", "Once")
    assert script.ends[0]["item"].status == "incomplete"
    assert len(script.requests) == 1 + 3
    assert [text for _, text in script.migrations] == ["Once"], "it is told once, not for each attempt"


@pytest.mark.parametrize(("attempts", "asked"), [(0, 3), (2, 1), (3, 0), (4, 0)])
async def test_attempts_of_other_replicas_count(attempts: int, asked: int) -> None:
    """A replica that takes over goes on with the count, so the bound is one for all."""
    script = Script([LOST])
    turn = script.turn(stored="Once", attempts=attempts)
    end = await script.run(turn)
    assert (end.outcome.status, script.ends[0]["item"].text) == ("failed", "Once")
    assert len(script.requests) == asked
    assert turn.attempts == max(attempts, 3)


async def test_an_answer_goes_on_as_long_as_there_is_new_text() -> None:
    """New text makes the count begin anew; white space is no text."""
    lives: list[list[str | Exception | None]] = []
    for _ in range(20):
        lives += [["word ", LOST], [" ", LOST], [LOST]]
    script = Script(*lives, ["."])
    end = await script.run(script.turn())
    assert end.outcome.status == "completed"
    assert script.ends[0]["item"].text == "word" * 20 + "."
    assert len(script.requests) == 61


@pytest.mark.parametrize(
    ("life", "asked"),
    [(["Once", EngineRefused("no")], 1), (["Once", RuntimeError("bug")], 1), (["Once", None, LOST], 1)],
    ids=["a no", "a bug", "thinking under way"],
)
async def test_what_no_other_engine_can_mend_ends_the_answer(life: list[Any], asked: int) -> None:
    """With the text that there is."""
    script = Script(life, [" more"])
    end = await script.run(script.turn())
    assert (end.outcome.status, script.ends[0]["item"].text) == ("failed", "Once")
    assert len(script.requests) == asked


async def test_thinking_before_the_first_word_starts_anew() -> None:
    """Nothing was sent."""
    script = Script([None, LOST], [None, "Hello"])
    end = await script.run(script.turn())
    assert (end.outcome.status, script.ends[0]["item"].text) == ("completed", "Hello")


async def test_an_engine_that_thinks_anew_does_not_go_on() -> None:
    """It would begin anew, or its thoughts are the rest of the answer: failed, and never a mixture or a silent hole."""
    script = Script(["Once", LOST], [None, "Twice"])
    end = await script.run(script.turn())
    assert (end.outcome.status, script.ends[0]["item"].text) == ("failed", "Once")
    assert script.failures == ["engine-1"], "the second one did nothing wrong"


async def test_busy_engines_are_left_alone_in_mid_answer_too() -> None:
    """The next one is asked; when all are busy the answer ends, for asking at once again makes it worse."""
    script = Script(["Once", LOST], [BUSY], [BUSY], engines=["http://a", "http://b"])
    end = await script.run(script.turn())
    assert end.outcome.status == "failed"
    assert end.outcome.details is not None
    assert end.outcome.details.error.code == "overloaded"  # type: ignore[union-attr]
    lost, *busy = [engine for engine, _ in script.requests]
    assert (len(busy), lost in busy) == (2, False)
    assert script.failures == [lost], "a busy engine is not a dead one"


async def test_a_budget_that_is_used_up_ends_the_answer_without_asking() -> None:
    """The engine was lost just before it could say that."""
    script = Script()
    end = await script.run(script.turn(stored="Once", max_output_tokens=4))
    assert (end.outcome.status, script.ends[0]["item"].text) == ("incomplete", "Once")
    assert end.outcome.details is not None
    assert end.outcome.details.reason == "max_output_tokens"
    assert script.requests == []


async def test_a_window_that_is_full_ends_the_answer() -> None:
    """The engine's no is then the end, not a fault."""
    script = Script([EngineRefused("This model's maximum context length is 8192 tokens.")])
    end = await script.run(script.turn(stored="Once"))
    assert (end.outcome.status, script.ends[0]["item"].text) == ("incomplete", "Once")


async def test_an_engine_that_does_not_count_keeps_no_answer_from_going_on() -> None:
    """The tokens are then estimated."""
    script = Script([" more"])
    script.counts = False
    end = await script.run(script.turn(stored="Once upon", max_output_tokens=20))
    assert end.outcome.status == "completed"
    assert script.requests[0][1].max_tokens == 20 - 3


@pytest.mark.parametrize(("counts", "status"), [(False, 404), (True, 401)])
async def test_the_words_of_a_refusal_are_in_no_log(
    caplog: pytest.LogCaptureFixture, counts: bool, status: int
) -> None:
    """They may hold what somebody wrote: the log has the status."""
    script = Script([EngineRefused("Once upon what?", status=status)] if counts else [" more"])
    script.counts = counts
    with caplog.at_level("DEBUG"):
        await script.run(script.turn(stored="Once upon"))
    assert "Once upon" not in caplog.text
    assert f"status {status}" in caplog.text


async def test_all_attempts_share_the_time_of_one_answer() -> None:
    """It does not begin anew with each engine."""

    class Slow(Script):
        async def stream(self, engine: str, url: str, request: ChatRequest, listener: EngineListener) -> Finish:
            self.requests.append((engine, request))
            listener.on_text("word")
            await asyncio.sleep(0.06)
            raise LOST

    script = Slow()
    end = await script.run(script.turn(), Limits(max_answer_s=0.2))
    assert end.outcome.status == "incomplete"
    assert end.outcome.details is not None
    assert end.outcome.details.error.code == "answer_timeout"  # type: ignore[union-attr]
    assert 2 <= len(script.requests) <= 4


# --- going on, with real engines' HTTP

AT_ONCE = SimulatedOptions(tokens_per_s=0, prefill_tokens_per_s=0, first_token_s=0, tokens_per_chunk=2)
BREAKS: tuple[FaultKind, ...] = ("cut", "end", "error", "abort", "hang")
WHOLE = answer_for([{"role": "user", "content": ASKED}])


@asynccontextmanager
async def playing(
    store: random.Random | None = None, options: SimulatedOptions = AT_ONCE
) -> AsyncIterator[tuple[Script, list[SimulatedEngine]]]:
    """Three simulated engines behind the real client, which leaves one that is silent for a moment."""
    deadlines = Deadlines(connect_s=5, headers_s=5, first_s=0.4, silence_s=0.4)
    async with open_http(deadlines) as http, AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(simulated_server(options)) for _ in range(3)]
        client = VllmClient(http, deadlines=deadlines)
        yield (
            Script(engines=[server.url for server in servers], client=client, store=store),
            [server.engine for server in servers],
        )


@pytest.mark.parametrize("round_", range(12))
async def test_an_answer_survives_any_engines_it_meets(round_: int) -> None:
    """They die, hang, say 500 or 503, stop in the middle, at random places: the text is as of one that never failed.

    The store takes the text in random pieces meanwhile. Tokens are counted as of one answer.
    """
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    async with playing(chance) as (script, engines):
        for _ in range(chance.randint(1, 9)):  # each after some text, for an emoji alone is none
            chance.choice(engines).add_fault(Fault(chance.choice(BREAKS), after_tokens=chance.randint(12, 60)))
        for _ in range(chance.randint(0, 2)):  # a third one without new text would be the end
            chance.choice(engines).add_fault(Fault("status", status=chance.choice((500, 503))))
        end = await script.run(script.turn())
        assert script.ends[0]["item"].text == WHOLE
        assert end.outcome.status == "completed"
        assert end.outcome.usage is not None
        prompt = prompt_tokens([{"role": "user", "content": ASKED}])
        assert end.outcome.usage.input_tokens == len(prompt)
        assert end.outcome.usage.output_tokens == len(tokens(WHOLE)) + 1


@pytest.mark.parametrize("budget", [1, 2, 40, 41, 100])
async def test_a_budget_holds_across_engines(budget: int) -> None:
    """To the token, wherever the answer is cut."""
    expected = "".join(tokens(WHOLE)[:budget])
    for after in range(1, min(budget, 45), 3):
        async with playing() as (script, engines):
            for engine in engines:
                engine.add_fault(Fault("cut", after_tokens=after))
            end = await script.run(script.turn(max_output_tokens=budget))
        text = script.ends[0]["item"].text
        assert end.outcome.status == "incomplete"
        # What ends the text may be white space or half an emoji: it was dropped if the budget was met at the cut.
        assert text == expected or (expected.startswith(text) and not script.ends[0]["rest"])
        assert len(tokens(text)) >= budget - 3


async def test_text_of_two_attempts_shows_where_engines_really_differ() -> None:
    """Each attempt of these engines writes words of its own, numbered: none is missing, none comes twice."""
    options = replace(AT_ONCE, vary=True, words=60, tokens_per_chunk=1)
    async with playing(options=options) as (script, engines):
        for engine in engines:
            engine.add_fault(Fault("cut", after_tokens=10))
        await script.run(script.turn())
    words = [word.partition("·") for word in script.ends[0]["item"].text.split()]
    assert [int(number) for _, _, number in words] == list(range(1, 61))
    assert len({attempt for attempt, _, _ in words}) == 3, "two were cut, and a third one wrote the rest"


async def test_a_stop_string_is_found_wherever_the_answer_is_cut() -> None:
    """Before it, in it or just after it: the text ends before it, and nothing of it is told."""
    at = WHOLE.index("simulated")
    stop = WHOLE[at - 6 : at + 12]
    before = len(tokens(WHOLE[: at - 6]))
    for after in range(before - 4, before + 3):
        async with playing() as (script, engines):
            for engine in engines:
                engine.add_fault(Fault("cut", after_tokens=after))
            end = await script.run(script.turn(stop=(stop,)))
        assert (end.outcome.status, script.ends[0]["item"].text) == ("completed", WHOLE.partition(stop)[0])
