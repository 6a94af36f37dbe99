"""One Chromium for all tests of a module: it takes longer to start than most of them take."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from tests.e2e.modules import empty_page
from tests.e2e.page import PATIENCE_MS, chromium


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
