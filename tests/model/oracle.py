"""What must hold in the store after each operation, and of all that is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from chat_server.store import keys
from chat_server.store.messages import ResponseEnded, decode
from tests.model.engines import Engines
from tests.model.network import Link, Wire
from tests.model.scheduler import Clock

#: functions that change nothing of what is looked at here
_READS = frozenset({"watch", "unwatch", "renew", "unwatched", "bind", "answer", "items_last"})

#: of functions whose caller says which version it knows, the argument that says so
_CLAIMS = {
    "item_add": 8,
    "item_replace": 8,
    "item_delete": 7,
    "begin": 16,
    "finish": 13,
    "cancel": 6,
    "attempt": 8,
    "hand_over": 6,
}
#: what is counted of what the functions say
_COUNTED = {
    ("hand_over", b"ok"): "hand-overs",
    ("cancel", b"wished"): "stops",
    ("cancel", b"ended"): "stops in the queue",
    ("finish", b"cancelled"): "ends that a stop came before",
    ("commit", b"refused"): "owners refused",
    ("commit", b"short"): "texts written whole",
    ("attempt", b"ok"): "attempts",
}
#: after so many seconds of an unbroken lease no look at it that is still to be acted on can have been before them.
_LEASED_S = 12.0
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


@dataclass
class Facts:
    """What is known of the answers of a session: it only grows, but for what a store loses with all who knew it."""

    #: the text of each, as far as it was stored
    texts: dict[str, str] = field(default_factory=dict)
    ended: dict[str, ResponseEnded] = field(default_factory=dict)
    #: where it is to be cut, by who wanted it stopped
    wishes: dict[str, int] = field(default_factory=dict)
    #: answers that somebody took out of the conversation
    deleted: set[str] = field(default_factory=set)

    def copy(self) -> Facts:
        return Facts(dict(self.texts), dict(self.ended), dict(self.wishes), set(self.deleted))


@dataclass(frozen=True)
class Past:
    """A session at one version, and what was known then."""

    session: Session
    facts: Facts


@dataclass(frozen=True)
class Witness:
    """A replica that knows what the store lost, up to a version: it has to write that again."""

    replica: str
    version: int
    #: it makes the answer that runs, so it knows all of its text
    is_owner: bool
    #: it has heard that somebody wants that answer stopped
    knows_wish: bool = False


@dataclass
class Loss:
    """A session that the store lost changes of, until a witness wrote them again."""

    witnesses: list[Witness]
    deadline: float

    @property
    def floor(self) -> Witness:
        return max(self.witnesses, key=lambda witness: (witness.version, witness.is_owner))


class Oracle:
    """Follows each session, and all answers from their beginning to their end.

    ``is_there`` says whether a replica can write again what it knows: it is not killed, stopped or cut off.
    ``leased_s`` says for how long its lease has held without a gap.
    """

    def __init__(
        self,
        wire: Wire,
        engines: Engines,
        clock: Clock,
        is_there: Callable[[str], bool],
        leased_s: Callable[[str], float],
    ) -> None:
        self._wire = wire
        self._engines = engines
        self._clock = clock
        self._is_there = is_there
        self._leased_s = leased_s
        self.counts: Counter[str] = Counter()
        #: as they are stored
        self.sessions: dict[str, Session] = {}
        self.history: dict[str, dict[int, Past]] = {}
        self._facts: dict[str, Facts] = {}
        self._session_of: dict[str, str] = {}
        self.items: dict[str, dict[str, Any]] = {}
        #: sessions that the store holds an older copy of than somebody knows
        self.losses: dict[str, Loss] = {}
        #: answers whose text has to grow again to what was stored of it, each with the replica that alone has that text
        #: (none: somebody wrote it again)
        self._regrows: dict[str, str] = {}
        #: what was taken back, as nobody was left who knew it: texts, ends, answers
        self.older_texts: dict[str, list[str]] = {}
        self.unended: set[str] = set()
        #: answers without an item, which are not written again
        self.forgotten: set[str] = set()

    def facts(self, response_id: str) -> Facts:
        """What is known of the answers beside this one."""
        return self._facts.setdefault(self._session_of.get(response_id, ""), Facts())

    def ended(self, response_id: str) -> ResponseEnded | None:
        return self.facts(response_id).ended.get(response_id)

    def text(self, response_id: str) -> str:
        return self.facts(response_id).texts.get(response_id, "")

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
        self._check_claim(function, args, before, after)
        if function == "take_over" and after.version != before.version:
            self._check_taken(link, str(args[7]), before)
        if function == "session_restore" and reply[0] == b"ok":
            self._on_written_again(link, session_id, before, after)
            return
        if session_id in self.losses and not self._outlives(session_id, function, before, after):
            return
        self._facts.setdefault(session_id, Facts())
        for response_id in filter(None, (after.running, after.queued)):
            self._session_of[response_id] = session_id
            self.facts(response_id).texts.setdefault(response_id, "")
        if function == "finish" and reply[0] == b"ok":
            self._on_end(link, before, reply[1])
        if function == "item_delete" and reply[0] == b"ok":
            gone = set(before.order) - set(after.order)
            self._facts[session_id].deleted.update(before.items[item_id].get("response_id", "") for item_id in gone)
        if function in ("cancel", "begin"):
            for message in [reply[1]] if function == "cancel" and reply[0] == b"ended" else _messages(reply):
                self._on_queued_end(message)
        self._count(function, args, reply)
        self._check(session_id, before, after)
        history, facts = self.history.setdefault(session_id, {}), self._facts[session_id]
        if function == "begin" and len(changes := _messages(reply)) > 1:
            # Two changes in one step: who misses the message of the second knows what is between them.
            ended = decode(changes[0])
            assert isinstance(ended, ResponseEnded)
            between = _without_queued(after, str(args[6]), ended.version)
            history[between.version] = Past(between, facts.copy())
        history[after.version] = Past(after, facts.copy())

    def _count(self, function: str, args: Sequence[Any], reply: Any) -> None:
        kind = reply[0] if isinstance(reply, list) else reply
        if function == "take_over" and kind == b"ok":
            self.counts[
                {"replica_lost": "take-overs", "replica_drained": "taken when left"}.get(args[7], "begun late")
            ] += 1
        elif function == "begin" and kind in (b"ok", b"queued"):
            self.counts["answers begun" if kind == b"ok" else "answers queued"] += 1
        elif (function, kind) in _COUNTED:
            self.counts[_COUNTED[function, kind]] += 1

    @staticmethod
    def _check_claim(function: str, args: Sequence[Any], before: Session, after: Session) -> None:
        """Who knows more than the store holds must not write on top of that."""
        claims = _CLAIMS.get(function)
        if claims is not None and after.version != before.version and int(args[claims]) > before.version:
            raise Broken(f"{function} by who knows {args[claims]}, on top of {before.version}")

    def _check_taken(self, link: Link, reason: str, before: Session) -> None:
        """Nobody takes an answer from a replica that is known to live."""
        owner = before.response["replica"]
        if reason == "replica_lost" and owner != link.name and self._leased_s(owner) > _LEASED_S:
            raise Broken(f"{link.name} took {before.running} from {owner}, whose lease had held for long")

    # --- what it loses

    def put_back(self, session_id: str, witnesses: list[Witness], deadline: float) -> None:
        """A session was put back to an older copy; ``deadline`` for the witnesses to write again what they know."""
        before = self.sessions[session_id]
        now = self.sessions[session_id] = self.read(session_id)
        if (now.version, now.text, now.response) == (before.version, before.text, before.response):
            self.counts["put-backs that lost nothing"] += 1
            return
        know_more = [w for w in witnesses if w.version > now.version or (w.is_owner and w.version == now.version)]
        if not know_more:
            self.counts["put-backs without a witness"] += 1
            self._go_back_to_stored(session_id, now)
            return
        self.counts["put-backs with a witness"] += 1
        loss = self.losses[session_id] = Loss(know_more, deadline)
        self._clock.at(deadline + 0.001, self.look_at_losses)
        self._go_back_to(session_id, loss)

    def _go_back_to(self, session_id: str, loss: Loss) -> None:
        """What the best witness knows is not lost; what came after that is."""
        floor, now = loss.floor, self.sessions[session_id]
        same = floor.version == now.version
        text = None if floor.is_owner else now.text if same else ""
        wish = floor.knows_wish or (same and "cancel" in now.response)
        self._go_back(session_id, floor.version, text, keeps_wish=wish)
        if same:  # only text was lost: its owner goes on with it
            del self.losses[session_id]
            self._catch_up(now, only=floor.replica)

    def _go_back_to_stored(self, session_id: str, now: Session) -> None:
        self._go_back(session_id, now.version, now.text, keeps_wish="cancel" in now.response)
        if now.running is not None and "cancel" in now.response:  # whoever knew of a shorter one is gone
            self._facts[session_id].wishes[now.running] = int(now.response["cancel"])

    def _go_back(self, session_id: str, version: int, text: str | None, *, keeps_wish: bool) -> None:
        """What is known of a session is what was known at a version, or was written in it.

        The running answer had that ``text`` (None: all of it). A wish to stop it that is not in the store, and that
        nobody at work has heard of, is gone; it was never answered.
        """
        past, known = self.history[session_id][version], self._facts[session_id]
        facts = self._facts[session_id] = past.facts.copy()
        running = past.session.running
        if running is not None:
            most = max(facts.texts[running], known.texts.get(running, ""), key=len)
            facts.texts[running] = most if text is None else text
            if not keeps_wish:
                facts.wishes.pop(running, None)
        for response_id, had in known.texts.items():
            if had != facts.texts.get(response_id):
                self.older_texts.setdefault(response_id, []).append(had)
        self.unended.update(known.ended.keys() - facts.ended.keys())

    def _catch_up(self, now: Session, *, only: str = "") -> None:
        """The running answer's text may be shorter than it was: it has to grow to the same."""
        if now.running is not None:
            self._regrows[now.running] = only
            self._check_text(now.running, now.text)

    def _on_written_again(self, link: Link, session_id: str, before: Session, now: Session) -> None:
        """Somebody who knew more than the store wrote that: it must be what was stored under its version."""
        self.counts["written again"] += 1
        past = self.history[session_id].get(now.version)
        if past is None or now.version <= before.version:
            raise Broken(f"{link.name} wrote {session_id} again as {now.version}, over {before.version}")
        was = past.session
        if (now.order, now.items) != (was.order, was.items):
            raise Broken(f"{link.name} wrote {now.order}: {now.items} again, it was {was.order}: {was.items}")
        for name in ("id", "item_id", "token", "q_id", "q_item_id", "q_token"):
            if now.response.get(name) != was.response.get(name):
                raise Broken(f"{link.name} wrote {now.response} again, it was {was.response}")
        loss = self.losses.get(session_id)
        if loss is None or now.version > loss.floor.version:
            self._go_back(
                session_id, now.version, None, keeps_wish="cancel" in now.response
            )  # rather forward: it was cut off, and knows more
        if loss is None or now.version >= loss.floor.version:
            self.losses.pop(session_id, None)
            self._catch_up(now)
        [left] = self._wire.ask(("LRANGE", keys.session_keys(session_id)[7], 0, -1))
        bare = {id for id, ended in self._facts[session_id].ended.items() if not ended.outcome.keeps_item}
        self.forgotten.update(id for id in bare if not any(f'"{id}"'.encode() in item for item in left))

    def _outlives(self, session_id: str, function: str, before: Session, after: Session) -> bool:
        """Whether an operation is to be looked at as any other while a loss waits to be written again."""
        if after.version == before.version:
            if after.running in self._facts[session_id].texts:  # it may be told
                self._catch_up(after)
            return False
        # By a replica that knew nothing of the loss: what was lost stays so (see the limits on the decision's page).
        self.counts["written over by who knew nothing"] += 1
        self.counts[f"written over: {function}"] += 1
        del self.losses[session_id]
        self._go_back_to_stored(session_id, before)
        return True

    def look_at_losses(self) -> None:
        """A witness that is not there any more writes nothing again; one that is must have, in time.

        To be called whenever one goes.
        """
        for session_id, loss in list(self.losses.items()):
            there = [witness for witness in loss.witnesses if self._is_there(witness.replica)]
            if len(there) < len(loss.witnesses):
                self.counts["witnesses lost"] += 1
                loss.witnesses = there
                now = self.sessions[session_id]
                if there and loss.floor.version >= now.version:
                    self._go_back_to(session_id, loss)
                else:
                    del self.losses[session_id]
                    self._go_back_to_stored(session_id, now)
            elif self._clock.now > loss.deadline:
                raise Broken(f"{loss.floor} did not write again what the store lost of {session_id}")
        for response_id, only in list(self._regrows.items()):
            if only and not self._is_there(only):  # what it had told is gone with it
                del self._regrows[response_id]
                session_id = self._session_of[response_id]
                if session_id not in self.losses and self.sessions[session_id].running == response_id:
                    self.counts["witnesses lost"] += 1
                    self._go_back_to_stored(session_id, self.sessions[session_id])

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

    def _check(self, session_id: str, before: Session, now: Session) -> None:
        facts = self._facts[session_id]
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
            if response_id in facts.ended:
                raise Broken(f"{response_id} had ended and is there again")
        for gone in {before.running, before.queued} - {now.running, now.queued, None}:
            if gone not in facts.ended:
                raise Broken(f"{gone} is gone without an end")
        if before.version and now.version < before.version:
            raise Broken("the version went back")
        for item_id, item in now.items.items():
            self.items[item_id] = item
        if now.running is not None:
            self._check_text(now.running, now.text)
            if "cancel" in now.response:
                facts.wishes.setdefault(now.running, int(now.response["cancel"]))

    def _check_text(self, response_id: str, text: str) -> None:
        known = self.text(response_id)
        if response_id in self._regrows and known.startswith(text):
            return
        if not text.startswith(known):
            raise Broken(f"the stored text of {response_id} changed from {known!r} to {text!r}")
        self._regrows.pop(response_id, None)
        if text != known:
            self._check_made(response_id, text)
            self.facts(response_id).texts[response_id] = text

    def _check_made(self, response_id: str, text: str) -> None:
        """It is what one attempt wrote, on top of what it was given."""
        attempts = self._engines.attempts_at(response_id)
        if not any(attempt.text.startswith(text) for attempt in attempts):
            raise Broken(f"{response_id} is a mixture: {text!r} of {[attempt.text for attempt in attempts]}")

    def _on_end(self, link: Link, before: Session, message: bytes) -> None:
        ended = decode(message)
        assert isinstance(ended, ResponseEnded)
        facts = self.facts(ended.response)
        known = facts.ended.get(ended.response)
        if known is not None:
            if known.version != ended.version:
                raise Broken(f"{ended.response} ended twice")
            return
        if before.running != ended.response:
            raise Broken(f"{ended.response} ended, and {before.running} was running")
        facts.ended[ended.response] = ended
        outcome = ended.outcome
        self.counts[f"answers {outcome.status}"] += 1
        if ended.offset == len(before.text):
            text = before.text + ended.rest
        elif had := [text for text in self._known_texts(ended.response) if len(text) >= ended.offset]:
            text = had[0][: ended.offset] + ended.rest  # it ends with what its owner knows
        else:
            raise Broken(f"{ended.response} ended at {ended.offset}, and {len(before.text)} were stored")
        if not text.startswith(self.text(ended.response)):
            raise Broken(f"{ended.response} ended as {text!r}, and was {self.text(ended.response)!r}")
        if text:
            self._check_made(ended.response, text)
        facts.texts[ended.response] = text
        wish = facts.wishes.get(ended.response)
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

    def _known_texts(self, response_id: str) -> list[str]:
        """What an owner may know of an answer that the store lost text of."""
        if response_id not in self._regrows and response_id not in self.older_texts:
            return []
        return [self.text(response_id), *self.older_texts.get(response_id, ())]

    def _on_queued_end(self, message: bytes) -> None:
        ended = decode(message)
        if isinstance(ended, ResponseEnded):
            self.facts(ended.response).ended.setdefault(ended.response, ended)

    def has_no_end(self, response_id: str) -> bool:
        """Whether the store knows nothing of a response (any more): it was taken out, is one of many that left no item,
        or was lost with all who knew it.
        """
        facts = self.facts(response_id)
        bare = [ended.response for ended in facts.ended.values() if not ended.outcome.keeps_item]
        known = response_id in facts.texts or response_id in facts.ended
        return (
            not known
            or response_id in self.forgotten
            or response_id in facts.deleted
            or response_id in bare[:-_MOST_ENDED]
        )

    # --- what is told

    def on_told(self, event: dict[str, Any]) -> None:
        """A frame is written to a socket."""
        kind = event["type"]
        if kind == "response.output_text.delta":
            response_id, end = event["response_id"], event["offset"] + len(event["delta"])
            stored = [self.text(response_id), *self.older_texts.get(response_id, ())]
            if all(text[event["offset"] : end] != event["delta"] for text in stored):
                raise Broken(f"told and not stored: {event}, stored is {stored!r}")
        elif kind in ("conversation.item.added", "conversation.item.done"):
            if event["item"]["id"] not in self.items:
                raise Broken(f"told and not stored: {event}")
        elif kind == "response.done":
            response_id = event["response"]["id"]
            ended = self.ended(response_id)
            if (
                ended is None or ended.outcome.status != event["response"]["status"]
            ) and response_id not in self.unended:
                raise Broken(f"told as ended: {event}; stored is {ended}")


def _without_queued(session: Session, item_id: str, version: int) -> Session:
    """A session before its queued answer was begun."""
    order = [one for one in session.order if one != item_id]
    items = {id: item for id, item in session.items.items() if id != item_id}
    response = {name: value for name, value in session.response.items() if not name.startswith("q_")}
    return Session(order, items, response, session.text, version)


def _messages(reply: Any) -> Sequence[bytes]:
    return reply[1] if reply[0] in (b"ok", b"queued") and isinstance(reply[1], list) else ()


def text_of(item: dict[str, Any]) -> str:
    return "".join(part["text"] for part in item["content"])
