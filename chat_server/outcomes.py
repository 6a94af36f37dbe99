"""How an answer ended, in the API's words: by the engine's own end of it, or by what went wrong."""

from __future__ import annotations

import logging

from msgspec import UNSET

from chat_server.core.items import ResponseStatus, StatusDetails, StatusError
from chat_server.engine.vllm import Finish
from chat_server.errors import EngineBusy, EngineError, EngineRefused, StoreError
from chat_server.placing import NoEngine
from chat_server.settings import Limits

log = logging.getLogger(__name__)

Ending = tuple[ResponseStatus, StatusDetails]

CANCELLED: Ending = ("cancelled", StatusDetails(type="cancelled", reason="client_cancelled"))


def of_finish(finish: Finish) -> Ending:
    """An engine came to an end of its own."""
    match finish.reason:
        case "length":
            return "incomplete", StatusDetails(type="incomplete", reason="max_output_tokens")
        case "content_filter":
            return "incomplete", StatusDetails(type="incomplete", reason="content_filter")
        case _:
            return "completed", StatusDetails(type="completed")


def of_error(error: Exception, limits: Limits) -> Ending:
    """Nobody could come to an end. One that nobody thought of is logged here: call it where it was caught."""
    match error:
        case TimeoutError():
            message = f"The answer took longer than {limits.max_answer_s:.0f} s."
            return "incomplete", _details("incomplete", "answer_timeout", message)
        case EngineRefused():
            return "failed", _refused(error)
        case NoEngine() | EngineBusy():
            return "failed", _details("failed", "overloaded", str(error), retryable=True, retry_after_ms=2000)
        case EngineError():
            return "failed", _details("failed", "engine_unavailable", str(error), retryable=True)
        case StoreError():
            return "failed", _details("failed", "store_unavailable", str(error), retryable=True)
        case _:
            log.exception("An answer failed")
            return "failed", _details("failed", "internal_error", "The server failed on this answer.")


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
    code = "context_length_exceeded" if is_too_long(error) else "invalid_request"
    return _details("failed", code, str(error), type="invalid_request_error")


def is_too_long(error: EngineRefused) -> bool:
    """Whether a prompt does not fit the window; vLLM has no code of its own for it."""
    return "context length" in str(error)
