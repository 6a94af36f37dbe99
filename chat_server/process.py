"""What each process of ours does: log, event loop, signals, and parts that run together and stop in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from typing import TYPE_CHECKING

from rich.logging import RichHandler

from chat_server.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence
    from types import FrameType
    from typing import Any

    from rich.console import Console

logger = logging.getLogger(__name__)


#: seconds that each part gets to end once it was told to
PART_STOP_S = 60.0


def set_up_logging(console: Console, level: str | None, name: str = "") -> None:
    """Our own lines from ``level`` on, warnings of the libraries. Without a level a terminal is kept quiet.

    ``name`` says in each line which process it is, where there are several.
    """
    name = name and f"{name} "
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, log_time_format="%X")
        handler.setFormatter(logging.Formatter(f"{name}%(message)s"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {name}%(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("chat_server").setLevel((level or ("warning" if console.is_terminal else "info")).upper())


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where there is one."""
    try:
        import uvloop  # noqa: PLC0415 (not on every system)
    except ImportError:
        return None
    return uvloop.new_event_loop


@contextlib.contextmanager
def stop_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP sets ``stop``, the next one raises KeyboardInterrupt out of the loop.

    Plain handlers, and the only ones: ``app.WebServer`` keeps uvicorn from putting its own in their place.
    """
    loop = asyncio.get_running_loop()
    signals = 0

    def interrupt() -> None:
        raise KeyboardInterrupt

    def handle(_signum: int, _frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            loop.call_soon_threadsafe(stop.set)
        elif signals == 2:
            # In no task: it would be that task's end, come again out of its group, and break the clean-up.
            loop.call_soon_threadsafe(interrupt)
        else:  # the loop hangs
            raise KeyboardInterrupt

    # what is ignored stays so: nohup means it
    ours = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, handle) for signum in ours}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


async def run_together(
    parts: Sequence[Coroutine[Any, Any, None]], stop: asyncio.Event, on_end: Callable[[], None], *, drain_s: float = 0.0
) -> None:
    """Run all parts until one ends, then end the others one after the other, in their order.

    When ``stop`` is set, whichever part knows of it gets ``drain_s`` seconds to end by itself. ``on_end`` is called
    when the end begins. Raises what made a part fail; StartError comes out of exception groups.
    """
    tasks = [asyncio.create_task(part) for part in parts]
    told = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([*tasks, told], return_when=asyncio.FIRST_COMPLETED)
        on_end()
        if told.done():
            await asyncio.wait(tasks, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        told.cancel()
        for task in tasks:
            task.cancel()
            _, late = await asyncio.wait([task], timeout=PART_STOP_S)
            if late:
                logger.error("A part of the server did not end within %.0f s and is left behind.", PART_STOP_S)
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise start_error(error) or error


def start_error(error: BaseException) -> StartError | None:
    """The StartError in an exception or a group of them."""
    if isinstance(error, StartError):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((found for one in error.exceptions if (found := start_error(one))), None)
    return None
