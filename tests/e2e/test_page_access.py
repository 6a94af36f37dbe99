"""The chat page for everybody: phone, dark colours, keyboard alone, screen reader, input methods, every script."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from chat_server.engine.simulated import SimulatedOptions
from tests.e2e.page import ChatPage, visit
from tests.support.server import RunningServer, running_server

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

PACE = SimulatedOptions(tokens_per_s=300.0, first_token_s=0.02, words=40)
LONG = "Tell me about lighthouses in 400 words"
PHONE = {"viewport": {"width": 375, "height": 667}, "has_touch": True, "is_mobile": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    async with running_server(tmp_path_factory.mktemp("server"), simulated=PACE, simulate=2) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def chat(browser: Browser, server: RunningServer) -> AsyncIterator[ChatPage]:
    """A fresh page, connected."""
    async with visit(browser, server.url) as page:
        await page.open()
        yield page


async def test_a_phone_shows_everything_without_scrolling_sideways(browser: Browser, server: RunningServer) -> None:
    """At 375 px nothing is wider than the screen: long words, code and tables included."""
    async with visit(browser, server.url, **PHONE) as chat:
        await chat.open()
        await chat.ask("w" * 300)
        await chat.ask("Show me everything in 400 words")
        widths = await chat.page.evaluate(
            "[document.documentElement.scrollWidth, ...[...document.querySelectorAll('.message, .md > *, .dock > *')]"
            ".map((element) => Math.ceil(element.getBoundingClientRect().right))]"
        )
        assert max(widths) <= 375
        for control in (chat.field, chat.send, chat.new_chat):
            box = await control.bounding_box()
            assert box is not None and box["y"] >= 0 and box["y"] + box["height"] <= 667
            assert box["height"] >= 36


async def test_dark_colours_by_system_and_by_choice(browser: Browser, server: RunningServer) -> None:
    """The page follows the system until the person chooses; a choice outlives a reload."""
    async with visit(browser, server.url, color_scheme="dark") as chat:
        await chat.open()
        assert await brightness(chat) < 60
        await chat.page.get_by_role("button", name="Light colours").click()
        assert await brightness(chat) > 200
        await chat.page.reload()
        assert await brightness(chat) > 200
        await expect(chat.page.get_by_role("button", name="Dark colours")).to_be_visible()


async def brightness(chat: ChatPage) -> float:
    """0 (black) to 255 (white), of the page's background."""
    colour = await chat.page.evaluate("getComputedStyle(document.body).backgroundColor")
    parts = [float(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    return sum(parts) / 3


async def test_the_keyboard_is_enough(chat: ChatPage) -> None:
    """Write two lines, send, stop, ask again and begin a new chat without a mouse."""
    keyboard = chat.page.keyboard
    await expect(chat.field).to_be_focused()
    await keyboard.type("Line one")
    await keyboard.press("Shift+Enter")
    await keyboard.type("line two, in 5000 words")
    await keyboard.press("Enter")
    assert await chat.asked.locator(".bubble").inner_text() == "Line one\nline two, in 5000 words"
    await chat.writing()
    await keyboard.press("Escape")
    await expect(chat.facts).to_contain_text("Stopped")
    await expect(chat.field).to_be_focused()
    for _ in range(100):  # past all that can be used in the answer
        await keyboard.press("Shift+Tab")
        if await chat.new_chat.evaluate("(button) => button === document.activeElement"):
            break
    await expect(chat.new_chat).to_be_focused()
    outline = await chat.new_chat.evaluate("(button) => getComputedStyle(button).outlineStyle")
    assert outline != "none"
    await keyboard.press("Enter")
    await expect(chat.asked).to_have_count(0)
    await expect(chat.field).to_be_focused()


async def test_enter_does_not_send_while_an_input_method_composes(chat: ChatPage) -> None:
    """Enter that chooses a Chinese or Japanese word must not send half a sentence."""
    await chat.field.fill("ni hao")
    taken = await chat.field.evaluate(
        "(field) => !field.dispatchEvent(new KeyboardEvent('keydown', "
        "{key: 'Enter', isComposing: true, bubbles: true, cancelable: true}))"
    )
    assert taken is False
    await expect(chat.field).to_have_value("ni hao")
    await expect(chat.asked).to_have_count(0)


async def test_a_screen_reader_hears_whole_answers(chat: ChatPage) -> None:
    """While an answer is written nothing of it is read out; when it is whole, all of it is, once."""
    log = chat.page.get_by_role("log", name="Conversation")
    spoken = chat.page.get_by_role("log", name="Finished answers")
    await expect(log).to_have_attribute("aria-live", "off")
    await expect(spoken).to_have_attribute("aria-live", "polite")
    await chat.say("Tell me about code in 300 words")
    await chat.writing()
    await expect(spoken).to_have_text("")
    await expect(chat.facts).to_have_count(1)
    await expect(spoken).to_contain_text("You wrote: “Tell me about code in 300 words”")
    await expect(spoken).to_contain_text("def greet(name: str) -> str:")
    await expect(spoken.get_by_role("button")).to_have_count(0)


async def test_everything_that_can_be_used_has_a_name(chat: ChatPage) -> None:
    """Buttons, fields and regions have names, and headings tell who speaks."""
    await chat.ask("Show me everything in 400 words")
    unnamed = await chat.page.evaluate(
        "[...document.querySelectorAll('button, input, textarea, a[href]')]"
        ".filter((element) => element.checkVisibility())"
        ".filter((element) => !element.innerText.trim() && !element.ariaLabel && !element.labels?.length)"
        ".map((element) => element.outerHTML)"
    )
    assert unnamed == []
    await expect(chat.page.get_by_role("main")).to_have_count(1)
    await expect(chat.page.get_by_role("banner")).to_have_count(1)
    headings = chat.page.get_by_role("heading", level=2)
    await expect(headings).to_have_text(["You said", "Answer"])


async def test_each_paragraph_runs_in_the_direction_of_its_script(chat: ChatPage) -> None:
    """Arabic stands at the right, English at the left, code always left to right."""
    answer = await chat.ask("مرحبا بالعالم")
    await expect(answer).to_be_visible()
    direction = "(element) => getComputedStyle(element).direction"
    assert await chat.asked.locator(".bubble").evaluate(direction) == "rtl"
    assert await answer.locator(".md > p").first.evaluate(direction) == "ltr"
    await chat.field.fill("שלום")
    assert await chat.field.evaluate(direction) == "rtl"


async def test_less_motion_if_asked(browser: Browser, server: RunningServer) -> None:
    """Nothing moves by itself for who asked the system for that."""
    async with visit(browser, server.url, reduced_motion="reduce") as chat:
        await chat.open()
        await chat.say(LONG)
        await chat.writing()
        assert await chat.page.evaluate("document.getAnimations().length") == 0


async def test_the_end_is_followed_only_while_the_reader_is_there(chat: ChatPage) -> None:
    """Who scrolls up to read is left alone while the answer grows; one button leads back to the end."""
    await chat.ask("Show me everything in 400 words")
    await chat.say(LONG)
    await chat.writing()
    log = chat.page.locator("#log")
    away = "(log) => Math.round(log.scrollHeight - log.clientHeight - log.scrollTop)"
    assert await log.evaluate(away) <= 8
    await log.hover()
    await chat.page.mouse.wheel(0, -400)
    latest = chat.page.get_by_role("button", name="Latest")
    await expect(latest).to_be_visible()
    top = await log.evaluate("(log) => log.scrollTop")
    height = await log.evaluate("(log) => log.scrollHeight")
    await chat.page.wait_for_timeout(400)
    assert await log.evaluate("(log) => log.scrollHeight") > height
    assert abs(await log.evaluate("(log) => log.scrollTop") - top) <= 1
    await latest.click()
    await expect(latest).to_be_hidden()
    await expect(chat.facts).to_have_count(2)
    assert await log.evaluate(away) <= 8
