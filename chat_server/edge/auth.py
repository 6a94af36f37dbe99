"""Who may connect, from where: credentials and origins. Pure functions over headers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from chat_server.core.principal import LOCAL, Principal
from chat_server.errors import ClientError
from chat_server.settings import Secret, is_loopback

#: What browsers send instead of a header: the OpenAI Realtime API's convention.
KEY_PROTOCOL = "openai-insecure-api-key."
PROTOCOL = "realtime"


class Keys:
    """The API keys and whose they are. Kept as digests: a look-up compares those, so its timing tells nothing."""

    def __init__(self, keys: Iterable[tuple[Secret, Principal]]) -> None:
        self._owners = {_digest(secret.reveal()): principal for secret, principal in keys}

    @property
    def required(self) -> bool:
        return bool(self._owners)

    def principal(self, credential: str | None) -> Principal:
        """Whose credential it is; everybody is ``local`` while there are no keys. Raises ClientError 401."""
        if not self._owners:
            return LOCAL
        if credential is None:
            message = "This server wants an API key: send `Authorization: Bearer KEY`."
            raise ClientError("missing_api_key", message, type="authentication_error", status=401)
        owner = self._owners.get(_digest(credential))
        if owner is None:
            message = "The API key is not one of this server's."
            raise ClientError("invalid_api_key", message, type="authentication_error", status=401)
        return owner


def credential(headers: Mapping[str, str], subprotocols: Iterable[str] = ()) -> str | None:
    """The caller's token: from the ``Authorization`` header, else from the list of subprotocols."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    for protocol in subprotocols:
        if protocol.startswith(KEY_PROTOCOL):
            return protocol.removeprefix(KEY_PROTOCOL)
    return None


def check_origin(headers: Mapping[str, str], scheme: str, allowed: Iterable[str], *, keys_required: bool) -> None:
    """Raises ClientError 403 for a page of another origin (cross-site WebSocket hijacking, see OWASP's cheat sheet).

    Apps and scripts send none and are let in. A page of our own has our own host; without API keys it must be a
    loopback name too, for a name of somebody else's can be made to point here (DNS rebinding).
    """
    origin = headers.get("origin")
    if origin is None or origin in allowed:
        return
    host = headers.get("host", "")
    own = f"{'https' if scheme in ('https', 'wss') else 'http'}://{host}"
    if origin.lower() == own.lower() and (keys_required or is_loopback(_host(own))):
        return
    raise ClientError(
        "origin_not_allowed",
        f"Pages of {origin[:200]} may not connect. The operator can allow it: --allow-origin {origin[:200]}",
        type="permission_error",
        status=403,
    )


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:  # a bracket that is never closed, say
        return ""


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
