"""``chat-server serve``: start the store, listen, start the engines, say where the chat is; stop all of it in order.

The server listens before the engines are there, so the page can say how far they are. It is one or several processes
(``workers.py``). Whatever ends first, the order of stopping is: the server (running answers finish, clients are told),
the engines, the store (it saves).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from chat_server.drain import AFTER_GRACE_S
from chat_server.engine.fleet import engine_id
from chat_server.engine.launch import LocalEngines, Stage
from chat_server.engine.ports import check_port
from chat_server.errors import StoreUnavailable
from chat_server.process import PART_STOP_S, loop_factory, run_together, set_up_logging, stop_on_signals
from chat_server.store.embedded import EmbeddedValkey
from chat_server.store.probe import probe_store
from chat_server.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from typing import Any

    from chat_server.settings import Settings

logger = logging.getLogger(__name__)

#: seconds between two looks at how far the engines are, and between two lines about it where there is no terminal
LOOK_EVERY_S = 0.1
LINE_EVERY_S = 15.0
#: seconds between two looks at what others run
ASK_EVERY_S = 0.5
#: seconds for the server to see as healthy what was seen to be up, or what others run
ALL_HEALTHY_S = 3.0
#: seconds after which a person is told why it still has not stopped
STILL_STOPPING_S = 1.0


def run(settings: Settings, log_level: str | None = None) -> int:
    """Serve until Ctrl-C or SIGTERM. Returns the exit status; raises StartError if it can not start or go on."""
    console = Console(stderr=True, highlight=False)
    set_up_logging(console, log_level)
    settings.check()
    check_port(settings.host, settings.port)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve(settings, console, log_level))
    except KeyboardInterrupt:  # the second one
        return 130
    return 0


async def serve(settings: Settings, console: Console, log_level: str | None) -> None:
    """Start everything, run until told to stop or a part can not go on, stop everything."""
    stop = asyncio.Event()
    store = None if settings.redis_url else EmbeddedValkey(settings.data_dir)
    with stop_on_signals(stop), Display(console) as display:
        redis_url = await open_store(settings, store, display)
        try:
            engines = None if settings.engines else LocalEngines(settings)
            parts = server_parts(settings, redis_url, engines, display, log_level=log_level, stop=stop)
            if engines:
                parts.append(engines.run())
            if store:
                parts.append(store.watch())
            drain_s = settings.drain_grace_s + AFTER_GRACE_S + PART_STOP_S
            await run_together(parts, stop, lambda: display.stopping(settings.drain_grace_s), drain_s=drain_s)
        finally:
            if store:
                await store.stop()


async def open_store(settings: Settings, store: EmbeddedValkey | None, display: Display) -> str:
    """The URL of the store: the one given, or the embedded one, started."""
    if store is not None:
        url = await store.start()
        await forget_replicas(url)
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


async def forget_replicas(url: str) -> None:
    """Nobody lives in a store that just started: what a killed server left behind need not wait for its lease."""
    # long imports; the store starts before them
    from chat_server.store.replicas import Replicas  # noqa: PLC0415
    from chat_server.store.server import Server  # noqa: PLC0415

    server = Server(url)
    try:
        with contextlib.suppress(StoreUnavailable):
            await Replicas(server, "").forget_all()
    finally:
        await server.close()


def server_parts(
    settings: Settings,
    redis_url: str,
    engines: LocalEngines | None,
    display: Display,
    *,
    log_level: str | None,
    stop: asyncio.Event,
) -> list[Coroutine[Any, Any, None]]:
    """What runs besides store and engines: what the person sees, and the server, which knows of ``stop``."""
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    ready = asyncio.Event()

    def on_listening(url: str) -> None:
        url = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")  # to be opened on this machine
        listening.set_result(url)
        if not settings.simulate:
            display.done(f"Listening on {url}; the page is there and says how far the engines are")

    arguments: dict[str, Any] = {
        "redis_url": redis_url,
        "engines": settings.engines if engines is None else engines.addresses,
        "startup": dict if engines is None else engines.status,
        "on_listening": on_listening,
        "on_ready": ready.set,
    }
    if settings.workers > 1:
        server = Workers(settings, log_level=log_level, **arguments).run(stop)
    else:
        from chat_server.app import run_app  # noqa: PLC0415 (the longest import; workers do it themselves)

        server = run_app(settings, stop=stop, **arguments)
    given = {engine_id(address): address.name or address.url for address in settings.engines}
    return [show(engines, given, listening, ready, display), server]


async def show(
    engines: LocalEngines | None,
    given: dict[str, str],
    listening: asyncio.Future[str],
    ready: asyncio.Event,
    display: Display,
) -> None:
    """Show how far everything is, and at last where the chat is. Ends by being cancelled.

    ``engines`` are those that we run; of others, ``given`` says what people call them.
    """
    url = await listening
    asked: dict[str, Stage] = {}
    while not ready.is_set() or (engines is not None and not engines.all_ready):
        if engines is None:
            _update(asked, await asked_readiness(url), given)
        display.show(list(asked.values()) if engines is None else engines.stages)
        await asyncio.sleep(LOOK_EVERY_S if engines is not None else ASK_EVERY_S)
    display.finish(f"Chat at {url}  ({await what_is_there(url)})")
    await asyncio.Event().wait()


def _update(stages: dict[str, Stage], readiness: dict[str, Any] | None, given: dict[str, str]) -> None:
    """What is waited for, as the server sees it."""
    if readiness is None:
        return
    doing = {} if readiness["store"] == "up" else {"store": "can not be reached"}
    for engine in readiness["engines"]:
        if engine["state"] != "healthy":
            name = engine["name"]
            doing[given.get(name, name)] = engine["detail"].removeprefix(f"Engine {name} ").rstrip(".")
    for who in stages.keys() - doing.keys():
        del stages[who]
    for who, what in doing.items():
        stages.setdefault(who, Stage(who, what, time.monotonic())).now(what)


async def asked_readiness(url: str) -> dict[str, Any] | None:
    """What the server itself says of its readiness; None if it does not answer on its own address."""
    parts = urlsplit(url)  # without the path, which is a proxy's
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as http:
        try:
            # our own certificate may be made for another name
            async with http.get(f"{parts.scheme}://{parts.netloc}/readyz", ssl=False) as answer:
                found: dict[str, Any] = await answer.json()
                return found
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            logger.warning("The server does not answer on its own address %s: %s", url, error)
            return None


async def what_is_there(url: str) -> str:
    """``2 engines, SmolLM2-135M-Instruct``, as the server itself says; it gets a moment to see all of its engines."""
    deadline = time.monotonic() + ALL_HEALTHY_S
    while True:
        found = await asked_readiness(url)
        if found is None:
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


class Display:
    """How far the start is: on a terminal lines that move, elsewhere a plain line when something changed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._live: Progress | None = None
        self._hint: asyncio.TimerHandle | None = None
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
        if self._hint is not None:
            self._hint.cancel()
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

    def stopping(self, grace_s: float) -> None:
        """The end began; running answers get ``grace_s`` seconds."""
        self._end_live()
        self._print("Stopping ...")
        hint = f"Waiting for running answers, at most {grace_s:.0f} s. Ctrl-C again stops at once."
        self._hint = asyncio.get_running_loop().call_later(STILL_STOPPING_S, self._print, hint)

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
