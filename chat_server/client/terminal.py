"""A chat in the terminal, for a look over ssh: type, and the answer streams in.

With a person in front of it there is a prompt and a dim line about each answer. In a pipe it reads one message per line
and writes plain answers, so that a script can use it; what is not an answer goes to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from rich.console import Console

from chat_server.client.connection import Answer, ChatError, Connection, ConnectionLost, SessionGone

T = TypeVar("T")

#: A model's text must not move the cursor or set the window's title: no control characters but newline and tab.
NO_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

#: Exit status of a program that Ctrl-C ended, as shells have it.
INTERRUPTED = 130


def run_terminal(url: str, api_key: str | None = None, session_id: str | None = None, model: str | None = None) -> int:
    """Chat until Ctrl-D, or Ctrl-C at the prompt; Ctrl-C during an answer stops that answer, a second one leaves.

    ``session_id`` goes on with a conversation. Returns the exit status: 0, or not after an error, which was printed.
    """
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    notes = Console(stderr=not interactive, highlight=False)
    with _Loop() as loop:
        try:
            connection = loop.run(Connection.open(url, api_key=api_key, session_id=session_id, model=model))
        except ChatError as error:
            notes.print(str(error), style="red", markup=False, soft_wrap=True)
            return 1
        except KeyboardInterrupt:
            return INTERRUPTED
        try:
            return _Chat(loop, connection, notes, interactive=interactive).run()
        except KeyboardInterrupt:
            return INTERRUPTED
        finally:
            with contextlib.suppress(KeyboardInterrupt):  # of somebody who does not want to wait for that either
                loop.run(connection.close())


class _Loop:
    """An event loop in a thread of its own: it answers pings while the main thread waits for the keyboard."""

    def __enter__(self) -> _Loop:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chat")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(
        self, work: Coroutine[Any, Any, T], *, on_interrupt: Callable[[], Coroutine[Any, Any, None]] | None = None
    ) -> T:
        """Wait for ``work``. The first Ctrl-C runs ``on_interrupt``, if any, and waits on; the next one raises."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while True:
            try:
                return future.result()
            except KeyboardInterrupt:
                if on_interrupt is None:
                    future.cancel()
                    raise
                asyncio.run_coroutine_threadsafe(on_interrupt(), self._loop)
                on_interrupt = None


class _Chat:
    """The conversation between one person, or script, and one connection."""

    def __init__(self, loop: _Loop, connection: Connection, notes: Console, *, interactive: bool) -> None:
        self._loop = loop
        self._connection = connection
        self._notes = notes
        self._interactive = interactive
        #: an answer stands half written in its line.
        self._is_mid_line = False

    def run(self) -> int:
        so_far = f", {self._connection.item_count} messages so far" if self._connection.item_count else ""
        self._note(f"{self._connection.model} · session {self._connection.session_id}{so_far}")
        if self._interactive:
            self._note("Ctrl-C stops an answer, Ctrl-D leaves.")
        status = 0
        for line in self._lines():
            try:
                answer = self._ask(line)
            except SessionGone as error:
                self._problem(f"{error} Start the chat again without --session for a new conversation.")
                return 1
            except ConnectionLost as error:
                again = f"Start the chat again with --session {self._connection.session_id} to go on from here."
                self._problem(f"{error} {again}")
                return 1
            except ChatError as error:
                self._problem(str(error))
                status = 1
                continue
            self._write("\n")
            self._note(_summary(answer))
            if answer.problem is not None:
                self._problem(answer.problem)
                status = 1
        return 0 if self._interactive else status

    def _lines(self) -> Iterator[str]:
        """What is to be said, line by line, until the person leaves or the input ends."""
        if not self._interactive:
            yield from filter(None, (line.strip() for line in sys.stdin))
            return
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401, PLC0415  # makes input() editable, with a history; not on every platform
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            while True:
                if line := input("> ").strip():
                    yield line
        self._write("\n")

    def _ask(self, line: str) -> Answer:
        on_interrupt = self._connection.cancel if self._interactive else None
        asking = self._connection.ask(line, self._write, lambda: self._note("Connection lost, reconnecting ..."))
        return self._loop.run(asking, on_interrupt=on_interrupt)

    def _write(self, text: str) -> None:
        sys.stdout.write(text.translate(NO_CONTROLS))
        sys.stdout.flush()
        self._is_mid_line = not text.endswith("\n")

    def _note(self, text: str) -> None:
        self._tell(text, style="dim")

    def _problem(self, text: str) -> None:
        self._tell(text, style="red")

    def _tell(self, text: str, style: str) -> None:
        """What is no answer, in a line of its own; an answer in a file goes on as if nothing had been said."""
        if self._is_mid_line and sys.stdout.isatty():
            self._notes.print()
            self._is_mid_line = False
        self._notes.print(text, style=style, markup=False, soft_wrap=True)


def _summary(answer: Answer) -> str:
    """One line about an answer: who made it, what the prefix cache saved, how long it took."""
    parts = []
    if answer.status != "completed":
        parts.append(answer.status)
    if answer.engine is not None:
        parts.append(answer.engine)
    if answer.input_tokens:  # the engine does not say how many if it was stopped
        parts.append(f"{answer.cached_tokens} of {answer.input_tokens} prompt tokens from the cache")
    if answer.ttft_ms is not None:
        parts.append(f"first token after {answer.ttft_ms} ms")
    if answer.total_ms is not None:
        tokens = f"{answer.output_tokens} tokens in " if answer.output_tokens else ""
        parts.append(f"{tokens}{answer.total_ms / 1000:.1f} s")
    return " · ".join(parts)
