"""The handshake of ``/v1/realtime``: everything that is checked before the upgrade.

A browser sees any refusal as 1006 without a reason; so the same URL fetched without ``Upgrade`` runs the same checks
and answers the same refusal, or 426 if it would have been let in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.datastructures import QueryParams
from starlette.requests import HTTPConnection

from chat_server.core.client_events import Flush
from chat_server.core.ids import is_id
from chat_server.core.principal import Principal
from chat_server.core.response import ResumePoint
from chat_server.core.session import check_flush
from chat_server.edge import auth
from chat_server.engine.fleet import Fleet
from chat_server.errors import ClientError, StoreError, StoreUnavailable
from chat_server.hub import Hub
from chat_server.live import LiveSession
from chat_server.settings import Settings

_FLUSH_MODES = ("token", "word", "sentence", "paragraph")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a handshake asks for, checked."""

    principal: Principal
    model: str
    #: whether the caller named the model; then it is the session's from now on.
    model_given: bool
    session_id: str | None
    history: int | None
    resume: ResumePoint | None
    extensions: bool
    flush: Flush
    subprotocol: str | None


class Gate:
    """Lets connections in, or raises ClientError with the status of the refusal."""

    def __init__(
        self, settings: Settings, keys: auth.Keys, fleet: Fleet, hub: Hub, *, loading_model: str | None = None
    ) -> None:
        self._loading_model = loading_model
        self._settings = settings
        self._keys = keys
        self._fleet = fleet
        self._hub = hub
        self._open: Counter[Principal] = Counter()
        #: this replica goes away: nobody is let in any more.
        self.closed = False

    def identify(self, connection: HTTPConnection, subprotocols: list[str]) -> Principal:
        """Who calls, from an origin that may. Raises ClientError 401 or 403."""
        scheme = connection.scope["scheme"]
        origins = self._settings.allow_origins
        auth.check_origin(connection.headers, scheme, origins, keys_required=self._keys.required)
        return self._keys.principal(auth.credential(connection.headers, subprotocols))

    def check(self, connection: HTTPConnection, subprotocols: list[str]) -> Asked:
        """All that can be checked without the store. Raises ClientError."""
        principal = self.identify(connection, subprotocols)
        query = connection.query_params
        if "call_id" in query or query.get("intent") == "transcription":
            raise ClientError("unsupported", "This server speaks text: no calls, no transcription.")
        if connection.headers.get("openai-beta", "").replace(" ", "").lower() == "realtime=v1":
            message = "The beta of the Realtime API had other event names. Leave the header `OpenAI-Beta` out."
            raise ClientError("unsupported", message, param="OpenAI-Beta")
        flush_mode = query.get("flush", "token")
        if flush_mode not in _FLUSH_MODES:
            message = f"`flush` must be one of {', '.join(_FLUSH_MODES)}."
            raise ClientError("invalid_value", message, param="flush")
        flush = Flush(mode=flush_mode)  # type: ignore[arg-type]  # it is one of them
        check_flush(flush, "flush")
        session_id = query.get("session_id")
        if session_id is not None and not is_id(session_id):
            raise ClientError("session_not_found", "There is no such session.", status=404)
        self._check_room(principal)
        return Asked(
            principal=principal,
            model=self._model(query.get("model")),
            model_given=bool(query.get("model")),
            session_id=session_id,
            history=_history(query),
            resume=_resume(query),
            extensions=query.get("extensions") == "1",
            flush=flush,
            subprotocol=auth.PROTOCOL if auth.PROTOCOL in subprotocols else None,
        )

    async def open(self, asked: Asked) -> LiveSession:
        """The session that a handshake asks for. Raises ClientError; the hub's ``close`` must follow."""
        with self.store_needed():
            if asked.session_id is None:
                return await self._hub.create(asked.principal, asked.model)
            return await self._hub.open(asked.principal, asked.session_id)

    async def probe(self, asked: Asked) -> None:
        """As ``open``, but leaves nothing behind. Raises ClientError, 426 if the handshake would have been let in."""
        with self.store_needed():
            if asked.session_id is None:
                await self._hub.check_room(asked.principal)
            else:
                await self._hub.close(await self._hub.open(asked.principal, asked.session_id))
        raise ClientError("upgrade_required", "Connect with a WebSocket.", status=426)

    def enter(self, principal: Principal) -> None:
        """A connection is open from now on."""
        self._open[principal] += 1

    def exit(self, principal: Principal) -> None:
        """It is closed."""
        self._open[principal] -= 1
        if not self._open[principal]:
            del self._open[principal]

    @contextmanager
    def store_needed(self) -> Iterator[None]:
        """What needs the store, or ClientError 503."""
        try:
            if not self._hub.ready:
                raise StoreUnavailable("The store is away.")
            yield
        except StoreError:
            raise _unavailable("store_unavailable", "The store is away. Try again in a moment.") from None

    def _check_room(self, principal: Principal) -> None:
        if self.closed:
            raise _unavailable("server_draining", "This server is being stopped. Connect again in a moment.")
        limits = self._settings.limits
        if self._open.total() >= limits.max_connections:
            raise _unavailable("too_many_connections", "The server has as many connections as it takes.")
        if self._open[principal] >= limits.max_connections_per_user:
            raise ClientError(
                "too_many_connections",
                f"You have {limits.max_connections_per_user} connections open, which is the limit.",
                type="rate_limit_error",
                status=429,
                retryable=True,
                retry_after_ms=5000,
            )

    def _model(self, wanted: str | None) -> str:
        models = self.models()
        if not models:
            raise _unavailable("engines_unavailable", "No engine has told yet which models it serves.")
        if not wanted:
            return models[0]
        if wanted not in models:
            message = f"There is no model {wanted[:200]!r} here. Served: {', '.join(models)}."
            raise ClientError("model_not_found", message, param="model", status=404)
        return wanted

    def models(self) -> list[str]:
        """The served models, the default first; while no engine has told yet, the one that local engines load."""
        return self._fleet.models() or ([self._loading_model] if self._loading_model else [])


def _history(query: QueryParams) -> int | None:
    value = query.get("history")
    if value is None:
        return None
    if value == "all":
        return 0
    if value.isascii() and value.isdigit() and len(value) <= 7 and 0 < int(value) <= 1_000_000:
        return int(value)
    raise ClientError("invalid_value", "`history` must be a number from 1 on, or `all`.", param="history")


def _resume(query: QueryParams) -> ResumePoint | None:
    """What the client holds of the answer that it was reading, if it says so."""
    response_id = query.get("response_id")
    if response_id is None:
        return None
    if "session_id" not in query:
        message = "`response_id` goes with the `session_id` of its conversation."
        raise ClientError("missing_required_parameter", message, param="session_id")
    if not is_id(response_id):
        raise ClientError("invalid_value", "`response_id` is no id of a response.", param="response_id")
    offset = query.get("offset", "0")
    if not (offset.isascii() and offset.isdigit() and len(offset) <= 10):
        raise ClientError("invalid_value", "`offset` must be a number of code points.", param="offset")
    return ResumePoint(response_id, query.get("epoch", ""), int(offset))


def _unavailable(code: str, message: str) -> ClientError:
    return ClientError(code, message, type="server_error", status=503, retryable=True, retry_after_ms=2000)
