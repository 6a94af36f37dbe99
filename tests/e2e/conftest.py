"""One Chromium for all tests of a module (it takes longer to start than most of them take), and pages in it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from tests.e2e.modules import empty_page
from tests.e2e.page import NETWORK, PATIENCE_MS, ChatPage, chromium, visit
from tests.support.line import Line, line_to
from tests.support.server import RunningServer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    async with chromium() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def page(browser: Browser) -> AsyncIterator[Page]:
    """An empty page that finds our modules under ``/static/``; there is no server."""
    async with empty_page(browser) as page:
        yield page


@pytest_asyncio.fixture(loop_scope="module")
async def line(server: RunningServer) -> AsyncIterator[Line]:
    async with line_to(server.url) as line:
        yield line


@pytest_asyncio.fixture(loop_scope="module")
async def chat(browser: Browser, line: Line) -> AsyncIterator[ChatPage]:
    """A fresh page, connected through the line."""
    async with visit(browser, line.url) as page:
        page.expected = NETWORK
        await page.open()
        yield page
