"""Several worker processes behind one port, as clients and operators see them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from chat_server.engine.simulated import SimulatedOptions, answer_for, simulated_server
from tests.support import ws
from tests.support.held import Held
from tests.support.processes import alive, children, command_line, descendants, holder_of, wait_until_gone
from tests.support.server import QUICK, ServerProcess, server_process
from tests.support.ws import WsClient

pytestmark = [pytest.mark.server, pytest.mark.timeout(60)]

LONG = "Tell me more, in 100 words."
ANSWER = answer_for([{"role": "user", "content": LONG}])
#: Slow enough that an answer outlives what is done to its server: it takes some two seconds.
SLOW = SimulatedOptions(tokens_per_s=100.0, first_token_s=0.005, block_size=16)


@asynccontextmanager
async def serving(folder: Path, *arguments: str, options: SimulatedOptions = QUICK) -> AsyncIterator[ServerProcess]:
    """``serve --workers 2`` in front of a simulated engine that runs elsewhere; ready when all workers are."""
    async with (
        simulated_server(options) as engine,
        server_process(folder, "--engine", engine.url, "--workers", "2", *arguments) as server,
    ):
        async with asyncio.timeout(20):
            while "Chat at" not in server.log.read_text():
                assert server.process.returncode is None, server.log.read_text()
                await asyncio.sleep(0.02)
        yield server


def workers(server: ServerProcess) -> set[int]:
    return {pid for pid in children(server.process.pid) if "chat_server.workers" in command_line(pid)}


def worker_of(server: ServerProcess, client: WsClient) -> int:
    """The worker that has this connection."""
    address = client.connection.transport.get_extra_info("sockname")
    return holder_of(address, ("127.0.0.1", urlsplit(server.url).port or 0), workers(server))


@asynccontextmanager
async def on_each_worker(server: ServerProcess) -> AsyncIterator[dict[int, WsClient]]:
    """A connection to one new session on each worker: connects until chance has been to all."""
    found: dict[int, WsClient] = {}
    session: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        async with asyncio.timeout(15):
            while found.keys() != workers(server):
                async with AsyncExitStack() as attempt:
                    client = await attempt.enter_async_context(ws.connect(server.ws_url, extensions=1, **session))
                    session = {"session_id": client.session["id"]}
                    if (pid := worker_of(server, client)) not in found:
                        found[pid] = client
                        stack.push_async_exit(attempt.pop_all())
        yield found


async def begin_answer(client: WsClient) -> None:
    await client.say(LONG)
    await client.send("response.create")
    await client.until("response.output_text.delta")


async def test_workers_share_a_session(tmp_path: Path) -> None:
    """Two connections on two workers: what one says and hears, the other hears, as between any replicas."""
    async with serving(tmp_path) as server, on_each_worker(server) as clients:
        one, two = clients.values()
        turn = await one.turn("Hello")
        assert (await two.until("response.done"))["response"] == turn.response
        assert two.texts == one.texts
        second = await two.turn("And now?")
        assert (await one.until("response.done"))["response"] == second.response
        assert second.cached_tokens > 0


async def test_a_killed_worker_is_replaced_and_the_others_go_on(tmp_path: Path) -> None:
    """Its connections break, new ones find a worker at once, and the port never refuses."""
    async with serving(tmp_path) as server, on_each_worker(server) as clients:
        (dies, broken), (lives, other) = clients.items()
        os.kill(dies, signal.SIGKILL)
        assert await broken.closed() == 1006
        for _ in range(10):  # some of them wait for the new worker
            async with ws.connect(server.ws_url, session_id=other.session["id"]):
                pass
        async with asyncio.timeout(10):
            while len(workers(server)) < 2 or dies in workers(server):
                await asyncio.sleep(0.02)
        assert lives in workers(server)
        assert (await other.turn("Hello")).response["status"] == "completed"
        log = server.log.read_text()
    assert "worker-" in log
    assert "ended: status -9. It starts again." in log


async def test_an_answer_outlives_the_worker_that_made_it(tmp_path: Path) -> None:
    """After ``kill -9`` in mid-answer another worker goes on with it; its reader comes back and gets the rest."""
    async with serving(tmp_path, options=SLOW) as server:
        async with ws.connect(server.ws_url, extensions=1) as client:
            held = await Held.begin(client, LONG)
            await held.read(client, deltas=20)
            os.kill(worker_of(server, client), signal.SIGKILL)
            with pytest.raises(ConnectionClosed):
                await held.read(client)
        assert 0 < len(held.text) < len(ANSWER)
        async with held.back(server.ws_url) as client:
            active = client.events[0]["active_response"]
            assert (active["id"], active["offset"]) == (held.response_id, len(held.text))
            await held.read(client)
        assert held.done is not None
        assert (held.done["status"], held.text) == ("completed", ANSWER)
        assert len(held.done["output"][0]["epochs"]) == 2, "it was taken over"


async def test_kill_9_of_the_parent_ends_all(tmp_path: Path) -> None:
    """Workers with connections and answers too, within three seconds; the port is free."""
    async with serving(tmp_path, options=SLOW) as server, on_each_worker(server) as clients:
        await begin_answer(next(iter(clients.values())))
        tree = descendants(server.process.pid)
        assert workers(server) < tree
        server.process.kill()
        assert await asyncio.to_thread(wait_until_gone, tree, within_s=3.0) == set()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", urlsplit(server.url).port)


async def test_a_stopped_worker_does_not_outlive_its_parent(tmp_path: Path) -> None:
    """Not even one that can not look for its parent, because it hangs."""
    async with serving(tmp_path) as server:
        pids = workers(server)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        server.process.kill()
        assert await asyncio.to_thread(wait_until_gone, pids, within_s=3.0) == set()


async def test_sigterm_lets_answers_on_all_workers_finish(tmp_path: Path) -> None:
    """Every reader gets ``response.done`` and then 1012; all is gone afterwards, and the exit status is 0."""
    async with (
        serving(tmp_path, "--drain-grace", "20", options=SLOW) as server,
        on_each_worker(server) as clients,
        on_each_worker(server) as others,
    ):
        tree = descendants(server.process.pid)
        speakers = [clients[min(clients)], others[max(others)]]
        for speaker in speakers:
            await begin_answer(speaker)
        ending = asyncio.create_task(server.end(signal.SIGTERM))
        for client in (*clients.values(), *others.values()):
            assert await client.closed() == 1012
            assert client.types[-1] == "response.done"
            assert client.events[-1]["response"]["status"] == "completed"
            assert list(client.texts.values()) == [ANSWER]
            assert "server.draining" in client.types
        assert await ending == 0
        assert await asyncio.to_thread(wait_until_gone, tree, within_s=1.0) == set()
        log = server.log.read_text()
    assert "Traceback" not in log
    assert "ERROR" not in log


async def test_a_worker_is_restarted_without_an_answer_lost(tmp_path: Path) -> None:
    """SIGTERM to one worker: its answer finishes, it comes back, the parent goes on."""
    async with serving(tmp_path, "--drain-grace", "20", options=SLOW) as server, on_each_worker(server) as clients:
        pid, client = next(iter(clients.items()))
        await begin_answer(client)
        os.kill(pid, signal.SIGTERM)
        assert await client.closed() == 1012
        assert client.types[-1] == "response.done"
        async with asyncio.timeout(10):
            while alive(pid) or len(workers(server)) < 2:
                await asyncio.sleep(0.02)
        assert server.process.returncode is None


async def test_what_outlasts_the_grace_time_goes_on_at_another_worker(tmp_path: Path) -> None:
    """A reader there sees it move, and hears all of it."""
    async with serving(tmp_path, "--drain-grace", "0.3", options=SLOW) as server, on_each_worker(server) as clients:
        (pid, here), (_, there) = clients.items()
        await begin_answer(here)
        os.kill(pid, signal.SIGTERM)
        assert await here.closed() == 1012
        assert "response.done" not in here.types
        assert (await there.until("response.migrated"))["reason"] == "replica_drained"
        assert (await there.until("response.done"))["response"]["status"] == "completed"
        assert list(there.texts.values()) == [ANSWER]


async def test_workers_restarted_one_by_one_under_load_lose_no_word(tmp_path: Path) -> None:
    """Clients that come back when they are told to get every answer, whole, to the question that they asked."""
    options = SimulatedOptions(tokens_per_s=200.0, first_token_s=0.005, words=40, block_size=16)
    async with serving(tmp_path, "--drain-grace", "20", options=options) as server:
        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            answered = [0] * 6
            talks = [tasks.create_task(talk(server.ws_url, number, over, answered)) for number in range(6)]
            await one_more(answered)
            for pid in workers(server):
                os.kill(pid, signal.SIGTERM)
                async with asyncio.timeout(20):
                    while alive(pid) or len(workers(server)) < 2:
                        await asyncio.sleep(0.02)
                await one_more(answered)
            over.set()
        assert "ERROR" not in server.log.read_text()
    print(f"{sum(answered)} questions answered, {sum(talk.result() for talk in talks)} times interrupted")


async def one_more(answered: list[int]) -> None:
    """Until each has got one more answer than it has now."""
    before = list(answered)
    async with asyncio.timeout(20):
        while any(now == then for now, then in zip(answered, before, strict=True)):
            await asyncio.sleep(0.02)


async def talk(url: str, number: int, over: asyncio.Event, answered: list[int]) -> int:
    """Ask one question after the other until it is ``over``, and count the answers. Returns how many were retried."""
    messages: list[dict[str, str]] = []
    session: dict[str, Any] = {}
    interrupted = 0
    while not over.is_set():
        messages.append({"role": "user", "content": f"Question {len(messages)} of {number}"})
        item_id = f"item_{number}_{len(messages)}"
        while (answer := await ask(url, session, item_id, messages[-1]["content"])) is None:
            interrupted += 1
            await asyncio.sleep(0.1)
        assert answer == answer_for(messages, 40)
        messages.append({"role": "assistant", "content": answer})
        answered[number] += 1
    return interrupted


async def ask(url: str, session: dict[str, Any], item_id: str, text: str) -> str | None:
    """One question, and the answer to it; None if the server went away. To be repeated with the same ids then."""
    item = {"type": "message", "role": "user", "id": item_id, "content": [{"type": "input_text", "text": text}]}
    try:
        async with ws.connect(url, extensions=1, **session) as client:
            session["session_id"] = client.session["id"]
            await client.send("conversation.item.create", item=item)
            await client.send("response.create", in_reply_to=item_id)
            response = (await client.until("response.done"))["response"]
    except ConnectionClosed as end:
        assert end.rcvd is not None, "it was closed with a reason"
        assert end.rcvd.code == 1012
        return None
    except InvalidStatus as refusal:
        assert refusal.response.status_code == 503
        return None
    assert response["status"] == "completed"
    [output] = response["output"]
    return str(output["content"][0]["text"])


async def test_the_second_signal_stops_at_once(tmp_path: Path) -> None:
    """Whatever runs; a second Ctrl-C is exit status 130."""
    async with serving(tmp_path, "--drain-grace", "20", options=SLOW) as server, on_each_worker(server) as clients:
        client = next(iter(clients.values()))
        await begin_answer(client)
        tree = descendants(server.process.pid)
        server.process.send_signal(signal.SIGINT)
        await client.until("server.draining")
        assert server.process.returncode is None, "it waits for the answer"
        began = time.monotonic()
        assert await server.end(signal.SIGINT) == 130
        assert time.monotonic() - began < 3.0
        assert await asyncio.to_thread(wait_until_gone, tree, within_s=3.0) == set()
