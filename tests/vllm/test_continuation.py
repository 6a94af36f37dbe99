"""Going on with an answer on real vLLM: exactly as if it had never been cut, wherever text may have been told."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import ANY
from urllib.parse import urlsplit

import pytest

from chat_server import tether
from chat_server.engine.vllm import VllmClient, open_http
from chat_server.errors import EngineError
from chat_server.settings import EngineAddress
from tests.support.server import server_for
from tests.vllm.continuation import ASKED, AT_A_TIME, STOP, Asking, Whole

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

#: Cuts of each answer; drawn anew by each run. `make exact` goes over all of them.
CUTS = 12


@pytest.fixture
async def asking(vllm_engines: tuple[EngineAddress, ...]) -> AsyncIterator[list[Asking]]:
    """Both engines."""
    async with open_http() as http:
        client = VllmClient(http)
        (model,) = await client.models(vllm_engines[0].url)
        yield [Asking(engine.url, client, model.id) for engine in vllm_engines]


@pytest.mark.parametrize("stop", [(), STOP], ids=["no stop string", "a stop string"])
async def test_an_answer_goes_on_exactly_from_any_place(asking: list[Asking], stop: tuple[str, ...]) -> None:
    """Prose, a list, code, Chinese, Japanese, emoji, a table: begun on one engine, gone on with on the other.

    Cut at places to which their text was told, the words that follow are those of the uninterrupted answer.
    """
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    limits = [asyncio.Semaphore(AT_A_TIME) for _ in asking]

    async def at(kind: str, place: int, answer: Whole, cut: int) -> str | None:
        async with limits[place]:
            wrong = await asking[place].differs(answer, cut)
        return wrong and f"{kind} at {cut}: {wrong}"

    begun = [asking[number % 2].whole(asked, stop) for number, asked in enumerate(ASKED.values())]
    cuts = [
        at(kind, 1 - number % 2, answer, cut)
        for number, (kind, answer) in enumerate(zip(ASKED, await asyncio.gather(*begun), strict=True))
        for cut in chance.sample(answer.places, min(CUTS, len(answer.places)))
    ]
    assert [wrong for wrong in await asyncio.gather(*cuts) if wrong] == []


async def test_an_engine_that_is_killed_in_mid_answer_costs_no_word(
    vllm_engines: tuple[EngineAddress, ...], asking: list[Asking], tmp_path: Path
) -> None:
    """Kill -9, through the whole server: at temperature 0 the other engine writes on what the first would have."""
    settings = {"temperature": 0.0, "max_output_tokens": 200}
    async with server_for(tmp_path, vllm_engines) as server:
        async with server.connect(extensions=1) as client:
            whole = await client.turn(ASKED["prose"], **settings)
        try:
            async with server.connect(extensions=1) as client:
                await client.say(ASKED["prose"])
                await client.send("response.create", response=settings)
                await client.until("response.output_text.delta")
                loads = [await engine.client.probe(engine.url) for engine in asking]
                (place,) = [place for place, probe in enumerate(loads) if probe.running]
                os.kill(process_of(asking[place].url), signal.SIGKILL)
                response = (await client.until("response.done"))["response"]
                assert response["engine"] == vllm_engines[1 - place].name
                assert response["status_details"] == whole.response["status_details"], "it ends as the whole one"
                assert client.texts[response["output"][0]["id"]] == whole.text
                assert response["usage"] == {**whole.response["usage"], "input_token_details": ANY}
        finally:
            await both_up(asking)


def process_of(url: str) -> int:
    """The process of the engine that listens there, not the tether that holds it: that one cleans up behind it."""
    port = str(urlsplit(url).port).encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            held = os.fsencode(tether.__file__) in words
            if not held and b"--port" in words and words[words.index(b"--port") + 1] == port:
                return int(folder.name)
    raise AssertionError(f"nobody listens at {url}")


async def both_up(asking: list[Asking]) -> None:
    """The engine that was killed starts again, for the tests that come after."""
    async with asyncio.timeout(600):
        for engine in asking:
            while True:
                with suppress(EngineError):
                    await engine.client.probe(engine.url)
                    break
                await asyncio.sleep(0.5)
