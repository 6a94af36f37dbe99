"""A chaos client against servers that lie, on real sockets: what it is told wrongly it says, and nothing else."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import orjson
import pytest
import websockets.asyncio.server
from websockets.asyncio.server import ServerConnection

from loadtest.chaos_audit import Audit
from loadtest.chaos_client import Client, Scene, SessionGone
from loadtest.chaos_line import Line, Lost, Refused, Unreachable
from loadtest.chaos_model import Asked
from loadtest.chaos_report import AFTER_DONE, CANCEL_SAME, DROPPED, Tally
from loadtest.chaos_stop import Stopping
from loadtest.chaos_texts import Violation
from loadtest.chaos_world import Replica, World
from loadtest.processes import Process, free_port
from tests.loadtest.test_chaos_model import CREATED, whole_stream

pytestmark = pytest.mark.server

DRAINING = {"type": "server.draining", "event_id": "event_draining", "retry_after_ms": 100}

Serve = Callable[[ServerConnection], Awaitable[None]]


@asynccontextmanager
async def client_of(serve: Serve, *, process_request: Any = None) -> AsyncIterator[Client]:
    """A client of a server that does this with each connection."""
    async with websockets.asyncio.server.serve(serve, "127.0.0.1", 0, process_request=process_request) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        replica = Replica(Process("fake", [], Path()), f"http://127.0.0.1:{port}", id="replica_1", up=True)
        world = World(cast("Any", None), [], [], [replica])
        async with aiohttp.ClientSession() as http:
            audit = Audit("redis://127.0.0.1:1", [], http)
            asked = {"item_1": Asked("item_1", "Hello 👋", words=None, expected=None)}
            asked["item_1"].expected = "".join(event.get("delta", "") for event in whole_stream())
            client = Client(Scene(world, audit, Tally()), "test", asked, random.Random(1))
            try:
                yield client
            finally:
                await client.leave()
                await audit.close()


def telling(events: list[dict[str, Any]], *, close: int | None = None) -> Serve:
    """Tell these events and then close with a code; 0: break the connection."""

    async def serve(connection: ServerConnection) -> None:
        for event in events:
            await connection.send(orjson.dumps(event).decode())
        if close == 0:
            connection.transport.abort()
        elif close is not None:
            await connection.close(close)
        await connection.wait_closed()

    return serve


async def read(client: Client) -> str | None:
    """Connect and read until the answer has ended or the connection is gone; the kind of the violation, if any."""
    try:
        await client.connect()
        while (event := await client.next()) is not None:
            if event["type"] == "response.done":
                break
    except Violation as violation:
        return violation.kind
    return None


async def test_a_server_that_is_right_passes() -> None:
    """The end of the answer is noted, for the watch over the engines."""
    async with client_of(telling(whole_stream())) as client:
        assert await read(client) is None
        assert list(client.scene.audit.ended) == ["resp_1"]


async def test_a_delta_less_is_seen() -> None:
    """And the trace says what came before."""
    events = [event for n, event in enumerate(whole_stream()) if n != 20]
    async with client_of(telling(events)) as client:
        assert await read(client) == "lost"
        assert "response.output_text.delta" in client.trace[-1]


@pytest.mark.parametrize("code", [1011, 1008, 1012, 1013])
async def test_a_connection_that_ends_needs_a_reason(code: int) -> None:
    """Also one that is asked to come back, and one that was too slow: nothing befell the system, and it reads."""
    async with client_of(telling([CREATED], close=code)) as client:
        assert await read(client) == "refused"


@pytest.mark.parametrize(("code", "kind"), [(1012, None), (1011, "refused"), (1008, "refused")])
async def test_after_a_fault_a_client_may_be_asked_to_come_back(code: int, kind: str | None) -> None:
    """For a while; an error of the server is one all the same."""
    async with client_of(telling([CREATED], close=code)) as client:
        client.scene.unsettled_until = time.monotonic() + 10
        assert await read(client) == kind
        client.scene.unsettled_until = time.monotonic()
        assert await read(client) == "refused"


@pytest.mark.parametrize(("code", "kind"), [(1013, None), (1011, "refused"), (1012, "refused")])
async def test_who_stops_reading_is_dropped(code: int, kind: str | None) -> None:
    """As too slow, and that is counted; not for any other reason."""
    async with client_of(telling([CREATED], close=code)) as client:
        client.frozen = True
        assert await read(client) == kind
        assert client.scene.tally.counts[DROPPED] == (kind is None)


@pytest.mark.parametrize(
    ("events", "code", "kind"),
    [([DRAINING], 1012, None), ([], 1012, "refused"), ([DRAINING], 1011, "refused"), ([DRAINING], None, "refused")],
)
async def test_a_replica_that_stops_says_so(events: list[dict[str, Any]], code: int | None, kind: str | None) -> None:
    """``server.draining``, and then 1012: nothing else is a rolling restart."""
    async with client_of(telling([CREATED, *events], close=code or 0)) as client:
        [replica] = client.scene.world.replicas
        replica.stopped.add(replica.id)
        assert await read(client) == kind


async def test_a_code_may_be_lost_by_who_speaks_to_a_replica_that_has_gone() -> None:
    """What is sent to a process that has ended breaks the connection."""
    async with client_of(telling([CREATED, DRAINING], close=0)) as client:
        [replica] = client.scene.world.replicas
        replica.stopped.add(replica.id)
        await client.connect()
        for _ in range(2):
            await client.next()
        await client.send("ping", t=1)
        assert await client.next() is None


@pytest.mark.parametrize(("made", "gone"), [(-0.5, True), (-5.0, False), (5.0, False)])
async def test_only_a_session_of_the_lost_second_may_be_gone(made: float, gone: bool) -> None:
    """One that was made before is in what was kept, and one that was made after was never lost."""

    def no(connection: ServerConnection, _: object) -> Any:
        return connection.respond(404, '{"error": {"code": "session_not_found"}}')

    for refuse in (no, None):
        async with client_of(telling([CREATED], close=1008), process_request=refuse) as client:
            client.session_id, client.session_at = "sess_1", 100.0 + made
            client.scene.losses.append(100.0)
            found: object = None
            try:
                found = await read(client)
            except SessionGone:
                found = SessionGone
            assert found == (SessionGone if gone else "refused")


async def test_a_restart_of_redis_is_no_reason() -> None:
    """Connections live through it."""
    async with client_of(telling([CREATED], close=1012)) as client:
        client.scene.restarting = True
        assert await read(client) == "refused"


async def test_a_replica_that_was_killed_is_a_reason() -> None:
    """Also when it is back already."""
    async with client_of(telling([CREATED], close=1011)) as client:
        await client.connect()
        client.scene.world.replicas[0].id = "replica_2"
        assert await client.next() is not None
        assert await client.next() is None


async def test_silence_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has nothing to say sends heartbeats."""
    monkeypatch.setattr("loadtest.chaos_client.SILENCE_S", 0.1)
    async with client_of(telling([CREATED])) as client:
        assert await read(client) == "stuck"


async def test_a_cut_is_a_reset() -> None:
    """The other side gets no close frame, and at once."""
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def serve(connection: ServerConnection) -> None:
        await connection.send(orjson.dumps(CREATED).decode())
        await connection.wait_closed()
        ended.set_result(connection.close_code or 0)

    async with client_of(serve) as client:
        await client.connect()
        await client.next()
        line = client.line
        assert line is not None
        client.cut("text")
        started = time.monotonic()
        assert await ended == 1006
        assert time.monotonic() - started < 1.0
        assert await client.next() is None
        assert client.scene.tally.cuts == {"text": 1}
        with pytest.raises(Lost):
            await line.recv(1.0)


async def test_nobody_there_is_no_refusal() -> None:
    """A replica that is down is another thing than one that says no."""
    with pytest.raises(Unreachable):
        await Line.open(f"ws://127.0.0.1:{free_port()}/v1/realtime", {})

    def no(connection: ServerConnection, _: object) -> Any:
        return connection.respond(404, '{"error": {"code": "session_not_found"}}')

    async with websockets.asyncio.server.serve(telling([]), "127.0.0.1", 0, process_request=no) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        with pytest.raises(Refused) as refusal:
            await Line.open(f"ws://127.0.0.1:{port}/v1/realtime", {})
        assert (refusal.value.status, refusal.value.code) == (404, "session_not_found")


@pytest.mark.parametrize(
    ("goes_on_s", "befalls", "kind"),
    [
        (0.3, "nothing", "end"),
        (0.0, "nothing", None),
        (0.3, "a fault", None),
        (0.3, "a kill", None),
        (0.3, "a cut", None),
    ],
)
async def test_a_stop_that_is_ignored_is_seen(
    goes_on_s: float, befalls: str, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer may come to its own end just after its stop, or when a fault befell the stop; else never."""
    monkeypatch.setattr("loadtest.chaos_stop.IGNORED_S", 0.2)
    events = whole_stream()

    async def serve(connection: ServerConnection) -> None:
        for event in events[:10]:
            await connection.send(orjson.dumps(event).decode())
        assert b"response.cancel" in await connection.recv(decode=False)
        await asyncio.sleep(goes_on_s)
        for event in events[10:]:
            await connection.send(orjson.dumps(event).decode())
        await connection.wait_closed()

    async with client_of(serve) as client:
        await client.connect()
        for _ in range(10):
            await client.next()
        answer = client.reader.answers["resp_1"]
        assert answer.in_the_middle
        stopping = Stopping(client.scene, answer.asked, answer, None)
        await stopping.send(client)
        if befalls == "a fault":
            client.scene.shaken_at = time.monotonic()
        answer.asked.kills = befalls == "a kill"
        while not answer.status:
            await client.next()
        if befalls == "a cut":
            client.cut("done")
        found = None
        try:
            stopping.judge_end(answer)
        except Violation as violation:
            found = violation.kind
        assert found == kind


@pytest.mark.parametrize(("idle_after_s", "kind"), [(-0.1, None), (0.05, None), (0.5, "orphan"), (None, "orphan")])
async def test_a_stopped_answer_has_left_its_engine_when_its_end_is_told(
    idle_after_s: float | None, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not much later, and not never: both are measured from the told end."""

    async def owner(_: Audit, session_id: str, response_id: str) -> str:
        return "replica_1"

    async def until_gone(audit: Audit, response_id: str, timeout_s: float) -> float | None:
        while response_id not in audit.ended:
            await asyncio.sleep(0.001)
        return audit.ended[response_id] + idle_after_s if idle_after_s is not None else None

    monkeypatch.setattr(Audit, "owner", owner)
    monkeypatch.setattr(Audit, "until_gone", until_gone)
    async with client_of(telling(whole_stream(cut=6))) as client:
        await client.connect()
        while client.reader.answer_to("item_1") is None:
            await client.next()
        answer = client.reader.answers["resp_1"]
        stopping = Stopping(client.scene, answer.asked, answer, None)
        await stopping.begin(client)
        answer.asked.stops.append((0, None))
        while not answer.status:
            await client.next()
        stopping.judge_end(answer)
        found = None
        try:
            await stopping.check(answer)
        except Violation as violation:
            found = violation.kind
        assert found == kind
        measured = [(name, len(values)) for name, values in client.scene.tally.latencies.items()]
        assert measured == ([(CANCEL_SAME, 1), (AFTER_DONE, 1)] if idle_after_s is not None else [])
