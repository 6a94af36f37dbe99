"""A person who talks through a client, turn after turn, while faults befall them; each turn is checked at its end."""

from __future__ import annotations

import asyncio
import random
import time

from chat_server.engine.simulated.text import Message, answer_for
from loadtest.chaos_checks import check_history, check_store, eventually
from loadtest.chaos_client import Client, Scene, SessionGone
from loadtest.chaos_model import DELTA, Answer, Asked, Event
from loadtest.chaos_plan import Again, Cut, Pool, State, Stop, Strike, TurnPlan
from loadtest.chaos_report import (
    CANCELS,
    DUPLICATES,
    FIRST_TEXT,
    IN_A_STORM,
    READERS,
    RESTART_PAUSE,
    TAKE_OVER,
    TURNS,
    UNHEARD,
    Failure,
)
from loadtest.chaos_stop import Stopping
from loadtest.chaos_tab import Tab
from loadtest.chaos_texts import Violation, check_same

#: seconds for one turn with all that befalls it; then its session is stuck.
TURN_S = 90.0
#: turns of one conversation.
MOST_TURNS = 6
#: seconds of silence after which a client asks again for an answer whose store lost data.
UNHEARD_S = 8.0

_TOPICS = ("rivers", "Zürich", "数学", "emoji like 👩🏽‍💻", "trains at 9 a.m.", "שלום", "the sea", "e\u0301tudes")


class Talk:
    """One client's conversations. ``run`` until the pool of faults is empty."""

    def __init__(self, scene: Scene, pool: Pool, name: str, seed: str, *, words: int, vary: bool) -> None:
        self._scene = scene
        self._pool = pool
        self._name = name
        self._choose = random.Random(f"{seed} {name}")
        self._words = words
        self._vary = vary
        self._conversations = 0
        self._turns = 0
        self._begin()

    def _begin(self) -> None:
        """Nothing is said yet: the next turn opens a new session."""
        self._conversations += 1
        self._asked: dict[str, Asked] = {}
        #: (item id, role, text); an answer's id is the server's
        self._said: list[tuple[str, str, str]] = []
        self.client = Client(self._scene, f"{self._name}.{self._conversations}", self._asked, self._choose)
        self._current: Asked | None = None
        self._tab: Tab | None = None
        self._away_s, self._storm = 0.0, 0
        self._asked_at = 0.0
        #: it was asked more than once, and the last time is not known to be done with
        self._unconfirmed = False
        #: it was asked on a connection that broke: that may be carried out at any later time
        self._may_come_late = False
        self._stopping: Stopping | None = None
        #: when its answer's replica was killed, and the epoch until then; whether its text waits for the store
        self._bereaved: tuple[float, str] | None = None
        self._paused = False
        #: the store lost data while a replica held an answer of this conversation, and so all of it
        self._was_held = False

    async def run(self) -> None:
        """Talk on; a conversation that shows a violation is left and told in the tally."""
        try:
            while (plan := self._pool.draw(self._choose)) is not None:
                if len(self._said) >= 2 * MOST_TURNS:
                    await self._leave()
                try:
                    async with asyncio.timeout(TURN_S):
                        await self._turn(plan)
                    self._scene.tally.counts[TURNS] += 1
                except SessionGone:
                    if self._was_held:
                        await self._fail(
                            Violation("lost", "the session is gone, and a replica held it with its answer")
                        )
                    else:
                        self._scene.tally.counts["sessions that the store lost, with no answer under way"] += 1
                        await self._leave()
                except TimeoutError:
                    await self._fail(Violation("stuck", f"the turn did not end within {TURN_S:.0f} s"))
                except Violation as violation:
                    await self._fail(violation)
                finally:
                    self._pool.give_back(plan)
        finally:
            await self._leave()

    async def _fail(self, violation: Violation) -> None:
        who = f"{self.client.name}, session {self.client.session_id or '(none yet)'}"
        trace = list(self.client.trace)
        if self._tab is not None:
            trace += ["the other window:", *list(self._tab.client.trace)[-20:]]
        self._scene.tally.failures.append(Failure(who, violation, tuple(trace)))
        await self._leave()

    async def _leave(self) -> None:
        self._pool.left.cuts += self._storm
        if self._stopping is not None:
            self._stopping.close()
        if self._tab is not None:
            await self._tab.close()
        await self.client.leave()
        self._begin()

    # --- what befalls the system, told by who makes it

    @property
    def answer(self) -> Answer | None:
        """The answer under way."""
        return self.client.reader.answer_to(self._current.item_id) if self._current is not None else None

    @property
    def session_id(self) -> str:
        return self.client.session_id

    def killed(self, already: Asked | None = None) -> Asked | None:
        """A replica is killed: any answer may begin one more making of its text, all but ``already``."""
        if self._current is not None and self._current is not already:
            self._current.kills += 1
        return self._current

    def bereaved(self, at: float) -> None:
        """It was the replica that makes this answer."""
        answer = self.answer
        if answer is not None and answer.in_the_middle:
            self._bereaved = at, answer.epoch
        self.client.bereaved = True

    def lost_data(self, *, double_fault: bool) -> None:
        """The store is about to lose its last second."""
        for asked in self._asked.values():
            asked.loss = True
            asked.double_fault |= double_fault
        answer = self.answer
        self._was_held = not double_fault and answer is not None and not answer.status

    def store_went(self) -> None:
        answer = self.answer
        self._paused = answer is not None and answer.in_the_middle and self.client.line is not None

    def cut_now(self) -> None:
        """Break the connection, whatever it is doing."""
        if self.client.line is not None:
            self._cut(f"{IN_A_STORM}, {self._state()}")

    # --- one turn

    async def _turn(self, plan: TurnPlan) -> None:
        asked = self._new_message(plan)
        if self.client.line is None:
            await self.client.connect()
            await self.client.next()
        if plan.needs_tab:
            await self._open_tab(plan)
        await self._strike(plan)  # idle
        self._current = asked
        self._unconfirmed, self._may_come_late, self._stopping, self._bereaved = False, False, None, None
        self.client.bereaved = False
        self._said.append((asked.item_id, "user", asked.text))
        await self._ask()
        while not await self._is_over():
            await self._strike(plan)
            await self._next()
        answer = self.answer
        assert answer is not None, "it is over"
        if self._stopping is not None:
            self._stopping.judge_end(answer)
        # Two cases in which nothing that follows is certain: the first wish for an answer may rightly make one now, at
        # any time; and an end that was told is lost with who could have written it again.
        if (self._may_come_late and not answer.text) or asked.double_fault:
            why = "after a double fault" if asked.double_fault else "for an earlier wish may still be carried out"
            self._scene.tally.counts[f"conversations left, {why}"] += 1
            return await self._leave()
        await self._strike(plan)  # done
        await self._check(asked, answer)
        self._current = self._stopping = None
        return None

    def _new_message(self, plan: TurnPlan) -> Asked:
        self._turns += 1
        text = f"{self._name} {self._turns}: tell me of {self._choose.choice(_TOPICS)}"
        if plan.reader is not None:
            text += ", in 300 words"
        asked = Asked(f"{self._name}-{self._conversations}-{self._turns}".replace(" ", "_"), text)
        if self._vary:
            asked.words = self._words
        else:
            spoken = [*self._said, ("", "user", text)]
            messages: list[Message] = [{"role": role, "content": content} for _, role, content in spoken]
            asked.expected = answer_for(messages, self._words)
        self._asked[asked.item_id] = asked
        return asked

    async def _open_tab(self, plan: TurnPlan) -> None:
        place = self.client.place
        client = Client(
            *(self._scene, f"{self.client.name}, other window", self._asked, self._choose, self.session_id),
            session_at=self.client.session_at,
            small_buffer=plan.reader is not None,
            frozen=plan.reader == "frozen",
        )
        self._tab = Tab(client, plan.reader)
        await self._tab.open(place.replica if place is not None else None)
        if plan.reader is not None:
            self._scene.tally.counts[READERS[plan.reader]] += 1
            plan.reader = None  # it is made

    async def _ask(self, client: Client | None = None) -> None:
        """Say it and ask for the answer; harmless when done again."""
        asked, client = self._current, client or self.client
        assert asked is not None, "a turn is under way"
        content = [{"type": "input_text", "text": asked.text}]
        item = {"id": asked.item_id, "type": "message", "role": "user", "content": content}
        self._asked_at = time.monotonic()
        await client.send("conversation.item.create", item=item)
        await client.send("response.create", in_reply_to=asked.item_id)

    def _state(self) -> State:
        answer = self.answer
        if self._current is None:
            return "idle"
        if answer is None:
            return "asked"
        if answer.status:
            return "done"
        if answer.whole:
            return "ending"
        return "text" if answer.text else "created"

    async def _is_over(self) -> bool:
        """Whether the answer has ended, and no other one to the same message can come."""
        answer = self.answer
        if answer is None or not answer.status:
            return False
        if answer.text or not self._unconfirmed:
            return True
        # It left nothing, and was asked for again: what comes of that is known when a later ping is answered.
        if self.client.line is None:
            await self._come_back()
        fence = time.monotonic()
        await self.client.send("ping", t=fence)
        while (event := await self.client.next()) is not None:
            if event["type"] == "pong" and event["t"] == fence:
                self._unconfirmed = False
                return self.answer is answer
        return False

    async def _next(self) -> None:
        if self.client.line is None:
            await self._come_back()
        length = len(self.answer.text) if self.answer else 0
        event = await self._hear()
        if event is None:
            return
        if event["type"] == "error":
            await self._heed(event["error"])
        elif event["type"] == DELTA and self.answer is not None and len(self.answer.text) > length:
            self._measure(self.answer, first=not length)

    async def _hear(self) -> Event | None:
        """The next event. An answer of which the store knows nothing any more is not told: it is asked for again."""
        asked = self._current
        if asked is None or not asked.loss:
            return await self.client.next()
        try:
            async with asyncio.timeout(UNHEARD_S):
                return await self.client.next()
        except TimeoutError:
            self._scene.tally.counts["answers asked for again after a loss"] += 1
            self.client.cut(UNHEARD)
            await self.client.connect(history=True)
            await self._ask()
            return None

    def _measure(self, answer: Answer, *, first: bool) -> None:
        now, scene = time.monotonic(), self._scene
        if self._bereaved is not None:
            at, epoch = self._bereaved
            if answer.epoch != epoch:  # else it was on its way already
                scene.tally.latencies[TAKE_OVER].append(now - at)
                self._bereaved = None
        elif self._paused and scene.back_at is not None:
            scene.tally.latencies[RESTART_PAUSE].append(now - scene.back_at)
            self._paused = False
        elif first and scene.shaken_at < self._asked_at:
            scene.tally.latencies[FIRST_TEXT].append(now - self._asked_at)

    async def _heed(self, error: Event) -> None:
        """An error is an answer too: some say "later", all others must not be."""
        self._scene.tally.counts[f"errors, {error['code']}"] += 1
        asked = self._current
        assert asked is not None, "a turn is under way"
        if error["code"] == "response_cancel_not_active" and any(one.stops for one in self._asked.values()):
            return  # it came too late, or twice
        lost = error["code"] in ("item_not_found", "session_not_found") and asked.loss
        # An end that was told and lost: that answer is made again.
        lost |= error["code"] == "conversation_already_has_active_response" and asked.double_fault
        if not error["retryable"] and not lost:
            raise Violation("refused", f"{error['event_id']}: {error['code']}, {error['message']}")
        await asyncio.sleep((error.get("retry_after_ms") or 200) / 1000)
        if str(error["event_id"]).startswith("response.cancel"):
            if self._stopping is not None:
                await self._stopping.send(self.client)
        else:
            self._unconfirmed = True
            await self._ask()

    # --- faults of this client's own

    async def _strike(self, plan: TurnPlan) -> None:
        """Make what is due now; after a cut, only when the client is back."""
        while self.client.line is not None:
            answer = self.answer
            strike = plan.due(self._state(), len(answer.text) if answer is not None else 0)
            if strike is None:
                return
            await self._make(strike)

    async def _make(self, strike: Strike) -> None:
        match strike:
            case Cut():
                await asyncio.sleep(strike.delay_s)
                self._cut_once(self._state())
                self._away_s, self._storm = strike.away_s, strike.storm
                answer = self.answer
                if answer is not None and answer.text:
                    await self._scene.audit.check_stored(self.session_id, answer)
                if self._state() in ("idle", "done"):
                    await self._come_back()
            case Stop():
                await self._stop(strike)
            case Again():
                other = self._tab.client if strike.where == "across" and self._tab is not None else self.client
                self._scene.tally.counts[f"{DUPLICATES}, {strike.where} replica, {self._state()}"] += 1
                await self._ask(other)

    def _cut_once(self, state: str) -> None:
        """One of the wanted cuts; if somebody else cut just before, it is still to be made."""
        self._pool.left.cuts += self.client.line is None
        self._cut(state)

    def _cut(self, state: str) -> None:
        self.client.cut(state)
        self._paused, self._bereaved = False, None

    async def _come_back(self) -> None:
        """Connect again: with the place where the answer was, else with all that was said, and ask again."""
        away_s, self._away_s = self._away_s, 0.0
        await asyncio.sleep(away_s)
        while self._storm:
            await self._connect()
            for _ in range(self._choose.randrange(4)):
                await self.client.next()
            self._storm -= 1
            self._cut_once("in a storm of one client, " + self._state())
        await self._connect()
        answer, asked = self.answer, self._current
        if asked is not None and answer is None:
            self._unconfirmed = self._may_come_late = True
            await self._ask()
        if self._stopping is not None and (answer is None or not answer.status):
            await self._stopping.send(self.client)

    async def _connect(self) -> None:
        answer = self.answer
        # One that ended before any text was told has nothing to resume.
        resume = answer if answer is not None and (answer.text or not answer.status) else None
        await self.client.connect(resume=resume, history=self._current is not None and answer is None)

    async def _stop(self, strike: Stop) -> None:
        assert self._current is not None, "a turn is under way"
        across = strike.where == "across" and self._tab is not None
        client = self._tab.client if across and self._tab is not None else self.client
        self._scene.tally.counts[f"{CANCELS}, {self._state()}"] += 1
        certain = self.answer is not None or not (across or self._unconfirmed)
        self._stopping = Stopping(self._scene, self._current, self.answer, strike.seen, certain=certain)
        await self._stopping.begin(client)

    # --- the end of a turn

    async def _check(self, asked: Asked, answer: Answer) -> None:
        """Compare what the client holds with the store, with the other window, and with a connection that is new."""
        self._scene.tally.counts[f"answers that ended {answer.status}"] += 1
        self._scene.audit.ended.setdefault(answer.id, time.monotonic())  # it may have been told by its item alone
        if answer.text:
            self._said.append((answer.item_id, "assistant", answer.text))
        audit, said = self._scene.audit, self._said
        await eventually(asked, lambda: check_store(audit, self.session_id, said))
        if self._tab is not None:
            check_same((await self._tab.until_ended(answer)).text, answer.text, "another window")
            await self._tab.close()
            self._tab = None
        if self._choose.random() < 0.25:
            client = self.client
            new = Client(self._scene, "history", self._asked, self._choose, self.session_id, trace=client.trace)
            new.session_at = client.session_at
            await eventually(asked, lambda: check_history(new, said))
        if self._stopping is not None:
            await self._stopping.check(answer)
