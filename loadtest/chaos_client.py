"""One client of a session over all its connections: it connects, resumes, is cut, and has each event judged."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from loadtest.chaos_audit import Audit
from loadtest.chaos_line import Line, Lost, Refused, Unreachable
from loadtest.chaos_model import DELTA, Answer, Asked, Event, Reader
from loadtest.chaos_report import DROPPED, RESUME, Tally
from loadtest.chaos_texts import Violation
from loadtest.chaos_world import LOST_S, Replica, World

#: seconds of silence after which a connection counts as stuck: a server that has nothing to say sends heartbeats.
SILENCE_S = 20.0
#: seconds in which some replica must take a connection.
CONNECT_S = 30.0
#: seconds by which a client hears later than the store writes, and a loss may be larger than it is meant to be.
LOSS_SLACK_S = 0.5
#: events that are kept to be shown when something goes wrong.
TRACED = 60


@dataclass
class Scene:
    """What all clients of a run share."""

    world: World
    audit: Audit
    tally: Tally
    #: the store is being restarted, or was a moment ago: connections have to live through it
    restarting: bool = False
    #: when it was back last; None while it is away
    back_at: float | None = None
    #: a moment in which something befell the system, by the clock: no latency is measured over it
    shaken_at: float = 0.0
    #: the times at which the store lost its last second: a session that was made just then may be gone
    losses: list[float] = field(default_factory=list)
    #: until then a connection may be asked to come back (1012), by the clock: a kill, a roll or a loss still shows
    unsettled_until: float = 0.0

    def lost_session(self, made_at: float) -> bool:
        """Whether the store may have lost a session of which a client was first told at this time."""
        return any(at - LOST_S - LOSS_SLACK_S <= made_at <= at + LOSS_SLACK_S for at in self.losses)


@dataclass(slots=True)
class Place:
    """Where a connection goes, and as which start of that replica."""

    replica: Replica
    id: str


class SessionGone(Exception):
    """The store lost the session."""


@dataclass
class Client:
    """``connect``, then ``next`` until it gives None: the connection is gone, and ``connect`` again."""

    scene: Scene
    name: str
    asked: dict[str, Asked]
    choose: random.Random
    session_id: str = ""
    #: when the session was made, by the clock
    session_at: float = 0.0
    small_buffer: bool = False
    #: being dropped is the reader's own fault
    frozen: bool = False
    #: the replica that makes its answer was killed: it waits for another one
    bereaved: bool = False
    line: Line | None = None
    trace: deque[str] = field(default_factory=lambda: deque(maxlen=TRACED))

    def __post_init__(self) -> None:
        self.reader = Reader(self.asked, self.scene.tally.counts)
        self.place: Place | None = None
        self._resume: tuple[float, Answer, int] | None = None
        #: of this connection: nothing came yet; it is open; its replica said that it goes; we sent something after that
        self._stage: Literal["new", "open", "draining", "spoke"] = "new"

    def note(self, what: str) -> None:
        """A line for the trace."""
        self.trace.append(f"{time.monotonic():.3f} {self.name}: {what}")

    # --- connections

    async def connect(
        self, *, resume: Answer | None = None, history: bool = False, apart: Replica | None = None
    ) -> None:
        """Connect to some replica, not ``apart``; with the resume point of an answer. Raises Violation, SessionGone."""
        query: dict[str, Any] = {"extensions": "1"}
        if self.session_id:
            query["session_id"] = self.session_id
        if resume is not None:
            query |= {"response_id": resume.id, "epoch": resume.epoch, "offset": len(resume.text)}
        if history:
            query["history"] = "all"
        deadline = time.monotonic() + CONNECT_S
        others = [replica for replica in self.scene.world.replicas if replica is not apart]
        while True:
            replica = self.choose.choice(others)
            started, place = time.monotonic(), Place(replica, replica.id)
            try:
                self.line = await Line.open(replica.ws_url, query, small_buffer=self.small_buffer)
                break
            except Unreachable as error:
                self.note(f"x {replica.process.name}: {error}")
                if replica.up and place.id == replica.id:
                    self.scene.tally.counts["connects that broke, though the replica ran"] += 1
            except Refused as refusal:
                self.note(f"x {replica.process.name}: {refusal}")
                self._judge_refusal(refusal)
            if time.monotonic() > deadline:
                raise Violation("stuck", f"no replica took a connection within {CONNECT_S:.0f} s")
            await asyncio.sleep(self.choose.uniform(0.02, 0.2))
        self.place, self._stage = place, "new"
        self.reader.connect(resume, history=history)
        what = f" at {len(resume.text)} of {resume.id}, epoch {resume.epoch or 'none'}" if resume else ""
        self.note(f"= connected to {replica.process.name}{what}{', history' if history else ''}")
        self._resume = (started, resume, len(resume.text)) if resume is not None and resume.in_the_middle else None

    def _judge_refusal(self, refusal: Refused) -> None:
        if refusal.status == 404 and self.scene.lost_session(self.session_at):
            raise SessionGone
        if refusal.status != 503:
            raise Violation("refused", f"a connection to {self.session_id or 'a new session'}: {refusal}")
        self.scene.tally.counts[f"connects refused for now, {refusal.code}"] += 1

    def cut(self, state: str) -> None:
        """Break the connection by a reset."""
        if self.line is not None:
            self.scene.tally.cuts[state] += 1
            self.note(f"x cut, {state}")
            self.line.cut()
            self.line = None

    async def leave(self) -> None:
        if self.line is not None:
            line, self.line = self.line, None
            await line.close()

    # --- events

    async def send(self, type: str, **fields: Any) -> None:
        if self.line is not None:
            self.note(f"> {type} {_brief(fields)}")
            if self._stage == "draining":
                self._stage = "spoke"
            await self.line.send(type, **fields)

    async def next(self) -> Event | None:
        """The next event, judged; None: the connection is gone. Raises Violation."""
        line = self.line
        if line is None:
            return None
        try:
            event = await line.recv(SILENCE_S)
        except Lost as lost:
            if line is self.line:
                self.line = None
            self._judge_loss(line, lost)
            return None
        except TimeoutError:
            raise Violation("stuck", f"nothing came for {SILENCE_S:.0f} s, not even a heartbeat") from None
        self.note(f"< {event['type']} {_brief(event)}")
        self.reader.take(event)
        self._measure(event)
        if event["type"] == "session.created":
            self._stage = "open"
            self.session_at = self.session_at if self.session_id else time.monotonic()
            self.session_id = self.reader.session_id
        elif event["type"] == "server.draining":
            self._stage = "draining"
        elif event["type"] == "response.done":
            self.scene.audit.ended.setdefault(event["response"]["id"], time.monotonic())
        return event

    def _judge_loss(self, line: Line, lost: Lost) -> None:
        """A connection that we did not cut needs a reason to end."""
        self.note(f"x {lost}")
        place, scene = self.place, self.scene
        if line.was_cut or place is None:
            return
        if place.id in place.replica.stopped:
            self._judge_leaving(place, lost)
            return
        if place.id != place.replica.id or not place.replica.up:
            return  # it was killed
        if self.frozen and lost.code in (1013, None):  # the code is lost where the connection is broken off
            scene.tally.counts[DROPPED] += 1
            return
        if lost.code == 1008 and scene.lost_session(self.session_at):
            raise SessionGone  # it was let in, and then the store did not know the session
        scene.tally.counts[f"connections that the server ended, {lost.code or 'without a word'}"] += 1
        if scene.restarting:
            raise Violation("refused", f"a restart of Redis ended a connection: {lost}")
        # 1012: it missed a message and asks the client to come back.
        if lost.code != 1012 or time.monotonic() > scene.unsettled_until:
            raise Violation("refused", f"the server ended a connection: {lost}")

    def _judge_leaving(self, place: Place, lost: Lost) -> None:
        """A replica that is told to stop says so, and then asks to come back."""
        self.scene.tally.counts["connections that a rolling restart ended"] += 1
        if self._stage == "new" or self.small_buffer:
            return  # it was just let in, or reads too late
        # What is sent to a process that has ended breaks the connection, and a code that was on its way is lost.
        if self._stage == "open" or (lost.code != 1012 and not (lost.code is None and self._stage == "spoke")):
            said = "without a word" if self._stage == "open" else "after server.draining"
            raise Violation("refused", f"{place.replica.process.name} stopped, and a connection ended {said}: {lost}")

    def _measure(self, event: Event) -> None:
        if self._resume is None or event["type"] not in (DELTA, "response.output_text.done"):
            return
        started, answer, held = self._resume
        if event["response_id"] == answer.id and (len(answer.text) > held or event["type"] != DELTA):
            self._resume = None
            if self.scene.shaken_at < started and not answer.asked.stops and not self.bereaved:
                self.scene.tally.latencies[RESUME].append(time.monotonic() - started)


def _brief(event: Event) -> str:
    """An event in a few words; texts here are made up by the engines."""
    words = []
    if "delta" in event:
        words.append(f"{event['offset']}+{len(event['delta'])} {event['delta'][:30]!r} {event['epoch'][:14]}")
    inner = [value for name in ("response", "item") if isinstance(value := event.get(name), dict)]
    words += [f"{value.get('id')} {value.get('status', '')}" for value in inner]
    names = ["item_id", "in_reply_to", "seen", "state", "duplicate", "active_response", "error", "t"]
    if "delta" not in event:
        names.append("response_id")
    words += [f"{name}={event[name]}" for name in names if event.get(name) is not None]
    return " ".join(words)
