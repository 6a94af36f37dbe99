"""Readers that lag, freeze or vanish: they get every word or come back for it, cost little, and nobody else notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

import pytest
import pytest_asyncio

from chat_server.edge import realtime
from chat_server.edge import socket as socket_module
from chat_server.edge.outbox import Outbox
from chat_server.edge.socket import SocketProtocol
from chat_server.engine.simulated import SimulatedOptions, answer_for
from chat_server.settings import Limits
from tests.support.server import RunningServer, another, running_server
from tests.support.slow_reader import SlowReader, slow_reader
from tests.support.ws import WsClient

pytestmark = [pytest.mark.server, pytest.mark.asyncio(loop_scope="module")]

DELTA = "response.output_text.delta"
#: Long enough to fill every buffer on the way to a reader that reads nothing, several times.
WISH = "Tell me more, in 400 words."
ANSWER = answer_for([{"role": "user", "content": WISH}])
#: An answer takes some seconds.
FAST = SimulatedOptions(tokens_per_s=400.0, first_token_s=0.0)
BUFFER = 8 << 10
#: Deadlines in proportion to the real ones: 10 s to take something, 15 s for a ping and its answer, 3 s for a close.
LIMITS = Limits(send_timeout_s=0.5, socket_buffer_bytes=BUFFER)
PING_S = 0.75
CLOSE_S = 0.5
#: Within which a silent peer is found and freed; a test may be late itself.
FREED_S = 2 * PING_S + CLOSE_S + 1.0


class Edges:
    """The server's side of each connection, in the order of their coming."""

    def __init__(self) -> None:
        self.sockets: list[SocketProtocol] = []
        self.outboxes: list[Outbox] = []

    def clear(self) -> None:
        self.sockets.clear()
        self.outboxes.clear()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def edges() -> AsyncIterator[Edges]:
    """Of both replicas."""
    known = Edges()

    class Recorded(Outbox):
        def __init__(self, socket: SocketProtocol, **how: Any) -> None:
            super().__init__(socket, **how)
            known.sockets.append(socket)
            known.outboxes.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(realtime, "Outbox", Recorded)
        patch.setattr(socket_module, "_CLOSE_S", CLOSE_S)
        yield known


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replicas(edges: Edges, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[RunningServer]]:
    """Two on one store: the first is patient, the second has short deadlines."""
    folder = tmp_path_factory.mktemp("slow")
    patient = replace(LIMITS, send_timeout_s=60.0)
    async with running_server(folder, engines=1, simulated=FAST, limits=patient) as one:
        one.settings = replace(one.settings, limits=LIMITS, ping_s=PING_S)  # what the next one starts with
        async with another(one) as two:
            yield [one, two]


def watch(server: RunningServer, client: WsClient, **query: Any) -> str:
    """The address at which a second connection joins a client's session."""
    return f"{server.ws_url}?{urlencode({'session_id': client.session['id'], 'extensions': 1, **query})}"


async def ask(client: WsClient) -> None:
    await client.say(WISH)
    await client.send("response.create")


async def ended(client: WsClient) -> None:
    """Read the whole answer: it came in small pieces all the time, as if nobody else were there."""
    await client.until("response.done")
    [text] = client.texts.values()
    assert text == ANSWER
    assert client.types.count(DELTA) > 200


async def gone(socket: SocketProtocol, within_s: float) -> None:
    """Wait until nothing is left of a connection on the server's side."""
    async with asyncio.timeout(within_s):
        while not socket.disconnected or socket in socket.connections:
            await asyncio.sleep(0.01)


async def resumed(server: RunningServer, client: WsClient, reader: SlowReader) -> None:
    """A reader that was dropped comes back with what it has, and has the whole answer then."""
    [created] = [event for event in reader.events if event["type"] == "response.created"]
    held = reader.text
    point = {"response_id": created["response"]["id"], "epoch": reader.deltas[-1]["epoch"], "offset": len(held)}
    async with server.connect(session_id=client.session["id"], extensions=1, **point) as again:
        [item] = created["response"]["output"] or [{"id": reader.deltas[-1]["item_id"]}]
        again.texts[item["id"]] = held
        await again.until("response.done")
        assert again.texts[item["id"]] == ANSWER


# --- slow


async def test_a_slow_reader_gets_longer_deltas_and_every_word(replicas: list[RunningServer], edges: Edges) -> None:
    """It is sent what it can take, each time all that there is; nothing is queued for it, and it is never dropped."""
    edges.clear()
    async with replicas[0].connect() as client, slow_reader(watch(replicas[0], client), 4 << 10) as reader:
        await ask(client)
        reading = asyncio.create_task(ended(client))
        most = 0
        while not any(event["type"] == "response.done" for event in reader.events):
            await reader.read(1000)
            await asyncio.sleep(0.07)
            most = max(most, edges.sockets[1].transport.get_write_buffer_size())
            statistics = edges.outboxes[1].statistics()
            assert statistics["event_bytes"] == 0
            assert statistics["events"] <= 1, "the end of the answer, which is made piece by piece"
        await reading
        assert reader.text == ANSWER
        lengths = [len(event["delta"]) for event in reader.deltas]
        assert max(lengths) > 100 > 10 * lengths[0]
        assert BUFFER // 4 < most < BUFFER // 4 + len(ANSWER) + 1000, "the buffer, and one event"


# --- frozen


async def test_a_frozen_reader_costs_little_and_can_come_back(replicas: list[RunningServer], edges: Edges) -> None:
    """In ``send_timeout_s`` and the time of a close it is gone; its answer goes on, and it gets the rest elsewhere."""
    edges.clear()
    async with replicas[1].connect() as client, slow_reader(watch(replicas[1], client)) as reader:
        ours = edges.sockets[1]
        await ask(client)
        await reader.until(DELTA)
        most = 0
        while ours.is_open:
            event = await client.next()
            assert event["type"] != "response.done", "the frozen reader was never dropped"
            most = max(most, ours.transport.get_write_buffer_size())
            assert edges.outboxes[1].statistics()["event_bytes"] == 0
        assert BUFFER // 4 < most < BUFFER // 4 + 2000
        await ended(client)
        await gone(ours, FREED_S)
        async with asyncio.timeout(FREED_S):
            while any(edges.outboxes[1].statistics().values()):
                await asyncio.sleep(0.01)
        await reader.read_to_the_end()
        assert (reader.close_code, reader.reset) == (None, True)
        assert len(reader.text) < len(ANSWER) // 2
        await resumed(replicas[0], client, reader)


async def test_a_reader_that_wakes_up_in_time_is_told(replicas: list[RunningServer], edges: Edges) -> None:
    """1013, behind what waited for it, so it knows where to go on."""
    edges.clear()
    async with replicas[1].connect() as client, slow_reader(watch(replicas[1], client)) as reader:
        await ask(client)
        while edges.sockets[1].is_open:
            await client.next()
        await reader.read_to_the_end()
        assert reader.close_code == 1013
        await client.until("response.done")
        await resumed(replicas[1], client, reader)


async def test_a_frozen_reader_of_a_patient_server_is_found_by_pings(
    replicas: list[RunningServer], edges: Edges
) -> None:
    """Whose bytes are taken by kernels on the way, so that no deadline of what waits is ever reached."""
    edges.clear()
    async with replicas[1].connect() as client, slow_reader(watch(replicas[1], client), 1 << 20) as reader:
        await ask(client)
        reading = asyncio.create_task(ended(client))
        await gone(edges.sockets[1], FREED_S)
        await reading
        await reader.read_to_the_end()
        assert reader.close_code == 1013
        await resumed(replicas[1], client, reader)


async def test_an_idle_peer_that_answers_nothing_is_found(replicas: list[RunningServer], edges: Edges) -> None:
    """With and without extensions: its TCP is up, but nobody is there."""
    edges.clear()
    async with slow_reader(replicas[1].ws_url) as one, slow_reader(f"{replicas[1].ws_url}?extensions=1") as two:
        for ours in list(edges.sockets):
            await gone(ours, FREED_S)
        for reader in (one, two):
            await reader.read_to_the_end()
            assert reader.close_code == 1013
