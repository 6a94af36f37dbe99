"""How an answer ended, in the API's words: each kind of end has its own, and says whether to try again."""

from __future__ import annotations

import logging

import pytest
from msgspec import UNSET

from chat_server import outcomes
from chat_server.engine.vllm import Finish
from chat_server.errors import EngineBusy, EngineError, EngineRefused, EngineUnavailable, StoreUnavailable
from chat_server.placing import NoEngine
from chat_server.settings import Limits

pytestmark = pytest.mark.pure

TOO_LONG = "This model's maximum context length is 10 tokens."


@pytest.mark.parametrize(
    ("reason", "status", "why"),
    [
        ("stop", "completed", UNSET),
        ("length", "incomplete", "max_output_tokens"),
        ("content_filter", "incomplete", "content_filter"),
        ("something_new", "completed", UNSET),
    ],
)
def test_an_engines_end_is_told_in_the_words_of_the_api(reason: str, status: str, why: object) -> None:
    """A reason that we do not know is an end as any other."""
    ended, details = outcomes.of_finish(Finish(reason, None))
    assert (ended, details.type, details.reason) == (status, status, why)


@pytest.mark.parametrize(
    ("error", "status", "code", "type", "retryable"),
    [
        (TimeoutError(), "incomplete", "answer_timeout", "server_error", False),
        (NoEngine("all are gone"), "failed", "overloaded", "server_error", True),
        (EngineBusy("busy"), "failed", "overloaded", "server_error", True),
        (EngineUnavailable("cut"), "failed", "engine_unavailable", "server_error", True),
        (EngineError("broken"), "failed", "engine_unavailable", "server_error", True),
        (StoreUnavailable("away"), "failed", "store_unavailable", "server_error", True),
        (EngineRefused("no", status=400), "failed", "invalid_request", "invalid_request_error", False),
        (EngineRefused(TOO_LONG, status=400), "failed", "context_length_exceeded", "invalid_request_error", False),
        (EngineRefused("secret", status=401), "failed", "engine_refused", "server_error", False),
        (RuntimeError("secret"), "failed", "internal_error", "server_error", False),
    ],
)
def test_what_went_wrong_says_whether_to_try_again(
    error: Exception, status: str, code: str, type: str, retryable: bool
) -> None:
    """Its words are for the caller, unless it is not the caller's doing."""
    ended, details = outcomes.of_error(error, Limits())
    found = details.error
    assert found is not UNSET
    assert (ended, details.type) == (status, status)
    assert (found.code, found.type, found.retryable) == (code, type, retryable or UNSET)
    assert (found.retry_after_ms is not UNSET) == (code == "overloaded")
    assert found.message
    assert "secret" not in found.message


def test_a_fault_that_nobody_thought_of_is_logged_whole(caplog: pytest.LogCaptureFixture) -> None:
    """It is ours to mend."""
    with caplog.at_level(logging.ERROR):
        try:
            raise RuntimeError("a fault")
        except RuntimeError as error:
            outcomes.of_error(error, Limits())
    [record] = caplog.records
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "a fault"
