"""The server is killed and started again: every conversation is there, and nothing of the old one is left behind."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from chat_server.engine.simulated import answer_for, simulated_server
from tests.support import ws
from tests.support.processes import descendants, wait_until_gone
from tests.support.server import QUICK, ServerProcess, server_process

pytestmark = pytest.mark.server


async def kill(server: ServerProcess) -> None:
    """``kill -9``, and see that its children go too."""
    children = descendants(server.process.pid)
    assert children, "the embedded store is a process of its own"
    assert await server.end(signal.SIGKILL) == -signal.SIGKILL
    assert await asyncio.to_thread(wait_until_gone, children, within_s=20) == set()


async def test_a_killed_server_keeps_every_conversation(tmp_path: Path) -> None:
    """After ``kill -9`` and a start on the same data, both conversations go on, each with its own history."""
    texts = ["The first conversation.", "The second conversation."]
    async with simulated_server(QUICK) as one, simulated_server(QUICK) as two:
        engines = ("--engine", one.url, "--engine", two.url)
        sessions = []
        async with server_process(tmp_path, *engines) as server:
            await server.ready()
            for text in texts:
                async with ws.connect(server.ws_url) as client:
                    turn = await client.turn(text)
                    sessions.append((client.session["id"], text, turn.text))
            await kill(server)
        async with server_process(tmp_path, *engines) as server:
            await server.ready()
            for session_id, text, answer in sessions:
                async with ws.connect(server.ws_url, session_id=session_id) as client:
                    assert client.events[0]["item_count"] == 2
                    turn = await client.turn("And now?")
                prompt = [("user", text), ("assistant", answer), ("user", "And now?")]
                messages = [{"role": role, "content": content} for role, content in prompt]
                assert turn.text == answer_for(messages, QUICK.words)


async def test_an_answer_under_way_goes_on_after_a_restart(tmp_path: Path) -> None:
    """From where it was when the server was killed, whoever comes back or not; nobody has to ask for it again."""
    async with simulated_server(QUICK) as engine:
        async with server_process(tmp_path, "--engine", engine.url) as server:
            await server.ready()
            async with ws.connect(server.ws_url) as client:
                await client.say("Tell me more, in 500 words.")
                await client.send("response.create")
                for _ in range(20):
                    delta = await client.until("response.output_text.delta")
                session_id, seen = client.session["id"], client.texts[delta["item_id"]]
                await kill(server)
        async with server_process(tmp_path, "--engine", engine.url) as server:
            await server.ready()
            async with ws.connect(server.ws_url, session_id=session_id) as client:
                [item] = (await client.until("response.done"))["response"]["output"]
    assert item["status"] == "completed"
    assert item["id"] == delta["item_id"]
    assert item["content"][0]["text"].startswith(seen)
    assert item["content"][0]["text"] == answer_for([{"role": "user", "content": "Tell me more, in 500 words."}])
