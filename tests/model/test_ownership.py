"""Ownership of answers under random schedules: replicas, store and network fail in any order, and nothing is lost,
repeated, mixed or stuck.

``World`` says what can happen, ``Oracle`` and ``Client`` what must hold. ``make model SEEDS=10000`` runs many more,
``make model-mutants`` shows that they fail for a server that is broken.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.model import runs
from tests.model.network import Valkey
from tests.model.oracle import Broken
from tests.model.world import World

pytestmark = pytest.mark.valkey

#: worlds that are run here; the same ones each time.
_SEEDS = 400


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with runs.valkey(tmp_path_factory.mktemp("model")) as store:
        yield store


@pytest.mark.timeout(180)
def test_whatever_happens_answers_are_whole_and_end_once() -> None:
    """Some hundred worlds, each with its own people, faults and weather."""
    environment = os.environ | {"PYTHONHASHSEED": "0"}  # what a set gives first is part of a world
    command = [sys.executable, "-m", "tests.model", str(_SEEDS)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_seed_repeats_its_world(store: Valkey) -> None:
    """All that happens comes from the seed: what is found once can be looked at again."""
    assert runs.trace(7, store) == runs.trace(7, store)


def test_a_text_that_is_told_before_it_is_stored_is_found(store: Valkey) -> None:
    """The model sees what it is there to see."""
    world = World(1, store)
    world.oracle.facts("resp").texts["resp"] = "Hel"
    delta = {"type": "response.output_text.delta", "response_id": "resp", "offset": 0, "delta": "Hello"}
    with pytest.raises(Broken, match="told and not stored"):
        world.oracle.on_told(delta)
