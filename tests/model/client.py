"""A client as the protocol wants it: it applies the offset rule, repeats what was not acknowledged, and comes back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import orjson
from starlette.websockets import WebSocket

from chat_server.edge.socket import SCOPE_KEY
from tests.model.network import short
from tests.model.oracle import Broken, text_of

if TYPE_CHECKING:
    from tests.model.replica import Replica
    from tests.model.world import World

#: frames on their way to one client before its socket takes no more.
_ROOM = 4

#: The order of the events of one answer on one connection; the item's own events between them.
_STAGES = (
    "response.created",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "conversation.item.done",
    "response.done",
)
_DELTA = _STAGES.index("response.output_text.delta")


@dataclass
class Answer:
    """What a client holds of an answer, over all its connections."""

    id: str
    item_id: str = ""
    in_reply_to: str | None = None
    text: str = ""
    epoch: str = ""
    #: epochs out of which text was taken back without more
    gone: set[str] = field(default_factory=set)
    #: what came last on this connection
    stage: int = -1
    #: it was told as ended, and how
    status: str | None = None


class Socket:
    """The server's end of one connection, and the way of its frames to the client."""

    def __init__(self, client: Client, replica: Replica) -> None:
        self.on_writable: Callable[[], None] | None = None
        self.bytes_written = 0
        self.is_open = True
        self._client = client
        self._replica = replica
        self._clock = client.world.clock
        self._on_way = 0
        self._waiting = 0
        self._last = 0.0
        self._last_sent = 0.0
        #: what the server reads
        self.received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.received.put_nowait({"type": "websocket.connect"})

    @property
    def can_write(self) -> bool:
        return self.is_open and self._on_way < _ROOM

    @property
    def bytes_taken(self) -> int:
        return self.bytes_written - self._waiting

    def write_text(self, payload: bytes) -> None:
        event = orjson.loads(payload)
        self._client.world.told(self._client, event)
        self.bytes_written += len(payload)
        self._waiting += len(payload)
        self._on_way += 1

        def arrive() -> None:
            self._on_way -= 1
            self._waiting -= len(payload)
            if self._client.socket is self:
                self._client.take(event)
            if self.is_open and not self._replica.dead:
                self._replica.loop.call_soon(self._notify)

        self._clock.at(self._arrival(), arrive)

    def _notify(self) -> None:
        if self.on_writable is not None and self.is_open:
            self.on_writable()

    def close(self, code: int, reason: str) -> None:
        if self.is_open:
            self.is_open = False
            self.received.put_nowait({"type": "websocket.disconnect", "code": code})
            self._clock.at(self._arrival(), lambda: self._client.closed(self, code))

    def abort(self) -> None:
        if self.is_open:
            self.is_open = False
            self.received.put_nowait({"type": "websocket.disconnect", "code": 1006})
            self._clock.after(0.01, lambda: self._client.closed(self, 1006))

    def send(self, event: dict[str, Any]) -> None:
        """The client says something."""
        self._last_sent = max(self._last_sent, self._clock.now + self._client.delay())
        text = orjson.dumps(event).decode()

        def arrive() -> None:
            if self.is_open and not self._replica.dead:
                self.received.put_nowait({"type": "websocket.receive", "text": text})

        self._clock.at(self._last_sent, arrive)

    def drop(self) -> None:
        """The client is gone; the server hears of it after a while."""

        def gone() -> None:
            if self.is_open and not self._replica.dead:
                self.is_open = False
                self.received.put_nowait({"type": "websocket.disconnect", "code": 1006})

        self._clock.after(self._client.delay(), gone)

    def _arrival(self) -> float:
        self._last = max(self._last, self._clock.now + self._client.delay())
        return self._last


@dataclass
class Wish:
    """What a client wants to have done, until it knows that it is."""

    event: dict[str, Any]
    tries: int = 0


@dataclass(eq=False)
class Client:
    """One person's tab. ``world`` gives it replicas to connect to."""

    world: World
    name: str
    random: random.Random
    session_id: str | None = None
    extensions: bool = True
    socket: Socket | None = None
    #: it comes back when it lost its connection
    stays: bool = True
    joined: bool = False
    answers: dict[str, Answer] = field(default_factory=dict)
    #: answers of this connection that were told from their beginning
    of_item: dict[str, Answer] = field(default_factory=dict)
    resumed: str | None = None
    wishes: dict[str, Wish] = field(default_factory=dict)
    said: int = 0

    def delay(self) -> float:
        slow = self.world.weather.slow_message
        return self.random.random() * (0.002 if self.random.random() >= slow else self.random.choice((0.05, 0.5, 2.0)))

    # --- connecting

    def connect(self) -> None:
        """Go to some replica; later, if there is none."""
        if self.socket is not None or not self.stays:
            return
        replica = self.world.some_replica(self.random)
        if replica is None:
            self._later()
            return
        query: dict[str, str | int] = {"extensions": int(self.extensions)}
        if self.session_id is not None:
            query |= {"session_id": self.session_id}
            if self.random.random() < 0.5:
                query |= {"history": "all"}
        open_answers = [answer for answer in self.answers.values() if answer.status is None and answer.stage >= 0]
        self.resumed = None
        if open_answers and self.random.random() < 0.8:
            held = open_answers[-1]
            query |= {"response_id": held.id, "epoch": held.epoch, "offset": len(held.text)}
            self.resumed = held.id
        for answer in self.answers.values():
            answer.stage = -1
        self.of_item = {}
        self.joined = False
        self.socket = socket = Socket(self, replica)
        self.world.trace(f"{self.name} connects to {replica.id} with {query}")
        replica.serve(self._serve(socket, replica, urlencode(query)), f"connection of {self.name}")
        if self.resumed is not None:
            held = self.answers[self.resumed]
            held.stage = _DELTA if held.text else _DELTA - 2
            if held.item_id:
                self.of_item[held.item_id] = held

    async def _serve(self, socket: Socket, replica: Replica, query: str) -> None:
        """The server's side of it, through the real endpoint."""
        scope = {
            "type": "websocket",
            "path": "/v1/realtime",
            "query_string": query.encode(),
            "headers": [(b"host", b"model")],
            "scheme": "ws",
            "subprotocols": [],
            "extensions": {SCOPE_KEY: socket, "websocket.http.response": {}},
        }
        status = 0

        async def send(message: Any) -> None:
            nonlocal status
            if message["type"] == "websocket.http.response.start":
                status = message["status"]

        await replica.realtime.serve(WebSocket(scope, socket.received.get, send))
        if status:
            self.world.clock.after(self.delay(), lambda: self.closed(socket, -status))

    def closed(self, socket: Socket, code: int) -> None:
        """The connection is gone: closed with a code, refused (minus the status), or lost (1006)."""
        if self.socket is not socket:
            return
        self.world.trace(f"{self.name}'s connection ends with {code}")
        if code == 1011 or code in (-404, -400, -403, 1008):
            raise Broken(f"{self.name}'s connection ended with {code}")
        self.socket = None
        self.joined = False
        self._later()

    def leave(self, *, for_good: bool) -> None:
        """Drop the connection, and come back later if not for good."""
        if self.socket is not None:
            self.world.trace(f"{self.name} drops its connection{' for good' if for_good else ''}")
            self.socket.drop()
            self.socket = None
        self.joined = False
        self.stays = not for_good
        if not for_good:
            self._later()

    def _later(self) -> None:
        self.world.clock.after(0.02 + self.random.random() * self.random.choice((0.1, 1.0)), self.connect)

    # --- what it wants

    def say(self) -> None:
        """Say something new, and ask for an answer to it."""
        self.said += 1
        item_id = f"item-{self.name}-{self.said}"
        content = [{"type": "input_text", "text": f"{self.name} says {self.said}"}]
        self._want(
            item_id,
            {
                "type": "conversation.item.create",
                "item": {"type": "message", "role": "user", "id": item_id, "content": content},
            },
        )
        if self.random.random() < 0.9:
            mode = self.random.choice(("reject", "queue", "queue", "interrupt", "interrupt"))
            self._want(f"answer to {item_id}", {"type": "response.create", "in_reply_to": item_id, "if_active": mode})

    def stop(self) -> None:
        """Stop the answer that it reads."""
        told = [answer for answer in self.answers.values() if answer.stage >= 0 and answer.status is None]
        if not told or self.socket is None:
            return
        answer = told[-1]
        event: dict[str, Any] = {"type": "response.cancel", "event_id": f"stop {answer.id}"}
        if self.random.random() < 0.7:
            event["response_id"] = answer.id
        if self.random.random() < 0.6:
            event["seen"] = self.random.randint(0, len(answer.text))
        self.tell(event)

    def meddle(self) -> None:
        """Take an answer out, or shorten it, or change the settings."""
        ended = [answer for answer in self.answers.values() if answer.status is not None and answer.text]
        draw = self.random.random()
        if draw < 0.3:
            instructions = f"rule {self.random.randint(0, 9)}"
            self.tell({"type": "session.update", "event_id": "update", "session": {"instructions": instructions}})
        elif ended and draw < 0.6:
            answer = self.random.choice(ended)
            self.tell({"type": "conversation.item.delete", "event_id": "delete", "item_id": answer.item_id})
        elif ended:
            answer = self.random.choice(ended)
            end = self.random.randint(0, len(answer.text))
            self.tell(
                {
                    "type": "conversation.item.truncate",
                    "event_id": "truncate",
                    "item_id": answer.item_id,
                    "text_end": end,
                }
            )

    def _want(self, name: str, event: dict[str, Any]) -> None:
        self.wishes[name] = Wish(event | {"event_id": name})
        self._ask(name)

    def _ask(self, name: str) -> None:
        """Say it again until it is known to be done."""
        wish = self.wishes.get(name)
        if wish is None:
            return
        if self.joined:
            self.tell(wish.event)
            wish.tries += 1
        self.world.clock.after(1.0 + self.random.random() * 3, lambda: self._ask(name))

    def tell(self, event: dict[str, Any]) -> None:
        if self.socket is not None and self.joined:
            self.world.trace(f"{self.name}: {short(event)}")
            self.socket.send(event)

    # --- what it is told

    def take(self, event: dict[str, Any]) -> None:
        """A frame came."""
        kind = event["type"]
        if kind == "session.created":
            self.joined = True
            self.session_id = event["session"]["id"]
            self.world.trace(f"{self.name} joined, active: {event['active_response']}")
            for name in list(self.wishes):
                self.tell(self.wishes[name].event)
        elif kind == "error":
            self._refused(event["error"])
        elif kind in _STAGES:
            self._tell(kind, event)
        elif kind == "conversation.item.deleted" and event["item_id"] in self.of_item:
            answer = self.of_item[event["item_id"]]
            if answer.status is None:  # it left nothing; else somebody took it out later
                self._advance(answer, _STAGES.index("conversation.item.done"), kind)

    def _refused(self, error: dict[str, Any]) -> None:
        self.world.trace(f"{self.name} is refused: {error['code']} {error['event_id']}")
        wrong = error["code"] == "invalid_value" and error["event_id"] != "truncate"  # it was shortened meanwhile
        if wrong or error["code"] == "internal_error":
            raise Broken(f"{self.name} was told {error}")
        wish = self.wishes.get(error["event_id"] or "")
        if wish is not None and wish.event["type"] == "response.create" and wish.tries > 4:
            del self.wishes[error["event_id"]]  # it is too late for it

    def _tell(self, kind: str, event: dict[str, Any]) -> None:
        item = event.get("item") or {}
        if kind.startswith("conversation.item."):
            answer = self.of_item.get(item["id"])
            self.wishes.pop(item["id"], None)
            if answer is None or event.get("duplicate"):
                if kind == "conversation.item.done" and item.get("response_id"):
                    self._whole(item)
                return
        elif kind == "response.created":
            answer = self._created(event)
            if answer is None:
                return
        else:
            response_id = event["response"]["id"] if kind == "response.done" else event["response_id"]
            answer = self.answers.get(response_id)
            if answer is None or answer.stage < 0:
                raise Broken(f"{self.name} is told of an answer before it began: {event}")
        self._advance(answer, _STAGES.index(kind), kind)
        if item_id := event.get("item_id") or item.get("id"):
            answer.item_id = item_id
            self.of_item[item_id] = answer
        match kind:
            case "response.output_text.delta":
                self._delta(answer, event)
            case "response.output_text.done" if event["text"] != answer.text and self.extensions:
                raise Broken(f"{self.name} holds {answer.text!r} of {answer.id}, the whole is {event['text']!r}")
            case "response.output_text.done":
                answer.text = event["text"]
            case "response.done":
                self._done(answer, event["response"])

    def _created(self, event: dict[str, Any]) -> Answer | None:
        response_id = event["response"]["id"]
        self.wishes.pop(f"answer to {event.get('in_reply_to')}", None)
        if event.get("duplicate"):
            return None
        answer = self.answers.setdefault(response_id, Answer(response_id))
        answer.text = ""  # it is told from its beginning
        return answer

    def _advance(self, answer: Answer, stage: int, kind: str) -> None:
        if stage < answer.stage or (stage == answer.stage and stage != _DELTA):
            raise Broken(f"{self.name} is told {kind} of {answer.id} after {_STAGES[answer.stage]}")
        answer.stage = stage

    def _delta(self, answer: Answer, event: dict[str, Any]) -> None:
        # Told from its beginning it comes from 0, whatever the client held of it before.
        if event["offset"] > len(answer.text):
            raise Broken(f"{self.name} misses text of {answer.id} before {event}, it holds {answer.text!r}")
        if event["offset"] < len(answer.text) and not self.world.takes_back(answer, event):
            raise Broken(f"{self.name} is told {event} and holds {answer.text!r}")
        if event["offset"] < len(answer.text) and not event["delta"] and answer.id in self.world.oracle.older_texts:
            answer.gone.add(event["epoch"])
        if not self.world.may_follow(answer, event):
            raise Broken(f"{self.name} is told {event} in an epoch that was taken back")
        answer.text = answer.text[: event["offset"]] + event["delta"]
        answer.epoch = event["epoch"]

    def _done(self, answer: Answer, response: dict[str, Any]) -> None:
        if (
            answer.status not in (None, "from history", response["status"])
            and answer.id not in self.world.oracle.unended
        ):
            raise Broken(f"{self.name} is told that {answer.id} ended twice: {answer.status}, {response['status']}")
        self.world.trace(f"{self.name} knows that {answer.id} is {response['status']}")
        answer.status = response["status"]
        output = response["output"]
        if answer.status == "completed" and text_of(output[0]) != answer.text:
            raise Broken(f"{self.name} holds {answer.text!r} and the end says {output}")

    def _whole(self, item: dict[str, Any]) -> None:
        """History: an answer as it is stored, out of which no more comes."""
        answer = self.answers.get(item["response_id"])
        if answer is not None and answer.status is None and item["status"] != "in_progress":
            answer.item_id, answer.text = item["id"], text_of(item)
            answer.status = "from history"
