"""A person uses the chat page, in real Chromium, on the server with simulated engines."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from chat_server.engine.simulated import SimulatedOptions
from chat_server.settings import Limits
from tests.e2e.page import ChatPage, visit
from tests.support.server import RunningServer, running_server

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

#: Fast, yet an answer of 400 words takes some seconds: long enough to be met in the middle on a busy machine.
PACE = SimulatedOptions(tokens_per_s=300.0, first_token_s=0.02, words=40, block_size=16)
LONG = "Tell me about lighthouses in 400 words"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    folder, limits = tmp_path_factory.mktemp("server"), Limits(max_message_bytes=1000)
    async with running_server(folder, simulated=PACE, simulate=2, limits=limits) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def chat(browser: Browser, server: RunningServer) -> AsyncIterator[ChatPage]:
    """A fresh page, connected."""
    async with visit(browser, server.url) as page:
        await page.open()
        yield page


async def test_an_answer_streams_in(chat: ChatPage) -> None:
    """The text grows while the engine writes, and then stands still with what it cost below."""
    await chat.say(LONG)
    first = second = await chat.writing()
    assert await chat.status.inner_text() == "Writing"
    while second == first:  # fails if the answer ends before
        second = await chat.writing()
    assert len(second) > len(first) > 0
    await expect(chat.facts).to_have_count(1)
    await expect(chat.live).to_have_count(0)
    await expect(chat.status).to_have_text("")
    await expect(chat.answers.last).to_contain_text("You wrote: “Tell me about lighthouses in 400 words” 👩🏽‍💻")


async def test_the_second_turn_remembers_the_first(chat: ChatPage) -> None:
    """The engine got the whole conversation: it tells how many messages came before and what the first one was."""
    await chat.ask("My name is Ada")
    answer = await chat.ask("What is my name?")
    await expect(answer).to_contain_text("Before it came 2 messages; the first was “My name is Ada”.")


async def test_engine_and_cached_tokens_are_shown(chat: ChatPage) -> None:
    """Below each answer stand the engine and the prompt tokens from its cache; both turns went to one engine."""
    await chat.ask("Hello, I would like to talk about the sea and all that swims in it")
    await chat.ask("Go on")
    engines = await chat.facts.locator(".engine").all_inner_texts()
    assert re.fullmatch("engine-[12]", engines[0]) and engines[0] == engines[1]
    counts = []
    for text in await chat.facts.locator(".cache").all_inner_texts():
        match = re.fullmatch(r"(\d+) of (\d+) prompt tokens from the cache", text.strip())
        assert match, text
        counts.append((int(match[1]), int(match[2])))
    assert counts[0][0] == 0 < counts[1][0] < counts[1][1]
    await expect(chat.facts.last.locator(".first")).to_have_text(re.compile(r"first word after \d+ ms"))


async def test_a_reload_keeps_the_conversation(chat: ChatPage) -> None:
    """After a reload the same messages stand there, with their facts, and the conversation goes on."""
    await chat.ask("Remember the number 4711")
    before = await chat.page.locator("#messages").inner_text()
    await chat.page.reload()
    await expect(chat.facts).to_have_count(1)
    assert await chat.page.locator("#messages").inner_text() == before
    await expect(await chat.ask("Which number?")).to_contain_text("Before it came 2 messages")


async def test_a_reload_in_mid_answer_goes_on(chat: ChatPage, browser: Browser) -> None:
    """The answer runs on while the page is away; the page shows it from its beginning to its end."""
    await chat.say("Tell me about lighthouses in 900 words")
    before = await chat.writing()
    await chat.page.reload()
    again = await chat.writing()
    assert again.startswith(before[:40])
    await expect(chat.stop).to_be_visible()
    await expect(chat.facts).to_have_count(1, timeout=25_000)
    async with visit(browser, chat.url) as other:
        await other.open(await chat.page.evaluate("location.hash"))
        await expect(other.facts).to_have_count(1)
        assert await other.answers.inner_text() == await chat.answers.inner_text()


async def test_two_tabs_show_the_same(chat: ChatPage, browser: Browser) -> None:
    """What is said in one tab, and its answer, appears in the other one by itself."""
    await chat.ask("One")
    async with visit(browser, chat.url) as other:
        await other.open(await chat.page.evaluate("location.hash"))
        await expect(other.facts).to_have_count(1)
        await chat.ask("Two")
        await expect(other.facts).to_have_count(2)
        await expect(other.asked.last).to_contain_text("Two")
        assert await other.answers.last.inner_text() == await chat.answers.last.inner_text()


async def test_stop_stops_the_engine(chat: ChatPage, server: RunningServer) -> None:
    """Stop ends the answer at the engine too, keeps what is there, says so, and the next message is answered."""
    await chat.say("Tell me about lighthouses in 5000 words")
    await chat.writing()
    await chat.stop.click()
    await expect(chat.facts).to_contain_text("Stopped")
    assert [engine.engine.running for engine in server.engines] == [0, 0]
    kept = await chat.answers.last.locator(".md").inner_text()
    await expect(chat.field).to_be_focused()
    await chat.ask("And now?")
    assert await chat.answers.first.locator(".md").inner_text() == kept


async def test_new_chat_and_back(chat: ChatPage) -> None:
    """New chat begins an empty conversation; the browser's Back leads to the old one."""
    await chat.ask("The first conversation")
    old = await chat.page.evaluate("location.hash")
    await chat.new_chat.click()
    await expect(chat.asked).to_have_count(0)
    await expect(chat.field).to_be_focused()
    await expect(await chat.ask("The second one")).to_contain_text("It is the first message of our conversation.")
    assert await chat.page.evaluate("location.hash") != old
    await chat.page.go_back()
    await expect(chat.asked).to_have_count(1)
    await expect(chat.asked).to_contain_text("The first conversation")


async def test_an_example_and_the_last_conversation_are_one_click_away(chat: ChatPage) -> None:
    """The empty page offers examples, and later the way back to the last conversation."""
    await chat.page.get_by_role("group", name="Examples").get_by_role("button").first.click()
    await expect(chat.facts).to_have_count(1)
    asked = await chat.asked.inner_text()
    await chat.page.goto("about:blank")
    await chat.open()
    await expect(chat.asked).to_have_count(0)
    await chat.page.get_by_role("button", name="Continue your last conversation").click()
    await expect(chat.facts).to_have_count(1)
    assert await chat.asked.inner_text() == asked


async def test_markdown_is_shown_and_code_can_be_copied(chat: ChatPage) -> None:
    """Lists, tables, headings, links and code are what they should be; the copy button copies the code alone."""
    await chat.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer = await chat.ask("Show me everything in 400 words")
    for selector in ("ul > li > em", "ol > li", "h5", "blockquote", "table td[align=right]", "strong", "code"):
        await expect(answer.locator(selector).first).to_be_visible()
    link = answer.get_by_role("link", name="link").first
    await expect(link).to_have_attribute("href", "https://example.com/a?b=1&c=2")
    await expect(link).to_have_attribute("rel", "noopener noreferrer")
    await expect(link).to_have_attribute("target", "_blank")
    await answer.get_by_role("button", name="Copy python code").first.click()
    await expect(answer.locator(".copy-code").first).to_have_text("Copied")
    copied = await chat.page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("def greet(name: str) -> str:\n")
    assert copied.rstrip().endswith('return f"Hello, {name}!\\n"')


async def test_text_of_people_and_models_is_no_markup(chat: ChatPage) -> None:
    """HTML, scripts, pictures and script links in a message and in its answer do nothing; the text is shown."""
    evil = (
        '<img src=x onerror="window.hacked=1"><script>window.hacked=2</script> [a](javascript:window.hacked=3) '
        "![p](http://evil.invalid/leak.png)"
    )
    answer = await chat.ask(evil)
    assert await chat.asked.locator(".bubble").inner_text() == evil
    await expect(answer).to_contain_text('<img src=x onerror="window.hacked=1">')
    for message in (chat.asked, answer):
        await expect(message.locator("img, script, iframe, object, form, [onerror], [style]")).to_have_count(0)
    await expect(answer.locator("a[href^='javascript']")).to_have_count(0)
    assert await chat.page.evaluate("window.hacked") is None


async def test_a_message_that_is_too_long_comes_back(chat: ChatPage) -> None:
    """The server refuses it; the person reads why and has the text to shorten it."""
    text = "a lot of words " * 100
    await chat.field.fill(text)
    await chat.send.click()
    await expect(chat.trouble).to_be_visible()
    await expect(chat.field).to_have_value(text.strip())
    await expect(chat.asked).to_have_count(0)
    await chat.page.get_by_role("button", name="Close this message").click()
    await expect(chat.trouble).to_be_hidden()
    await chat.ask("Shorter")
    await expect(chat.trouble).to_be_hidden()
