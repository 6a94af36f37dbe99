"""The two clients in the README do what it says, as they stand there: only the address is another."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from chat_server.engine.simulated import answer_for
from chat_server.settings import DEMO_MODEL
from tests.support.server import QUICK, RunningServer, running_server

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

README = (Path(__file__).parents[2] / "README.md").read_text()


@pytest_asyncio.fixture(loop_scope="module")
async def demo(tmp_path: Path) -> AsyncIterator[RunningServer]:
    """Simulated engines under the name of the demo model, which ``make run`` would serve."""
    async with running_server(tmp_path, simulated=replace(QUICK, model=DEMO_MODEL)) as server:
        yield server


def example(language: str, server: RunningServer) -> str:
    """The one block of code in this language, pointed at the server."""
    (code,) = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert isinstance(code, str)
    assert "127.0.0.1:8000" in code
    return code.replace("127.0.0.1:8000", server.url.removeprefix("http://"))


def answers(code: str) -> list[str]:
    """What the engine answers to the two questions in the code."""
    messages: list[dict[str, str]] = []
    for question in re.findall(r'"([^"]+\?)"', code):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer_for(messages, QUICK.words)})
    assert len(messages) == 4
    return [messages[1]["content"], messages[3]["content"]]


async def test_the_python_client_prints_two_answers_the_second_from_the_cache(demo: RunningServer) -> None:
    """The ``openai`` package unmodified, in a process of its own."""
    code = example("python", demo)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(20):
        out, _ = await process.communicate()
    assert process.returncode == 0
    first, second = answers(code)
    said = re.fullmatch(r"(.*)\ncached tokens: (\d+)\n(.*)\ncached tokens: (\d+)\n", out.decode(), re.DOTALL)
    assert said
    assert (said[1], said[3]) == (first, second)
    assert int(said[4]) > 0


async def test_the_javascript_client_shows_two_answers(demo: RunningServer, browser: Browser) -> None:
    """In a page of the server's own origin."""
    code = example("js", demo)
    page = await browser.new_page()
    try:
        await page.goto(f"{demo.url}/healthz")
        await page.evaluate("document.body.textContent = ''")
        await page.evaluate(f"() => {{ {code} }}")
        first, second = answers(code)
        await expect(page.locator("body")).to_have_text(first + second)
        assert await page.evaluate("document.body.textContent") == first + second
    finally:
        await page.close()
