"""Which faults befall which turn: drawn by a seed, until as many of each kind were made as are wanted. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

#: What the client sees of its answer when a fault strikes.
State = Literal["idle", "asked", "created", "text", "ending", "done"]
#: Where cuts are placed, and how often: most of them between two deltas.
PLACES: dict[State, int] = {"text": 78, "asked": 6, "created": 5, "ending": 5, "done": 4, "idle": 2}
#: Code points at which a fault in mid-answer strikes, at most; an answer has some more.
MOST_TEXT = 500

Where = Literal["same", "across"]
Pace = Literal["slow", "frozen"]


@dataclass(frozen=True, slots=True)
class Cut:
    """The socket is reset. ``storm`` more connections follow and are reset at once; ``away_s`` before it comes back."""

    state: State
    at: int = 0
    delay_s: float = 0.0
    away_s: float = 0.0
    storm: int = 0


@dataclass(frozen=True, slots=True)
class Stop:
    """``response.cancel``, on the connection that asked or through the other replica. ``seen``: a part of what is held;
    None: left to the server."""

    state: State
    where: Where
    at: int = 0
    seen: float | None = None


@dataclass(frozen=True, slots=True)
class Again:
    """The message and the wish for an answer are sent once more."""

    state: State
    where: Where
    at: int = 0


Strike = Cut | Stop | Again


@dataclass
class TurnPlan:
    """What befalls one turn. ``due`` hands the strikes out; those left over go back to the pool, as does a reader."""

    strikes: list[Strike] = field(default_factory=list)
    reader: Pace | None = None

    @property
    def needs_tab(self) -> bool:
        """Whether another connection, on another replica, has to be there."""
        return self.reader is not None or any(isinstance(s, Stop | Again) and s.where == "across" for s in self.strikes)

    def due(self, state: State, length: int) -> Strike | None:
        """The next strike for this state, with ``length`` code points held; it is taken off the plan."""
        for strike in self.strikes:
            if strike.state == state and (state != "text" or strike.at <= length):
                self.strikes.remove(strike)
                return strike
        return None


@dataclass(frozen=True, slots=True)
class Fates:
    """What befalls the system: how many of each."""

    kills: int = 0
    rolls: int = 0
    redis_restarts: int = 0
    redis_losses: int = 0
    double_faults: int = 0
    storms: int = 0


@dataclass
class Wanted:
    """What befalls the turns: how many of each; each connection of a client's own storm is a cut of its own."""

    cuts: int
    cancels: int
    duplicates: int
    slow: int
    frozen: int


class Pool:
    """The faults that are still to be made, over all clients."""

    def __init__(self, wanted: Wanted) -> None:
        self.left = replace(wanted)
        self._places: list[State] = []
        # A turn has 1.7 cuts on average; the other kinds are spread over the same turns.
        self.expected_turns = max(round(wanted.cuts / 1.7), round(wanted.cancels * 1.3), wanted.duplicates, 1)
        self._turns = 0
        self._others: Callable[[], int] = lambda: 0

    def wait_for(self, left: Callable[[], int]) -> None:
        """Turns without faults follow while ``left`` gives anything."""
        self._others = left

    @property
    def progress(self) -> float:
        """From 0 to 1."""
        return min(self._turns / self.expected_turns, 1.0)

    @property
    def empty(self) -> bool:
        left = self.left
        return left.cuts + left.cancels + left.duplicates + left.slow + left.frozen + self._others() <= 0

    def draw(self, choose: random.Random) -> TurnPlan | None:
        """The next turn's faults; None when all were made."""
        if self.empty:
            return None
        turns_left = max(self.expected_turns - self._turns, 1)
        self._turns += 1
        left, plan = self.left, TurnPlan()
        most = min(choose.choice((0, 1, 1, 2, 2, 2, 4)) or (0 if turns_left > 1 else 1), left.cuts)
        while most > 0:
            cut = _cut(choose, self._place(choose), most - 1)
            plan.strikes.append(cut)
            most -= 1 + cut.storm
            left.cuts -= 1 + cut.storm
        if choose.random() * turns_left < left.cancels:
            left.cancels -= 1
            plan.strikes.append(_stop(choose))
        elif choose.random() * turns_left < left.duplicates:
            # Not in one turn: an answer that left nothing may rightly be made again.
            left.duplicates -= 1
            plan.strikes.append(_again(choose))
        paces: tuple[Pace, ...] = ("slow", "frozen")
        for pace in paces:
            if plan.reader is None and choose.random() * turns_left < getattr(left, pace):
                setattr(left, pace, getattr(left, pace) - 1)
                plan.reader = pace
        plan.strikes.sort(key=lambda strike: strike.at)
        return plan

    def give_back(self, plan: TurnPlan) -> None:
        """The strikes of a turn that ended before they could be made."""
        for strike in plan.strikes:
            match strike:
                case Cut():
                    self.left.cuts += 1 + strike.storm
                    self._places.append(strike.state)
                case Stop():
                    self.left.cancels += 1
                case Again():
                    self.left.duplicates += 1
        plan.strikes.clear()
        if plan.reader is not None:
            setattr(self.left, plan.reader, getattr(self.left, plan.reader) + 1)
            plan.reader = None

    def _place(self, choose: random.Random) -> State:
        """Dealt from a deck, to which a cut that was not made comes back: else those in mid-answer would be too few."""
        if not self._places:
            self._places = [state for state, share in PLACES.items() for _ in range(share)]
            choose.shuffle(self._places)
        return self._places.pop()


def _cut(choose: random.Random, state: State, most_storm: int) -> Cut:
    at = choose.randrange(1, MOST_TEXT) if state == "text" else 0
    # Now and then so long that the answer ends meanwhile.
    away_s = choose.choice((0.0, 0.0, choose.uniform(0, 0.3), choose.uniform(0.3, 1.5), choose.uniform(2, 5)))
    storm = min(choose.randrange(2, 6), most_storm) if choose.random() < 0.1 else 0
    return Cut(state, at, delay_s=choose.choice((0.0, choose.uniform(0, 0.03))), away_s=away_s, storm=max(storm, 0))


def _stop(choose: random.Random) -> Stop:
    state: State = choose.choice(("text", "text", "text", "text", "created", "asked", "ending"))
    at = choose.randrange(1, MOST_TEXT) if state == "text" else 0
    seen = choose.choice((None, 1.0, choose.random()))
    return Stop(state, choose.choice(("same", "across")), at, seen)


def _again(choose: random.Random) -> Again:
    state: State = choose.choice(("asked", "asked", "created", "text", "done"))
    at = choose.randrange(1, MOST_TEXT) if state == "text" else 0
    return Again(state, choose.choice(("same", "across")), at)
