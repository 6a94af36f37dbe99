"""The pure part: no await, no clock (``now`` is an argument), no socket, no store, no engine."""
