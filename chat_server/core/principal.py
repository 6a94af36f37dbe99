"""Who is asking: a user of a tenant. Goes through all layers; whatever is stored belongs to one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Principal:
    """The owner of sessions.

    ``tenant`` separates organisations (their prefix caches too, by ``cache_salt``); ``user`` is one caller in it.
    """

    tenant: str
    user: str

    @property
    def key(self) -> str:
        """One string for both; tenants and users hold no slash (settings checks it), so it is unambiguous."""
        return f"{self.tenant}/{self.user}"


#: Everybody, while no ``--api-key`` is set. The server then listens on loopback only.
LOCAL = Principal(tenant="local", user="local")
