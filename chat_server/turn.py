"""One answer, from its beginning in the store to its end there: bind, start the engine's stream, wait, finish.

The text itself does not come by here: the engine's reader calls ``Turn.on_text``, which goes to the committer and from
there to the connections, all plain calls.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Literal, Protocol

from msgspec import UNSET

from chat_server import outcomes
from chat_server.core import context
from chat_server.core.ids import new_id
from chat_server.core.items import Item, ResponseStatus, StatusDetails, Timing
from chat_server.core.items import Usage as WireUsage
from chat_server.core.placement import Binding
from chat_server.core.principal import Principal
from chat_server.core.response import Outcome, Response, State
from chat_server.core.session import cache_salt
from chat_server.engine.fleet import Engine, Fleet
from chat_server.engine.vllm import ChatRequest, Finish, Usage, VllmClient
from chat_server.errors import (
    EngineBusy,
    EngineError,
    EngineRefused,
    EngineUnavailable,
    StoreBehind,
    StoreError,
)
from chat_server.placing import Placer
from chat_server.settings import Limits
from chat_server.store.committer import Committer, Writer
from chat_server.store.redis import Store
from chat_server.store.replies import Cut

log = logging.getLogger(__name__)

#: engines and replicas that one answer may cost without new text: one that kills what it touches has to end.
_MAX_ATTEMPTS = 3
#: seconds that an end waits for a store that is away, and between its tries.
_END_S = 600.0
_END_RETRY_S = 0.25


class TextSink(Protocol):
    """Who takes the text of answers further (``store/committer.py``)."""

    def add(self, writer: Writer) -> None: ...
    def lose(self, writer: Writer) -> None: ...


class Turn:
    """One answer in the making on this replica, as its owner.

    ``response`` may have text already, from another replica: the answer goes on from there. ``attempts`` were made
    since the last new text. ``on_migrate`` is told why, each time that another engine is to go on, before its text
    comes; it must not raise. ``restore`` is asked when the store does not know the response at its end: whether it was
    lost there, and is there again. ``known`` gives the version of the session that the store must have at least.
    """

    def __init__(
        self,
        *,
        session_id: str,
        principal: Principal,
        response: Response,
        writer: Writer,
        prompt: tuple[Item, ...],
        binding: Binding | None,
        committer: TextSink,
        attempts: int = 0,
        on_migrate: Callable[[str], Awaitable[None]] | None = None,
        restore: Callable[[], Awaitable[bool]] | None = None,
        known: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        self.session_id = session_id
        self.principal = principal
        self.response = response
        self.writer = writer
        self.prompt = prompt
        self.binding = binding
        self.attempts = attempts
        self.on_migrate = on_migrate
        self.restore = restore
        self.known = known
        #: the engine goes on with text that it did not write.
        self.goes_on = False
        #: somebody wants it stopped; the cut may not be known yet: the end is told it.
        self.stopped = False
        self.cut: Cut | None = None
        #: the wish to stop it that the store is known to hold.
        self.wish: Cut | None = None
        #: another replica is to go on with it: it does not end here.
        self.left = False
        self.engine = ""
        self.started_at = time.monotonic()
        self.placed_at: float | None = None
        self.first_text_at: float | None = None
        self._committer = committer
        self._answering: asyncio.Task[Finish] | None = None

    # --- the engine's reader calls these

    def on_text(self, text: str) -> None:
        if self.first_text_at is None:
            self.first_text_at = time.monotonic()
        self.response.on_text(text)
        self._committer.add(self.writer)

    def on_thinking(self) -> None:
        if self.goes_on:  # who thinks anew would say anew, and what looks like thoughts may be the rest of the answer
            raise EngineError("The answer broke off, and this model can not go on in the middle of it.")
        self.response.on_thinking()

    # --- stopping

    def stop(self, cut: Cut | None, *, stored: bool = True) -> None:
        """Stop the answer, by a wish that the store holds (None: whatever that is), or does not hold yet.

        It holds the first one; if it lost that and holds another one now, the shorter one counts. Before it holds any,
        the first that came.
        """
        if cut is not None and stored:
            self.cut = cut if self.wish is None or self.cut is None else min(self.cut, cut, key=lambda one: one.length)
            self.wish = cut
        elif cut is not None and self.cut is None:
            self.cut = cut
        if not self.stopped:
            self.stopped = True
            self.abandon()

    def leave(self) -> bool:
        """Stop working on it, for another replica goes on; False if there is nothing left but to end it."""
        if self.stopped or self._answering is None or self._answering.done():
            return False
        self.left = True
        self.abandon()
        return True

    def lose(self) -> None:
        """Somebody else owns it now, or it has ended: nothing more of it is made here."""
        self._committer.lose(self.writer)

    def abandon(self) -> None:
        """Close the engine's stream."""
        if self._answering is not None:
            self._answering.cancel()

    async def until_answered(self, conductor: Conductor) -> Finish | None:
        """Run the answer to its end; None if it was stopped, or the store takes no more text of ours."""
        self._answering = asyncio.create_task(conductor.answer(self), name=f"answer {self.response.id}")
        try:
            if self.stopped or self.writer.lost:
                self.abandon()
            return await self._answering
        except asyncio.CancelledError:
            if (self.stopped or self.left or self.writer.lost) and not _is_cancelled():
                return None
            raise
        finally:
            if not self._answering.done():  # we were cancelled ourselves
                self._answering.cancel()
                await asyncio.wait([self._answering])

    def timing(self) -> Timing:
        def since(moment: float | None) -> int | None:
            return None if moment is None else round((moment - self.started_at) * 1000)

        now = time.monotonic()
        return Timing(queue_ms=since(self.placed_at) or 0, ttft_ms=since(self.first_text_at), total_ms=since(now) or 0)


class Conductor:
    """Runs turns. ``told`` is called with the store's message when a response has ended."""

    def __init__(self, *, store: Store, committer: Committer, fleet: Fleet, client: VllmClient, limits: Limits) -> None:
        self._store = store
        self._committer = committer
        self._fleet = fleet
        self._client = client
        self._placer = Placer(store, fleet, limits)
        self._limits = limits

    async def run(self, turn: Turn, ended: Callable[[bytes], Awaitable[None]], lock: asyncio.Lock) -> None:
        """Make one answer, whatever happens to it; ``ended`` gets the message of its end, under ``lock``."""
        finish, status, details = await self._run_to_end(turn)
        if turn.writer.lost or turn.left:
            return
        response = turn.response
        if not await self._settled(turn):
            return
        rest = response.take_rest()
        usage = finish.usage if finish else None

        def ending() -> tuple[str, Outcome]:
            nonlocal status, details, rest
            if turn.stopped:  # perhaps only now: the text is cut all the same, so it is not whole
                (status, details), rest = outcomes.CANCELLED, ""
            return rest, self._outcome(turn, status, details, response.length + len(rest), usage)

        await self._end(turn, ending, ended, lock)

    async def run_unstored(self, turn: Turn) -> None:
        """Make an answer that nobody else hears of; it is ended in memory."""
        finish, status, details = await self._run_to_end(turn)
        response = turn.response
        rest = response.take_rest()
        if turn.stopped:
            status, details = outcomes.CANCELLED
        elif rest:
            response.on_stored(rest, len(rest.encode()))
        response.end(self._outcome(turn, status, details, response.length, finish.usage if finish else None))

    def _outcome(
        self, turn: Turn, status: ResponseStatus, details: StatusDetails, length: int, usage: Usage | None
    ) -> Outcome:
        epochs = list(turn.response.epochs)
        if turn.cut is not None and turn.cut.length < length:
            length = turn.cut.length
            epochs.append((new_id("epoch"), length))
        return Outcome(
            status=status,
            details=details,
            usage=WireUsage.of(usage.input_tokens, usage.output_tokens, usage.cached_tokens) if usage else None,
            timing=turn.timing(),
            engine=turn.engine or UNSET,
            text_length=length,
            epochs=epochs,
            keeps_item=length > 0 or status == "completed",
        )

    async def answer(self, turn: Turn) -> Finish:
        """Find an engine and read its answer; if it fails, another one goes on from the text so far.

        The text, the token budget and the usage are those of one answer, whoever wrote it. Raises EngineError when
        ``_MAX_ATTEMPTS`` in a row gave no new text, or none can go on; TimeoutError; NoEngine.
        """
        text = turn.response.go_on()
        deadline: float | None = None
        tried: set[str] = set()
        moves = False
        lost = EngineError("The answer ended all that worked on it.")
        while turn.attempts < _MAX_ATTEMPTS:
            engine, turn.binding = await self._placer.place(
                turn.session_id, turn.response.begun.model, turn.binding, tried
            )
            turn.engine = engine.id
            turn.placed_at = turn.placed_at or time.monotonic()
            deadline = deadline or asyncio.get_running_loop().time() + self._limits.max_answer_s
            if moves and turn.on_migrate is not None:
                await turn.on_migrate("engine_lost")
            turn.response.move(State.PREFILL)
            engine.in_flight += 1
            try:
                async with asyncio.timeout_at(deadline):
                    return await self._attempt(turn, engine, text)
            except EngineUnavailable as error:
                log.warning("Engine %s failed an answer: %s", engine.id, error)
                lost = error
            finally:
                engine.in_flight -= 1
            if not isinstance(lost, EngineBusy):
                self._fleet.failed(engine.id, str(lost))
            elif engine.id in tried:
                raise lost  # all that could take it are busy: asking at once again makes it worse
            before, text = text, turn.response.go_on()
            if text and turn.response.state is State.THINKING:
                raise lost  # what it thought is lost too
            moves = len(text) > len(before)
            turn.attempts = 0 if moves else turn.attempts + 1
            tried = {engine.id} if moves else tried | {engine.id}
            turn.response.move(State.QUEUED)
        raise lost

    # --- private

    async def _settled(self, turn: Turn) -> bool:
        """Whether no commit of the turn is under way, and it is still ours to end."""
        try:
            async with asyncio.timeout(_END_S):
                await self._committer.settle(turn.writer)
        except TimeoutError:
            log.error("The text of an answer could not be stored for %.0f s", _END_S)
            return False
        return not turn.writer.lost

    async def _run_to_end(self, turn: Turn) -> tuple[Finish | None, ResponseStatus, StatusDetails]:
        """The engine's answer, and how the response ended by it."""
        try:
            finish = await turn.until_answered(self)
        except Exception as error:
            return None, *outcomes.of_error(error, self._limits)
        if finish is None:
            return None, *outcomes.CANCELLED
        return finish, *outcomes.of_finish(finish)

    async def _attempt(self, turn: Turn, engine: Engine, text: str) -> Finish:
        """One engine's part of the answer, from ``text`` on. The end and the usage are those of the whole answer."""
        turn.goes_on = bool(text)
        written = await self._count(turn, engine, text) if text else 0
        request = self._request(turn, engine, text, written)
        if request.max_tokens is not None and request.max_tokens <= 0:
            return Finish("length", None)
        try:
            finish = await self._client.stream(engine.id, engine.url, request, turn)
        except EngineRefused as error:
            if text and outcomes.is_too_long(error):  # it fills the window, and only its end was missing
                return Finish("length", None)
            raise
        return Finish(finish.reason, finish.usage.of_whole(written) if finish.usage else None)

    async def _count(self, turn: Turn, engine: Engine, text: str) -> int:
        """The tokens of the answer so far, about: an engine that does not count keeps no answer from going on."""
        try:
            return await self._client.count_tokens(engine.url, turn.response.begun.model, text, engine=engine.id)
        except EngineError as error:
            # A refusal is in the engine's words, which may hold the text.
            why = f"HTTP status {error.status}" if isinstance(error, EngineRefused) else error
            log.warning("Engine %s did not count the tokens of an answer, so they are estimated: %s", engine.id, why)
            return context.estimated_tokens(text)

    def _request(self, turn: Turn, engine: Engine, text: str, written: int) -> ChatRequest:
        """What to ask for: the answer, or what follows its ``text`` of ``written`` tokens.

        No stop string lies across the cut: vLLM sends nothing that may be the beginning of one.
        """
        begun = turn.response.begun
        budget = context.output_budget(
            begun.max_output_tokens,
            limit=self._limits.max_output_tokens,
            window=engine.max_model_len,
            instructions=begun.instructions,
            items=turn.prompt,
        )
        return ChatRequest(
            model=begun.model,
            messages=context.messages(begun.instructions, turn.prompt, text),
            max_tokens=None if budget is None else budget - written,
            request_id=begun.id,
            temperature=begun.temperature,
            top_p=begun.top_p,
            stop=begun.stop,
            cache_salt=cache_salt(turn.principal),
            continue_final=bool(text),
        )

    async def _end(
        self,
        turn: Turn,
        ending: Callable[[], tuple[str, Outcome]],
        ended: Callable[[bytes], Awaitable[None]],
        lock: asyncio.Lock,
    ) -> None:
        """Store the end, then tell it; while the store is away, try on.

        ``ending`` is the rest of the text, and the outcome: a stop may come between two tries.
        """
        response = turn.response
        deadline = time.monotonic() + _END_S
        while True:
            try:
                async with lock:
                    if turn.writer.lost or response.outcome is not None:  # somebody else's by now, or its end was told
                        return
                    rest, outcome = ending()
                    reply = await self._store_end(turn, rest, outcome)
                    if isinstance(reply, Cut):  # it was wished before the end was stored
                        turn.stop(reply)
                        continue
                    if isinstance(reply, bytes):
                        await ended(reply)
                    elif turn.restore is not None and await turn.restore():
                        continue  # the store had lost the response; it is there again
                    else:
                        turn.lose()
                return
            except StoreError as error:
                if time.monotonic() > deadline:
                    log.error("The end of an answer could not be stored for %.0f s: %s", _END_S, error)
                    return
                response.waiting_for_store = True
                await asyncio.sleep(_END_RETRY_S)

    async def _store_end(self, turn: Turn, rest: str, outcome: Outcome) -> bytes | Cut | Literal["refused", "missing"]:
        response = turn.response
        try:
            return await self._store.end(
                turn.session_id,
                response.id,
                turn.writer.token,
                _item(response, rest, outcome),
                rest_offset=response.length,
                rest=rest,
                outcome=outcome,
                wish=turn.wish,
                known=await turn.known() if turn.known is not None else -1,
            )
        except StoreBehind:
            return "missing"  # of the session, if not of the response


def _item(response: Response, rest: str, outcome: Outcome) -> Item:
    text = (response.text(0) + rest)[: outcome.text_length]
    return response.make_item("completed" if outcome.status == "completed" else "incomplete", text, outcome)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
