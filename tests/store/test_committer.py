"""Group commit: many answers in one round trip, each in its order, whatever the store does meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from chat_server.core.response import State
from chat_server.errors import StoreError, StoreUnavailable
from chat_server.store import committer as committer_module
from chat_server.store.committer import Committer, Writer
from chat_server.store.replies import CommitReply, TextCommit
from tests.core.answers import new_response

pytestmark = pytest.mark.pure

AWAY = StoreUnavailable("away")


class FakeStore:
    """Keeps what it is told at the place that it is told, as the script does, and counts the round trips."""

    def __init__(self) -> None:
        self.pipelines: list[list[TextCommit]] = []
        self.texts: dict[str, bytes] = {}
        self.replies: dict[str, CommitReply | StoreUnavailable] = {}
        #: where sessions lie, and the servers that are silent
        self.shards: dict[str, str] = {}
        self.silent: set[str] = set()
        #: raised before (True) or after (False) the text was stored, one for each round trip to come
        self.faults: list[tuple[Exception, bool]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = asyncio.Event()

    def shard(self, session_id: str) -> str:
        return self.shards.get(session_id, "")

    async def commit(self, commits: Sequence[TextCommit]) -> list[CommitReply | StoreUnavailable]:
        self.pipelines.append(list(commits))
        self.asked.set()
        await self.gate.wait()
        while any(self.shard(one.session_id) in self.silent for one in commits):
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        fault, before = self.faults.pop(0) if self.faults else (None, False)
        if fault and before:
            raise fault
        replies: list[CommitReply | StoreUnavailable] = []
        for one in commits:
            held = self.texts.get(one.response_id, b"")
            if one.byte_offset > len(held):
                replies.append("short")
                continue
            self.texts[one.response_id] = held[: one.byte_offset] + one.data
            replies.append(self.replies.get(one.response_id, "ok"))
        if fault:
            raise fault
        return replies


class Answer:
    """An answer with its writer; it keeps what was told of it and why it was lost."""

    def __init__(self, committer: Committer, number: int = 1) -> None:
        self.response = new_response(id=f"resp_{number}")
        self.response.move(State.PREFILL)
        self.told: list[str] = []
        self.refused: list[CommitReply] = []
        self.lost = 0
        self.wishes = 0
        self.fails = False
        self.changed = asyncio.Event()
        self.writer = Writer(
            session_id=f"sess_{number}",
            token=f"token_{number}",
            response=self.response,
            on_stored=self._stored,
            on_wish=self._wished,
            on_refused=self._refused,
            on_lost=self._lost,
        )
        self._committer = committer

    def _stored(self) -> None:
        if self.fails:
            raise RuntimeError("a connection of this one is broken")
        self.told.append(self.response.text(sum(map(len, self.told))))
        self.changed.set()

    def _wished(self) -> None:
        self.wishes += 1

    def _refused(self, reply: CommitReply) -> None:
        self.refused.append(reply)
        self.changed.set()

    def _lost(self) -> None:
        self.lost += 1
        self.changed.set()

    def says(self, text: str) -> None:
        self.response.on_text(text)
        self._committer.add(self.writer)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def until_told(self, text: str) -> None:
        await self.until(lambda: "".join(self.told) == text)


@asynccontextmanager
async def running(store: FakeStore, *, gather_s: float = 0.0) -> AsyncIterator[Committer]:
    committer = Committer(cast("Any", store), gather_s=gather_s)
    task = asyncio.create_task(committer.run())
    try:
        yield committer
        assert not task.done(), "it goes on, whatever happens"
    finally:
        task.cancel()
        await asyncio.wait({task})


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two tries there is no need to wait in a test."""
    monkeypatch.setattr(committer_module, "_RETRY_S", 0.0)


async def test_text_is_told_when_it_is_stored_and_not_before() -> None:
    """After a quiet moment it goes to the store at once; until the store answers nothing is told."""
    store = FakeStore()
    store.gate.clear()
    async with running(store) as committer:
        answer = Answer(committer)
        answer.says("Hello")
        await store.asked.wait()
        [[sent]] = store.pipelines
        assert (sent.session_id, sent.response_id, sent.token) == ("sess_1", "resp_1", "token_1")
        assert (sent.epoch, sent.byte_offset, sent.offset, sent.data) == (answer.response.epoch, 0, 0, b"Hello")
        assert (answer.told, answer.response.length) == ([], 0)
        store.gate.set()
        await answer.until_told("Hello")


async def test_many_answers_go_in_one_round_trip() -> None:
    """What comes while one is under way waits and goes together with the next; there is never a second beside it."""
    store = FakeStore()
    store.gate.clear()
    async with running(store) as committer:
        answers = [Answer(committer, number) for number in range(200)]
        answers[0].says("first")
        await store.asked.wait()
        for word in ("Hello", ",", " you"):
            for answer in answers:
                answer.says(word)
            await asyncio.sleep(0)
        assert len(store.pipelines) == 1
        store.gate.set()
        for answer in answers:
            await answer.until(lambda answer=answer: "you" in "".join(answer.told))  # type: ignore[misc]
        assert [len(pipeline) for pipeline in store.pipelines] == [1, 200]
        assert store.texts["resp_0"] == b"firstHello, you"
        assert store.texts["resp_7"] == b"Hello, you"
        assert answers[7].told == ["Hello, you"]


async def test_round_trips_keep_their_distance() -> None:
    """At most one each ``gather_s`` while text comes all the time."""
    store = FakeStore()
    async with running(store, gather_s=0.02) as committer:
        answer = Answer(committer)
        began = asyncio.get_running_loop().time()
        while (passed := asyncio.get_running_loop().time() - began) < 0.1:
            answer.says("x")
            await asyncio.sleep(0.001)
    assert 2 <= len(store.pipelines) <= passed / 0.02 + 2


async def test_each_answer_keeps_the_order_of_its_text() -> None:
    """Any pace of the engine, any trouble and loss of the store: what is stored and told is what was said."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    store = FakeStore()
    store.shards = {f"sess_{number}": dice.choice("ab") for number in range(5)}
    async with running(store) as committer:
        answers = [Answer(committer, number) for number in range(5)]
        said = [""] * 5
        for number in range(500):
            place = dice.randrange(5)
            word = f"{number}.{dice.choice(['', 'ü', '👩🏽‍💻', 'é'])};"
            answers[place].says(word)
            said[place] += word
            if dice.random() < 0.2:
                store.faults.append((StoreUnavailable("away"), dice.random() < 0.5))
            if dice.random() < 0.1:
                store.replies = {f"resp_{n}": AWAY for n in range(5) if dice.random() < 0.3}
            if dice.random() < 0.1:
                lost = f"resp_{dice.randrange(5)}"
                store.texts[lost] = store.texts.get(lost, b"")[: dice.randrange(9)]
            for _ in range(dice.randrange(4)):
                await asyncio.sleep(0)
        store.replies = {}
        for answer, text in zip(answers, said, strict=True):
            answer.says(".")
            await answer.until_told(text + ".")
            assert store.texts[answer.response.id].decode() == text + "."


async def test_text_waits_for_a_safe_place() -> None:
    """White space and half an emoji are held back until more comes; that alone makes no round trip."""
    store = FakeStore()
    async with running(store) as committer:
        answer = Answer(committer)
        answer.says("Hello ")
        await answer.until_told("Hello")
        answer.says("\n")
        await asyncio.sleep(0.01)
        assert len(store.pipelines) == 1
        answer.says("you")
        await answer.until_told("Hello \nyou")


@pytest.mark.parametrize("fault", [StoreUnavailable("away"), StoreError("no room")])
@pytest.mark.parametrize("before", [True, False])
async def test_a_store_that_is_away_is_waited_for(fault: Exception, before: bool) -> None:
    """The same commit is tried until it is taken, also if it had been: nothing is lost, doubled or told too early."""
    store = FakeStore()
    store.faults = [(fault, before)] * 3
    async with running(store) as committer:
        answer = Answer(committer)
        answer.says("Hello")
        await answer.until_told("Hello")
        assert store.texts == {"resp_1": b"Hello"}
        assert len(store.pipelines) == 4
        answer.says(", you")
        await answer.until_told("Hello, you")
        assert store.texts == {"resp_1": b"Hello, you"}
    assert answer.refused == []


async def test_a_server_that_is_silent_keeps_no_other_one_waiting() -> None:
    """Of a cluster, which holds some of the sessions: the others are told as ever, also those that begin now."""
    store = FakeStore()
    store.shards = {"sess_1": "a", "sess_2": "b", "sess_3": "b", "sess_4": "a"}
    async with running(store) as committer:
        answers = [Answer(committer, number) for number in (1, 2, 3, 4)]
        store.silent = {"a"}
        for answer in answers[:2]:
            answer.says("Hello")
        await answers[1].until_told("Hello")
        for answer in answers:
            answer.says("!")
        await answers[1].until_told("Hello!")
        await answers[2].until_told("!")
        assert answers[0].told == answers[3].told == []
        store.silent = set()
        await answers[0].until_told("Hello!")
        await answers[3].until_told("!")


@pytest.mark.parametrize("more", ["", "!"])
async def test_a_commit_without_an_answer_is_sent_again_by_itself(caplog: pytest.LogCaptureFixture, more: str) -> None:
    """The others of the same round trip are told, and not sent twice; the log says when it begins and ends."""
    store = FakeStore()
    store.replies = {"resp_1": AWAY}
    async with running(store) as committer:
        one, two = Answer(committer, 1), Answer(committer, 2)
        for answer in (one, two):
            answer.says("Hello")
        await two.until_told("Hello")
        one.says(more)
        two.says(", you")
        await two.until_told("Hello, you")
        sent = len(store.pipelines)
        async with asyncio.timeout(5):
            while len(store.pipelines) < sent + 3:
                await asyncio.sleep(0)
        assert {commit.response_id for pipeline in store.pipelines[sent:] for commit in pipeline} == {"resp_1"}
        assert (one.told, one.response.heartbeat_state) == ([], "waiting")
        assert two.response.heartbeat_state == "streaming"
        store.replies = {}
        await one.until_told("Hello" + more)
        assert one.response.heartbeat_state == "streaming"
        assert store.texts == {"resp_1": ("Hello" + more).encode(), "resp_2": b"Hello, you"}
        assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


async def test_who_waits_for_the_store_says_so() -> None:
    """The heartbeat says ``waiting`` as long as the store is away, and not after that."""
    store = FakeStore()
    seen = []
    async with running(store) as committer:
        answer = Answer(committer)
        store.faults = [(StoreUnavailable("away"), True), (StoreUnavailable("away"), True)]
        answer.says("Hello")
        async with asyncio.timeout(5):
            while not answer.told:
                seen.append(answer.response.heartbeat_state)
                await asyncio.sleep(0)
        assert "waiting" in seen
        assert answer.response.heartbeat_state == "streaming"


@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize("reply", ["refused", "missing"])
async def test_an_answer_that_the_store_does_not_take_waits(reply: CommitReply, lost: bool) -> None:
    """Its owner is told so, once, and nothing of the text is told: until the store has it again, or it is lost."""
    store = FakeStore()
    store.replies["resp_1"] = reply
    async with running(store) as committer:
        one, two = Answer(committer, 1), Answer(committer, 2)
        for answer in (one, two):
            answer.says("Hello")
        await two.until_told("Hello")
        one.says(", you")
        await asyncio.sleep(0.02)
        assert (one.refused, one.told, two.refused) == ([reply], [], [])
        if lost:
            committer.lose(one.writer)
            await asyncio.sleep(0.02)
            assert (one.lost, one.told, one.writer.lost) == (1, [], True)
        else:
            del store.replies["resp_1"]
            committer.resume(one.writer)
            await one.until_told("Hello, you")
            assert (one.refused, one.lost) == ([reply], 0)


async def test_text_that_the_store_lost_is_written_again_whole() -> None:
    """It says that it holds less than the commit begins at; readers hear the new text only."""
    store = FakeStore()
    async with running(store) as committer:
        answer = Answer(committer)
        answer.says("Hello")
        await answer.until_told("Hello")
        store.texts["resp_1"] = b"He"
        answer.says(", you")
        await answer.until_told("Hello, you")
        answer.says("!")
        await answer.until_told("Hello, you!")
        assert store.texts == {"resp_1": b"Hello, you!"}
        assert answer.refused == []


async def test_text_that_the_store_lost_is_stored_again_without_more_of_it() -> None:
    """All that was told, and nothing is told twice."""
    store = FakeStore()
    async with running(store) as committer:
        answer = Answer(committer)
        answer.says("Hello, you")
        await answer.until_told("Hello, you")
        store.texts["resp_1"] = b"He"
        await committer.store_whole(answer.writer)
        assert store.texts == {"resp_1": b"Hello, you"}
        assert "".join(answer.told) == "Hello, you"


async def test_a_callback_that_raises_ends_its_own_answer_only() -> None:
    """It is lost, and says so; the others in the same round trip are told as ever."""
    store = FakeStore()
    async with running(store) as committer:
        answers = [Answer(committer, number) for number in range(3)]
        answers[1].fails = True
        for answer in answers:
            answer.says("Hello")
        for answer in (answers[0], answers[2]):
            await answer.until_told("Hello")
        assert answers[1].writer.lost
        assert answers[1].lost == 1
        for answer in (answers[0], answers[2]):
            answer.says("!")
            await answer.until_told("Hello!")


@pytest.mark.parametrize("reply", ["ok", "refused"])
async def test_a_loss_that_can_not_be_told_is_that_answers_trouble_too(reply: CommitReply) -> None:
    """Even a broken ending of one answer does not end the committer, which all others need."""

    def broken(*_: Any) -> None:
        raise RuntimeError("broken twice")

    store = FakeStore()
    store.replies["resp_1"] = reply
    async with running(store) as committer:
        one, two = Answer(committer, 1), Answer(committer, 2)
        one.writer.on_stored = one.writer.on_refused = one.writer.on_lost = broken
        for answer in (one, two):
            answer.says("Hello")
        await two.until_told("Hello")
        assert one.writer.lost
        two.says("!")
        await two.until_told("Hello!")


async def test_settling_waits_for_what_is_under_way() -> None:
    """Then no commit is under way, what is pending stays with the caller, and nothing more is sent of it."""
    store = FakeStore()
    store.gate.clear()
    async with running(store) as committer:
        answer = Answer(committer)
        answer.says("Hello")
        await store.asked.wait()
        answer.says(", you")
        settled = asyncio.create_task(committer.settle(answer.writer))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not settled.done()
        store.gate.set()
        await asyncio.wait_for(settled, 5)
        assert not answer.response.in_flight
        told = "".join(answer.told)
        assert told + answer.response.take_rest() == "Hello, you"
        await asyncio.sleep(0.01)
        assert store.texts == {"resp_1": told.encode()}


async def test_the_rest_is_not_stored_while_the_store_is_away() -> None:
    """Whoever leaves an answer to somebody else has to know; there is only that one commit."""
    store = FakeStore()
    async with running(store) as committer:
        answer = Answer(committer)
        store.replies = {"resp_1": AWAY}
        answer.response.on_text("Hello")
        with pytest.raises(StoreUnavailable):
            await committer.store_rest(answer.writer)
        store.replies = {}
        assert await committer.store_rest(answer.writer)
        assert answer.told == ["Hello"]


async def test_settling_lets_what_the_store_lost_be_sent_again() -> None:
    """Also when the answer comes to its end at the very moment at which its text may be written again."""
    store = FakeStore()
    store.replies["resp_1"] = "refused"
    async with running(store) as committer:
        answer = Answer(committer)
        answer.says("Hello")
        await answer.until(lambda: bool(answer.refused))
        del store.replies["resp_1"]
        committer.resume(answer.writer)
        async with asyncio.timeout(2):
            await committer.settle(answer.writer)  # at once: not even the committer has its turn before
        assert answer.told == ["Hello"]
        assert store.texts == {"resp_1": b"Hello"}


@pytest.mark.parametrize("more", ["", ", you"])
@pytest.mark.parametrize("held", [b"", b"Hel", b"Hello"])
async def test_the_rest_is_stored_with_all_before_it(held: bytes, more: str) -> None:
    """Whatever the store lost of it meanwhile, with something left to store or nothing."""
    store = FakeStore()
    async with running(store) as committer:
        answer = Answer(committer)
        answer.says("Hello")
        await answer.until_told("Hello")
        store.texts["resp_1"] = held
        answer.response.on_text(more)
        assert await committer.store_rest(answer.writer)
        assert store.texts == {"resp_1": ("Hello" + more).encode()}
        assert "".join(answer.told) == "Hello" + more


@pytest.mark.parametrize("reply", ["refused", "missing"])
async def test_a_rest_that_the_store_does_not_take_is_left_to_the_caller(reply: CommitReply) -> None:
    store = FakeStore()
    store.replies["resp_1"] = reply
    async with running(store) as committer:
        answer = Answer(committer)
        answer.response.on_text("Hello")
        assert not await committer.store_rest(answer.writer)
        assert (answer.told, answer.refused, answer.lost) == ([], [], 0)


async def test_settling_has_nothing_to_wait_for() -> None:
    """Without a commit under way, or when the answer is lost, it is done at once."""
    store = FakeStore()
    store.replies["resp_2"] = "refused"
    async with running(store) as committer:
        idle, lost = Answer(committer, 1), Answer(committer, 2)
        lost.says("Hello")
        await lost.until(lambda: bool(lost.refused))
        committer.lose(lost.writer)
        async with asyncio.timeout(5):
            await committer.settle(idle.writer)
            await committer.settle(lost.writer)


async def test_a_wish_to_stop_is_passed_on_with_the_text_that_was_stored() -> None:
    """The message that said it may have been lost; what was stored is told all the same."""
    store = FakeStore()
    store.replies["resp_1"] = "wished"
    async with running(store) as committer:
        answer = Answer(committer)
        answer.says("Hello")
        await answer.until(lambda: answer.told == ["Hello"])
        assert (answer.wishes, answer.refused) == (1, [])
