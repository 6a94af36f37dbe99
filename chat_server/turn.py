"""One answer, from its beginning in the store to its end there: bind, start the engine's stream, wait, finish.

The text itself does not come by here: the engine's reader calls ``Turn.on_text``, which goes to the committer and from
there to the connections, all plain calls.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from msgspec import UNSET

from chat_server.core import context
from chat_server.core.ids import new_id
from chat_server.core.items import Item, ResponseStatus, StatusDetails, StatusError, Timing
from chat_server.core.items import Usage as WireUsage
from chat_server.core.placement import Binding, place
from chat_server.core.principal import Principal
from chat_server.core.response import Outcome, Response, State
from chat_server.core.session import cache_salt
from chat_server.engine.fleet import Engine, Fleet
from chat_server.engine.vllm import ChatRequest, Finish, Usage, VllmClient
from chat_server.errors import EngineBusy, EngineError, EngineRefused, EngineUnavailable, StoreError, StoreUnavailable
from chat_server.settings import Limits
from chat_server.store.committer import Committer, Writer
from chat_server.store.redis import Store
from chat_server.store.replies import Cut

log = logging.getLogger(__name__)

#: engines that are tried for one answer while none has given any text.
_MAX_ATTEMPTS = 3
#: seconds that an answer waits for engines that start, beyond the usual wait: a large model loads for minutes.
_STARTING_S = 900.0
#: seconds that an end waits for a store that is away, and between its tries.
_END_S = 600.0
_END_RETRY_S = 0.25

_CANCELLED = StatusDetails(type="cancelled", reason="client_cancelled")


class Turn:
    """One answer in the making on this replica, as its owner."""

    def __init__(
        self,
        *,
        session_id: str,
        principal: Principal,
        response: Response,
        writer: Writer,
        prompt: tuple[Item, ...],
        binding: Binding | None,
        committer: Committer,
    ) -> None:
        self.session_id = session_id
        self.principal = principal
        self.response = response
        self.writer = writer
        self.prompt = prompt
        self.binding = binding
        #: somebody wants it stopped; the cut may not be known yet: the end is told it.
        self.stopped = False
        self.cut: Cut | None = None
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
        self.response.on_thinking()

    # --- stopping

    def stop(self, cut: Cut | None) -> None:
        """Stop the answer, by a wish that the store holds (None: whatever that is). The first one counts."""
        self.cut = self.cut or cut
        if not self.stopped:
            self.stopped = True
            self.abandon()

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
            if (self.stopped or self.writer.lost) and not _is_cancelled():
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
        self._limits = limits

    async def run(self, turn: Turn, ended: Callable[[bytes], Awaitable[None]], lock: asyncio.Lock) -> None:
        """Make one answer, whatever happens to it; ``ended`` gets the message of its end, under ``lock``."""
        finish, status, details = await self._run_to_end(turn)
        if turn.writer.lost:
            return
        response = turn.response
        if not await self._settled(turn):
            return
        rest = response.take_rest()
        usage = finish.usage if finish else None
        while True:
            if turn.stopped:  # perhaps only now: the text is cut all the same, so it is not whole
                status, details, rest = "cancelled", _CANCELLED, ""
            outcome = self._outcome(turn, status, details, response.length + len(rest), usage)
            reply = await self._end(turn, rest, outcome, ended, lock)
            if not isinstance(reply, Cut):
                return
            turn.stop(reply)  # it was wished before the end was stored
            turn.cut = reply

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
        """Find an engine and read its answer; another engine while none has given any text."""
        tried: set[str] = set()
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            engine = await self._place(turn, tried)
            turn.engine = engine.id
            turn.placed_at = turn.placed_at or time.monotonic()
            turn.response.move(State.PREFILL)
            engine.in_flight += 1
            try:
                async with asyncio.timeout(self._limits.max_answer_s):
                    return await self._client.stream(engine.id, engine.url, self._request(turn, engine), turn)
            except EngineUnavailable as error:
                log.warning("Engine %s failed an answer: %s", engine.id, error)
                if not isinstance(error, EngineBusy):
                    self._fleet.failed(engine.id, str(error))
                elif engine.id in tried:
                    raise  # all that could take it are busy: asking at once again makes it worse
                if turn.first_text_at is not None or attempt == _MAX_ATTEMPTS:
                    raise
                tried.add(engine.id)
                turn.response.move(State.QUEUED)
            finally:
                engine.in_flight -= 1
        raise AssertionError("unreachable")

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
        except TimeoutError:
            message = f"The answer took longer than {self._limits.max_answer_s:.0f} s."
            return None, "incomplete", _details("incomplete", "answer_timeout", message, type="server_error")
        except _NoEngine as error:
            details = _details(
                "failed", "overloaded", str(error), type="server_error", retryable=True, retry_after_ms=2000
            )
            return None, "failed", details
        except EngineRefused as error:
            return None, "failed", _refused(error)
        except EngineBusy as error:
            return None, "failed", _details("failed", "overloaded", str(error), retryable=True, retry_after_ms=2000)
        except EngineError as error:
            return (
                None,
                "failed",
                _details("failed", "engine_unavailable", str(error), type="server_error", retryable=True),
            )
        except StoreError as error:
            return None, "failed", _details("failed", "store_unavailable", str(error), retryable=True)
        except Exception:
            log.exception("An answer failed")
            message = "The server failed on this answer."
            return None, "failed", _details("failed", "internal_error", message, type="server_error")
        if finish is None:
            return None, "cancelled", _CANCELLED
        match finish.reason:
            case "length":
                return finish, "incomplete", StatusDetails(type="incomplete", reason="max_output_tokens")
            case "content_filter":
                return finish, "incomplete", StatusDetails(type="incomplete", reason="content_filter")
            case "abort":
                message = "The engine gave the answer up."
                return finish, "failed", _details("failed", "engine_aborted", message, retryable=True)
            case _:
                return finish, "completed", StatusDetails(type="completed")

    async def _place(self, turn: Turn, tried: set[str]) -> Engine:
        """The engine for this turn, and the session bound to it: one that was not ``tried``, if there is one.

        Raises _NoEngine if none comes up in time.
        """
        healthy = await self._healthy(turn.response.begun.model)
        healthy = [engine for engine in healthy if engine.id not in tried] or healthy
        while True:
            engine = place(turn.session_id, turn.binding, healthy)
            assert engine is not None, "one is healthy"
            wanted = Binding(engine.id, engine.epoch)
            if turn.binding == wanted:
                return engine
            # Somebody else may have bound it meanwhile: then theirs holds, if it can be used.
            try:
                holds = await self._store.bind(turn.session_id, turn.binding, wanted)
            except StoreUnavailable:
                return engine  # the answer waits for the store, not for the place of the next one
            if holds is None or holds in (wanted, turn.binding):
                turn.binding = wanted
                return engine
            turn.binding = holds

    async def _healthy(self, model: str) -> list[Engine]:
        """The engines that can answer for ``model``; waits for one. Raises _NoEngine if none comes up in time.

        Engines that start are waited for, for a while: who wrote while they load gets an answer, not an error.
        """
        if healthy := self._fleet.healthy(model):
            return healthy
        deadline = time.monotonic() + _STARTING_S
        while True:
            try:
                return await self._fleet.wait_healthy(model, self._limits.max_queue_s)
            except TimeoutError:
                starting = any(engine.state == "starting" for engine in self._fleet.engines)
                if not starting or time.monotonic() > deadline:
                    waited = f"within {self._limits.max_queue_s:.0f} s"
                    raise _NoEngine(f"No engine that serves {model} came up {waited}.") from None

    def _request(self, turn: Turn, engine: Engine) -> ChatRequest:
        begun = turn.response.begun
        return ChatRequest(
            model=begun.model,
            messages=context.messages(begun.instructions, turn.prompt),
            max_tokens=context.output_budget(
                begun.max_output_tokens,
                limit=self._limits.max_output_tokens,
                window=engine.max_model_len,
                instructions=begun.instructions,
                items=turn.prompt,
            ),
            request_id=begun.id,
            temperature=begun.temperature,
            top_p=begun.top_p,
            stop=begun.stop,
            cache_salt=cache_salt(turn.principal),
        )

    async def _end(
        self, turn: Turn, rest: str, outcome: Outcome, ended: Callable[[bytes], Awaitable[None]], lock: asyncio.Lock
    ) -> Cut | None:
        """Store the end, then tell it; while the store is away, try on.

        Returns a wish to stop that was not carried out, if there is one; nothing is stored then.
        """
        response = turn.response
        text = (response.text(0) + rest)[: outcome.text_length]
        item = response.make_item("completed" if outcome.status == "completed" else "incomplete", text, outcome)
        deadline = time.monotonic() + _END_S
        while True:
            try:
                async with lock:
                    reply = await self._store.end(
                        turn.session_id,
                        response.id,
                        turn.writer.token,
                        item,
                        rest_offset=response.length,
                        rest=rest,
                        outcome=outcome,
                        cut=turn.cut.length if turn.cut else None,
                    )
                    if isinstance(reply, Cut):
                        return reply
                    if isinstance(reply, bytes):
                        await ended(reply)
                    else:
                        turn.writer.lost = True
                        turn.writer.on_lost(reply)
                return None
            except StoreUnavailable as error:
                if time.monotonic() > deadline:
                    log.error("The end of an answer could not be stored for %.0f s: %s", _END_S, error)
                    return None
                response.waiting_for_store = True
                await asyncio.sleep(_END_RETRY_S)


class _NoEngine(Exception):
    """No engine can take the answer."""


def _details(
    status: str,
    code: str,
    message: str,
    *,
    type: str = "server_error",
    retryable: bool = False,
    retry_after_ms: int | None = None,
) -> StatusDetails:
    error = StatusError(
        type=type,
        code=code,
        message=message,
        retryable=retryable or UNSET,
        retry_after_ms=UNSET if retry_after_ms is None else retry_after_ms,
    )
    return StatusDetails(type=status, error=error)  # type: ignore[arg-type]


def _refused(error: EngineRefused) -> StatusDetails:
    """An engine's no: to this request, with its reason; or to us (a key, a path), which is not the caller's doing."""
    if error.status not in (400, 413, 422):
        log.error("Engine %s refused us with status %d", error.engine, error.status)
        return _details("failed", "engine_refused", "The engine does not take requests from this server.")
    # vLLM has no code of its own for it.
    too_long = "context length" in str(error)
    code = "context_length_exceeded" if too_long else "invalid_request"
    return _details("failed", code, str(error), type="invalid_request_error")


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
