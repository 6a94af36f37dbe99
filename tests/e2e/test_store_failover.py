"""The store's machine dies in mid-answer and another takes over: the answer pauses and goes on, whole, everywhere."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from chat_server.core.principal import LOCAL
from chat_server.engine.simulated import answer_for
from chat_server.settings import Secret
from chat_server.store import keys
from tests.support import ws
from tests.support.server import QUICK, RunningServer, another, running_server
from tests.support.valkeys import valkey_cluster, valkey_sentinel
from tests.support.ws import WsClient

pytestmark = [pytest.mark.server, pytest.mark.timeout(60)]

QUESTION = "Tell me more, in 150 words."
WHOLE = answer_for([{"role": "user", "content": QUESTION}])
#: an answer takes some seconds, as long as a failover
SLOW = replace(QUICK, tokens_per_s=100.0)
DELTA = "response.output_text.delta"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failover takes some seconds, in which no text comes."""
    monkeypatch.setattr(ws, "PATIENCE_S", 30.0)


async def survive(one: WsClient, two: WsClient, fail: Callable[[], Awaitable[None]]) -> None:
    """The store fails in mid-answer; both clients read the whole of it all the same, and the next turn works."""
    await one.say(QUESTION)
    await one.send("response.create")
    for client in (one, two):
        for _ in range(5):
            await client.until(DELTA)
    await fail()
    for client in (one, two):
        response = (await client.until("response.done"))["response"]
        assert response["status"] == "completed"
        assert response["output"][0]["content"][0]["text"] == WHOLE
    states = {event["state"] for event in one.events if event["type"] == "heartbeat"}
    assert "waiting" in states
    await say_until_it_is_taken(two, "Are you there?")
    await two.send("response.create")
    response = (await two.until("response.done"))["response"]
    assert response["status"] == "completed"
    await one.until("response.done")
    for client in (one, two):
        assert list(client.texts.values()) == [WHOLE, response["output"][0]["content"][0]["text"]]


async def say_until_it_is_taken(client: WsClient, text: str) -> None:
    """The first write of a replica after the failover may go out on a connection that is dead: it can be sent again."""
    message = {"type": "message", "id": "again", "role": "user", "content": [{"type": "input_text", "text": text}]}
    while True:
        await client.send("conversation.item.create", item=message)
        while (event := await client.next())["type"] not in ("conversation.item.done", "error"):
            pass
        if event["type"] == "conversation.item.done":
            return
        assert (event["error"]["code"], event["error"]["retryable"]) == ("store_unavailable", True)
        await asyncio.sleep(0.1)


async def on_first(server: RunningServer, is_there: Callable[[str], bool]) -> str:
    """A session that lies where one wants it."""
    while True:
        async with server.connect() as client:
            if is_there(client.session["id"]):
                return str(client.session["id"])


async def test_a_replica_of_the_cluster_takes_over_in_mid_answer(tmp_path: Path) -> None:
    """The primary with the session is killed; its replica has all that was told."""
    async with (
        valkey_cluster(tmp_path) as cluster,
        running_server(tmp_path, simulated=SLOW, redis_url=Secret(cluster.url), heartbeat_s=0.5) as server,
        another(server) as replica,
    ):
        session_id = await on_first(server, lambda id: cluster.primary_of(id) == 0)
        async with (
            server.connect(session_id=session_id, extensions=1) as one,
            replica.connect(session_id=session_id, extensions=1) as two,
        ):
            await survive(one, two, lambda: cluster.primaries[0].end(signal.SIGKILL))


@pytest.mark.parametrize("daemons", [1, 3])
async def test_sentinel_puts_a_replica_in_place_in_mid_answer(tmp_path: Path, daemons: int) -> None:
    """The server is killed; the replica that Sentinel promotes has all that was told."""
    async with (
        valkey_sentinel(tmp_path, daemons=daemons) as watched,
        running_server(tmp_path, simulated=SLOW, redis_url=Secret(watched.url), heartbeat_s=0.5) as server,
        another(server) as replica,
        server.connect(extensions=1) as one,
        replica.connect(session_id=one.session["id"], extensions=1) as two,
    ):
        await survive(one, two, lambda: watched.server.end(signal.SIGKILL))


async def test_a_server_of_the_cluster_that_is_away_holds_up_the_sessions_on_it_alone(tmp_path: Path) -> None:
    """The others do not notice, on any replica, not even that the list of their user's sessions lies on it."""
    async with (
        valkey_cluster(tmp_path) as cluster,
        running_server(tmp_path, simulated=SLOW, redis_url=Secret(cluster.url), heartbeat_s=0.5) as server,
        another(server) as replica,
    ):
        away = cluster.primary_with(keys.user_sessions(LOCAL))
        assert away != cluster.primary_with(keys.REPLICAS), "without that one nobody is let in"
        there = await on_first(server, lambda id: cluster.primary_of(id) == away)
        elsewhere = await on_first(server, lambda id: cluster.primary_of(id) not in (0, away))
        async with (
            server.connect(session_id=there, extensions=1) as waits,
            replica.connect(session_id=there, extensions=1) as waits_too,
            server.connect(session_id=elsewhere, extensions=1) as one,
            replica.connect(session_id=elsewhere, extensions=1) as two,
        ):
            for client in (waits, one):
                await client.say(QUESTION)
                await client.send("response.create")
            for client in (waits, waits_too, one, two):
                for _ in range(5):
                    await client.until(DELTA)
            await cluster.primaries[away].end(signal.SIGKILL)
            for client in (one, two):
                response = (await client.until("response.done"))["response"]
                assert response["status"] == "completed"
                assert client.texts[response["output"][0]["id"]] == WHOLE
            for client, other in ((two, one), (one, two)):
                assert (await client.turn("Are you there? In 5 words.")).response["status"] == "completed"
                await other.until("response.done")
            assert one.texts == two.texts
            assert not any(event.get("state") == "waiting" for client in (one, two) for event in client.events)
            for client in (waits, waits_too):
                while (await client.until("heartbeat"))["state"] != "waiting":
                    pass
            await cluster.primaries[away].start()
            for client in (waits, waits_too):
                response = (await client.until("response.done"))["response"]
                assert response["status"] == "completed"
                assert list(client.texts.values()) == [response["output"][0]["content"][0]["text"]] == [WHOLE]
            await say_until_it_is_taken(waits_too, "Are you there?")
