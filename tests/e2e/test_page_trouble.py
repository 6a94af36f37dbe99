"""What the chat page says and does when something is in the way: keys, lost sessions, restarts, engines that load."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from chat_server.engine.simulated import Fault, SimulatedOptions, simulated_server
from chat_server.settings import Limits, parse_api_keys
from tests.e2e.page import NETWORK, visit
from tests.support.line import line_to
from tests.support.server import RunningServer, free_port, running_server, server_process

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

PACE = SimulatedOptions(tokens_per_s=300.0, first_token_s=0.02, words=40)


@pytest_asyncio.fixture(loop_scope="module")
async def server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    """A server of the test's own: these tests stop it and break its engines."""
    async with running_server(tmp_path, simulated=PACE) as running:
        yield running


async def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Browser, tmp_path: Path) -> None:
    """Without a key the page asks for one; it tells a wrong one from none, and a reload does not ask again."""
    keys = parse_api_keys(["ada:right-key"])
    async with running_server(tmp_path, simulated=PACE, api_keys=keys) as server, visit(browser, server.url) as chat:
        chat.expected = NETWORK
        await chat.page.goto(server.url)
        key = chat.page.get_by_label("This server asks for an API key.")
        await expect(key).to_be_focused()
        await key.fill("has a space")
        await key.press("Enter")
        assert await key.evaluate("(field) => field.validationMessage") != ""
        await key.fill("wrong-key")
        await key.press("Enter")
        await expect(chat.page.get_by_text("The server did not accept this API key.")).to_be_visible()
        chat.expected = None
        await chat.page.locator("#key").fill("right-key")
        await chat.page.locator("#key").press("Enter")
        await chat.ask("Hello")
        await expect(chat.page.locator("#key-form")).to_be_hidden()
        await chat.page.reload()
        await expect(chat.facts).to_have_count(1)
        assert "right-key" not in " ".join(chat.requests)


async def test_a_conversation_that_is_gone_is_told(browser: Browser, server: RunningServer) -> None:
    """An address with a session that is not there says so, and a new chat is one click away."""
    async with visit(browser, server.url) as chat:
        chat.expected = NETWORK
        await chat.page.goto(f"{server.url}/#session=sess_00000000000000000000000000000000")
        await expect(chat.trouble).to_contain_text("not there any more")
        await chat.trouble.get_by_role("button", name="New chat").click()
        await expect(chat.trouble).to_be_hidden()
        await chat.ask("Hello")


async def test_a_restart_of_the_server_loses_nothing(browser: Browser, server: RunningServer) -> None:
    """The page comes back by itself, and a message written meanwhile is sent once the server is there."""
    async with visit(browser, server.url) as chat:
        chat.expected = NETWORK
        await chat.open()
        await chat.ask("Before the restart")
        await server.drain()
        await expect(chat.trouble).to_be_visible()
        await chat.say("While you were away")
        await expect(chat.asked.last).to_contain_text("Not sent yet")
        await expect(chat.status).to_have_text("Sent as soon as the connection is there")
        await server.start()
        await expect(chat.facts).to_have_count(2, timeout=20_000)
        await expect(chat.trouble).to_be_hidden()
        await expect(chat.asked).to_have_count(2)
        await expect(chat.answers.last).to_contain_text("the first was “Before the restart”")


async def test_a_message_that_was_not_sent_can_be_taken_back(browser: Browser, server: RunningServer) -> None:
    """Stop, while the server is away, gives the text back instead of leaving it to be sent one day."""
    async with visit(browser, server.url) as chat:
        chat.expected = NETWORK
        await chat.open()
        await server.stop()
        await expect(chat.trouble).to_be_visible()
        await chat.say("Better not")
        await chat.stop.click()
        await expect(chat.asked).to_have_count(0)
        await expect(chat.field).to_have_value("Better not")


async def test_a_failed_answer_says_why_and_can_be_asked_for_again(browser: Browser, server: RunningServer) -> None:
    """The engine refuses the request: the reason stands below the message, and one click tries once more."""
    async with visit(browser, server.url) as chat:
        await chat.open()
        for engine in server.engines:
            engine.engine.add_fault(Fault("status", status=400, message="no such thing here", times=1))
        await chat.say("Hello")
        again = chat.asked.get_by_role("button", name="Ask again")
        await expect(again).to_be_visible()
        await expect(chat.asked.locator(".note")).to_contain_text("no such thing here")
        for engine in server.engines:
            engine.engine.clear_faults()
        await again.click()
        await expect(chat.facts).to_have_count(1)
        await expect(again).to_be_hidden()
        await expect(chat.asked).to_have_count(1)


async def test_engines_that_load_are_told_and_waited_for(browser: Browser, tmp_path: Path) -> None:
    """The page is there before the engines: it names what is loading, takes a message, and answers it later."""
    port = free_port()
    async with (
        server_process(tmp_path, "--engine", f"slow-one=http://127.0.0.1:{port}") as server,
        visit(browser, server.url) as chat,
    ):
        chat.expected = NETWORK
        for _ in range(50):
            try:
                await chat.page.goto(server.url)
                break
            except Exception as error:  # the process does not listen yet
                assert "ERR_CONNECTION_REFUSED" in str(error)
                await chat.page.wait_for_timeout(100)
        engines = chat.page.locator("#engines")
        await expect(engines).to_be_visible()
        await expect(engines.get_by_role("listitem")).to_contain_text("slow-one")
        await chat.say("Are you there?")
        await expect(chat.asked).to_contain_text("Not sent yet")
        async with simulated_server(PACE, port=port):
            await expect(chat.facts).to_have_count(1)
            await expect(engines).to_be_hidden()
            await expect(chat.facts.locator(".engine")).to_have_text("slow-one")


async def test_an_answer_waits_for_an_engine(browser: Browser, server: RunningServer) -> None:
    """With no engine left the message is taken and queued; the page says so, and for how long; then it is answered."""
    async with visit(browser, server.url) as chat:
        chat.expected = NETWORK  # 503 of /readyz
        await chat.open()
        ports = [urlsplit(engine.url).port or 0 for engine in server.engines]
        for engine in server.engines:
            engine.die()
        await chat.say("Is anybody there?")
        await expect(chat.status).to_have_text(re.compile("^Waiting for (the first engine|a place on an engine)"))
        await expect(chat.page.locator("#status-time")).to_have_text(re.compile(r"\d s"))
        await expect(chat.page.locator("#engines")).to_contain_text("No engine answers at the moment.")
        async with simulated_server(PACE, port=ports[0]):
            await expect(chat.facts).to_have_count(1)
            await expect(chat.page.locator("#engines")).to_be_hidden()


async def test_an_answer_that_no_engine_came_for_is_asked_for_again(browser: Browser, tmp_path: Path) -> None:
    """Engines that take longer than the server lets an answer wait: the page says so, and asks when one is there."""
    limits = Limits(max_queue_s=1.0)
    async with running_server(tmp_path, simulated=PACE, limits=limits) as server, visit(browser, server.url) as chat:
        chat.expected = NETWORK  # 503 of /readyz
        await chat.open()
        ports = [urlsplit(engine.url).port or 0 for engine in server.engines]
        for engine in server.engines:
            engine.die()
        await chat.say("Is anybody there?")
        await expect(chat.asked.locator(".note")).to_contain_text("No engine")
        async with simulated_server(PACE, port=ports[1]):
            await expect(chat.facts).to_have_count(1)
            await expect(chat.asked).to_have_count(1)


async def test_simulated_engines_are_told_from_a_model(browser: Browser, tmp_path: Path) -> None:
    """Who talks to a program that makes text up reads so all the time; with other engines nothing is said."""
    for simulate in (2, 0):
        folder = tmp_path / str(simulate)
        folder.mkdir()
        async with running_server(folder, simulate=simulate) as server, visit(browser, server.url) as chat:
            await chat.open()
            badge = chat.page.get_by_text("Simulated engines, not a model")
            await expect(badge).to_be_visible(visible=simulate > 0)


async def test_a_dead_connection_is_found_when_the_page_is_shown_again(browser: Browser, server: RunningServer) -> None:
    """A connection that swallows everything is left soon after the page is shown again, and the next one goes on."""
    async with line_to(server.url) as line, visit(browser, line.url) as chat:
        await chat.open()
        await chat.ask("Before")
        line.swallow()
        await chat.say("Into the void")
        await chat.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        await expect(chat.facts).to_have_count(2, timeout=20_000)
        await expect(chat.asked).to_have_count(2)
        await expect(chat.answers.last).to_contain_text("the first was “Before”")
