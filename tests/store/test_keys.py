"""The names of keys: what belongs together lies together, and nothing of two owners ever meets."""

from __future__ import annotations

import pytest
from redis.crc import key_slot

from chat_server.core.principal import Principal
from chat_server.store import keys

pytestmark = pytest.mark.pure


def test_all_keys_of_a_session_lie_on_one_node_of_a_cluster() -> None:
    """They share a hash tag; other sessions have other keys."""
    names = keys.session_keys("sess_1")
    assert len(set(names)) == 10
    assert len({key_slot(name.encode()) for name in names}) == 1
    assert not set(names) & set(keys.session_keys("sess_2"))
    assert key_slot(names[0].encode()) != key_slot(keys.session_keys("sess_2")[0].encode())


def test_each_user_has_an_index() -> None:
    """Tenants and users of the same name are told apart."""
    principals = [Principal("a", "b"), Principal("b", "a"), Principal("a", "a"), Principal("b", "b")]
    assert len({keys.user_sessions(principal) for principal in principals}) == 4


def test_what_all_need_lies_on_one_node_of_a_cluster() -> None:
    """A replica that can renew its lease can read all others, and the index of running answers."""
    names = (keys.REPLICAS, keys.RUNNING, keys.replica("replica_1"), keys.replica("replica_2"))
    assert len({key_slot(name.encode()) for name in names}) == 1


def test_a_replica_has_a_lease_and_an_inbox() -> None:
    """Under its own id, apart from sessions and users."""
    assert keys.replica("replica_1") == "chat:{replicas}:replica_1"
    assert keys.inbox("replica_1") == "chat:replica:replica_1:inbox"
    everything = {keys.replica("x"), keys.inbox("x"), keys.user_sessions(Principal("x", "x")), *keys.session_keys("x")}
    assert len(everything | {keys.REPLICAS, keys.RUNNING}) == 15
