"""Processes, as the kernel tells of them: who lives, and who is whose child."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path


def stat(pid: int) -> list[str]:
    """State, parent and so on of a process; empty if there is none."""
    try:
        # "pid (name) state ppid ...": the name may hold anything, so from the last bracket on
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def alive(pid: int) -> bool:
    """Whether it runs. A zombie does not: it only waits for somebody to ask how it ended."""
    return stat(pid)[:1] not in ([], ["Z"], ["X"])


def children(pid: int) -> set[int]:
    """The living processes that it started, or that were given to it."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return {child for child in pids if stat(child)[1:2] == [str(pid)] and alive(child)}


def descendants(pid: int) -> set[int]:
    """All living processes below it."""
    found: set[int] = set()
    todo = [pid]
    while todo:
        more = children(todo.pop()) - found
        found |= more
        todo += more
    return found


def wait_until_gone(pids: set[int], within_s: float = 5.0) -> set[int]:
    """Wait until none of them lives; returns those that do after all."""
    deadline = time.monotonic() + within_s
    while (left := {pid for pid in pids if alive(pid)}) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def wait_for_lines(path: Path, count: int, within_s: float = 10.0) -> list[str]:
    """Wait until a file has so many whole lines, and return them."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        text = path.read_text() if path.exists() else ""
        if text.count("\n") >= count:
            return text.splitlines()
        time.sleep(0.01)
    raise AssertionError(f"{path} has fewer than {count} lines after {within_s} s: {text!r}")


def holder_of(client: tuple[str, int], server: tuple[str, int], among: set[int]) -> int:
    """Which of the processes has the server's end of this TCP connection (IPv4 on this machine)."""
    wanted = [f"{port:04X}" for _, port in (server, client)]
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    [inode] = [row[9] for row in rows if [row[1].rpartition(":")[2], row[2].rpartition(":")[2]] == wanted]
    for pid in among:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed while we looked
                if entry.readlink() == Path(f"socket:[{inode}]"):
                    return pid
    raise AssertionError(f"none of {among} holds the connection from port {client[1]}")


def command_line(pid: int) -> str:
    """As ``ps`` shows it to everybody; of a process that has ended meanwhile there is none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""
