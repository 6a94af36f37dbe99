"""The faults of a run: as many as are wanted, drawn by the seed, each when its moment comes."""

from __future__ import annotations

import random

import pytest

from loadtest.chaos_plan import Again, Cut, Pool, Stop, TurnPlan, Wanted

pytestmark = pytest.mark.pure

WANTED = {"cuts": 300, "cancels": 60, "duplicates": 15, "slow": 6, "frozen": 6}


def drawn(seed: int) -> list[TurnPlan]:
    pool, choose = Pool(Wanted(**WANTED)), random.Random(seed)
    return list(iter(lambda: pool.draw(choose), None))


def test_all_that_is_wanted_is_drawn() -> None:
    """No more, no less, whatever the seed."""
    seed = random.randrange(10**6)
    print("seed", seed)
    plans = drawn(seed)
    strikes = [strike for plan in plans for strike in plan.strikes]
    cuts = [strike for strike in strikes if isinstance(strike, Cut)]
    assert sum(1 + cut.storm for cut in cuts) == 300
    assert sum(isinstance(strike, Stop) for strike in strikes) == 60
    assert sum(isinstance(strike, Again) for strike in strikes) == 15
    assert [sum(plan.reader == pace for plan in plans) for pace in ("slow", "frozen")] == [6, 6]
    assert sum(cut.state == "text" for cut in cuts) > 0.65 * len(cuts), "most cuts are in mid-answer"


def test_the_seed_draws_the_same_again() -> None:
    """A failed run can be repeated."""
    assert drawn(7) == drawn(7) != drawn(8)


def test_what_was_not_made_is_drawn_again() -> None:
    """An answer may end before its faults came."""
    pool = Pool(Wanted(cuts=2, cancels=0, duplicates=0, slow=0, frozen=0))
    plan = pool.draw(random.Random(1))
    assert plan is not None
    while not plan.strikes:
        plan = pool.draw(random.Random(2))
        assert plan is not None
    made = sum(1 + strike.storm for strike in plan.strikes if isinstance(strike, Cut))
    before = pool.left.cuts
    pool.give_back(plan)
    assert pool.left.cuts == before + made
    assert not plan.strikes


def test_most_cuts_are_in_mid_answer_also_if_many_were_not_made() -> None:
    """Those that were drawn for a moment that did not come are drawn again, for such a moment."""
    seed = random.randrange(10**6)
    print("seed", seed)
    pool, choose = Pool(Wanted(cuts=60, cancels=0, duplicates=0, slow=0, frozen=0)), random.Random(seed)
    made: list[str] = []
    while (plan := pool.draw(choose)) is not None:
        for strike in list(plan.strikes):
            assert isinstance(strike, Cut)
            if strike.state != "text" or strike.at < 100:
                plan.strikes.remove(strike)
                made += [strike.state] * (1 + strike.storm)
        pool.give_back(plan)
    assert len(made) == 60
    assert made.count("text") > 0.6 * len(made)


def test_a_reader_that_did_not_come_is_drawn_again() -> None:
    """Its window may not have been opened."""
    pool = Pool(Wanted(cuts=0, cancels=0, duplicates=0, slow=0, frozen=1))
    plan = pool.draw(random.Random(1))
    assert plan is not None
    assert plan.reader == "frozen"
    pool.give_back(plan)
    again = pool.draw(random.Random(1))
    assert again is not None
    assert again.reader == "frozen"


def test_turns_follow_while_others_wait() -> None:
    """A replica is killed only while somebody talks."""
    pool = Pool(Wanted(cuts=0, cancels=0, duplicates=0, slow=0, frozen=0))
    left = [1]
    pool.wait_for(lambda: len(left))
    assert pool.draw(random.Random(1)) == TurnPlan()
    left.clear()
    assert pool.draw(random.Random(1)) is None


def test_a_strike_is_due_once_in_its_state() -> None:
    """In mid-answer when so much of the text is there."""
    plan = TurnPlan([Cut("text", at=10), Stop("created", "same")])
    assert plan.due("text", 9) is None
    assert plan.due("created", 0) == Stop("created", "same")
    assert plan.due("text", 10) == Cut("text", at=10)
    assert plan.due("text", 11) is None
