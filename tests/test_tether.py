"""The tether, run as the script that it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chat_server import tether
from tests.support.processes import alive, descendants, wait_for_lines, wait_until_gone

pytestmark = pytest.mark.server

only_linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel has no such help elsewhere")


@contextmanager
def tethered(log: Path, *command: str, grace_s: float = 5.0, limit: int = 1 << 20) -> Iterator[subprocess.Popen[bytes]]:
    """A tether with a command; its standard input is the lifeline."""
    arguments = [sys.executable, "-I", "-S", tether.__file__, str(grace_s), str(log), str(limit), *command]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE)
    assert process.stdin is not None
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait(timeout=20)


def cut(process: subprocess.Popen[bytes]) -> int:
    """End the lifeline and wait for the exit status."""
    assert process.stdin is not None
    process.stdin.close()
    return process.wait(timeout=20)


@pytest.mark.parametrize(("script", "status"), [("exit 0", 0), ("exit 3", 3), ("kill -TERM $$", 143)])
def test_the_exit_status_is_the_childs(tmp_path: Path, script: str, status: int) -> None:
    """The tether ends as its child did; a signal shows as 128 and its number, as in a shell."""
    with tethered(tmp_path / "log", "sh", "-c", script) as process:
        assert process.wait(timeout=20) == status


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    """What can not be started ends with 127, and the log says why."""
    with tethered(tmp_path / "log", "/no/such/program") as process:
        assert process.wait(timeout=20) == 127
    assert (tmp_path / "log").read_text() == "Cannot start /no/such/program: No such file or directory\n"


def test_output_and_errors_are_kept(tmp_path: Path) -> None:
    """Both streams of the child are in the log, whole, when the tether ends."""
    with tethered(tmp_path / "log", "sh", "-c", "echo out; echo err >&2; printf end") as process:
        process.wait(timeout=20)
    assert (tmp_path / "log").read_text() == "out\nerr\nend"


def test_the_log_is_bounded(tmp_path: Path) -> None:
    """However much a child writes, two files of about the limit are all that is kept, and the end is among it."""
    limit = 100_000
    with tethered(tmp_path / "log", "sh", "-c", "seq 300000; echo last", limit=limit) as process:
        process.wait(timeout=20)
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= limit
    assert (tmp_path / "log").read_text().endswith("300000\nlast\n")


def test_the_end_of_the_lifeline_stops_the_child(tmp_path: Path) -> None:
    """The child gets SIGTERM and may end in its own way."""
    script = "trap 'echo bye; exit 7' TERM; echo up; while :; do sleep 0.01; done"
    with tethered(tmp_path / "log", "sh", "-c", script) as process:
        wait_for_lines(tmp_path / "log", 1)
        assert cut(process) == 7
    assert (tmp_path / "log").read_text().endswith("bye\n")


def test_sigterm_to_the_tether_stops_the_child(tmp_path: Path) -> None:
    """Who sends SIGTERM to the tether means the child."""
    with tethered(tmp_path / "log", "sh", "-c", "echo up; exec sleep 60") as process:
        wait_for_lines(tmp_path / "log", 1)
        process.terminate()
        assert process.wait(timeout=20) == 128 + signal.SIGTERM


def test_a_deaf_child_is_killed_after_the_grace_time(tmp_path: Path) -> None:
    """A child that ignores SIGTERM is killed."""
    with tethered(tmp_path / "log", "sh", "-c", "trap '' TERM; echo up; sleep 60", grace_s=0.1) as process:
        wait_for_lines(tmp_path / "log", 1)
        assert cut(process) == 128 + signal.SIGKILL


@only_linux
def test_nothing_of_the_tree_survives(tmp_path: Path) -> None:
    """Descendants go with the child: those that left its group, and those whose parent ended before."""
    script = "setsid sleep 60 & (setsid sh -c 'trap \"\" TERM; sleep 60' &) ; echo up; exec sleep 60"
    with tethered(tmp_path / "log", "sh", "-c", script) as process:
        wait_for_lines(tmp_path / "log", 1)
        tree = descendants(process.pid)
        assert len(tree) >= 3
        cut(process)
        assert [pid for pid in tree if alive(pid)] == []


@only_linux
def test_what_a_dead_child_leaves_behind_is_killed(tmp_path: Path) -> None:
    """When the child itself is killed, its own children go too, and only then does the tether end."""
    with tethered(tmp_path / "log", "sh", "-c", "setsid sleep 60 & echo $!; exec sleep 60") as process:
        left = int(wait_for_lines(tmp_path / "log", 1)[0])
        child = next(pid for pid in descendants(process.pid) if pid != left)
        os.kill(child, signal.SIGKILL)
        assert process.wait(timeout=20) == 128 + signal.SIGKILL
        assert not alive(left)


@only_linux
def test_the_child_dies_with_its_tether(tmp_path: Path) -> None:
    """A tether that is killed takes the child with it."""
    with tethered(tmp_path / "log", "sh", "-c", "echo up; exec sleep 60") as process:
        wait_for_lines(tmp_path / "log", 1)
        tree = descendants(process.pid)
        process.kill()
        assert wait_until_gone(tree) == set()


def test_the_childs_signals_are_as_usual(tmp_path: Path) -> None:
    """Python ignores SIGPIPE; the child does not inherit that: a closed pipe ends it."""
    with tethered(tmp_path / "log", "bash", "-c", "yes | head -1; echo ${PIPESTATUS[0]}") as process:
        process.wait(timeout=20)
    assert (tmp_path / "log").read_text() == f"y\n{128 + signal.SIGPIPE}\n"
