"""The page's connection is cut in the middle of an answer: it goes on from what it holds, and a Stop is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from chat_server.engine.simulated import Fault, SimulatedOptions, answer_for
from chat_server.settings import Limits
from tests.e2e.page import ChatPage, visit
from tests.support.line import Line
from tests.support.server import RunningServer, running_server
from tests.support.ws import WsClient

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

PACE = SimulatedOptions(tokens_per_s=200.0, first_token_s=0.02, words=40)
#: With characters beyond UTF-16's first plane at its beginning: who counts `.length` resumes at the wrong place.
LONG = "👩🏽‍💻👍 Tell me about lighthouses in 500 words"
ENDLESS = "👩🏽‍💻👍 Tell me about lighthouses in 5000 words"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    async with running_server(tmp_path_factory.mktemp("server"), simulated=PACE) as running:
        yield running


async def until(true: Any, what: str) -> None:
    """Wait until ``true()``; what was told to a page comes to the test a little later."""
    for _ in range(500):
        if true():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"within 10 s: {what}")


async def told_more(chat: ChatPage, sockets: int) -> None:
    """Wait until the page has opened so many sockets and was told some text by the last one."""
    await until(lambda: len(chat.sockets) >= sockets and len(chat.sockets[-1].deltas()) > 3, "text")


def idle(server: RunningServer) -> bool:
    return [engine.engine.running for engine in server.engines] == [0, 0]


async def test_an_answer_that_is_cut_goes_on_from_where_it_was(
    chat: ChatPage, line: Line, browser: Browser, server: RunningServer
) -> None:
    """Each new connection says what the page holds and gets the rest: plain joining of all deltas is the text."""
    await chat.say(LONG)
    await chat.writing()
    for cuts in range(1, 4):
        await told_more(chat, cuts)
        line.cut()
    await expect(chat.facts).to_have_count(1, timeout=20_000)
    await until(lambda: chat.sockets[-1].told[-1]["type"] == "response.done", "the end")
    text = ""
    for number, socket in enumerate(chat.sockets):
        deltas = socket.deltas()
        if number:
            assert socket.query["response_id"] == chat.sockets[0].deltas()[0]["response_id"]
            assert socket.query["epoch"] == deltas[0]["epoch"]
            # The page may have had a little less or more than the test was told of when the line was cut.
            assert int(socket.query["offset"]) == deltas[0]["offset"] > 0
            text = text[: deltas[0]["offset"]]
        for delta in deltas:
            assert delta["offset"] == len(text), "neither lost nor doubled"
            text += delta["delta"]
    assert len(chat.sockets) == 4
    assert text == answer_for([{"role": "user", "content": LONG}])
    await chat.same_in_a_fresh_tab(browser, server.url)


@pytest.mark.parametrize("others", [0, 1])
async def test_an_answer_that_ended_while_the_page_was_away(
    chat: ChatPage, line: Line, browser: Browser, server: RunningServer, others: int
) -> None:
    """Its rest and its facts come, also when others followed it, in the right order and once."""
    await chat.say("Tell me about lighthouses in 200 words")
    await chat.writing()
    line.cut(down=True)
    async with server.connect(session_id=chat.session_id, extensions=1) as client:
        await client.until("response.done")
        for number in range(others):
            await client.turn(f"Another {number}")
    await expect(chat.live).to_have_count(1)
    line.up()
    await expect(chat.facts).to_have_count(1 + others, timeout=20_000)
    await expect(chat.stop).to_be_hidden()
    assert int(chat.sockets[-1].query["offset"]) > 0
    assert chat.sockets[-1].deltas()[0]["offset"] == int(chat.sockets[-1].query["offset"])
    await chat.same_in_a_fresh_tab(browser, server.url)


@asynccontextmanager
async def stopped_elsewhere(chat: ChatPage, line: Line, server: RunningServer) -> AsyncIterator[WsClient]:
    """The page is cut off in mid-answer; another tab, which is given, stopped that at 40 code points of it."""
    await chat.say(ENDLESS)
    await chat.writing()
    line.cut(down=True)
    async with server.connect(session_id=chat.session_id, extensions=1) as other:
        await other.until("response.output_text.delta")
        await other.send("response.cancel", seen=40)
        await other.until("response.done")
        yield other
    line.up()


async def test_text_that_was_taken_back_while_the_page_was_away(
    chat: ChatPage, line: Line, browser: Browser, server: RunningServer
) -> None:
    """Another tab stopped the answer at what it had seen of it: the page gives up what it has more."""
    async with stopped_elsewhere(chat, line, server):
        pass
    await expect(chat.facts).to_contain_text("Stopped", timeout=20_000)
    await chat.same_in_a_fresh_tab(browser, server.url)


async def test_a_session_whose_answer_is_gone_shows_nothing_of_it(
    chat: ChatPage, line: Line, browser: Browser, server: RunningServer
) -> None:
    """The answer was deleted meanwhile: the page does not keep a part of it."""
    async with stopped_elsewhere(chat, line, server) as other:
        await other.send("conversation.item.delete", item_id=other.events[-1]["response"]["output"][0]["id"])
        await other.until("conversation.item.deleted")
    await expect(chat.answers).to_have_count(0, timeout=20_000)
    await expect(chat.asked.get_by_role("button", name="Ask again")).to_be_visible()
    await chat.same_in_a_fresh_tab(browser, server.url)


@pytest.mark.parametrize("swallowed", [True, False], ids=["pressed before the cut", "pressed during the cut"])
async def test_a_stop_outlives_the_cut(
    chat: ChatPage, line: Line, browser: Browser, server: RunningServer, swallowed: bool
) -> None:
    """Stop that did not arrive is sent again, with what was seen when it was pressed; no word follows on the page."""
    await chat.say(ENDLESS)
    await chat.writing()
    if swallowed:
        line.swallow()
        await chat.stop.click()
        line.cut(down=True)
    else:
        line.cut(down=True)
        await expect(chat.trouble).to_be_visible()
        await chat.stop.click()
    await expect(chat.status).to_contain_text("stopped as soon as the connection is there")
    seen = await chat.answers.last.locator(".md").inner_text()
    assert not idle(server)
    line.up()
    await expect(chat.facts).to_contain_text("Stopped", timeout=20_000)
    await until(lambda: idle(server), "the engines are idle")
    assert await chat.answers.last.locator(".md").inner_text() == seen
    [cancel] = [event for event in chat.sockets[-1].sent if event["type"] == "response.cancel"]
    assert cancel["seen"] == int(chat.sockets[-1].query["offset"]) > 0
    await expect(chat.status).to_have_text("")
    await chat.same_in_a_fresh_tab(browser, server.url)
    await chat.ask("And now?")


@pytest.mark.parametrize("arrived", [True, False], ids=["asked", "not asked"])
async def test_a_stop_before_the_answer_was_accepted_is_kept(
    chat: ChatPage, line: Line, server: RunningServer, arrived: bool
) -> None:
    """Whether or not the server had the question when the line was cut: in the end nothing of an answer is there."""
    await chat.ask("Hello")
    line.swallow(sent=not arrived)
    await chat.say(ENDLESS)
    await expect(chat.status).to_have_text("Waiting for the answer")
    if arrived:
        await until(lambda: not idle(server), "an engine works")
    await chat.stop.click()
    line.cut()
    await expect(chat.asked.last).to_contain_text("Stopped before the answer began.", timeout=20_000)
    await expect(chat.asked.last).to_contain_text("Tell me about lighthouses in 5000 words")
    await expect(chat.answers).to_have_count(1)
    await until(lambda: idle(server), "the engines are idle")
    await expect(chat.stop).to_be_hidden()


async def test_an_answer_that_is_not_whole_says_why(browser: Browser, tmp_path: Path) -> None:
    """In words: that it is too long, or what broke it off; also after a reload."""
    limits = Limits(max_output_tokens=60)
    async with running_server(tmp_path, simulated=PACE, limits=limits) as server, visit(browser, server.url) as chat:
        await chat.open()
        await chat.ask(LONG)
        for engine in server.engines:
            fault = Fault("error", after_tokens=20, status=400, message="The engine ran out of memory.", times=None)
            engine.engine.add_fault(fault)
        await chat.ask(LONG)
        for _ in range(2):
            why = chat.facts.locator(".why")
            await expect(why).to_have_count(2)
            await expect(why.first).to_have_text("Cut off: the answer is as long as one may be")
            await expect(why.last).to_contain_text("Broken off: ")
            await expect(why.last).to_contain_text("ran out of memory")
            await chat.page.reload()
