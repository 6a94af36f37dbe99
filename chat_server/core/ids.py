"""Ids: a kind and 128 random bits. Ids that a client chooses must look alike, so they may stand in keys and logs."""

from __future__ import annotations

import re
import secrets

#: What an id may be made of; the store puts ids into keys and messages without escaping. (``$`` would let a last
#: line end pass.)
CLIENT_ID = r"^[A-Za-z0-9_.:-]{1,64}\Z"
_CLIENT_ID = re.compile(CLIENT_ID)


def new_id(kind: str) -> str:
    """A fresh id such as ``sess_6f...``. Unguessable: knowing one is no right, but guessing one is no way either."""
    return f"{kind}_{secrets.token_hex(16)}"


def is_id(text: str) -> bool:
    """Whether ``text`` could be an id, ours or a client's."""
    return _CLIENT_ID.fullmatch(text) is not None
