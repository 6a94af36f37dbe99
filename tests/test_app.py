"""The whole server in one process: its start, its stop, several of it on one store, and a store that comes and goes."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import redis.asyncio
import trustme
import websockets.asyncio.client
from websockets.exceptions import InvalidMessage

from chat_server.app import run_app
from chat_server.engine.simulated import SimulatedOptions, answer_for, simulated_server
from chat_server.errors import StartError
from chat_server.settings import EngineAddress, Secret, Settings
from chat_server.store import keys
from chat_server.store.embedded import EmbeddedValkey
from tests.support.server import QUICK, RunningServer, another, free_port, running_server
from tests.support.ws import WsClient, refused

pytestmark = pytest.mark.server

LONG = "Tell me more, in 150 words."
#: Slow enough that the store can go and come back within one answer.
SLOW = SimulatedOptions(tokens_per_s=150.0, first_token_s=0.005, block_size=16)


@asynccontextmanager
async def server_and_store(
    folder: Path, options: SimulatedOptions, **settings: Any
) -> AsyncIterator[tuple[RunningServer, EmbeddedValkey]]:
    """A server that is not started yet, and its store, which is not started either."""
    valkey = EmbeddedValkey(folder)
    async with simulated_server(options) as engine:
        addresses = (EngineAddress(engine.url, "engine-1"),)
        server = RunningServer(Settings(port=0, engines=addresses, data_dir=folder, **settings), valkey.url, [engine])
        try:
            yield server, valkey
        finally:
            await server.stop()
            await valkey.stop()


async def ready(server: RunningServer) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as http, http.get(f"{server.url}/readyz") as answer:
        return answer.status, await answer.json()


def same_but_ids(one: WsClient, two: WsClient, *, since: str) -> bool:
    """Whether both were told the same from the first event of type ``since`` on; deltas may be cut otherwise."""
    stories = []
    for client in (one, two):
        start = client.types.index(since)
        told = [event for event in client.events[start:] if event["type"] != "response.output_text.delta"]
        stories.append([{name: value for name, value in event.items() if name != "event_id"} for event in told])
    return stories[0] == stories[1] and one.texts == two.texts


# --- start and stop


async def test_a_restart_keeps_the_conversation(tmp_path: Path) -> None:
    """The session goes on after a server restart, with its history, settings and place."""
    async with running_server(tmp_path) as server:
        async with server.connect() as client:
            await client.send("session.update", session={"instructions": "Be kind."})
            first = await client.turn("Hello")
        await server.restart()
        async with server.connect(session_id=client.session["id"], history="all") as again:
            assert again.session == client.session
            assert again.events[0]["item_count"] == 2
            for item in (first.user_item, first.response["output"][0]):
                assert (await again.until("conversation.item.done"))["item"] == item
            second = await again.turn("And now?")
        assert second.response["engine"] == first.response["engine"]
        assert second.cached_tokens > 0


async def test_an_answer_under_way_at_a_stop_goes_on_after_the_restart(tmp_path: Path) -> None:
    """Connections are closed with 1012; the answer is made to its end, from where it was."""
    async with running_server(tmp_path, simulated=SLOW) as server:
        async with server.connect() as client:
            await client.say(LONG)
            await client.send("response.create")
            for _ in range(20):
                await client.until("response.output_text.delta")
            stopping = asyncio.create_task(server.stop())
            assert await client.closed() == 1012
            [text] = client.texts.values()
            await stopping
        assert [engine.engine.running for engine in server.engines] == [0, 0]
        await server.start()
        async with server.connect(session_id=client.session["id"], history=1) as again:
            response = (await again.until("response.done"))["response"]
            assert response["status"] == "completed"
            whole = response["output"][0]["content"][0]["text"]
            assert whole.startswith(text)
            assert whole == answer_for([{"role": "user", "content": LONG}])


async def test_a_server_that_is_told_to_stop_lets_answers_finish(tmp_path: Path) -> None:
    """Readers get ``response.done``, then 1012, with extensions or without; idle ones go before, new are refused."""
    async with (
        running_server(tmp_path, simulated=SLOW) as server,
        server.connect(extensions=1) as idle,
        server.connect(extensions=1) as one,
        server.connect(session_id=one.session["id"]) as two,
    ):
        await one.say(LONG)
        await one.send("response.create")
        for client in (one, two):
            await client.until("response.output_text.delta")
        draining = asyncio.create_task(server.drain())
        assert await idle.closed() == 1012
        assert idle.types == ["session.created", "server.draining"]
        status, body = await ready(server)
        assert (status, body["ready"], body["draining"]) == (503, False, True)
        refusal = await refused(server.ws_url, session_id=one.session["id"])
        assert (refusal.status, refusal.error["code"]) == (503, "server_draining")
        assert int(refusal.headers["retry-after"]) > 0
        for client in (one, two):
            assert await client.closed() == 1012
            assert client.types[-1] == "response.done"
            assert client.events[-1]["response"]["status"] == "completed"
            assert list(client.texts.values()) == [answer_for([{"role": "user", "content": LONG}])]
        assert 0 <= one.events[one.types.index("server.draining")]["retry_after_ms"] <= 2000
        await draining


async def test_an_answer_without_a_reader_finishes_before_the_stop(tmp_path: Path) -> None:
    """It is there, whole, after the restart."""
    async with running_server(tmp_path, simulated=SLOW) as server:
        async with server.connect() as client:
            await client.say(LONG)
            await client.send("response.create")
            await client.until("response.output_text.delta")
        await server.drain()
        await server.start()
        async with server.connect(session_id=client.session["id"], history=1) as again:
            item = (await again.until("conversation.item.done"))["item"]
    assert item["status"] == "completed"
    assert item["content"][0]["text"] == answer_for([{"role": "user", "content": LONG}])


async def test_after_the_grace_time_an_answer_goes_on_at_another_replica(tmp_path: Path) -> None:
    """Its reader is closed with 1012 in mid-answer, and reads on there, without a word lost or told twice."""
    async with (
        running_server(tmp_path, simulated=SLOW, drain_grace_s=0.3) as server,
        another(server) as replica,
        server.connect(extensions=1) as one,
    ):
        await one.say(LONG)
        await one.send("response.create")
        await one.until("response.output_text.delta")
        began = time.monotonic()
        await asyncio.gather(server.drain(), one.closed())
        assert 0.3 < time.monotonic() - began < 3.0
        assert one.connection.close_code == 1012
        assert "server.draining" in one.types
        assert "response.done" not in one.types
        [(item_id, text)] = one.texts.items()
        deltas = [event for event in one.events if event["type"] == "response.output_text.delta"]
        point = {name: deltas[-1][name] for name in ("response_id", "epoch")}
        async with replica.connect(extensions=1, session_id=one.session["id"], offset=len(text), **point) as two:
            two.texts[item_id] = text
            response = (await two.until("response.done"))["response"]
        assert response["status"] == "completed"
        assert two.texts[item_id] == answer_for([{"role": "user", "content": LONG}])
        assert min(event["offset"] for event in two.events if event["type"] == "response.output_text.delta") >= len(
            text
        )


async def test_an_answer_without_a_reader_goes_on_at_another_replica(tmp_path: Path) -> None:
    """Also when the session is not known there."""
    async with running_server(tmp_path, simulated=SLOW, drain_grace_s=0.1) as server, another(server) as replica:
        async with server.connect() as client:
            await client.say(LONG)
            await client.send("response.create")
            await client.until("response.output_text.delta")
            owner = await server.owner(client.session["id"])
        await server.drain()
        await replica.owner(client.session["id"], other_than=owner)  # before anybody asks for it there
        async with replica.connect(session_id=client.session["id"], history=1) as again:
            response = (await again.until("response.done"))["response"]
    assert response["status"] == "completed"
    assert list(again.texts.values()) == [answer_for([{"role": "user", "content": LONG}])]


async def test_a_stopped_server_leaves_no_lease(tmp_path: Path) -> None:
    """So that others need not wait for it to run out."""
    async with running_server(tmp_path, engines=1) as server:
        store = redis.asyncio.Redis.from_url(server.redis_url)
        assert len(await store.keys(keys.replica("*"))) == 1
        await server.stop()
        assert await store.keys(keys.replica("*")) == []
        assert await store.zcard(keys.REPLICAS) == 0
        await store.aclose()


async def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    """StartError, with the address, and who has it goes on undisturbed."""
    async with running_server(tmp_path, engines=1) as server:
        settings = replace(server.settings, redis_url=Secret(server.redis_url))
        with pytest.RaisesGroup(pytest.RaisesExc(StartError, match=str(settings.port))):
            async with asyncio.timeout(10):
                await run_app(
                    settings,
                    redis_url=server.redis_url,
                    engines=settings.engines,
                    startup=dict,
                    on_listening=lambda url: None,
                    on_ready=lambda: None,
                )
        async with server.connect() as client:
            await client.say("Still here")


async def test_a_store_may_come_later(tmp_path: Path) -> None:
    """The server listens, says what it waits for, refuses with 503, and is ready when the store is there."""
    async with server_and_store(tmp_path, QUICK) as (server, valkey):
        listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        is_ready = asyncio.Event()
        app = asyncio.create_task(
            run_app(
                replace(server.settings, port=free_port()),
                redis_url=valkey.url,
                engines=server.settings.engines,
                startup=dict,
                on_listening=listening.set_result,
                on_ready=is_ready.set,
            )
        )
        try:
            server.url = await listening
            status, body = await ready(server)
            assert (status, body["ready"], body["store"]) == (503, False, "down")
            async with aiohttp.ClientSession() as http, http.get(f"{server.url}/v1/realtime") as answer:
                assert answer.status == 503
                assert int(answer.headers["Retry-After"]) > 0
            assert not is_ready.is_set()
            await valkey.start()
            async with asyncio.timeout(10):
                await is_ready.wait()
            assert (await ready(server))[0] == 200
            async with server.connect() as client:
                assert (await client.turn("Hello")).response["status"] == "completed"
        finally:
            app.cancel()
            await asyncio.wait({app})


# --- several replicas


async def test_what_happens_on_one_replica_is_told_on_the_other(tmp_path: Path) -> None:
    """Items, settings, answers and deletions, live and in the same order, in both directions."""
    async with (
        running_server(tmp_path) as server,
        another(server) as replica,
        server.connect() as one,
        replica.connect(session_id=one.session["id"], extensions=1) as two,
    ):
        for speaker, listener in ((one, two), (two, one)):
            item = await speaker.say("Hello")
            assert (await listener.until("conversation.item.done"))["item"] == item
            await speaker.send("session.update", session={"instructions": f"Be kind to {item['id']}."})
            await speaker.until("session.updated")
            await listener.until("session.updated")
            await speaker.send("response.create")
            await speaker.until("response.done")
            await listener.until("response.done")
            await speaker.send("conversation.item.delete", item_id=item["id"])
            await speaker.until("conversation.item.deleted")
            await listener.until("conversation.item.deleted")
        deltas = [event for event in two.events if event["type"] == "response.output_text.delta"]
        assert len(deltas) > 10, "text is told as it comes, not at the end"
        assert one.session["instructions"] == two.session["instructions"]
        for client in (one, two):
            client.events = [event for event in client.events if event["type"] != "session.updated"]
        assert same_but_ids(one, two, since="conversation.item.added")


async def test_writes_on_two_replicas_at_once_end_no_connection_and_lose_nothing(tmp_path: Path) -> None:
    """Answers to own writes and messages of the other replica overtake each other; both tell all, in one order."""
    async with (
        running_server(tmp_path) as server,
        another(server) as replica,
        server.connect() as one,
        replica.connect(session_id=one.session["id"], extensions=1) as two,
    ):
        for number in range(30):
            await asyncio.gather(one.say(f"Item {number}"), two.send("response.create"))
            await one.until("response.done")
            await two.until("response.done")
        last = await one.say("The end")
        while two.events[-1].get("item") != last or two.events[-1]["type"] != "conversation.item.done":
            await two.next()
        orders = [
            [event["item"]["id"] for event in client.events if event["type"] == "conversation.item.added"]
            for client in (one, two)
        ]
        assert orders[0] == orders[1]
        assert len(orders[0]) == 61


async def test_settings_changed_on_two_replicas_at_once_are_both_kept(tmp_path: Path) -> None:
    """Each change goes on top of the other, whichever was first; nobody's field is written over."""
    async with (
        running_server(tmp_path) as server,
        another(server) as replica,
        server.connect() as one,
        replica.connect(session_id=one.session["id"], extensions=1) as two,
    ):
        for number in range(1, 21):
            await asyncio.gather(
                one.send("session.update", session={"instructions": f"Number {number}"}),
                two.send("session.update", session={"max_output_tokens": number}),
            )
            for client in (one, two):
                for _ in range(2):
                    session = (await client.expect("session.updated"))["session"]
                assert (session["instructions"], session["max_output_tokens"]) == (f"Number {number}", number)


async def test_a_tab_on_another_replica_joins_in_mid_answer(tmp_path: Path) -> None:
    """The text so far comes from the store, the rest live; the end is the same."""
    async with running_server(tmp_path, simulated=SLOW) as server, another(server) as replica, server.connect() as one:
        await one.say("Tell me more, in 80 words.")
        await one.send("response.create")
        for _ in range(20):
            await one.until("response.output_text.delta")
        async with replica.connect(session_id=one.session["id"], extensions=1) as two:
            active = two.events[0]["active_response"]
            assert active["state"] == "streaming"
            await two.until("response.content_part.added")
            delta = await two.expect("response.output_text.delta")
            assert (delta["offset"], delta["epoch"]) == (0, active["epoch"])
            assert len(delta["delta"]) > 20
            await two.until("response.done")
            await one.until("response.done")
            assert same_but_ids(one, two, since="response.created")


async def test_only_one_of_two_replicas_begins_an_answer(tmp_path: Path) -> None:
    """Asked on both at once, one makes it and the other says that it runs."""
    async with (
        running_server(tmp_path) as server,
        another(server) as replica,
        server.connect() as one,
        replica.connect(session_id=one.session["id"]) as two,
    ):
        item = await one.say("Hello")
        await two.until("conversation.item.done")
        await asyncio.gather(*(c.send("response.create", in_reply_to=item["id"]) for c in (one, two)))
        for client in (one, two):
            while client.events[-1]["type"] != "response.done":
                await client.next()
        assert one.texts == two.texts
        assert sum(engine.engine.counters.requests for engine in server.engines) == 1


# --- a store that goes and comes back


async def test_an_answer_waits_for_the_store_and_goes_on(tmp_path: Path) -> None:
    """Its text pauses, heartbeats say ``waiting``, new turns can be tried again; nothing is lost or doubled."""
    async with server_and_store(tmp_path, SLOW, heartbeat_s=0.5) as (server, valkey):
        await valkey.start()
        await server.start()
        async with (
            server.connect(extensions=1) as client,
            server.connect(extensions=1) as other,
        ):
            await client.say(LONG)
            await client.send("response.create")
            for _ in range(20):
                await client.until("response.output_text.delta")
            await valkey.stop()
            while client.events[-1].get("state") != "waiting":
                await client.next()
            await other.send("conversation.item.create", item=hello("mine"))
            while other.events[-1]["type"] != "error":
                await other.next()
            error = other.events[-1]["error"]
            assert (error["code"], error["retryable"]) == ("store_unavailable", True)
            status, body = await ready(server)
            assert (status, body["store"]) == (503, "down")
            await valkey.start()
            done = (await client.until("response.done"))["response"]
            assert done["status"] == "completed"
            [text] = client.texts.values()
            assert text == answer_for([{"role": "user", "content": LONG}])
            await other.send("conversation.item.create", item=hello("mine"))
            assert (await other.until("conversation.item.done"))["item"]["id"] == "mine"
            await client.send("conversation.item.retrieve", item_id=done["output"][0]["id"])
            assert (await client.until("conversation.item.retrieved"))["item"] == done["output"][0]


def hello(id: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "id": id, "content": [{"type": "input_text", "text": "Hello"}]}


async def test_a_conversation_over_tls(tmp_path: Path) -> None:
    """With a certificate the same port speaks https and wss, and nothing else."""
    pem = tmp_path / "server.pem"
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(pem))
    context = ssl.create_default_context()
    authority.configure_trust(context)
    async with running_server(tmp_path, tls_cert=pem, tls_key=pem) as server:
        assert server.url.startswith("https://127.0.0.1:")
        async with websockets.asyncio.client.connect(server.ws_url, ssl=context) as connection:
            assert orjson.loads(await connection.recv())["type"] == "session.created"
            for event in (
                {"type": "response.create", "response": {"instructions": "Say something."}},
                {"type": "response.create"},
            ):
                await connection.send(orjson.dumps(event), text=True)
                while orjson.loads(await connection.recv())["type"] != "response.done":
                    pass
        with pytest.raises(InvalidMessage):
            await websockets.asyncio.client.connect(server.ws_url.replace("wss", "ws"))
