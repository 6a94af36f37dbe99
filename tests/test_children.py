"""Children that never outlive us, started as the server starts them."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chat_server.children import Child, tail
from tests.support.processes import alive, descendants, wait_for_lines, wait_until_gone

pytestmark = pytest.mark.server

#: A server in miniature: two children, one after the other, and then it waits.
PARENT = """
import asyncio, sys
from pathlib import Path
from chat_server.children import Child

async def main():
    for name in ("one", "two"):
        await Child.start(["sh", "-c", "trap '' INT; echo up; setsid sleep 60 & exec sleep 60"], log=Path(sys.argv[1], name))
    print("started", flush=True)
    await asyncio.Event().wait()

if sys.argv[2] == "uvloop":
    import uvloop
    uvloop.run(main())
else:
    asyncio.run(main())
"""  # noqa: E501


async def until_written(log: Path, count: int = 1) -> None:
    await asyncio.to_thread(wait_for_lines, log, count)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_kill_9_of_the_parent_leaves_nothing(tmp_path: Path, loop: str) -> None:
    """After ``kill -9`` all that it started is gone within a moment, grandchildren in their own sessions too."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), loop], stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"started\n"
        for name in ("one", "two"):
            wait_for_lines(tmp_path / name, 1)
        tree = descendants(parent.pid)
        assert len(tree) >= 6
        parent.kill()
    assert wait_until_gone(tree) == set()


def test_ctrl_c_in_the_terminal_does_not_reach_children(tmp_path: Path) -> None:
    """A terminal sends SIGINT to the whole foreground group; children are in none of it."""
    command = [sys.executable, "-c", PARENT, str(tmp_path), "asyncio"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        children = descendants(parent.pid)
        assert {os.getpgid(pid) for pid in children}.isdisjoint({parent.pid})
        parent.kill()


async def test_a_child_ends_and_says_how(tmp_path: Path) -> None:
    """``wait`` gives the exit status, ``last_lines`` what was said at the end."""
    child = await Child.start(["sh", "-c", "echo one; echo; echo two; echo three; exit 4"], log=tmp_path / "a" / "log")
    assert await child.wait() == 4
    assert not child.running
    assert await child.last_lines(2) == ["two", "three"]
    assert await child.stop() == 4


async def test_stop_ends_the_tree(tmp_path: Path) -> None:
    """``stop`` returns when all of it is gone; stopping twice is no mistake."""
    child = await Child.start(["sh", "-c", "setsid sleep 60 & echo up; exec sleep 60"], log=tmp_path / "log")
    await until_written(child.log)
    tree = descendants(child.pid)
    assert await child.stop() == 128 + signal.SIGTERM
    assert [pid for pid in tree if alive(pid)] == []
    assert await child.stop() == 128 + signal.SIGTERM


async def test_a_block_stops_its_child(tmp_path: Path) -> None:
    """As a context manager a child is stopped however the block ends."""
    with pytest.raises(ZeroDivisionError):
        async with await Child.start(["sleep", "60"], log=tmp_path / "log") as child:
            _ = 1 / 0
    assert not child.running


async def test_the_log_begins_anew_and_the_last_one_is_kept(tmp_path: Path) -> None:
    """A second run does not show the first one's lines as its own."""
    for word in ("first", "second"):
        child = await Child.start(["echo", word], log=tmp_path / "log")
        await child.wait()
    assert await child.last_lines(9) == ["second"]
    assert (tmp_path / "log.1").read_text() == "first\n"


async def test_environment_and_folder_are_ours_to_choose(tmp_path: Path) -> None:
    """``env`` replaces the environment, ``cwd`` is where the child begins."""
    child = await Child.start(
        ["/bin/sh", "-c", "echo $GREETING $HOME; pwd"], log=tmp_path / "log", env={"GREETING": "hello"}, cwd=tmp_path
    )
    await child.wait()
    assert await child.last_lines(2) == ["hello", str(tmp_path)]


async def test_a_lock_is_held_until_the_tree_is_gone(tmp_path: Path) -> None:
    """A descriptor that is kept open keeps its lock although we closed ours."""
    path = tmp_path / "lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    child = await Child.start(["sleep", "60"], log=tmp_path / "log", keep_open=(fd,))
    os.close(fd)
    again = os.open(path, os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    await child.stop()
    fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(again)


async def test_a_hanging_tether_does_not_hold_up_the_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tether that does nothing any more is killed in the end, and the kernel takes the child."""
    monkeypatch.setattr("chat_server.children.HANG_S", 0.1)
    child = await Child.start(["sh", "-c", "echo up; exec sleep 60"], log=tmp_path / "log", grace_s=0.1)
    await until_written(child.log)
    tree = descendants(child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    assert await child.stop() == 128 + signal.SIGKILL
    assert await asyncio.to_thread(wait_until_gone, tree) == set()


def test_the_tail_of_a_long_file(tmp_path: Path) -> None:
    """Only the end is read; half a character at its beginning does no harm, and no file has no lines."""
    path = tmp_path / "file"
    path.write_text("é" * 100 + "\nlast\n")
    assert tail(path, 5, max_bytes=20)[-1] == "last"
    assert tail(tmp_path / "none", 5) == []
