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

import pytest

from chat_server.engine.simulated import Fault, answer_for
from tests.support.server import QUICK, RunningServer, free_port

pytestmark = pytest.mark.server

PROGRAM = "import sys; from chat_server.client.terminal import run_terminal; sys.exit(run_terminal(*sys.argv[1:]))"

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

    async def end(self) -> int:
        async with asyncio.timeout(10):
            return await self.process.wait()


@asynccontextmanager
async def person(server: RunningServer) -> AsyncIterator[Person]:
    screen, terminal = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, server.url),
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
        somebody.press(CTRL_C)
        assert await somebody.end() == 0
        assert "Traceback" not in somebody.seen


async def test_text_of_a_model_can_not_steer_the_terminal(server: RunningServer) -> None:
    """Escape sequences in an answer (here the engine quotes what was said) lose the character that makes them one."""
    _, out, _ = await piped(server.url, said="\x1b]0;gotcha\x07\x1b[2J Hello\n")
    assert "gotcha" in out
    assert "\x1b" not in out
    assert "\x07" not in out
