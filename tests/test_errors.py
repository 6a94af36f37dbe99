"""Errors tell apart who can mend them, and carry what that person or program needs."""

from __future__ import annotations

import inspect

import pytest

from chat_server import errors
from chat_server.errors import (
    ChatServerError,
    ClientError,
    EngineBusy,
    EngineError,
    EngineRefused,
    EngineUnavailable,
    StartError,
    StoreError,
    StoreUnavailable,
)

pytestmark = pytest.mark.pure


def all_errors() -> list[type[Exception]]:
    return [value for _, value in inspect.getmembers(errors, inspect.isclass) if issubclass(value, Exception)]


def test_all_errors_have_one_base() -> None:
    """What we raise on purpose can be told from what is a fault of ours."""
    assert all(issubclass(error, ChatServerError) for error in all_errors())


def test_the_tree_is_drawn_as_it_is() -> None:
    """The module's docstring shows every error, below one that it is a kind of."""
    by_name = {error.__name__: error for error in all_errors()}
    path: list[type[Exception]] = []
    drawn = set()
    for line in (errors.__doc__ or "").splitlines():
        name = line.lstrip("│├└─ ").split(" ")[0]
        if name in by_name:
            path[(len(line) - len(line.lstrip("│├└─ "))) // 4 :] = [by_name[name]]
            assert all(issubclass(path[-1], parent) for parent in path), line
            drawn.add(name)
    assert drawn == by_name.keys()


@pytest.mark.parametrize("error", [EngineUnavailable, EngineBusy])
def test_another_attempt_may_help_where_an_engine_is_unavailable(error: type[EngineError]) -> None:
    """A busy engine too: the caller tries elsewhere for both, with one ``except``."""
    with pytest.raises(EngineUnavailable):
        raise error("The engine is away.", engine="a")


def test_a_refusal_is_not_tried_elsewhere() -> None:
    """The request is at fault, so the next engine would refuse it as well."""
    assert not issubclass(EngineRefused, EngineUnavailable)


def test_errors_carry_what_the_handler_needs() -> None:
    """As attributes, so nobody parses a message."""
    assert StartError("The port is taken.", exit_code=3).exit_code == 3
    assert StartError("The port is taken.").exit_code == 1
    assert EngineError("Away.", engine="a").engine == "a"
    refused = EngineRefused("Too long.", engine="a", status=413, code="string_above_max_length")
    assert (refused.engine, refused.status, refused.code) == ("a", 413, "string_above_max_length")
    assert issubclass(StoreUnavailable, StoreError)


def test_a_client_error_is_the_error_of_the_protocol() -> None:
    """``str`` is for people, the rest for programs; unless said otherwise it is the request's fault."""
    error = ClientError("unknown_parameter", "Unknown parameter: `x`.", param="x")
    assert (str(error), error.message) == ("Unknown parameter: `x`.", "Unknown parameter: `x`.")
    assert (error.code, error.param, error.type, error.status) == (
        "unknown_parameter",
        "x",
        "invalid_request_error",
        400,
    )
    assert (error.retryable, error.retry_after_ms) == (False, None)


def test_a_client_error_says_when_to_come_again() -> None:
    """For what time mends: overload, a store that is away."""
    error = ClientError("rate_limit", "Later.", type="server_error", retryable=True, retry_after_ms=500, status=429)
    assert (error.type, error.retryable, error.retry_after_ms, error.status) == ("server_error", True, 500, 429)
