"""``chat-server serve``: start the store, listen, start the engines, say where the chat is; stop all of it in order.

The server listens before the engines are there, so the page can say how far they are. Whatever ends first, the order of
stopping is: the server (it tells its clients), the engines, the store (it saves).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import aiohttp
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from chat_server.engine.launch import LocalEngines, Stage
from chat_server.engine.ports import check_port
from chat_server.errors import StartError, StoreUnavailable
from chat_server.store.embedded import EmbeddedValkey
from chat_server.store.probe import probe_store

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence
    from types import FrameType
    from typing import Any

    from chat_server.settings import Settings

logger = logging.getLogger(__name__)

#: seconds that each part gets to end once it was told to
PART_STOP_S = 60.0
#: seconds between two looks at how far the engines are, and between two lines about it where there is no terminal
LOOK_EVERY_S = 0.1
LINE_EVERY_S = 15.0
#: seconds for the server to see as healthy what was seen to be up, or what others run
ALL_HEALTHY_S = 3.0


def run(settings: Settings, log_level: str | None = None) -> int:
    """Serve until Ctrl-C or SIGTERM. Returns the exit status; raises StartError if it can not start or go on."""
    console = Console(stderr=True, highlight=False)
    set_up_logging(console, log_level)
    settings.check()
    check_port(settings.host, settings.port)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        try:
            runner.run(serve(settings, console))
        except KeyboardInterrupt:  # the second one
            return 130
    return 0


async def serve(settings: Settings, console: Console) -> None:
    """Start everything, run until told to stop or a part can not go on, stop everything."""
    stop = asyncio.Event()
    store = None if settings.redis_url else EmbeddedValkey(settings.data_dir)
    with stop_on_signals(stop), Display(console) as display:
        redis_url = await open_store(settings, store, display)
        try:
            engines = None if settings.engines else LocalEngines(settings)
            parts = server_parts(settings, redis_url, engines, display)
            if engines:
                parts.append(engines.run())
            if store:
                parts.append(store.watch())
            await run_together(parts, stop, display.stopping)
        finally:
            if store:
                await store.stop()


async def open_store(settings: Settings, store: EmbeddedValkey | None, display: Display) -> str:
    """The URL of the store: the one given, or the embedded one, started."""
    if store is not None:
        url = await store.start()
        display.done(f"Store: embedded Valkey, data in {settings.data_dir}")
        return url
    assert settings.redis_url is not None
    try:
        facts = await probe_store(settings.redis_url)
    except StoreUnavailable as error:  # it may start after us: the server waits, and says that it is not ready
        logger.warning("%s Going on; answers have to wait until it is there.", error)
    else:
        display.done(f"Store: {facts.server} {facts.version} at {facts.place}")
    return settings.redis_url.reveal()


def server_parts(
    settings: Settings, redis_url: str, engines: LocalEngines | None, display: Display
) -> list[Coroutine[Any, Any, None]]:
    """What runs besides the processes: what the person sees, and the server."""
    from chat_server.app import run_app  # noqa: PLC0415 (the longest import; the store starts before it)

    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    ready = asyncio.Event()

    def on_listening(url: str) -> None:
        url = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")  # to be opened on this machine
        listening.set_result(url)
        if not settings.simulate:
            display.done(f"Listening on {url}; the page is there and says how far the engines are")

    app = run_app(
        settings,
        redis_url=redis_url,
        engines=settings.engines if engines is None else engines.addresses,
        startup=dict if engines is None else engines.status,
        on_listening=on_listening,
        on_ready=ready.set,
    )
    return [show(engines, listening, ready, display), app]


async def show(
    engines: LocalEngines | None, listening: asyncio.Future[str], ready: asyncio.Event, display: Display
) -> None:
    """Show how far everything is, and at last where the chat is. Ends by being cancelled."""
    url = await listening
    given = Stage("engines", "are asked", time.monotonic())
    while not ready.is_set() or (engines is not None and not engines.all_ready):
        display.show([given] if engines is None else engines.stages)
        await asyncio.sleep(LOOK_EVERY_S)
    display.finish(f"Chat at {url}  ({await what_is_there(url)})")
    await asyncio.Event().wait()


async def what_is_there(url: str) -> str:
    """``2 engines, SmolLM2-135M-Instruct``, as the server itself says; it gets a moment to see all of its engines."""
    parts = urlsplit(url)  # without the path, which is a proxy's
    deadline = time.monotonic() + ALL_HEALTHY_S
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as http:
        while True:
            try:
                # our own certificate may be made for another name
                async with http.get(f"{parts.scheme}://{parts.netloc}/readyz", ssl=False) as answer:
                    found = await answer.json()
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                logger.warning("The server does not answer on its own address %s: %s", url, error)
                return "engines unknown"
            engines = [engine for engine in found["engines"] if engine["state"] == "healthy"]
            if len(engines) == len(found["engines"]) or time.monotonic() > deadline:
                break
            await asyncio.sleep(LOOK_EVERY_S)
    models = dict.fromkeys(model for engine in engines for model in engine["models"])
    kind = "simulated engine" if found["simulated"] else "engine"
    missing = len(found["engines"]) - len(engines)
    count = f"{len(engines)} of {len(found['engines'])}" if missing else str(len(engines))
    return ", ".join([f"{count} {kind}{'' if len(found['engines']) == 1 else 's'}", *models])


async def run_together(
    parts: Sequence[Coroutine[Any, Any, None]], stop: asyncio.Event, on_end: Callable[[], None]
) -> None:
    """Run all parts until ``stop`` or until one ends; call ``on_end`` and end them one after the other, in their order.

    Raises what made a part fail; StartError comes out of exception groups.
    """
    tasks = [asyncio.create_task(part) for part in parts]
    told = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([*tasks, told], return_when=asyncio.FIRST_COMPLETED)
    finally:
        on_end()
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


@contextlib.contextmanager
def stop_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP sets ``stop``, the next one raises KeyboardInterrupt.

    Plain handlers, and the only ones: ``app.Server`` keeps uvicorn from putting its own in their place.
    """
    loop = asyncio.get_running_loop()
    told = False

    def handle(_signum: int, _frame: FrameType | None) -> None:
        nonlocal told
        if told:
            raise KeyboardInterrupt
        told = True
        loop.call_soon_threadsafe(stop.set)

    # what is ignored stays so: nohup means it
    ours = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, handle) for signum in ours}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where there is one."""
    try:
        import uvloop  # noqa: PLC0415 (not on every system)
    except ImportError:
        return None
    return uvloop.new_event_loop


def set_up_logging(console: Console, level: str | None) -> None:
    """Our own lines from ``level`` on, warnings of the libraries. Without a level a terminal is kept quiet."""
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, log_time_format="%X")
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("chat_server").setLevel((level or ("warning" if console.is_terminal else "info")).upper())


class Display:
    """How far the start is: on a terminal lines that move, elsewhere a plain line when something changed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._live: Progress | None = None
        self._rows: dict[str, TaskID] = {}
        #: who -> what was last said of it, and when, where there is no terminal
        self._said: dict[str, tuple[str, float]] = {}

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(24),
                TextColumn("{task.fields[line]}"),
            )
            self._live = Progress(*columns, console=self._console, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_live()

    def done(self, text: str) -> None:
        """A step is behind us."""
        self._print(f"✓ {text}  ({time.monotonic() - self._began:.1f} s)")

    def show(self, stages: Sequence[Stage]) -> None:
        """What is going on now."""
        if self._live is None:
            self._say(stages)
            return
        for who in self._rows.keys() - {stage.who for stage in stages}:
            self._live.remove_task(self._rows.pop(who))
        for stage in stages:
            if stage.who not in self._rows:
                self._rows[stage.who] = self._live.add_task(stage.who, total=None, line="")
            total = None if stage.part is None and stage.since is not None else 1.0
            completed = 1.0 if stage.since is None else stage.part or 0.0
            self._live.update(self._rows[stage.who], total=total, completed=completed, line=stage.line)

    def finish(self, line: str) -> None:
        """All is there: one line on the standard output."""
        self._end_live()
        Console(highlight=False).print(line, style="bold", soft_wrap=True)
        sys.stdout.flush()

    def stopping(self) -> None:
        """The end began."""
        self._end_live()
        self._print("Stopping ...")

    def _say(self, stages: Sequence[Stage]) -> None:
        now = time.monotonic()
        for stage in stages:
            doing, at = self._said.get(stage.who, ("", 0.0))
            if doing != stage.doing or now - at >= LINE_EVERY_S:
                self._said[stage.who] = (stage.doing, now)
                self._print(f"  {stage.who}: {stage.line}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
