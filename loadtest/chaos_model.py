"""What a client may be told, and what it holds: the guarantees of the protocol, judged event by event. Pure.

A ``Reader`` is one client over all its connections to a session. It applies the offset rule and raises a ``Violation``
on the first event that breaks a promise. What may happen to an answer is in ``Asked``, which all readers of the session
share: text may be taken back only if somebody wanted it cut, or the store lost data.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from loadtest.chaos_texts import Violation, check_marked, check_same

Event = dict[str, Any]

DELTA = "response.output_text.delta"
TEXT_DONE = "response.output_text.done"

#: What is counted.
GOES_ON = "resumes in mid-answer: went on from their offset"
FROM_BEFORE = "resumes in mid-answer: from 0 or before their offset, for the store lost data"
FROM_CUT = "resumes in mid-answer: went on from a cut that was wanted"
TAKE_OVERS = "take-overs that a client was told of"
TAKEN_BACK_BY_CUT = "texts taken back by a cut that was wanted"
TAKEN_BACK_BY_LOSS = "texts taken back, for the store lost data and their owner died"

#: The order of a response's events on one connection: stage -> event -> next stage. A connection that resumes begins at
#: ``told`` (nothing of the text is held) or at ``text``.
ORDER: dict[str, dict[str, str]] = {
    "": {"response.created": "created"},
    "created": {"response.output_item.added": "placed"},
    "placed": {"conversation.item.added": "told"},
    "told": {
        "response.queued": "told",
        "response.migrated": "told",
        "response.content_part.added": "part",
        "response.output_item.done": "item done",  # it ends without any text
    },
    "part": {DELTA: "text", "response.migrated": "part", TEXT_DONE: "text done"},
    "text": {DELTA: "text", "response.migrated": "text", "response.queued": "text", TEXT_DONE: "text done"},
    "text done": {"response.content_part.done": "part done"},
    "part done": {"response.output_item.done": "item done"},
    "item done": {"conversation.item.done": "kept", "conversation.item.deleted": "gone"},
    "kept": {"response.done": "done"},
    "gone": {"response.done": "done"},
    "done": {},
}


@dataclass
class Asked:
    """A message of the person, and what may become of its answer.

    ``expected`` is the whole answer where it is known; else ``words`` is how many marked words it has.
    """

    item_id: str
    text: str
    expected: str | None = None
    words: int | None = None
    #: cuts that somebody asked for: the least and the most code points that may be left; None: all.
    stops: list[tuple[int, int | None]] = field(default_factory=list)
    #: the store lost data while it was made; and a replica died in the same moment
    loss: bool = False
    double_fault: bool = False
    #: kills of a replica since it was asked: each may begin one more making of the text
    kills: int = 0
    #: its answers that anybody was told of
    response_ids: set[str] = field(default_factory=set)


@dataclass
class Answer:
    """One response, as a reader holds it. ``status`` is empty while it runs."""

    asked: Asked
    id: str
    item_id: str = ""
    text: str = ""
    epoch: str = ""
    epochs: list[str] = field(default_factory=list)
    status: str = ""
    #: its whole text was told: only the end is missing
    whole: bool = False

    @property
    def in_the_middle(self) -> bool:
        return bool(self.text) and not self.whole and not self.status


class Reader:
    """One client of a session. ``connect`` for each connection, then ``take`` each event of it."""

    def __init__(self, asked: dict[str, Asked], counts: Counter[str]) -> None:
        self._asked = asked
        self._counts = counts
        self.session_id = ""
        self.answers: dict[str, Answer] = {}
        #: of this connection: the items that were told at the beginning, if it asked for all
        self.history: list[Event] = []
        self._stages: dict[str, str] = {}
        self._items: set[str] = set()
        self._event_ids: set[str] = set()
        self._wants_history = False
        self._created = False
        #: the answer that is resumed, what was held of it, and where the server said that it goes on
        self._resumed: Answer | None = None
        self._promised: int | None = None
        self._in_the_middle = False

    def connect(self, resume: Answer | None = None, *, history: bool = False) -> None:
        """A new connection, with the place in ``resume`` as its resume point."""
        self.history = []
        self._stages = {} if resume is None else {resume.id: "text" if resume.text else "told"}
        self._items, self._event_ids = set(), set()
        self._wants_history, self._created = history, False
        self._resumed, self._promised = resume, None
        self._in_the_middle = resume is not None and resume.in_the_middle

    def answer_to(self, item_id: str) -> Answer | None:
        """The answer to a message, as far as it was told; the last one, if others left nothing."""
        return next((a for a in reversed(self.answers.values()) if a.asked.item_id == item_id), None)

    def stage(self, answer: Answer) -> str:
        """Where the telling of an answer stands on this connection."""
        return self._stages.get(answer.id, "")

    def take(self, event: Event) -> None:
        """Apply the next event. Raises Violation."""
        kind = event["type"]
        if event["event_id"] in self._event_ids:
            raise Violation("repeated", f"the event id of {kind} came before")
        self._event_ids.add(event["event_id"])
        if self._created == (kind == "session.created"):
            raise Violation("order", f"{kind} came {'again' if self._created else 'before session.created'}")
        match kind:
            case "session.created":
                self._take_session(event)
            case "conversation.item.added" | "conversation.item.done" | "conversation.item.deleted":
                self._take_item(kind, event)
            case "response.created":
                self._take_created(event)
            case "response.done":
                self._take_done(event["response"])
            case _ if kind.startswith("response."):
                self._take_part(kind, event)

    # --- events of the session

    def _take_session(self, event: Event) -> None:
        self._created = True
        session_id = event["session"]["id"]
        if self.session_id and session_id != self.session_id:
            raise Violation("wrong", f"session {session_id} in place of {self.session_id}")
        self.session_id = session_id
        active = event["active_response"]
        if self._resumed is not None and active is not None and active["id"] == self._resumed.id:
            self._promised = active["offset"]

    def _take_item(self, kind: str, event: Event) -> None:
        item_id = event["item_id"] if kind == "conversation.item.deleted" else event["item"]["id"]
        for answer in self.answers.values():
            if answer.item_id == item_id and self.stage(answer) not in ("", "done"):
                self._step(answer, kind)
                if kind == "conversation.item.done":
                    check_same(answer.text, _text(event["item"]), kind)
                return
        if kind == "conversation.item.deleted":
            raise Violation("order", f"item {item_id} was deleted, and nobody wanted that")
        if event.get("duplicate"):
            return
        item = event["item"]
        if kind == "conversation.item.added":
            if item_id in self._items:
                raise Violation("duplicate", f"item {item_id} was added twice")
            self._items.add(item_id)
            if self._wants_history and (item["role"] == "user" or item["status"] != "in_progress"):
                self.history.append(item)
        elif item.get("response_id"):
            self._take_past(item)

    def _take_past(self, item: Event) -> None:
        """An answer that ended before this connection came: its item tells all."""
        asked = self._of(item.get("in_reply_to"), item["response_id"])
        answer = self.answers.setdefault(item["response_id"], Answer(asked, item["response_id"]))
        self._replace(answer, _text(item))
        answer.item_id, answer.whole = item["id"], True
        answer.epoch = item["epochs"][-1][0]
        status = (item.get("status_details") or {}).get("type") or item["status"]
        self._stages[answer.id] = "done"
        self._end(answer, status, [item])

    # --- events of a response

    def _of(self, item_id: str | None, response_id: str) -> Asked:
        """What a response answers. There is one answer to a message, unless the first left nothing."""
        asked = self._asked.get(item_id or "")
        if asked is None:
            raise Violation("wrong", f"response {response_id} answers {item_id}, which nobody asked")
        # One that was stopped may have left nothing, and be asked for once more; two that stay are found in the store.
        if asked.response_ids - {response_id} and not asked.stops and not asked.loss:
            raise Violation("duplicate", f"{response_id} answers {item_id}, as {asked.response_ids} did")
        asked.response_ids.add(response_id)
        return asked

    def _step(self, answer: Answer, kind: str) -> None:
        stage = self.stage(answer)
        after = ORDER[stage].get(kind)
        if after is None:
            what = "after response.done" if stage == "done" else f"in stage {stage or 'before response.created'!r}"
            raise Violation("end" if kind == "response.done" else "order", f"{kind} of {answer.id} came {what}")
        self._stages[answer.id] = after

    def _take_created(self, event: Event) -> None:
        response_id = event["response"]["id"]
        asked = self._of(event.get("in_reply_to"), response_id)
        answer = self.answers.setdefault(response_id, Answer(asked, response_id))
        if not event.get("duplicate"):
            self._step(answer, "response.created")

    def _take_part(self, kind: str, event: Event) -> None:
        response_id = event["response_id"]
        answer = self.answers.get(response_id)
        if answer is None:
            raise Violation("order", f"{kind} of {response_id}, whose beginning was not told")
        before = self.stage(answer)
        self._step(answer, kind)
        item_id = event["item"]["id"] if "item" in event else event.get("item_id", answer.item_id)
        if answer.item_id not in ("", item_id):
            raise Violation("mixed", f"{kind} is of item {item_id}, the answer is {answer.item_id}")
        answer.item_id = item_id
        match kind:
            case "response.output_text.delta":
                self._take_delta(answer, event, first=before == "part")
            case "response.migrated":
                self._counts[TAKE_OVERS] += 1
            case "response.output_text.done":
                self._prove_resume(answer, None)
                check_same(answer.text, event["text"], kind)
                answer.whole = True
            case "response.content_part.done":
                check_same(answer.text, event["part"]["text"], kind)
            case "response.output_item.done":
                if before == "told":  # it ends without any text
                    self._replace(answer, "")
                check_same(answer.text, _text(event["item"]), kind)

    def _take_delta(self, answer: Answer, event: Event, *, first: bool) -> None:
        offset, held = event["offset"], answer.text
        if offset > len(held):
            raise Violation("lost", f"{len(held)} code points are here, the delta is at {offset}")
        resumes = self._prove_resume(answer, offset)
        text = held[:offset] + event["delta"]
        if offset < len(held) and not resumes and not first and text.startswith(held):
            raise Violation("repeated", f"{len(held)} code points are here, and the delta tells from {offset} on")
        self._replace(answer, text)
        if event["epoch"] != answer.epoch:
            if event["epoch"] in answer.epochs:
                raise Violation("mixed", f"epoch {event['epoch']} of {answer.id} comes back")
            answer.epoch = event["epoch"]
            answer.epochs.append(answer.epoch)

    def _replace(self, answer: Answer, text: str) -> None:
        """The text as it is now. Taking back what was told needs a reason."""
        if not text.startswith(answer.text):
            if not answer.asked.stops and not answer.asked.double_fault:
                check_same(text, answer.text[: len(text)], f"told anew, of {answer.id}")
                raise Violation("taken back", f"of {len(answer.text)} code points of {answer.id}, {len(text)} are left")
            self._counts[TAKEN_BACK_BY_CUT if answer.asked.stops else TAKEN_BACK_BY_LOSS] += 1
        answer.text = text
        expected = answer.asked.expected
        if expected is not None and not expected.startswith(text):
            check_same(text, expected[: len(text)], f"the text of {answer.id} so far")

    def _prove_resume(self, answer: Answer, offset: int | None) -> bool:
        """Where a resumed answer goes on, by its first delta (None: none came). Whether this was the proof."""
        if self._resumed is not answer:
            return False
        self._resumed = None
        held, asked = len(answer.text), answer.asked
        if self._promised is not None and offset not in (None, self._promised) and not (asked.stops or asked.loss):
            raise Violation("wrong", f"session.created says that {answer.id} goes on at {self._promised}, not {offset}")
        if offset is None or offset == held:
            how = GOES_ON
        elif asked.loss:
            how = FROM_BEFORE
        elif asked.stops:
            how = FROM_CUT
        else:
            raise Violation("repeated", f"{held} code points were held of {answer.id}, it goes on from {offset}")
        if self._in_the_middle:
            self._counts[how] += 1
        return True

    # --- the end

    def _take_done(self, response: Event) -> None:
        answer = self.answers.get(response["id"])
        if answer is None:
            raise Violation("order", f"response.done of {response['id']}, whose beginning was not told")
        gone = self.stage(answer) == "gone"
        self._step(answer, "response.done")
        if gone and response["output"]:
            raise Violation("end", f"the item of {answer.id} was deleted and is in its output")
        if gone:
            self._replace(answer, "")
        self._end(answer, response["status"], response["output"])

    def _end(self, answer: Answer, status: str, output: list[Event]) -> None:
        if answer.status and (answer.status != status):
            raise Violation("end", f"{answer.id} ended {answer.status}, and now {status}")
        answer.status, answer.whole = status, True
        check_same(answer.text, "".join(map(_text, output)), "the output")
        judge_end(answer, [(epoch, start) for item in output for epoch, start in item.get("epochs") or ()])


def judge_end(answer: Answer, chain: list[tuple[str, int]]) -> None:
    """Judge an answer that ended, with its chain of epochs as its item tells it. Raises Violation."""
    asked, length = answer.asked, len(answer.text)
    cut = answer.status == "cancelled"
    if cut and not any(least <= length and (most is None or length <= most) for least, most in asked.stops):
        wanted = asked.stops or "nobody wanted it"
        raise Violation("end", f"{answer.id} was cut to {length} code points; wanted: {wanted}")
    if not cut and answer.status != "completed" and not (asked.double_fault and answer.status == "failed"):
        raise Violation("end", f"{answer.id} ended {answer.status}")
    if asked.expected is not None:
        check_same(answer.text, asked.expected if answer.status == "completed" else asked.expected[:length], answer.id)
    else:
        starts = {start for _, start in chain}
        check_marked(answer.text, whole=asked.words if answer.status == "completed" else None, starts=starts)
    if not chain and not answer.text:
        return
    if not chain or chain[0][1] != 0 or any(not 0 <= start <= length for _, start in chain if not cut):
        raise Violation("mixed", f"the makings of {answer.id} began at {[start for _, start in chain]}")
    if len(chain) > 1 + cut + asked.kills and not asked.loss:
        raise Violation("mixed", f"{answer.id} was made {len(chain)} times, with {asked.kills} replicas killed")
    left = iter([epoch for epoch, _ in chain])
    if not all(epoch in left for epoch in answer.epochs) and not asked.loss:
        raise Violation("mixed", f"epochs of {answer.id} were told that its item does not have, or in another order")


def judge_conversation(said: list[tuple[str, str, str]], items: list[Event], where: str) -> None:
    """Compare the conversation with what it must be: (item id or '' for an answer's, role, text). Raises Violation."""
    ids = [item["id"] for item in items]
    if twice := {item_id for item_id in ids if ids.count(item_id) > 1}:
        raise Violation("duplicate", f"{where}: {sorted(twice)} are there twice")
    answered = [item["in_reply_to"] for item in items if item.get("in_reply_to")]
    if twice := {item_id for item_id in answered if answered.count(item_id) > 1}:
        raise Violation("duplicate", f"{where}: {sorted(twice)} have two answers")
    if len(said) != len(items):
        have = [f"{item['role']} {item['id']}" for item in items]
        raise Violation(
            "lost" if len(items) < len(said) else "duplicate",
            f"{where}: {len(items)} items in place of {len(said)}: {have}",
        )
    for (item_id, role, text), item in zip(said, items, strict=True):
        if item["role"] != role or item_id not in ("", item["id"]):
            raise Violation("wrong", f"{where}: {item['role']} {item['id']} in place of {role} {item_id}")
        check_same(_text(item), text, f"{where}, {role} {item['id']}")


def _text(item: Event) -> str:
    return "".join(part["text"] for part in item["content"])
