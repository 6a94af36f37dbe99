"""Faults out of JSON."""

from __future__ import annotations

import pytest

from chat_server.engine.simulated.options import Fault

pytestmark = pytest.mark.pure


def test_a_fault_is_read() -> None:
    """All fields by name, what is absent has its default."""
    assert Fault.parse({"kind": "cut", "after_tokens": 5}) == Fault("cut", after_tokens=5)
    assert Fault.parse({"kind": "status", "status": 500, "times": None}) == Fault("status", status=500, times=None)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], "an object"),
        ({}, "kind is one of"),
        ({"kind": "explode"}, "kind is one of"),
        ({"kind": "cut", "after": 5}, "has no after; it has after_tokens"),
        ({"kind": "cut", "after_tokens": "5"}, "after_tokens is a whole number"),
        ({"kind": "cut", "times": "all"}, "times is a whole number"),
        ({"kind": "status", "message": 7}, "message is a string"),
    ],
)
def test_a_wrong_fault_is_refused_with_what_is_wrong(values: object, said: str) -> None:
    """A typo in a test must not be a fault that never happens."""
    with pytest.raises(ValueError, match=said):
        Fault.parse(values)
