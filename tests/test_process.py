"""What each process does, in this one."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any

import pytest

from chat_server.errors import StartError
from chat_server.process import loop_factory, run_together, start_error, stop_on_signals

pytestmark = pytest.mark.server


async def test_parts_end_in_their_order() -> None:
    """When one ends by itself the others are ended one after the other, each whole before the next."""
    order: list[str] = []

    async def part(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            order.append(name)

    async def short() -> None:
        await asyncio.sleep(0)

    await run_together([part("server"), short(), part("engines"), part("store")], asyncio.Event(), lambda: None)
    assert order == ["server", "engines", "store"]


async def test_the_part_that_knows_of_stop_gets_its_time() -> None:
    """Told to stop, it ends by itself, and the others only after it; beyond its time it is ended too."""
    for takes_s, whole in ((0.05, True), (5.0, False)):
        order: list[str] = []
        stop = asyncio.Event()

        async def server(takes_s: float = takes_s, stop: asyncio.Event = stop, order: list[str] = order) -> None:
            await stop.wait()
            await asyncio.sleep(takes_s)
            order.append("server")

        async def store(order: list[str] = order) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                order.append("store")

        asyncio.get_running_loop().call_later(0.01, stop.set)
        await run_together([server(), store()], stop, lambda order=order: order.append("told"), drain_s=0.3)  # type: ignore[misc]
        assert order == (["told", "server", "store"] if whole else ["told", "store"])


async def test_a_failed_part_ends_all_and_is_told() -> None:
    """Its error comes out, also out of the group that a part puts it in."""

    async def fails() -> None:
        raise ExceptionGroup("of a task group", [StartError("no memory")])

    async def lasts() -> None:
        await asyncio.Event().wait()

    with pytest.raises(StartError, match="no memory"):
        await run_together([lasts(), fails()], asyncio.Event(), lambda: None)


def test_a_start_error_is_found_in_groups() -> None:
    """However deep; other errors are none."""
    error = StartError("x")
    assert start_error(ExceptionGroup("a", [ValueError(), ExceptionGroup("b", [error])])) is error
    assert start_error(ValueError()) is None


@pytest.mark.parametrize("where", ["between tasks", "in a task"])
@pytest.mark.parametrize("factory", [None, loop_factory()], ids=["asyncio", "uvloop"])
def test_the_second_ctrl_c_does_not_wait(factory: Any, where: str) -> None:
    """The first asks, the second one interrupts, wherever it comes, and all clean up; the handlers are as before."""
    assert threading.current_thread() is threading.main_thread()
    # asyncio's own handler takes the place of Python's default alone.
    default = signal.signal(signal.SIGINT, lambda *_: None)
    before = signal.getsignal(signal.SIGINT)
    cleaned_up = []

    async def work() -> None:
        try:
            if where == "in a task":
                signal.raise_signal(signal.SIGINT)
            else:
                asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            cleaned_up.append(1)

    async def main() -> None:
        stop = asyncio.Event()
        with stop_on_signals(stop):
            signal.raise_signal(signal.SIGINT)
            await asyncio.wait_for(stop.wait(), 5)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(work())

    try:
        with asyncio.Runner(loop_factory=factory) as runner, pytest.raises(KeyboardInterrupt):
            runner.run(main())
        assert cleaned_up == [1]
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, default)


async def test_what_is_ignored_stays_ignored() -> None:
    """Under nohup the end of the terminal is not the end of the server."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals(asyncio.Event()):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
