"""The load test itself, in short: it runs, it counts what it did, and it sees a server that lies."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys

import pytest

from loadtest.chaos import Options, halves
from loadtest.chaos_plan import Fates, Wanted

pytestmark = pytest.mark.server


async def chaos(*arguments: str) -> tuple[int, str]:
    """A run as a person starts it: its exit status, and what it printed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loadtest.chaos", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    print(output.decode())
    return process.returncode or 0, output.decode()


QUICK = ("--clients", "8", "--tokens-per-s", "300", "--words", "60")


@pytest.mark.timeout(60)
async def test_a_short_run_holds() -> None:
    """Both modes, all faults that clients can make: every guarantee holds, and all of it was made."""
    status, told = await chaos("--cuts", "30", "--storms", "1", *QUICK)
    assert status == 0, told
    assert "Every guarantee held" in told
    cuts = re.search(r"socket cuts in mid-answer\W+(\d+) of (\d+)", told)
    assert cuts is not None
    assert int(cuts[2]) >= 30
    assert int(cuts[1]) >= 15
    assert re.search(r"answers that ended cancelled\W+[1-9]", told)
    assert re.search(r"resumes in mid-answer: went on from their offset\W+[1-9]", told)


@pytest.mark.timeout(120)
async def test_a_run_with_all_that_befalls_the_system_holds() -> None:
    """A kill, a rolling restart, and both kinds of restart of the store: of a few cuts alone none would follow."""
    fates = ("--kills", "1", "--redis-restarts", "1", "--redis-losses", "1", "--rolls", "1", "--storms", "0")
    status, told = await chaos("--cuts", "20", "--frozen", "0", "--mode", "vary", *fates, *QUICK)
    assert status == 0, told
    assert "Every guarantee held" in told


@pytest.mark.timeout(60)
async def test_ctrl_c_is_no_verdict() -> None:
    """Nobody can take a run that was stopped for one that held; nothing is left running."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loadtest.chaos", "--cuts", "1000", *QUICK),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    told = (await process.stdout.readline()).decode()
    await asyncio.sleep(3.0)
    process.send_signal(signal.SIGINT)
    told += (await process.stdout.read()).decode()
    assert await process.wait() == 130, told
    assert "no verdict" in told
    assert "held" not in told
    assert "Traceback" not in told


def test_both_modes_share_the_faults() -> None:
    """Half each, and none is left out."""
    options = Options(
        seed=1,
        clients=1,
        replicas=2,
        engines=3,
        tokens_per_s=1,
        words=20,
        vary=False,
        wanted=Wanted(cuts=31, cancels=5, duplicates=1, slow=0, frozen=2),
        fates=Fates(kills=5, redis_restarts=3),
    )
    one, two = halves(options, "both")
    assert (one.vary, two.vary) == (False, True)
    assert one.wanted.cuts + two.wanted.cuts == 31
    assert one.fates.kills + two.fates.kills == 5
    assert one.fates.redis_restarts + two.fates.redis_restarts == 3
    assert [half.vary for half in halves(options, "vary")] == [True]
