"""Every setting of the server in one frozen, typed object.

The command line fills it (each flag has an environment variable, see ``cli.py``); nothing else reads the environment.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from chat_server.core.principal import Principal
from chat_server.errors import StartError

#: The demo model: small enough for two cores, shipped in a package of the index, so no model hub is needed.
DEMO_MODEL = "SmolLM2-135M-Instruct"


class Secret:
    """A string that does not show itself in a log, a repr or a traceback. ``reveal()`` gives it."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return "Secret('***')"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """An engine that somebody else runs: base URL without ``/v1``, and its name if one was given."""

    url: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What one caller may use. Each bound says its unit."""

    #: bytes of one WebSocket frame from a client; larger closes with 1009. As the ``websockets`` library's default.
    max_frame_bytes: int = 1 << 20
    #: bytes of the text of one message (UTF-8); larger is error ``string_above_max_length``.
    max_message_bytes: int = 256 << 10
    #: bytes of the text (UTF-8) of a prompt that a response brings along; larger is error ``string_above_max_length``.
    max_input_bytes: int = 1 << 20
    #: tokens of one answer, when the client asks for none or for more.
    max_output_tokens: int = 4096
    #: seconds that one answer may take, from its start on the engine; then it ends ``incomplete``.
    max_answer_s: float = 600.0
    #: seconds that an answer goes on while no connection to its session is open on any replica; then it is stopped.
    resume_window_s: float = 120.0
    #: seconds that an answer waits for an engine that can take it; then it ends ``failed``, code ``overloaded``.
    max_queue_s: float = 60.0
    #: open sockets of this process; above it the handshake is refused with 503.
    max_connections: int = 10_000
    #: open sockets of one user on this process; above it the handshake is refused with 429.
    max_connections_per_user: int = 1_000
    #: stored sessions of one user; above it a new one is refused with 429.
    max_sessions_per_user: int = 10_000
    #: items of one session; above it ``conversation.item.create`` is an error.
    max_items: int = 10_000
    #: bytes of one session's items as they are stored (each turn reads them all); above it that is an error too.
    max_session_bytes: int = 8 << 20
    #: bytes that wait for one socket, here and in the kernel, before its views stop advancing.
    socket_buffer_bytes: int = 64 << 10
    #: seconds in which a socket must take something of what waits for it; then it is closed (1013) and dropped.
    send_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How this process runs. Secrets are masked in ``repr``; times are seconds unless the name says ms."""

    host: str = "127.0.0.1"
    port: int = 8000
    #: processes that serve, each a replica of its own.
    workers: int = 1
    #: engines that somebody else runs; empty: local ones are launched.
    engines: tuple[EngineAddress, ...] = ()
    engine_api_key: Secret | None = None
    #: where the store is, in the forms of ``store/address.py``; None: a Valkey is started here. May hold a password.
    redis_url: Secret | None = None
    #: replicas of the store that must have the begin and the end of an answer before they count.
    redis_wait_replicas: int = 0
    #: name or path of the model that local engines load.
    model: str = DEMO_MODEL
    #: number of local engines.
    engine_count: int = 2
    #: tokens of the local engines' context window.
    max_model_len: int = 8192
    #: number of simulated engines instead of real ones; 0: none.
    simulate: int = 0
    api_keys: tuple[tuple[Secret, Principal], ...] = ()
    #: origins (scheme, host, port) of pages that may connect, besides the server's own.
    allow_origins: tuple[str, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    root_path: str = ""
    forwarded_allow_ips: str = "127.0.0.1"
    #: where the embedded store keeps its data and the launcher its logs.
    data_dir: Path = Path("~/.local/share/chat-server")
    #: where downloaded and converted models are kept.
    cache_dir: Path = Path("~/.cache/chat-server")
    #: seconds of silence after which a connection with extensions hears a heartbeat.
    heartbeat_s: float = 15.0
    #: seconds that running answers get to finish when the server is told to stop; Kubernetes kills after 30.
    drain_grace_s: float = 25.0
    #: seconds between WebSocket pings, and in which each must be answered: a silent peer is closed after twice that.
    ping_s: float = 15.0
    #: seconds that a session lives after its last use.
    session_ttl_s: int = 30 * 24 * 3600
    #: seconds that a session without items lives.
    empty_session_ttl_s: int = 3600
    limits: Limits = field(default_factory=Limits)

    def model_name(self) -> str:
        """The name that local engines serve their model under: a folder's last part, a hub's whole name."""
        folder = Path(self.model).expanduser()
        return folder.absolute().name if folder.is_dir() else self.model

    def check(self) -> None:
        """Raise StartError for a combination that can not work or is not safe, saying what to do."""
        if not self.api_keys and not is_loopback(self.host):
            raise StartError(
                f"Refusing to listen on {self.host} without an API key: anybody who reaches it could read and write "
                "every conversation. Give --api-key KEY, or listen on 127.0.0.1."
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise StartError("--tls-cert and --tls-key belong together: give both or none.")
        for path in (self.tls_cert, self.tls_key):
            if path is not None and not path.is_file():
                raise StartError(f"No such file: {path}")
        if self.tls_cert is not None:
            _check_certificate(self.tls_cert, self.tls_key)
        if not _PREFIX.fullmatch(self.root_path):
            raise StartError("--root-path must be a path such as /chat: letters, digits and -._~ between slashes.")
        for origin in self.allow_origins:
            if not _ORIGIN.fullmatch(origin):
                raise StartError(
                    f"--allow-origin {origin[:200]} is no origin. Write scheme, host and port as a browser does, "
                    "without a path or a slash at the end: https://app.example.org"
                )
        numbers = {
            "heartbeat": self.heartbeat_s,
            "ping": self.ping_s,
            "drain grace": self.drain_grace_s,
            **dataclasses.asdict(self.limits),
        }
        for name, number in numbers.items():
            if not math.isfinite(number):
                raise StartError(f"The value for {name.replace('_', ' ')} is no number.")
        if self.redis_wait_replicas and self.redis_url is None:
            raise StartError("--redis-wait-replicas needs --redis: the store that is started here has no replicas.")
        if self.engines and self.simulate:
            raise StartError("--engine and --simulate exclude each other: give one of them.")


def _check_certificate(cert: Path, key: Path | None) -> None:
    try:
        # An empty password: a key that wants one is an error then, not a question on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error.strerror if isinstance(error, OSError) else "no PEM"
        raise StartError(f"--tls-cert and --tls-key can not be used together: {reason}.") from None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_engine(text: str) -> EngineAddress:
    """``URL`` or ``NAME=URL`` -> EngineAddress; a trailing slash or ``/v1`` is taken off. Raises StartError."""
    name, sep, rest = text.partition("=")
    named = bool(sep) and "://" not in name
    url = (rest if named else text).rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and (name or not named)
    except ValueError:  # a port that is none, a bracket that is not closed
        usable = False
    if not usable:
        raise StartError(f"--engine {text!r} is no http(s) URL. Example: --engine http://10.0.0.5:8000")
    if parts.username or parts.password:
        raise StartError("An --engine URL holds a password, which would show in logs. Give it as --engine-api-key.")
    return EngineAddress(url=url, name=name if named else None)


#: What a key may be made of (a token of RFC 9110, 5.6.2): browsers send it as a subprotocol.
_KEY = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
#: Where a proxy shows us: nothing, or segments of unreserved characters (RFC 3986, 2.3).
_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)*")
#: As browsers write it (RFC 6454, 6.2): lower case, no path.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]+)?")
_NAME = re.compile(r"[^\s/:]+(/[^\s/:]+)?")


def parse_api_keys(values: Sequence[str]) -> tuple[tuple[Secret, Principal], ...]:
    """``KEY``, ``USER:KEY``, ``TENANT/USER:KEY`` or the path of a file with one of these per line -> keys.

    Blank lines and lines that start with ``#`` are left out. A key without a name is its own user, ``key-N`` by its
    place. Raises StartError, which never shows a key, for whatever can not be meant.
    """
    lines: list[str] = []
    for value in values:
        lines += _key_file(Path(value)) if _is_path(value) else [value]
    keys: dict[Secret, Principal] = {}
    for line in map(str.strip, lines):
        if not line or line.startswith("#"):
            continue
        owner, named, key = line.rpartition(":")
        if not _KEY.fullmatch(key):
            raise StartError(
                "An --api-key is empty or holds a character that can not be sent. "
                "Write KEY, USER:KEY or TENANT/USER:KEY; a key is made of letters, digits and !#$%&'*+-.^_`|~"
            )
        if named and not _NAME.fullmatch(owner):
            raise StartError("The name before the colon of an --api-key must be USER or TENANT/USER.")
        tenant, _, user = owner.rpartition("/")
        principal = Principal(tenant or "default", user or f"key-{len(keys) + 1}")
        if Secret(key) in keys:
            raise StartError(f"Two --api-key values are the same (the second belongs to {principal.key}).")
        if not named and principal in keys.values():
            raise StartError(f"An --api-key without a name would belong to {principal.key}, who has one. Name it.")
        keys[Secret(key)] = principal
    if values and not keys:
        raise StartError("--api-key was given but holds no key, so everybody could come in. Write one into it.")
    return tuple(keys.items())


def _is_path(value: str) -> bool:
    try:
        return ("/" in value and ":" not in value) or Path(value).is_file()
    except (OSError, ValueError):  # longer than any name may be: a key, which an error must not show
        return False


def _key_file(path: Path) -> list[str]:
    try:
        return path.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise StartError(f"The file of --api-key {path} can not be read: {reason}.") from None
