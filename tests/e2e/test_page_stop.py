"""A Stop that comes after the answer's end: what the person had not seen is taken off, as if it had come in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from chat_server.engine.simulated import SimulatedOptions, answer_for
from chat_server.settings import Limits
from tests.e2e.page import NETWORK, ChatPage, visit
from tests.support.line import Line, line_to
from tests.support.prompts import prompt
from tests.support.server import RunningServer, running_server

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

PACE = SimulatedOptions(tokens_per_s=200.0, first_token_s=0.02, words=40)
ASKED = "👩🏽‍💻👍 Tell me about lighthouses in 200 words"
WHOLE = answer_for([{"role": "user", "content": ASKED}])

#: A line on which a Stop takes until the answer's end to reach the server, and what follows it waits behind it.
SLOW = """() => {
  const send = WebSocket.prototype.send;
  let waiting = null;
  WebSocket.prototype.send = function (data) {
    if (!waiting && JSON.parse(data).type === 'response.cancel') {
      waiting = [];
      this.addEventListener('message', (event) => {
        if (JSON.parse(event.data).type !== 'response.done') return;
        WebSocket.prototype.send = send;
        for (const waits of waiting) this.send(waits);
      });
    }
    if (waiting) waiting.push(data);
    else send.call(this, data);
  };
}"""

#: How long the answer's text is in the page; from then on the longest that it had is remembered.
WATCH = """async () => {
  await new Promise((shown) => setTimeout(shown, 400)); // what was told before is in the page by then
  const answer = document.querySelector('.message.assistant .md');
  const look = () => { window.longest = Math.max(window.longest ?? 0, answer.textContent.length); };
  new MutationObserver(look).observe(answer, { subtree: true, childList: true, characterData: true });
  look();
  return window.longest;
}"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    async with running_server(tmp_path_factory.mktemp("server"), simulated=PACE) as running:
        yield running


async def ended(chat: ChatPage, server: RunningServer, *, others: int = 0) -> None:
    """Wait for the answer's end as another tab hears it, which then says so many more things."""
    async with server.connect(session_id=chat.session_id, history="all", extensions=1) as client:
        if client.events[0]["active_response"] is not None:
            await client.until("response.done")
        for number in range(others):
            await client.turn(f"Another {number}")


async def stored(chat: ChatPage, server: RunningServer) -> list[dict[str, Any]]:
    """The session's items as the server has them."""
    async with asyncio.timeout(10), server.connect(session_id=chat.session_id, history="all") as client:
        return [(await client.until("conversation.item.done"))["item"] for _ in range(client.events[0]["item_count"])]


async def stop(chat: ChatPage) -> int:
    """Press Stop. Returns how long the text is that is seen then."""
    await chat.stop.click()
    return int(await chat.page.evaluate(WATCH))


async def never_more(chat: ChatPage, length: int) -> None:
    """The page shows what was seen when Stop was pressed, and has never shown more since."""
    shown = await chat.page.evaluate("document.querySelector('.message.assistant .md').textContent.length")
    longest = await chat.page.evaluate("window.longest")
    # Markdown that is cut off is shown in other characters than markdown that is still being written.
    assert length - 10 < shown < length + 10
    assert longest < length + 10


async def test_a_stop_of_an_answer_that_ended_meanwhile_cuts_it(
    chat: ChatPage, line: Line, browser: Browser, server: RunningServer
) -> None:
    """Pressed while the line was down: the page and the store keep what was seen then, and the next prompt has that."""
    await chat.say(ASKED)
    await chat.writing()
    line.cut(down=True)
    await expect(chat.trouble).to_be_visible()
    length = await stop(chat)
    await ended(chat, server)
    line.up()
    await expect(chat.facts.locator(".why")).to_have_text("Stopped", timeout=20_000)
    await expect(chat.status).to_have_text("")
    await kept(chat, browser, server, length)


async def test_a_stop_that_the_end_overtakes_cuts_the_answer(
    chat: ChatPage, browser: Browser, server: RunningServer
) -> None:
    """The same on a line that is slow and holds: no word follows on the page, and nobody reads of an error."""
    await chat.page.evaluate(SLOW)
    await chat.say(ASKED)
    await chat.writing()
    length = await stop(chat)
    await expect(chat.status).to_have_text("Stopping")
    await expect(chat.facts.locator(".why")).to_have_text("Stopped")
    await expect(chat.status).to_have_text("")
    await kept(chat, browser, server, length)
    await expect(chat.trouble).to_be_hidden()


async def kept(chat: ChatPage, browser: Browser, server: RunningServer, length: int) -> None:
    """The page shows what was seen when Stop was pressed, the store has the same, and so has the next prompt."""
    await never_more(chat, length)
    [cut] = [event for event in chat.sockets[-1].sent if event["type"] == "conversation.item.truncate"]
    _, answer = await stored(chat, server)
    assert 0 < cut["text_end"] < len(WHOLE)
    assert answer["content"][0]["text"] == WHOLE[: cut["text_end"]]
    await chat.same_in_a_fresh_tab(browser, server.url)
    shown = await chat.page.locator("#messages").inner_text()
    await chat.page.reload()
    await expect(chat.facts).to_have_count(1)
    assert await chat.page.locator("#messages").inner_text() == shown
    await chat.ask("And now?")
    asked = prompt(("user", ASKED), ("assistant", WHOLE[: cut["text_end"]]), ("user", "And now?"))
    assert (await stored(chat, server))[-1]["content"][0]["text"] == answer_for(asked, PACE.words)


async def test_a_stop_before_anything_was_seen_leaves_nothing(
    chat: ChatPage, line: Line, browser: Browser, server: RunningServer
) -> None:
    """The whole answer was made and stored unheard: it is deleted, and can be asked for again."""
    line.swallow(sent=False)
    await chat.say("Hello")
    await expect(chat.status).to_have_text("Waiting for the answer")
    while len(items := await stored(chat, server)) < 2 or items[1]["status"] != "completed":
        await asyncio.sleep(0.02)
    await chat.stop.click()
    line.cut()
    await expect(chat.asked).to_contain_text("Stopped before the answer began.", timeout=20_000)
    await expect(chat.answers).to_have_count(0)
    assert len(await stored(chat, server)) == 1
    await chat.asked.get_by_role("button", name="Ask again").click()
    await expect(chat.facts).to_have_count(1)
    await chat.same_in_a_fresh_tab(browser, server.url)


async def test_an_answer_that_somebody_went_on_from_stays_whole(
    chat: ChatPage, line: Line, browser: Browser, server: RunningServer
) -> None:
    """Another tab read it to its end and asked on: to cut it now would change what that was about."""
    await chat.say(ASKED)
    await chat.writing()
    line.cut(down=True)
    await expect(chat.trouble).to_be_visible()
    await chat.stop.click()
    await ended(chat, server, others=1)
    line.up()
    await expect(chat.facts).to_have_count(2, timeout=20_000)
    await expect(chat.status).to_have_text("")
    await expect(chat.stop).to_be_hidden()
    assert (await stored(chat, server))[1]["content"][0]["text"] == WHOLE
    await chat.same_in_a_fresh_tab(browser, server.url)


async def test_a_cut_that_is_lost_with_the_connection_is_asked_for_again(
    chat: ChatPage, line: Line, browser: Browser, server: RunningServer
) -> None:
    """The line swallows all that the page says, and breaks once the page has heard the end."""
    await chat.say(ASKED)
    await chat.writing()
    line.swallow(told=False)
    length = await stop(chat)
    await expect(chat.facts).to_have_count(1)
    await expect(chat.status).to_have_text("Stopping")
    line.cut()
    await expect(chat.facts.locator(".why")).to_have_text("Stopped", timeout=20_000)
    await kept(chat, browser, server, length)


async def test_a_cut_in_another_tab_is_seen_in_this_one(chat: ChatPage, server: RunningServer) -> None:
    """At once, with why the answer is not whole; a reload changes nothing."""
    await chat.ask(ASKED)
    async with server.connect(session_id=chat.session_id) as client:
        await client.send("conversation.item.truncate", item_id=(await stored(chat, server))[1]["id"], text_end=20)
        await client.until("conversation.item.truncated")
    await expect(chat.facts.locator(".why")).to_have_text("Stopped")
    shown = await chat.page.locator("#messages").inner_text()
    await chat.page.reload()
    await expect(chat.facts).to_have_count(1)
    assert await chat.page.locator("#messages").inner_text() == shown


async def test_a_stop_of_an_answer_that_was_left_alone_too_long(browser: Browser, tmp_path: Path) -> None:
    """The server cancelled it, for nobody was there: what it wrote until then, unseen, is taken off too."""
    async with (
        running_server(tmp_path, simulated=PACE, limits=Limits(resume_window_s=1.0)) as server,
        line_to(server.url) as line,
        visit(browser, line.url) as chat,
    ):
        chat.expected = NETWORK
        await chat.open()
        await chat.say("Tell me about lighthouses in 5000 words")
        await chat.writing()
        line.cut(down=True)
        await expect(chat.trouble).to_be_visible()
        length = await stop(chat)
        async with asyncio.timeout(10):
            while any(engine.engine.running for engine in server.engines):
                await asyncio.sleep(0.05)
        line.up()
        await expect(chat.facts.locator(".why")).to_have_text("Stopped", timeout=20_000)
        await expect(chat.status).to_have_text("")
        await never_more(chat, length)
        await chat.same_in_a_fresh_tab(browser, server.url)
