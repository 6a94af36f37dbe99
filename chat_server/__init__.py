"""WebSocket streaming chat for teams that run their own models on vLLM.

The nouns, as the code uses them:

session     a multi-turn conversation, kept in Redis; owned by one principal (a user of a tenant)
item        one message of it
response    the making of one answer: queued, running, then completed, cancelled, incomplete or failed
connection  one WebSocket; any number per session, on any replica
view        how far a connection has been told of a response: a stage and a cursor into its text, and no queue
replica     one server process (a new id with each start); any replica can serve any session
engine      one vLLM OpenAI server; has an epoch (its start), a health, a load
binding     session -> engine, kept in Redis: the engine that holds the session's cached prefix

The life of a message, top to bottom:

edge/realtime.py      reads a frame from the socket
core/codec.py         frame -> typed client event, or an error event
commands.py           carries it out on the session: the store first, then everybody who listens (``live.py``)
answers.py            who makes an answer: begun here, taken over from a replica that is gone, handed on
turn.py               one answer: start an engine's stream -> go on elsewhere if it breaks off -> finish
placing.py            the engine for it, and the session bound to that engine
engine/vllm.py        parses the engine's stream and calls ``response.on_text``
store/committer.py    writes the text of all responses to the store, together; what is written may be told
core/view.py          what a connection still has to be told
edge/outbox.py        tells it, while the socket takes bytes

``core/`` is pure: no await, no clock, no socket. ``app.py`` alone wires things together.
"""

__version__ = "0.1.0"
