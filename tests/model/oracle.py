"""What must hold in the store after each operation, and of all that is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from chat_server.store import keys
from chat_server.store.messages import ResponseEnded, decode
from tests.model.engines import Engines
from tests.model.network import Link, Wire

#: functions that change nothing of what is looked at here
_READS = frozenset({"watch", "unwatch", "renew", "unwatched", "bind", "answer", "items_last"})


#: so many that left no item are remembered, as in ``lua/_prelude.lua``.
_MOST_ENDED = 30


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass
class Session:
    """A session as it is stored."""

    order: list[str] = field(default_factory=list)
    items: dict[str, dict[str, Any]] = field(default_factory=dict)
    response: dict[str, str] = field(default_factory=dict)
    text: str = ""
    version: int = 0

    @property
    def running(self) -> str | None:
        return self.response.get("id")

    @property
    def queued(self) -> str | None:
        return self.response.get("q_id")


class Oracle:
    """Follows each session, and all answers from their beginning to their end."""

    def __init__(self, wire: Wire, engines: Engines) -> None:
        self._wire = wire
        self._engines = engines
        self.sessions: dict[str, Session] = {}
        #: every text that was ever stored of an answer (the longest), and how those ended that did
        self.texts: dict[str, str] = {}
        self.ended: dict[str, ResponseEnded] = {}
        self.wishes: dict[str, int] = {}
        self.items: dict[str, dict[str, Any]] = {}
        #: the store was put back: what was told may be gone, and all that is made again is made of what is there
        self.lost = False
        #: longer texts that an answer had before that
        self.older_texts: dict[str, list[str]] = {}
        #: answers that somebody took out of the conversation
        self.deleted: set[str] = set()

    # --- the store

    def on_done(self, link: Link, function: str, args: Sequence[Any], reply: Any) -> None:
        """A function was carried out."""
        if isinstance(reply, Exception):
            raise Broken(f"the script {function} failed: {reply}")
        if function in _READS:
            return
        session_id = str(args[0])
        before = self.sessions.get(session_id, Session())
        if function == "commit":
            after = self._with_text(session_id, before)
        else:
            after = self.sessions[session_id] = self.read(session_id)
        if function == "session_restore" and reply[0] == b"ok":  # by the owner of an answer, who knows more
            self.on_other_store(session_id)
            return
        if function == "finish" and reply[0] == b"ok":
            self._on_end(link, before, reply[1])
        if function == "item_delete" and reply[0] == b"ok":
            gone = set(before.order) - set(after.order)
            self.deleted.update(before.items[item_id].get("response_id", "") for item_id in gone)
        if function in ("cancel", "begin"):
            for message in [reply[1]] if function == "cancel" and reply[0] == b"ended" else _messages(reply):
                self._on_queued_end(message)
        self._check(before, after)

    def on_other_store(self, session_id: str) -> None:
        """A session was put back to an older copy, or written again: what follows is made of what is there."""
        self.lost = True
        now = self.sessions[session_id] = self.read(session_id)
        for response_id in filter(None, (now.running, now.queued)):
            self.ended.pop(response_id, None)
            self.wishes.pop(response_id, None)
        if now.running is not None:
            self._forget_text(now.running, now.text)
        self._check(now, now)

    def _forget_text(self, response_id: str, text: str) -> None:
        self.older_texts.setdefault(response_id, []).append(self.texts.get(response_id, ""))
        self.texts[response_id] = text

    def _with_text(self, session_id: str, before: Session) -> Session:
        [text] = self._wire.ask(("GET", keys.session_keys(session_id)[4]))
        after = Session(before.order, before.items, before.response, (text or b"").decode(), before.version)
        self.sessions[session_id] = after
        return after

    def read(self, session_id: str) -> Session:
        """A session as it is now."""
        names = keys.session_keys(session_id)
        version, items, order, response, text = self._wire.ask(
            ("HGET", names[0], "version"),
            ("HGETALL", names[1]),
            ("LRANGE", names[2], 0, -1),
            ("HGETALL", names[3]),
            ("GET", names[4]),
        )
        return Session(
            order=[item_id.decode() for item_id in order],
            items={items[i].decode(): orjson.loads(items[i + 1]) for i in range(0, len(items), 2)},
            response={response[i].decode(): response[i + 1].decode() for i in range(0, len(response), 2)},
            text=(text or b"").decode(),
            version=int(version or 0),
        )

    def _check(self, before: Session, now: Session) -> None:
        if len(now.order) != len(set(now.order)) or set(now.order) != set(now.items):
            raise Broken(f"order and items differ: {now.order} and {sorted(now.items)}")
        made = {now.response.get("item_id"), now.response.get("q_item_id")}
        if left := [id for id, item in now.items.items() if item["status"] == "in_progress" and id not in made]:
            raise Broken(f"nobody makes {left} any more")
        answered = [item["in_reply_to"] for item in now.items.values() if item.get("in_reply_to")]
        if len(answered) != len(set(answered)):
            raise Broken(f"two answers to one text: {answered}")
        said = [text_of(item) for item in now.items.values() if item["role"] == "user"]
        if len(said) != len(set(said)):
            raise Broken(f"one text is there twice: {said}")
        for response_id in (now.running, now.queued):
            if response_id in self.ended:
                raise Broken(f"{response_id} had ended and is there again")
        for gone in {before.running, before.queued} - {now.running, now.queued, None}:
            if gone not in self.ended:
                raise Broken(f"{gone} is gone without an end")
        if before.version and now.version < before.version:
            raise Broken("the version went back")
        for item_id, item in now.items.items():
            self.items[item_id] = item
        if now.running is not None:
            self._check_text(now.running, now.text)
            if "cancel" in now.response:
                self.wishes.setdefault(now.running, int(now.response["cancel"]))

    def _check_text(self, response_id: str, text: str) -> None:
        known = self.texts.get(response_id, "")
        if not text.startswith(known):
            raise Broken(f"the stored text of {response_id} changed from {known!r} to {text!r}")
        if text != known:
            self._check_made(response_id, text)
            self.texts[response_id] = text

    def _check_made(self, response_id: str, text: str) -> None:
        """It is what one attempt wrote, on top of what it was given."""
        attempts = self._engines.attempts_at(response_id)
        if not any(attempt.text.startswith(text) for attempt in attempts):
            raise Broken(f"{response_id} is a mixture: {text!r} of {[attempt.text for attempt in attempts]}")

    def _on_end(self, link: Link, before: Session, message: bytes) -> None:
        ended = decode(message)
        assert isinstance(ended, ResponseEnded)
        known = self.ended.get(ended.response)
        if known is not None:
            if known.version != ended.version and not self.lost:
                raise Broken(f"{ended.response} ended twice")
            return
        if before.running != ended.response:
            raise Broken(f"{ended.response} ended, and {before.running} was running")
        self.ended[ended.response] = ended
        if ended.offset == len(before.text):
            text = before.text + ended.rest
        elif self.lost:  # the text was, and the item has all of it
            left = self.sessions[ended.session].items.get(before.response["item_id"])
            text = text_of(left) if left is not None else ""
        else:
            raise Broken(f"{ended.response} ended at {ended.offset}, and {len(before.text)} were stored")
        outcome = ended.outcome
        if text:
            self._check_made(ended.response, text)
        self.texts[ended.response] = text
        wish = self.wishes.get(ended.response)
        if wish is not None and (outcome.status != "cancelled" or outcome.text_length > wish):
            raise Broken(f"{ended.response} was to be stopped at {wish} and ended {outcome}")
        if outcome.status == "completed":
            whole = [attempt.text for attempt in self._engines.attempts_at(ended.response) if attempt.whole]
            if text not in whole:
                raise Broken(f"{ended.response} is not whole: {text!r} of {whole}")
        item = self.sessions[ended.session].items.get(before.response["item_id"])
        if outcome.keeps_item != (item is not None):
            raise Broken(f"{ended.response} left {item} and said {outcome}")
        if item is not None and text_of(item) != text[: outcome.text_length]:
            raise Broken(f"{ended.response} left {text_of(item)!r} and not {text[: outcome.text_length]!r}")
        if (link.name, ended.response) in self._engines.streams:
            raise Broken(f"{ended.response} ended while its engine still worked")

    def _on_queued_end(self, message: bytes) -> None:
        ended = decode(message)
        if isinstance(ended, ResponseEnded) and ended.response not in self.ended:
            self.ended[ended.response] = ended

    def is_forgotten(self, response_id: str) -> bool:
        """Whether the store knows nothing of an ended response any more: one of many that left no item."""
        bare = [ended.response for ended in self.ended.values() if not ended.outcome.keeps_item]
        return response_id in bare[:-_MOST_ENDED]

    # --- what is told

    def on_told(self, event: dict[str, Any]) -> None:
        """A frame is written to a socket."""
        kind = event["type"]
        if kind == "response.output_text.delta":
            response_id, end = event["response_id"], event["offset"] + len(event["delta"])
            stored = [self.texts.get(response_id, ""), *self.older_texts.get(response_id, ())]
            if all(text[event["offset"] : end] != event["delta"] for text in stored):
                raise Broken(f"told and not stored: {event}, stored is {stored!r}")
        elif kind in ("conversation.item.added", "conversation.item.done"):
            if event["item"]["id"] not in self.items:
                raise Broken(f"told and not stored: {event}")
        elif kind == "response.done":
            ended = self.ended.get(event["response"]["id"])
            if (ended is None or ended.outcome.status != event["response"]["status"]) and not self.lost:
                raise Broken(f"told as ended: {event}; stored is {ended}")


def _messages(reply: Any) -> Sequence[bytes]:
    return reply[1] if reply[0] in (b"ok", b"queued") and isinstance(reply[1], list) else ()


def text_of(item: dict[str, Any]) -> str:
    return "".join(part["text"] for part in item["content"])
