"""WebSocket close codes that we send: standard ones only, for the SDKs retry no private one (RFC 6455, 7.4.1)."""

from __future__ import annotations

DONE = 1000
INVALID_TEXT = 1007  # a text frame that is no UTF-8
POLICY = 1008  # credential expired or revoked: a new one first
TOO_BIG = 1009  # a frame over ``max_frame_bytes``
FAULT = 1011  # our fault: reconnect with backoff
RESTART = 1012  # this replica goes, or must be left: reconnect, resume
OVERLOADED = 1013  # overloaded, or the reader was too slow: reconnect with backoff, resume
