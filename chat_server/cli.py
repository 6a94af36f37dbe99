"""The command line. Each flag has an environment variable; ``Settings`` is what comes of both.

What takes long to import is imported where it is used: ``--help`` answers at once.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from chat_server import __version__
from chat_server.errors import StartError
from chat_server.settings import Limits, Secret, Settings, parse_api_keys, parse_engine

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT = Settings()
PREFIX = "CHAT_SERVER_"


class Option(click.Option):
    """An option with a section in ``--help``, and an environment variable made from its name."""

    def __init__(self, declarations: list[str], *, section: str = "Options", **attributes: Any) -> None:
        self.section = section
        name = declarations[0].removeprefix("--").upper().replace("-", "_")
        attributes.setdefault("envvar", f"{PREFIX}{name}")
        attributes.setdefault("show_envvar", True)
        attributes.setdefault("show_default", True)
        super().__init__(declarations, **attributes)


class Sections(click.Command):
    """A command whose ``--help`` shows the options by section."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(param, "section", "Other"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def option(flag: str, *names: str, section: str, **attributes: Any) -> Callable[[Any], Any]:
    return click.option(flag, *names, cls=Option, section=section, **attributes)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="chat-server")
def main() -> None:
    """A streaming chat server over WebSocket for teams that run their own models on vLLM.

    \b
    chat-server serve                                     two local engines, demo model, page at :8000
    chat-server serve --engine http://10.0.0.5:8000       in front of vLLM servers that you run
    chat-server serve --simulate 2                        no model at all, ready in a second
    chat-server chat                                      talk to it in the terminal
    chat-server doctor                                    what is missing here, and what to do
    """


LIMITS: dict[str, tuple[str, str]] = {
    "max_frame_bytes": ("BYTES", "Largest WebSocket frame from a client; above it the socket is closed (1009)."),
    "max_message_bytes": ("BYTES", "Largest text of one message."),
    "max_input_bytes": ("BYTES", "Largest text of a prompt that a response brings along."),
    "max_output_tokens": ("TOKENS", "Longest answer."),
    "max_answer_s": ("SECONDS", "Longest time for one answer; then it ends as incomplete."),
    "resume_window_s": ("SECONDS", "How long an answer goes on with nobody connected; then it is stopped."),
    "max_queue_s": ("SECONDS", "Longest wait of an answer for a free engine; then it fails as overloaded."),
    "max_connections": ("COUNT", "Open sockets, of each worker."),
    "max_connections_per_user": ("COUNT", "Open sockets of one user, on each worker."),
    "max_sessions_per_user": ("COUNT", "Stored sessions of one user."),
    "max_items": ("COUNT", "Messages of one session."),
    "max_session_bytes": ("BYTES", "Size of one session's messages, as they are stored."),
    "socket_buffer_bytes": ("BYTES", "What may wait for one socket, before its deltas grow longer instead."),
    "send_timeout_s": ("SECONDS", "Time in which a reader must take some of what waits; then it is dropped (1013)."),
}


def limit_options(command: Callable[..., None]) -> Callable[..., None]:
    """A flag for each field of ``Limits``."""
    for name, (unit, text) in reversed(LIMITS.items()):
        default = getattr(DEFAULT.limits, name)
        kind = click.FloatRange(0, min_open=True) if isinstance(default, float) else click.IntRange(1)
        flag = "--" + re.sub(r"(?<!timeout)_s$", "_time", name).removesuffix("_s").replace("_", "-")
        add = option(flag, name, section="Limits", metavar=unit, type=kind, default=default, help=text)
        command = add(command)
    return command


LISTEN = "Where it listens"
USERS = "Who may use it"
ENGINES = "Engines (give --engine to use your own; else they are started here)"
STATE = "State"
PATH = click.Path(path_type=Path)
COUNT = click.IntRange(1)
#: ten years: the store counts in milliseconds, and has to add
TTL = click.IntRange(1, 10 * 365 * 24 * 3600)


@main.command(
    cls=Sections,
    epilog="Ctrl-C or SIGTERM stops everything in order, with exit status 0: running answers finish first. "
    "A second one stops at once.",
)
@option(
    "--host",
    section=LISTEN,
    default=DEFAULT.host,
    metavar="ADDRESS",
    help="Address to listen on. Anything but loopback needs an --api-key.",
)
@option(
    "--port",
    section=LISTEN,
    default=DEFAULT.port,
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Port to listen on; 0 takes a free one.",
)
@option(
    "--workers",
    section=LISTEN,
    default=DEFAULT.workers,
    type=COUNT,
    metavar="COUNT",
    help="Processes that serve on it, for more than one core; any of them can serve any session.",
)
@option("--tls-cert", section=LISTEN, type=PATH, metavar="FILE", help="Certificate chain (PEM), for https and wss.")
@option("--tls-key", section=LISTEN, type=PATH, metavar="FILE", help="Its private key (PEM).")
@option(
    "--root-path",
    section=LISTEN,
    default=DEFAULT.root_path,
    metavar="PATH",
    help="Path under which a reverse proxy shows the server, such as /chat.",
)
@option(
    "--forwarded-allow-ips",
    section=LISTEN,
    default=DEFAULT.forwarded_allow_ips,
    metavar="ADDRESSES",
    help="Proxies, comma-separated, whose X-Forwarded-* headers are believed.",
)
@option(
    "--api-key",
    section=USERS,
    multiple=True,
    metavar="KEY",
    help="Who may use the server: KEY, USER:KEY, TENANT/USER:KEY, or a file with one of these per line "
    "(others on the machine can read a command line). Repeatable. Without any, everybody on this machine may.",
)
@option(
    "--allow-origin",
    section=USERS,
    multiple=True,
    metavar="ORIGIN",
    help="Origin of a page that may connect besides the server's own, such as https://app.example.org. Repeatable.",
)
@option(
    "--engine",
    section=ENGINES,
    multiple=True,
    metavar="URL",
    help="A vLLM server that you run: URL or NAME=URL. Repeatable. Nothing is started here then.",
)
@option("--engine-api-key", section=ENGINES, metavar="KEY", help="What your engines want as --api-key.")
@option(
    "--model",
    section=ENGINES,
    default=DEFAULT.model,
    metavar="NAME_OR_PATH",
    help="What engines started here load: a folder, a name on the model hub, or the demo model.",
)
@option(
    "--engines",
    "engine_count",
    section=ENGINES,
    default=DEFAULT.engine_count,
    type=COUNT,
    metavar="COUNT",
    help="Engines to start here.",
)
@option(
    "--max-model-len",
    section=ENGINES,
    default=DEFAULT.max_model_len,
    type=COUNT,
    metavar="TOKENS",
    help="Context window of engines started here.",
)
@option(
    "--simulate",
    section=ENGINES,
    default=DEFAULT.simulate,
    type=click.IntRange(0),
    metavar="COUNT",
    help="Start this many simulated engines instead of real ones: for front-end work, ready in a second.",
)
@option(
    "--redis",
    section=STATE,
    envvar=[f"{PREFIX}REDIS", "REDIS_URL"],
    metavar="URL",
    help="Redis or Valkey, version 7 or later: redis://, rediss:// (TLS) or unix://; a cluster: "
    "redis+cluster://HOST:PORT,HOST:PORT; Sentinel: redis+sentinel://HOST:PORT,HOST:PORT/SERVICE. "
    "Without it one is started here.",
)
@option(
    "--redis-wait-replicas",
    section=STATE,
    default=DEFAULT.redis_wait_replicas,
    type=click.IntRange(0),
    metavar="COUNT",
    help="Replicas of the store that must have the begin and the end of an answer. With fewer that follow, the store "
    "counts as away.",
)
@option(
    "--data-dir",
    section=STATE,
    default=DEFAULT.data_dir,
    type=PATH,
    metavar="PATH",
    help="Conversations of the store started here, and logs.",
)
@option("--cache-dir", section=STATE, default=DEFAULT.cache_dir, type=PATH, metavar="PATH", help="The demo model.")
@option(
    "--session-ttl",
    "session_ttl_s",
    section=STATE,
    default=DEFAULT.session_ttl_s,
    type=TTL,
    metavar="SECONDS",
    help="How long a session lives after its last use.",
)
@option(
    "--empty-session-ttl",
    "empty_session_ttl_s",
    section=STATE,
    default=DEFAULT.empty_session_ttl_s,
    type=TTL,
    metavar="SECONDS",
    help="The same, for one without messages.",
)
@limit_options
@option(
    "--heartbeat",
    "heartbeat_s",
    section="Other",
    default=DEFAULT.heartbeat_s,
    metavar="SECONDS",
    type=click.FloatRange(0.1),
    help="Silence after which a connection with extensions gets a sign of life.",
)
@option(
    "--ping",
    "ping_s",
    section="Other",
    default=DEFAULT.ping_s,
    metavar="SECONDS",
    type=click.FloatRange(0.1),
    help="Time between WebSocket pings, and for the answer to one. Keep it well below what your proxy allows a "
    "connection to be silent.",
)
@option(
    "--drain-grace",
    "drain_grace_s",
    section="Other",
    default=DEFAULT.drain_grace_s,
    metavar="SECONDS",
    type=click.FloatRange(0),
    help="How long the server may take to end when it is told to stop: running answers get to finish, those that need "
    "longer are handed over to other servers in the last 5 s.",
)
@option(
    "--log-level",
    section="Other",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="What is logged, to the standard error output; never what people write. Default: warning on a terminal, "
    "else info.",
)
def serve(log_level: str | None, **values: Any) -> None:
    """Run the server, and what it needs: a store and engines, unless you name your own.

    \b
    chat-server serve
    chat-server serve --model Qwen/Qwen3-8B --engines 1
    chat-server serve --engine gpu1=http://10.0.0.5:8000 --engine gpu2=http://10.0.0.6:8000 \\
        --redis redis://10.0.0.7 --host 0.0.0.0 --api-key ./keys.txt
    """
    try:
        settings = settings_from(values)
        from chat_server.serve import run  # noqa: PLC0415 (see above)

        status = run(settings, log_level)
    except StartError as error:
        fail(error)
    sys.exit(status)


def settings_from(values: dict[str, Any]) -> Settings:
    """What click read -> Settings. Raises StartError for a value that can not be."""
    limits = Limits(**{name: values.pop(name) for name in LIMITS})
    engine_api_key, redis_url = values.pop("engine_api_key"), values.pop("redis")
    settings = Settings(
        engines=tuple(parse_engine(text) for text in values.pop("engine")),
        engine_api_key=Secret(engine_api_key) if engine_api_key else None,
        redis_url=Secret(redis_url) if redis_url else None,
        api_keys=parse_api_keys(values.pop("api_key")),
        allow_origins=tuple(values.pop("allow_origin")),
        limits=limits,
        **values,
    )
    settings.check()
    return settings


@main.command(cls=Sections)
@option("--url", section="Options", default="http://127.0.0.1:8000", metavar="URL", help="Where the server is.")
@option("--key", "api_key", section="Options", envvar=f"{PREFIX}KEY", metavar="KEY", help="Your key, if it wants one.")
@option("--session", section="Options", metavar="ID", help="Go on with this conversation.")
@option("--model", section="Options", envvar=f"{PREFIX}CHAT_MODEL", metavar="NAME", help="A model that it serves.")
def chat(url: str, api_key: str | None, session: str | None, model: str | None) -> None:
    """Chat in the terminal. In a pipe it reads one message per line and writes plain answers."""
    from chat_server.client.terminal import run_terminal  # noqa: PLC0415 (see above)

    sys.exit(run_terminal(url, api_key, session, model))


@main.command(cls=Sections)
@option("--engine", section="Look at", multiple=True, metavar="URL", help="An engine: URL or NAME=URL. Repeatable.")
@option("--engine-api-key", section="Look at", metavar="KEY", help="What the engines want as --api-key.")
@option("--redis", section="Look at", envvar=[f"{PREFIX}REDIS", "REDIS_URL"], metavar="URL", help="The store.")
@option(
    "--port",
    section="Look at",
    default=DEFAULT.port,
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="The port that the server is to listen on.",
)
@option("--data-dir", section="Look at", default=DEFAULT.data_dir, type=PATH, metavar="PATH", help="Data folder.")
@option("--cache-dir", section="Look at", default=DEFAULT.cache_dir, type=PATH, metavar="PATH", help="Cache folder.")
def doctor(engine: tuple[str, ...], engine_api_key: str | None, redis: str | None, **values: Any) -> None:
    """Say what is installed, reachable and healthy, and what to do about the rest.

    The exit status is 1 if something is broken that the server needs.
    """
    from chat_server.doctor import run  # noqa: PLC0415 (see above)

    try:
        settings = Settings(
            engines=tuple(parse_engine(text) for text in engine),
            engine_api_key=Secret(engine_api_key) if engine_api_key else None,
            redis_url=Secret(redis) if redis else None,
            **values,
        )
    except StartError as error:
        fail(error)
    sys.exit(run(settings))


@main.command(
    "simulate-engine",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True},
    short_help="Run an engine without a model, for front-end work and tests.",
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def simulate_engine(args: tuple[str, ...]) -> None:
    """Hand all arguments on; its options are its own."""
    from chat_server.engine.simulated.command import simulate_engine as command  # noqa: PLC0415 (see above)

    for param in command.params:
        if isinstance(param, click.Option):
            param.show_envvar = True
    command.main(
        list(args),
        prog_name="chat-server simulate-engine",
        auto_envvar_prefix=f"{PREFIX}SIMULATED",
        max_content_width=100,
    )


def fail(error: StartError) -> NoReturn:
    """One message for people, and the exit status."""
    click.secho(f"chat-server: {error}", err=True, fg="red")
    sys.exit(error.exit_code)
