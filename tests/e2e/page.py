"""The chat page in the system's Chromium, as tests drive it.

The page may not complain: an error on its console, a blocked load or a request to another host fails the test that
caused it. What a test expects to see there it names beforehand.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from playwright.async_api import Browser, ConsoleMessage, Locator, Page, Request, WebSocket, async_playwright, expect

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
INSTALL = "apt-get update && apt-get install -y --no-install-recommends chromium fonts-noto-color-emoji fonts-noto-cjk"
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

#: Milliseconds in which a page must show what is expected; it takes a fraction of it on an idle machine.
PATIENCE_MS = 10_000

#: What Chromium writes by itself when a server refuses or is gone. Tests of just that expect it.
NETWORK = r"Failed to load resource|WebSocket connection to .* failed"


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """The system's Chromium. Fails with the command that installs it if it is missing."""
    program = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    if program is None:
        raise AssertionError(f"These tests need Chromium. Install it, as root: {INSTALL}")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        try:
            yield browser
        finally:
            await browser.close()


class PageSocket:
    """One WebSocket of the page: the query that opened it, and all events in both directions."""

    def __init__(self, socket: WebSocket) -> None:
        self.query = dict(parse_qsl(urlsplit(socket.url).query, keep_blank_values=True))
        self.told: list[dict[str, Any]] = []
        self.sent: list[dict[str, Any]] = []
        socket.on("framereceived", lambda frame: self.told.append(json.loads(frame)))
        socket.on("framesent", lambda frame: self.sent.append(json.loads(frame)))

    def deltas(self) -> list[dict[str, Any]]:
        return [event for event in self.told if event["type"] == "response.output_text.delta"]


class ChatPage:
    """One tab. ``requests`` are all addresses that it asked for, ``sockets`` all that it opened."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.requests: list[str] = []
        self.sockets: list[PageSocket] = []
        #: what the page may complain of from now on, as a regular expression
        self.expected: str | None = None
        self._complaints: list[str] = []
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self._complaints.append(f"uncaught: {error}"))
        page.on("request", self._asked)
        page.on("websocket", lambda socket: self.sockets.append(PageSocket(socket)))
        self.field = page.get_by_label("Message", exact=True)
        self.send = page.get_by_role("button", name="Send")
        self.stop = page.get_by_role("button", name="Stop the answer")
        self.new_chat = page.get_by_role("button", name="New chat").first
        self.status = page.locator("#status-text")
        self.trouble = page.locator("#trouble")
        self.asked = page.locator(".message.user")
        self.answers = page.locator(".message.assistant")
        self.live = page.locator(".message.assistant.live")
        self.facts = page.locator(".message.assistant .facts")

    async def open(self, fragment: str = "") -> None:
        """Load the page and wait until it is connected."""
        await self.page.goto(self.url + "/" + fragment)
        await expect(self.page.locator("#model")).to_be_visible()

    async def say(self, text: str) -> None:
        await self.field.fill(text)
        await self.field.press("Enter")

    async def ask(self, text: str) -> Locator:
        """Say something and wait for the whole answer."""
        before = await self.facts.count()
        await self.say(text)
        await expect(self.facts).to_have_count(before + 1, timeout=PATIENCE_MS)
        return self.answers.last

    async def writing(self) -> str:
        """Wait until an answer is being written and has some text; that text."""
        # Not `expect`: that looks once a second in the end, and an answer may be over by then.
        await self.live.filter(has_text="You wrote:").wait_for(timeout=PATIENCE_MS)
        return await self.live.locator(".md").inner_text()

    @property
    def session_id(self) -> str:
        return self.page.url.partition("#session=")[2]

    async def same_in_a_fresh_tab(self, browser: Browser, url: str) -> None:
        """What the page shows is what the server at ``url`` has: a tab that was never cut shows the same."""
        async with visit(browser, url) as other:
            await other.open(f"#session={self.session_id}")
            await expect(other.facts).to_have_count(await self.facts.count())
            messages = "#messages"
            assert await other.page.locator(messages).inner_text() == await self.page.locator(messages).inner_text()

    def quiet(self) -> None:
        """Fail if the page complained of anything but what was expected, or asked another host for anything."""
        assert self._complaints == []
        home = urlsplit(self.url).netloc
        assert [url for url in self.requests if urlsplit(url).netloc != home] == []

    def _heard(self, message: ConsoleMessage) -> None:
        expected = self.expected is not None and re.search(self.expected, message.text)
        if message.type in ("error", "warning") and not expected:
            self._complaints.append(message.text)

    def _asked(self, request: Request) -> None:
        if not request.url.startswith("data:"):
            self.requests.append(request.url)


@asynccontextmanager
async def visit(browser: Browser, url: str, **context: Any) -> AsyncIterator[ChatPage]:
    """A fresh browser profile on the page at ``url``; at the end the page must not have complained."""
    profile = await browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **context})
    try:
        chat = ChatPage(await profile.new_page(), url)
        yield chat
        chat.quiet()
    finally:
        await profile.close()
