"""Who is asking, as one string."""

from __future__ import annotations

import dataclasses

import pytest

from chat_server.core.principal import LOCAL, Principal

pytestmark = pytest.mark.pure


def test_the_key_names_tenant_and_user() -> None:
    """The store's index of a user's sessions stands under it."""
    assert Principal(tenant="acme", user="ada").key == "acme/ada"


def test_principals_of_different_tenants_differ() -> None:
    """The same user name in two tenants is two callers."""
    acme, other = Principal("acme", "ada"), Principal("other", "ada")
    assert acme != other
    assert acme.key != other.key
    assert acme == Principal("acme", "ada")


def test_a_principal_does_not_change() -> None:
    """It is decided once, at the handshake."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        LOCAL.user = "root"  # type: ignore[misc]


def test_everybody_is_local_without_keys() -> None:
    """The name under which sessions are kept while there are no keys; another one would lose them."""
    assert LOCAL.key == "local/local"
