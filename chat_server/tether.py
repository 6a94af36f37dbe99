"""The small process between us and each child: it keeps the child's output and takes the whole tree down when we go.

Run as a script: ``python -I -S tether.py GRACE_S LOG LOG_BYTES COMMAND...``. Standard library only and few imports, so
that it is up in some 20 ms.

Its standard input is the lifeline: a pipe whose other end only the parent holds. When it ends, the parent wants the
child stopped, or is gone, however it went (``kill -9`` too): SIGTERM to the child's process group, after GRACE_S
seconds SIGKILL. On Linux the tether is also the "subreaper" of the tree: a descendant that lost its own parent becomes
ours, whatever its group, and is killed once the child has ended; and the kernel kills the child if the tether dies.

The exit status is the child's, or 128 + the number of the signal that ended it; 127 if it could not be started.
The output goes to LOG; when that grows past LOG_BYTES it becomes ``LOG.1`` and a new one begins.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

LIFELINE = 0
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


class Log:
    """A file of at most ``limit`` bytes and the one before it. A full disk loses lines, never the child."""

    def __init__(self, path: str, limit: int) -> None:
        self._path = path
        self._limit = limit
        self._size = 0
        self._fd = self._open()

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, data: bytes) -> None:
        try:
            if self._size + len(data) > self._limit:
                os.close(self._fd)
                os.replace(self._path, self._path + ".1")
                self._fd = self._open()
                self._size = 0
            self._size += os.write(self._fd, data)
        except OSError:
            pass


def prctl(option: int, value: int) -> None:
    """Linux only; elsewhere nothing, and the process group has to do."""
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415 (a third of the start-up time)

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def start(command: list[str], output: int) -> int:
    """Fork and execute ``command`` in a session of its own; returns its pid once that is done.

    Before it a signal would be lost: there is no group yet, and our own handlers are still in force.
    """
    tether = os.getpid()
    done, done_write = os.pipe()  # closed by the kernel when the command is executed
    pid = os.fork()
    if pid:
        os.close(done_write)
        os.read(done, 1)
        os.close(done)
        return pid
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # Python ignores it, and ignored signals stay ignored in what we execute.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == tether:  # else it died before the line above could help
            os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"Cannot start {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def signal_group(group: int, signum: int) -> None:
    try:  # noqa: SIM105 (contextlib would cost start-up time)
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):  # gone already; macOS says the latter of a zombie
        pass


def reap(child: int) -> int | None:
    """Collect all that ended; returns the exit status of ``child`` if it is among them."""
    status: int | None = None
    try:
        while True:
            pid, raw = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                code = os.waitstatus_to_exitcode(raw)
                status = code if code >= 0 else 128 - code
    except ChildProcessError:
        pass
    return status


def children() -> list[int]:
    """Our children, adopted ones included, read from /proc; empty where there is none."""
    me = str(os.getpid())
    found = []
    try:
        pids = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat") as file:
                # "pid (name) state ppid ...": the name may hold anything, so from the last bracket on
                if file.read().rpartition(")")[2].split()[1] == me:
                    found.append(int(pid))
        except OSError:
            continue
    return found


def sweep(group: int, patience_s: float = 5.0) -> None:
    """Kill what is left of the tree after its root ended. Orphans come to us as their parents die, hence the rounds."""
    signal_group(group, signal.SIGKILL)
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        reap(0)
        left = children()
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.005)


def watch(child: int, wake: int, output: int, log: Log, grace_s: float) -> int:
    """Until the child has ended: its output to the log, and the end of the lifeline to the child."""
    readers = {LIFELINE, wake, output}
    deadline: float | None = None
    while True:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = select.select(list(readers), [], [], timeout)[0]
        stop = False
        if output in ready:
            data = os.read(output, 1 << 16)
            log.write(data)
            if not data:
                readers.discard(output)
        if wake in ready:
            stop = signal.SIGTERM in os.read(wake, 512)
        if LIFELINE in ready and not os.read(LIFELINE, 512):
            readers.discard(LIFELINE)
            stop = True
        status = reap(child)
        if status is not None:
            return status
        if stop and deadline is None:
            signal_group(child, signal.SIGTERM)
            deadline = time.monotonic() + grace_s
        elif deadline is not None and time.monotonic() >= deadline:
            signal_group(child, signal.SIGKILL)
            deadline = time.monotonic() + 1.0


def main(argv: list[str]) -> int:
    grace_s, path, limit, *command = argv
    log = Log(path, int(limit))
    wake, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    for signum in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(signum, lambda *_: None)  # only the byte in the pipe counts
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    output, output_write = os.pipe()
    child = start(command, output_write)
    os.close(output_write)
    status = watch(child, wake, output, log, float(grace_s))
    sweep(child)
    os.set_blocking(output, False)
    try:
        while data := os.read(output, 1 << 16):
            log.write(data)
    except BlockingIOError:
        pass
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
