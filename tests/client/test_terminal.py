"""The terminal chat as a program: in a pipe, and with a person (a pseudo-terminal) in front of it."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from chat_server.engine.simulated import Fault, answer_for
from tests.support.line import Line, line_to
from tests.support.server import QUICK, RunningServer, free_port, running_server

pytestmark = pytest.mark.server

PROGRAM = "import sys; from chat_server.client.terminal import run_terminal; sys.exit(run_terminal(*sys.argv[1:]))"

#: The same with a chat that waits for a lost connection for a second only.
IMPATIENT = (
    "import functools; from chat_server.client.terminal import Connection; "
    "Connection.open = functools.partial(Connection.open, patience_s=1.2); "
) + PROGRAM

#: What is said of a connection that is away for long.
LOST = "Connection lost, reconnecting ..."

#: Ctrl-C as the terminal sends it is SIGINT to the program.
CTRL_C = signal.SIGINT

#: Part of the line that follows each answer.
ABOUT = "first token after"


def answer(*said: str) -> str:
    """What the engine answers to the last of these messages; the answers before it are its own."""
    messages: list[dict[str, str]] = []
    for text in said:
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": answer_for(messages, QUICK.words)})
    return messages[-1]["content"]


async def piped(url: str, *arguments: str, said: str) -> tuple[int, str, str]:
    """Run it with ``said`` on its standard input. Returns (exit status, output, notes)."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, url, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(15):
        out, notes = await process.communicate(said.encode())
    assert process.returncode is not None
    return process.returncode, out.decode(), notes.decode()


async def test_in_a_pipe_it_writes_nothing_but_answers(server: RunningServer) -> None:
    """One message per line in, one answer after the other out; what else there is to say goes to stderr."""
    status, out, notes = await piped(server.url, said="Hello\n\nAnd again\n")
    assert out == answer("Hello") + "\n" + answer("Hello", "And again") + "\n"
    assert status == 0
    assert notes.count("prompt tokens from the cache") == 2


async def test_a_conversation_goes_on_with_the_session_that_was_shown(server: RunningServer) -> None:
    """The notes name the session; given again, the model remembers."""
    _, _, notes = await piped(server.url, said="Hello\n")
    session = re.search(r"session (\S+)", notes)
    assert session
    _, out, notes = await piped(server.url, "", session[1], said="And again\n")
    assert "2 messages so far" in notes
    assert out == answer("Hello", "And again") + "\n"


async def test_a_failed_answer_shows_in_the_exit_status(server: RunningServer) -> None:
    """A script sees that it has no answer, a person reads why; later lines are still answered."""
    for engine in server.engines:
        engine.engine.add_fault(Fault("status", status=400, message="no such thing"))
        engine.engine.add_fault(Fault("status", status=400, message="no such thing"))
    status, _, notes = await piped(server.url, said="Hello\nAnd again\n")
    assert status == 1
    assert "no such thing" in notes


async def test_without_a_server_it_says_what_to_do() -> None:
    """No traceback, one line, exit status 1."""
    status, out, notes = await piped(f"http://127.0.0.1:{free_port()}", said="Hello\n")
    assert (status, out) == (1, "")
    assert "chat-server serve" in notes
    assert "Traceback" not in notes


class Person:
    """Somebody in front of a terminal in which the program runs."""

    def __init__(self, process: asyncio.subprocess.Process, screen: int) -> None:
        self.process = process
        self._screen = screen
        self._shown = asyncio.Event()
        self.seen = ""
        asyncio.get_running_loop().add_reader(screen, self._read)

    def _read(self) -> None:
        try:
            self.seen += os.read(self._screen, 1 << 16).decode("utf-8", "replace")
        except OSError:  # the program ended
            asyncio.get_running_loop().remove_reader(self._screen)
        self._shown.set()

    def type(self, line: str) -> None:
        os.write(self._screen, f"{line}\n".encode())

    def press(self, key: signal.Signals) -> None:
        self.process.send_signal(key)

    async def see(self, text: str) -> None:
        """Wait until the terminal has shown ``text``."""
        await self._until(lambda: text in self.seen)

    async def prompt(self, answers: int) -> None:
        """Wait until it was told about so many answers and the prompt is there again."""
        await self._until(lambda: self.seen.count(ABOUT) == answers and self.seen.endswith("> "))

    async def _until(self, shown: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not shown():
                self._shown.clear()
                await self._shown.wait()

    async def leave(self) -> int:
        """Press Ctrl-C at the prompt, as people do: again if nothing happens.

        readline loses one that comes between its showing the prompt and its waiting for a key.
        """
        ending = asyncio.ensure_future(self.end())
        while not ending.done():
            self.press(CTRL_C)
            await asyncio.wait({ending}, timeout=1.0)
        return await ending

    async def end(self) -> int:
        async with asyncio.timeout(10):
            return await self.process.wait()


@asynccontextmanager
async def person(server: RunningServer | Line, program: str = PROGRAM) -> AsyncIterator[Person]:
    screen, terminal = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, server.url),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(terminal)
    try:
        somebody = Person(process, screen)
        await somebody.prompt(0)
        yield somebody
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        asyncio.get_running_loop().remove_reader(screen)
        os.close(screen)


async def test_ctrl_d_leaves(server: RunningServer) -> None:
    """After an answer, which was shown with a line about it; exit status 0."""
    async with person(server) as somebody:
        assert "session sess_" in somebody.seen
        somebody.type("Hello")
        await somebody.prompt(1)
        assert "first message of our conversation" in somebody.seen
        somebody.type("\x04")
        assert await somebody.end() == 0


async def test_ctrl_c_stops_the_answer_and_at_the_prompt_it_leaves(server: RunningServer) -> None:
    """The answer ends at once, marked as cancelled, and the chat goes on."""
    async with person(server) as somebody:
        somebody.type("Tell me more, in 5000 words.")
        await somebody.see("You wrote")
        somebody.press(CTRL_C)
        await somebody.prompt(1)
        assert "cancelled" in somebody.seen
        somebody.type("Hello")
        await somebody.prompt(2)
        assert await somebody.leave() == 0
        assert "Traceback" not in somebody.seen


async def test_text_of_a_model_can_not_steer_the_terminal(server: RunningServer) -> None:
    """Escape sequences in an answer (here the engine quotes what was said) lose the character that makes them one."""
    _, out, _ = await piped(server.url, said="\x1b]0;gotcha\x07\x1b[2J Hello\n")
    assert "gotcha" in out
    assert "\x1b" not in out
    assert "\x07" not in out


@pytest_asyncio.fixture
async def slow_server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    """Slow enough to be cut in mid-answer."""
    async with running_server(tmp_path, simulated=replace(QUICK, tokens_per_s=300.0)) as running:
        yield running


LONG = "Tell me more, in 300 words."


async def test_a_person_reads_that_the_connection_is_away(slow_server: RunningServer) -> None:
    """In a line of its own within the answer, which goes on below it; nothing is said of a connection that is back."""
    async with line_to(slow_server.url) as line, person(line) as somebody:
        somebody.type(LONG)
        await somebody.see("You wrote")
        line.cut(down=True)
        await somebody.see(LOST)
        line.up()
        await somebody.prompt(1)
        plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", somebody.seen).replace("\r\n", "\n")
        assert plain.count(f"\n{LOST}\n") == 1
        assert answer_for([{"role": "user", "content": LONG}]) in plain.replace(f"\n{LOST}\n", "")


async def test_in_a_pipe_the_answer_has_nothing_of_it(slow_server: RunningServer) -> None:
    """That the connection is away goes to stderr, once; the answer is whole."""
    async with line_to(slow_server.url) as line:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PROGRAM, line.url),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdin and process.stdout and process.stderr
        try:
            async with asyncio.timeout(20):
                process.stdin.write(f"{LONG}\n".encode())
                begun = await process.stdout.readexactly(20)
                line.cut(down=True)
                notes = await process.stderr.readuntil(LOST.encode())
                line.up()
                rest, more = await process.communicate(b"")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert (begun + rest).decode() == answer_for([{"role": "user", "content": LONG}]) + "\n"
    assert (notes + more).decode().count(LOST) == 1
    assert process.returncode == 0


async def test_who_gives_up_says_how_to_go_on(slow_server: RunningServer) -> None:
    """The connection does not come back in time: in a line of its own stands the session to start again with."""
    async with line_to(slow_server.url) as line, person(line, IMPATIENT) as somebody:
        somebody.type(LONG)
        await somebody.see("You wrote")
        line.cut(down=True)
        assert await somebody.end() == 1
        session = re.search(r"session (\w+)", somebody.seen)
        assert session
        await somebody.see(f"Start the chat again with --session {session[1]} to go on from here.")
        assert re.search(r"\n\S*The connection was lost: .* It did not come back", somebody.seen)
        assert "Traceback" not in somebody.seen


async def test_a_conversation_that_was_deleted_can_not_be_gone_on_with(slow_server: RunningServer) -> None:
    """While the connection was away: nobody is told to come back to it."""
    async with line_to(slow_server.url) as line, person(line) as somebody:
        somebody.type(LONG)
        await somebody.see("You wrote")
        line.cut(down=True)
        session = re.search(r"session (\w+)", somebody.seen)
        assert session
        async with (
            aiohttp.ClientSession() as http,
            http.delete(f"{slow_server.url}/v1/sessions/{session[1]}") as told,
        ):
            assert told.status < 300
        line.up()
        assert await somebody.end() == 1
        await somebody.see("Start the chat again without --session for a new conversation.")
        assert "Traceback" not in somebody.seen


async def test_who_does_not_want_to_wait_for_a_lost_connection_leaves(slow_server: RunningServer) -> None:
    """The first Ctrl-C is the wish to stop the answer, the second one leaves; no traceback."""
    async with line_to(slow_server.url) as line, person(line) as somebody:
        somebody.type(LONG)
        await somebody.see("You wrote")
        line.cut(down=True)
        await somebody.see(LOST)
        somebody.press(CTRL_C)
        await asyncio.sleep(0.2)
        somebody.press(CTRL_C)
        assert await somebody.end() == 130
        assert "Traceback" not in somebody.seen
