"""One answer runs and one more may wait: queue, interrupt and cancel, from any tab on any replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from chat_server.engine.simulated import answer_for
from tests.support.prompts import prompt
from tests.support.server import QUICK, RunningServer, two_replicas
from tests.support.ws import WsClient

pytestmark = [pytest.mark.server, pytest.mark.asyncio(loop_scope="module")]

DELTA = "response.output_text.delta"
LONG = "Tell me more, in 300 words."
WHOLE = answer_for([{"role": "user", "content": LONG}])
ACTIVE = "conversation_already_has_active_response"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replicas(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[RunningServer]]:
    """Two replicas on one store and the same engines."""
    slow = replace(QUICK, tokens_per_s=400.0)
    async with two_replicas(tmp_path_factory.mktemp("queue"), simulated=slow) as replicas:
        yield replicas


async def ask(client: WsClient, text: str = LONG, **fields: Any) -> None:
    await client.say(text)
    await client.send("response.create", **fields)


async def ends(client: WsClient, count: int) -> list[dict[str, Any]]:
    """The next ``count`` responses that end on a connection."""
    ended: list[dict[str, Any]] = []
    while len(ended) < count:
        event = await client.next()
        assert event["type"] != "error", event
        if event["type"] == "response.done":
            ended.append(event["response"])
    return ended


@pytest.mark.parametrize("second", [0, 1])
async def test_a_queued_answer_is_made_when_the_running_one_has_ended(
    replicas: list[RunningServer], second: int
) -> None:
    """It has its place at once, whichever replica it was asked of; it answers what stands before that place."""
    async with (
        replicas[0].connect(extensions=1) as one,
        replicas[1].connect(session_id=one.session["id"], extensions=1) as two,
    ):
        await ask(one)
        await two.until(DELTA)
        client = (one, two)[second]
        await ask(client, "And then?", if_active="queue")
        created = await client.until("response.created")
        assert (await client.until("response.queued"))["position"] == 1
        for tab in (one, two):
            first, queued = await ends(tab, 2)
            assert queued["id"] == created["response"]["id"]
            assert [response["status"] for response in (first, queued)] == ["completed", "completed"]
            assert first["output"][0]["content"][0]["text"] == WHOLE
            text = queued["output"][0]["content"][0]["text"]
            assert text == answer_for(prompt(("user", LONG), ("assistant", WHOLE), ("user", "And then?")), QUICK.words)


async def test_the_place_in_the_queue_is_taken_once(replicas: list[RunningServer]) -> None:
    """A further one is refused, and so is one that does not want to wait; the two that were accepted are made."""
    async with replicas[0].connect(extensions=1) as client:
        await ask(client)
        await client.send("response.create", if_active="queue")
        await client.until("response.queued")
        for fields in ({"if_active": "queue"}, {"if_active": "reject"}, {}):
            await client.send("response.create", **fields)
            while (event := await client.next())["type"] != "error":
                pass
            assert event["error"]["code"] == ACTIVE
        assert [response["status"] for response in await ends(client, 2)] == ["completed", "completed"]


@pytest.mark.parametrize("second", [0, 1])
async def test_an_interrupt_stops_the_running_answer_and_answers_instead(
    replicas: list[RunningServer], second: int
) -> None:
    """Cut to what was seen; the new prompt has the cut text."""
    async with (
        replicas[0].connect(extensions=1) as one,
        replicas[1].connect(session_id=one.session["id"], extensions=1) as two,
    ):
        await ask(one)
        client = (one, two)[second]
        while sum(map(len, client.texts.values())) < 12:
            await client.until(DELTA)
        await ask(client, "Stop, something else.", if_active="interrupt", seen=12)
        for tab in (one, two):
            first, second_answer = await ends(tab, 2)
            assert first["status"] == "cancelled"
            assert first["output"][0]["content"][0]["text"] == tab.texts[first["output"][0]["id"]] == WHOLE[:12]
            text = second_answer["output"][0]["content"][0]["text"]
            asked = prompt(("user", LONG), ("assistant", WHOLE[:12]), ("user", "Stop, something else."))
            assert text == answer_for(asked, QUICK.words)


async def test_of_two_interrupts_the_later_wins(replicas: list[RunningServer]) -> None:
    """From two tabs on two replicas at once: one of them is cancelled while it waits, the other is made."""
    for _ in range(5):
        async with (
            replicas[0].connect(extensions=1) as one,
            replicas[1].connect(session_id=one.session["id"], extensions=1) as two,
        ):
            await ask(one)
            await two.until(DELTA)
            await asyncio.gather(*(tab.send("response.create", if_active="interrupt") for tab in (one, two)))
            for tab in (one, two):
                statuses = [response["status"] for response in await ends(tab, 3)]
                assert sorted(statuses) == ["cancelled", "cancelled", "completed"]
                assert statuses[-1] == "completed"
            for tab in (one, two):
                assert (await tab.turn("Still there?")).response["status"] == "completed"
                await (two if tab is one else one).until("response.done")


@pytest.mark.parametrize("running", [True, False], ids=["while one runs", "while none runs"])
@pytest.mark.parametrize("if_active", ["queue", "interrupt"])
async def test_two_that_ask_at_once_make_one_history(
    replicas: list[RunningServer], if_active: str, running: bool
) -> None:
    """From two tabs on two replicas: both see the same answers, each ended once, in the order that is stored."""
    for _ in range(2):
        async with (
            replicas[0].connect(extensions=1) as one,
            replicas[1].connect(session_id=one.session["id"], extensions=1) as two,
        ):
            tabs = (one, two)
            await one.say("Tell me more, in 150 words.")
            if running:
                await one.send("response.create")
                for tab in tabs:
                    await tab.until(DELTA)
            else:
                await two.until("conversation.item.done")
            short = {"if_active": if_active, "response": {"max_output_tokens": 20}}
            await asyncio.gather(*(tab.send("response.create", **short) for tab in tabs))
            refused = await read_to_rest(one, two)
            asked = 2 + running
            # One may wait: the other one that wants to is told so. Whoever interrupts always has its place.
            assert refused == (1 if if_active == "queue" and running else 0)
            begun, ended = ([by_kind(tab, kind) for tab in tabs] for kind in ("response.created", "response.done"))
            assert begun[0] == begun[1]
            assert ended[0] == ended[1]
            assert sorted(begun[0]) == sorted(ended[0])
            assert len(set(ended[0])) == len(ended[0]) == asked - refused
            assert one.texts == two.texts
            for server in replicas:
                async with server.connect(session_id=one.session["id"], history="all") as later:
                    assert later.events[0]["active_response"] is None
                    count = later.events[0]["item_count"]
                    items = [(await later.until("conversation.item.done"))["item"] for _ in range(count)]
                for tab in tabs:
                    answers = {event["response"]["id"]: event["response"] for event in tab.events if is_end(event)}
                    left = [answers[id]["output"] for id in begun[0] if answers[id]["output"]]
                    assert [[item] for item in items[1:]] == left
            ends = [event["response"]["status"] for event in two.events if is_end(event)]
            if if_active == "queue":
                assert ends == ["completed"] * running + ["incomplete"] * (2 - refused), "each was made to its end"
            else:
                # The first of the two may have come to its end before the second was there.
                assert ends[:-2] == ["cancelled"] * running
                assert ends[-2] in ("cancelled", "incomplete")
                assert ends[-1] == "incomplete", "the last one is made"


def is_end(event: dict[str, Any]) -> bool:
    return bool(event["type"] == "response.done")


def by_kind(client: WsClient, kind: str) -> list[str]:
    """The ids of the responses that a connection was told to begin, or to end, in order."""
    return [event["response"]["id"] for event in client.events if event["type"] == kind]


async def read_to_rest(*clients: WsClient) -> int:
    """Read until all that asked know what came of it, and all that began has ended; how many were refused."""
    refused = 0
    for client in clients:
        # What the client asked for begins, or an error says why not: `pong` is behind both.
        await client.send("ping", t=0)
        while client.events[-1]["type"] != "pong":
            await client.next()
        refused += sum(event["type"] == "error" for event in client.events)
    begun = max((by_kind(client, "response.created") for client in clients), key=len)
    for client in clients:
        while by_kind(client, "response.created") != begun or len(by_kind(client, "response.done")) < len(begun):
            event = await client.next()
            assert event["type"] != "error", event
    return refused


@pytest.mark.parametrize("canceller", [0, 1])
async def test_a_queued_answer_can_be_cancelled(replicas: list[RunningServer], canceller: int) -> None:
    """It ends at once and gives its place up; the running one is not touched."""
    async with (
        replicas[0].connect(extensions=1) as one,
        replicas[1].connect(session_id=one.session["id"], extensions=1) as two,
    ):
        await ask(one)
        await two.until(DELTA)
        await ask(one, "And then?", if_active="queue")
        queued = await two.until("response.queued")
        client = (one, two)[canceller]
        await client.send("response.cancel", response_id=queued["response_id"])
        for tab in (one, two):
            cancelled, first = await ends(tab, 2)
            assert (cancelled["id"], cancelled["status"]) == (queued["response_id"], "cancelled")
            assert cancelled["output"] == []
            assert first["status"] == "completed"
        async with replicas[1].connect(session_id=one.session["id"]) as again:
            assert again.events[0]["item_count"] == 3
            assert again.events[0]["active_response"] is None


async def test_a_cancel_without_an_id_is_for_the_answer_last_told(replicas: list[RunningServer]) -> None:
    """First the one that waits, then the one that runs."""
    async with replicas[0].connect(extensions=1) as client:
        await ask(client)
        await client.until(DELTA)
        await client.send("response.create", if_active="queue")
        queued = await client.until("response.queued")
        await client.send("response.cancel")
        assert [response["id"] for response in await ends(client, 1)] == [queued["response_id"]]
        await client.send("response.cancel")
        [first] = await ends(client, 1)
        assert first["status"] == "cancelled"


async def test_a_new_question_right_behind_a_stop_is_answered(replicas: list[RunningServer]) -> None:
    """Nobody has to wait for the end of an answer that is being stopped."""
    for _ in range(10):
        async with replicas[0].connect(extensions=1) as client:
            await ask(client)
            while sum(map(len, client.texts.values())) < 4:
                await client.until(DELTA)
            await client.send("response.cancel", seen=4)
            await client.send("response.create")
            first, second = await ends(client, 2)
            assert (first["status"], second["status"]) == ("cancelled", "completed")


async def test_a_queued_answer_outlives_its_socket(replicas: list[RunningServer]) -> None:
    """Who comes back, to any replica, is told of both: the running one from where it was, and the queued one."""
    async with replicas[0].connect(extensions=1) as client:
        await ask(client)
        delta = await client.until(DELTA)
        await ask(client, "And then?", if_active="queue")
        queued = await client.until("response.queued")
        held = {"response_id": delta["response_id"], "epoch": delta["epoch"], "offset": 0}
        client.connection.transport.abort()
    async with replicas[1].connect(session_id=client.session["id"], extensions=1, **held) as again:
        first, second = await ends(again, 2)
        assert first["output"][0]["content"][0]["text"] == WHOLE
        assert (second["id"], second["status"]) == (queued["response_id"], "completed")


async def test_the_item_of_an_answer_that_waits_stays(replicas: list[RunningServer]) -> None:
    """It can neither be deleted nor truncated, like that of one that runs."""
    async with replicas[0].connect(extensions=1) as client:
        await ask(client)
        first = await client.until("response.output_item.added")
        await client.send("response.create", if_active="queue")
        second = await client.until("response.output_item.added")
        for item_id in (first["item"]["id"], second["item"]["id"]):
            for event in (
                {"type": "conversation.item.delete"},
                {"type": "conversation.item.truncate", "content_index": 0, "audio_end_ms": 0, "text_end": 0},
            ):
                await client.send(**event, item_id=item_id)
                while (told := await client.next())["type"] != "error":
                    pass
                assert told["error"]["code"] == "item_in_progress"
        assert len(await ends(client, 2)) == 2
