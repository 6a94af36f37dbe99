"""What goes wrong, by who can mend it.

ChatServerError
├── StartError        the operator: the server can not start as it is set up (exit status 1, or its own)
├── StoreError        nobody at once: the store is away or refused the write
│   ├── StoreBehind        it lost changes that we know of: they are written again, or lost
│   └── StoreUnavailable   it is away; retrying helps
├── EngineError       an engine did not do what was asked
│   ├── EngineRefused      it said no to this request (4xx): the request's fault, its reason is for the caller
│   └── EngineUnavailable  connect failed, 5xx, cut or silent: another attempt may work
│       └── EngineBusy     503 with the engine's own admission limit: later, or elsewhere
└── ClientError       the caller: becomes an ``error`` event, or an HTTP refusal before the upgrade
"""

from __future__ import annotations


class ChatServerError(Exception):
    """Base of all errors that we raise on purpose. ``str()`` of it is fit for the person who gets it."""


class StartError(ChatServerError):
    """The server can not start. The text says what happened and what to do; the CLI prints it without a traceback.

    ``exit_code`` is the process's exit status.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class StoreError(ChatServerError):
    """The store refused or failed."""


class StoreBehind(StoreError):
    """The store holds an older session than we know: it lost changes, and a write would hide that."""


class StoreUnavailable(StoreError):
    """The store can not be reached. Nothing was lost; the same call may work later."""


class EngineError(ChatServerError):
    """An engine failed. ``engine`` is its name."""

    def __init__(self, message: str, *, engine: str = "") -> None:
        super().__init__(message)
        self.engine = engine


class EngineRefused(EngineError):
    """The engine said no to this request (HTTP 4xx). ``status`` and ``code`` are the engine's."""

    def __init__(self, message: str, *, engine: str = "", status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message, engine=engine)
        self.status = status
        self.code = code


class EngineUnavailable(EngineError):
    """Connect failed, 5xx, the stream was cut, or silence past its deadline."""


class EngineBusy(EngineUnavailable):
    """The engine's own admission control said 503."""


class ClientError(ChatServerError):
    """The caller's mistake, as the protocol reports it.

    ``code`` is stable and for programs; the message is for people; ``param`` is the path of the field that is wrong.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        type: str = "invalid_request_error",  # the API's own name for the field
        param: str | None = None,
        retryable: bool = False,
        retry_after_ms: int | None = None,
        status: int = 400,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.type = type
        self.param = param
        self.retryable = retryable
        self.retry_after_ms = retry_after_ms
        self.status = status
