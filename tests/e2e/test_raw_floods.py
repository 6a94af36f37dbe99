"""Many frames at once, and noise: each is dealt with, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from websockets.server import ServerProtocol
from wsproto.frame_protocol import Opcode

from chat_server.core.codec import decode
from chat_server.edge import realtime
from tests.e2e.neighbour import STALL_S, Neighbour, no_traceback, talkative_server, undisturbed
from tests.support import raw
from tests.support.raw import create, event, fragments, frame, text
from tests.support.server import RunningServer

pytestmark = [pytest.mark.server, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    """One server for all tests here; each has a session of its own."""
    async with talkative_server(tmp_path_factory.mktemp("frames")) as running:
        yield running


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def neighbour(server: RunningServer) -> AsyncIterator[Neighbour]:
    async with undisturbed(server) as neighbour:
        yield neighbour


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with no_traceback(caplog):
        yield


async def test_a_thousand_frames_a_second_bother_nobody(server: RunningServer, neighbour: Neighbour) -> None:
    """Each is answered, in its order; the neighbour's answer does not falter."""
    seconds, each = 3, 1000
    async with raw.connect(server.ws_url, extensions=1) as client:
        began = time.monotonic()

        async def flood() -> None:
            for number in range(0, seconds * each, 10):
                pings = [frame(Opcode.PING, b"%d" % (number + n)) for n in range(0, 10, 2)]
                events = [event("ping", t=number + n) for n in range(1, 10, 2)]
                await client.send(b"".join(part for pair in zip(pings, events, strict=True) for part in pair))
                await asyncio.sleep(began + (number + 10) / each - time.monotonic())

        flooding = asyncio.create_task(flood())
        answers: dict[Opcode, list[int]] = {Opcode.PONG: [], Opcode.TEXT: []}
        while len(answers[Opcode.TEXT]) < seconds * each // 2 or len(answers[Opcode.PONG]) < seconds * each // 2:
            opcode, payload = await client.next()
            answers[opcode].append(int(payload) if opcode is Opcode.PONG else json.loads(payload)["t"])
        await flooding
    assert answers[Opcode.PONG] == list(range(0, seconds * each, 2))
    assert answers[Opcode.TEXT] == list(range(1, seconds * each, 2))
    print(
        f"{seconds * each} frames in {time.monotonic() - began:.2f} s; "
        f"the neighbour waited for {neighbour.longest_wait_s:.3f} s of work at most"
    )
    assert neighbour.longest_wait_s < STALL_S / 2


class Turns:
    """Counts what is done in one turn of the event loop."""

    def __init__(self) -> None:
        self.done: Counter[int] = Counter()
        self._turn = 0

    def count(self) -> None:
        self.done[self._turn] += 1

    async def run(self) -> None:
        while True:
            self._turn += 1
            await asyncio.sleep(0)


@pytest_asyncio.fixture(loop_scope="module")
async def turns() -> AsyncIterator[Turns]:
    turns = Turns()
    turning = asyncio.create_task(turns.run())
    yield turns
    turning.cancel()


async def test_messages_that_come_at_once_are_not_done_at_once(
    server: RunningServer, turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment may hold thousands: between any two of them everybody else has a turn."""

    def counted(payload: str | bytes) -> Any:
        turns.count()
        return decode(payload)

    monkeypatch.setattr(realtime, "decode", counted)
    async with raw.connect(server.ws_url, extensions=1) as client:
        await client.send(event("ping", t=1) * 500 + text("?") * 500)
        for _ in range(500):
            await client.expect("pong")
        for _ in range(500):
            await client.error("invalid_json")
    assert max(turns.done.values()) == 1


@pytest.mark.parametrize("opcode", [Opcode.PING, Opcode.PONG, Opcode.CONTINUATION])
async def test_frames_without_a_message_are_done_in_small_parts(
    server: RunningServer, turns: Turns, monkeypatch: pytest.MonkeyPatch, opcode: Opcode
) -> None:
    """A read may hold tens of thousands. What follows them is done as ever."""
    recv_frame = ServerProtocol.recv_frame

    def counted(self: ServerProtocol, frame: Any) -> None:
        turns.count()
        recv_frame(self, frame)

    monkeypatch.setattr(ServerProtocol, "recv_frame", counted)
    count = 20_000
    end = json.dumps({"type": "ping", "t": 8}).encode()
    async with raw.connect(server.ws_url, extensions=1) as client:
        many = frame(opcode, fin=opcode is not Opcode.CONTINUATION) * count
        if opcode is Opcode.CONTINUATION:
            many = frame(Opcode.TEXT, fin=False) + many + frame(Opcode.CONTINUATION, end)
        else:
            many += text(end)
        sending = asyncio.create_task(client.send(many))
        assert (await client.expect("pong"))["t"] == 8
        await sending
    assert sum(turns.done.values()) > count
    assert max(turns.done.values()) < 3000


async def test_any_bytes_end_in_order(server: RunningServer) -> None:
    """Noise, and right frames with a few bytes changed: a right close code, or the connection lives."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    ends: Counter[int | None] = Counter()
    for _ in range(100):
        stream = bytearray(
            b"".join([event("ping", t=1), *fragments(create("Grüezi 👋🏽"), 40), frame(Opcode.PING, b"x")])
        )
        if dice.random() < 0.3:
            stream = bytearray(dice.randbytes(dice.randrange(1, 200)))
        for _ in range(dice.randrange(4)):
            stream[dice.randrange(len(stream))] = dice.randrange(256)
        async with raw.connect(server.ws_url) as client:
            await client.send(bytes(stream))
            client.socket.shutdown(socket.SHUT_WR)
            ends[await client.closed()] += 1
    print(dict(ends))
    assert ends.keys() <= {None, *range(1000, 1014), *range(3000, 5000)}
    assert ends[1002] > 10
    async with server.connect() as client:
        await client.say("All is well.")
