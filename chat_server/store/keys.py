"""Every key in the store, in one place. All keys of one session share a hash tag, so a cluster keeps them together."""

from __future__ import annotations

from chat_server.core.principal import Principal

#: Replicas that live, by the time of their last sign (ms). It and their leases lie on one node of a cluster: who could
#: not renew there, could not look there either, so nobody takes another for dead because of that node.
REPLICAS = "chat:{replicas}"
#: Sessions with a running response, by the time when their owner last said so (ms). On that node too: all need it, and
#: they need no other one.
RUNNING = "chat:running:{replicas}"


def session_keys(session_id: str) -> list[str]:
    """The keys that the scripts work on, in the order in which ``lua/_prelude.lua`` names them."""
    tag = f"chat:{{{session_id}}}"
    return [
        f"{tag}:{name}"
        for name in (
            "session",
            "items",
            "order",
            "response",
            "text",
            "watchers",
            "replies",
            "ended",
            "deleted",
            "changes",
        )
    ]


def user_sessions(principal: Principal) -> str:
    """A user's sessions by last use (ms)."""
    return f"chat:user:{principal.key}:sessions"


def replica(replica_id: str) -> str:
    """Lives as long as its replica: one lease for all that it runs."""
    return f"{REPLICAS}:{replica_id}"


def inbox(replica_id: str) -> str:
    """The channel with all that others tell this replica. The scripts build the same name."""
    return f"chat:replica:{replica_id}:inbox"
