"""One answer from its beginning to its end: which engine makes it, what goes wrong there, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest
import pytest_asyncio
import redis.asyncio

from chat_server import turn as turn_module
from chat_server.core.placement import Binding
from chat_server.core.principal import LOCAL
from chat_server.core.response import Begun, Response
from chat_server.engine.fleet import Engine
from chat_server.engine.simulated import Fault, SimulatedOptions, answer_for
from chat_server.engine.vllm import ChatRequest, EngineListener, Finish, Usage
from chat_server.errors import EngineUnavailable, StoreUnavailable
from chat_server.settings import Limits
from chat_server.store import messages
from chat_server.store.committer import Writer
from chat_server.store.messages import ResponseEnded
from chat_server.store.replies import Cut
from chat_server.turn import Conductor, Turn
from tests.support.server import QUICK, RunningServer, running_server
from tests.support.ws import WsClient

pytestmark = [pytest.mark.server, pytest.mark.asyncio(loop_scope="module")]

LONG = "Tell me more, in 300 words."
#: Answers are thought over first, and an engine that is silent for a second is left.
THINKING = SimulatedOptions(
    tokens_per_s=2000.0, first_token_s=0.005, words=40, block_size=16, reasoning_tokens=5, max_model_len=4000
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    """One server with two engines for all tests here; each has a session of its own and leaves no fault behind."""
    limits = Limits(max_answer_s=1.0, max_queue_s=5.0)
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


@pytest.mark.parametrize("kind", ["cut", "end", "error"])
async def test_an_answer_that_breaks_off_keeps_its_text(server: RunningServer, faults: AddFault, kind: Any) -> None:
    """Failed, with a code; what was told is what is stored, and what the next prompt holds."""
    faults(Fault(kind, after_tokens=50, status=500))
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


# --- by itself: a conductor with scripted parts


class Script:
    """Stands for the store, the committer, the fleet and the engines of one conductor, and records its end."""

    def __init__(self, *, fail: Exception | None = None) -> None:
        self.fail = fail
        self.engine = Engine("engine-1", "http://engine", state="healthy", epoch="1", models=("m",))
        self.ends: list[dict[str, Any]] = []
        self.told: list[ResponseEnded] = []
        self.away = 0
        self.on_settle: Callable[[], None] = lambda: None
        self.bindings: list[tuple[Binding | None, Binding]] = []
        self.bound: Binding | None = None

    # the fleet
    def healthy(self, model: str) -> list[Engine]:
        return [self.engine]

    def failed(self, engine_id: str, reason: str) -> None:
        pass

    # the engine
    async def stream(self, engine: str, url: str, request: ChatRequest, listener: EngineListener) -> Finish:
        if self.fail is not None:
            raise self.fail
        listener.on_text("Hello")
        return Finish("stop", Usage(3, 2, 1))

    # the committer
    def add(self, writer: Writer) -> None:
        if writer.response.take_commit():
            writer.response.stored_in_flight()

    async def settle(self, writer: Writer) -> None:
        self.on_settle()

    # the store
    async def bind(self, session_id: str, read: Binding | None, new: Binding) -> Binding | None:
        self.bindings.append((read, new))
        if self.bound != read:
            return self.bound
        self.bound = new
        return new

    async def end(self, session_id: str, response_id: str, token: str, item: Any, **how: Any) -> bytes:
        if self.away:
            self.away -= 1
            raise StoreUnavailable("away")
        self.ends.append({"item": item, **how})
        body = messages.end_body(response_id, how["rest_offset"], how["rest"], how["outcome"])
        return b'{"kind":"end","session":"s","before":1,"version":2,' + body + b"}"

    def turn(self, binding: Binding | None = None) -> Turn:
        begun = Begun(
            id="resp_1",
            item_id="item_1",
            replica="replica_1",
            epochs=[("epoch_1", 0)],
            created_ms=0,
            model="m",
            instructions="",
            max_output_tokens=None,
            temperature=None,
            top_p=None,
            stop=(),
            metadata=None,
        )
        response = Response(begun, previous_item_id=None)
        writer = Writer("s", "token_1", response, lambda: None, lambda: None, lambda reply: None)
        return Turn(
            session_id="s",
            principal=LOCAL,
            response=response,
            writer=writer,
            prompt=(),
            binding=binding,
            committer=cast("Any", self),
        )

    async def run(self, turn: Turn) -> ResponseEnded:
        part = cast("Any", self)
        conductor = Conductor(store=part, committer=part, fleet=part, client=part, limits=Limits())

        async def told(message: bytes) -> None:
            change = messages.decode(message)
            assert isinstance(change, ResponseEnded)
            self.told.append(change)

        await conductor.run(turn, told, asyncio.Lock())
        [end] = self.told
        return end


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


async def test_an_end_waits_for_a_store_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written when the store is back, once, and told then; meanwhile heartbeats say ``waiting``."""
    monkeypatch.setattr(turn_module, "_END_RETRY_S", 0.0)
    script = Script()
    script.away = 3
    turn = script.turn()
    end = await script.run(turn)
    assert (end.outcome.status, len(script.ends)) == ("completed", 1)
    assert turn.response.heartbeat_state == "waiting"


@pytest.mark.parametrize(
    ("error", "code"),
    [(RuntimeError("secret text"), "internal_error"), (EngineUnavailable("gone"), "engine_unavailable")],
)
async def test_any_fault_has_an_end(error: Exception, code: str) -> None:
    """Also one of our own, which tells nothing of its inside."""
    script = Script(fail=error)
    end = await script.run(script.turn())
    assert end.outcome.status == "failed"
    assert end.outcome.details is not None
    assert end.outcome.details.error.code == code  # type: ignore[union-attr]
    assert "secret" not in end.outcome.details.error.message  # type: ignore[union-attr]
    assert script.engine.in_flight == 0


async def test_a_binding_that_somebody_else_made_meanwhile_holds() -> None:
    """The session is asked of again with what holds now, instead of overwriting it blindly."""
    script = Script()
    script.bound = Binding("engine-0", "9")
    await script.run(script.turn())
    assert script.bindings == [
        (None, Binding("engine-1", "1")),
        (Binding("engine-0", "9"), Binding("engine-1", "1")),  # theirs can not be used: it is not healthy
    ]
    assert script.bound == Binding("engine-1", "1")
    again = Script()
    await again.run(again.turn(Binding("engine-1", "1")))
    assert again.bindings == []
