"""What clients ask of a session, over the real server: items, answers and their errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio

from chat_server.engine.simulated import answer_for
from chat_server.settings import Limits
from tests.support.server import QUICK, RunningServer, running_server
from tests.support.ws import WsClient

pytestmark = [pytest.mark.server, pytest.mark.asyncio(loop_scope="module")]

LONG = "Tell me more, in 300 words."
LIMITS = Limits(max_items=6, max_message_bytes=1000, max_session_bytes=5000)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    """One server for all tests here; each has a session of its own."""
    async with running_server(tmp_path_factory.mktemp("commands"), limits=LIMITS) as running:
        yield running


def message(text: str, *, role: str = "user", kind: str = "input_text", **item: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}], **item}


async def begun(client: WsClient) -> dict[str, Any]:
    """Ask for a long answer and read the beginning of its text; the response as it was created."""
    await client.say(LONG)
    await client.send("response.create")
    created = await client.until("response.created")
    while sum(map(len, client.texts.values())) < 30:
        await client.until("response.output_text.delta")
    return created["response"]  # type: ignore[no-any-return]


async def items(server: RunningServer, client: WsClient) -> list[str]:
    """The ids of the conversation, in order, as somebody who joins is told them."""
    count = None
    async with server.connect(session_id=client.session["id"], history="all") as other:
        count = other.events[0]["item_count"]
        return [(await other.until("conversation.item.done"))["item"]["id"] for _ in range(count)]


# --- items


@pytest.mark.parametrize(
    ("role", "kind"), [("user", "input_text"), ("system", "input_text"), ("assistant", "output_text")]
)
async def test_an_item_is_told_as_it_is_stored(server: RunningServer, role: str, kind: str) -> None:
    """Added, then done, then there for who asks for it; with an id from us if the client chose none."""
    async with server.connect() as client:
        content = [{"type": kind, "text": "Grüezi, "}, {"type": kind, "text": "👩🏽‍💻\u0000\u2028\\\"'"}]
        await client.send("conversation.item.create", item={"type": "message", "role": role, "content": content})
        added = await client.expect("conversation.item.added")
        done = await client.expect("conversation.item.done")
        assert (added["previous_item_id"], added["item"]) == (None, done["item"])
        item = added["item"]
        assert (item["role"], item["status"], item["content"]) == (role, "completed", content)
        await client.send("conversation.item.retrieve", item_id=item["id"])
        assert (await client.expect("conversation.item.retrieved"))["item"] == item


async def test_items_take_the_place_they_are_given(server: RunningServer) -> None:
    """At the end, at the start by ``root``, or behind another; each is told with what stands before it."""
    async with server.connect() as client:
        for id, previous, before in (
            ("b", None, None),
            ("d", None, "b"),
            ("a", "root", None),
            ("c", "b", "b"),
            ("e", "d", "d"),
        ):
            await client.send("conversation.item.create", item=message(id, id=id), previous_item_id=previous)
            assert (await client.expect("conversation.item.added"))["previous_item_id"] == before
            assert (await client.expect("conversation.item.done"))["previous_item_id"] == before
        assert await items(server, client) == ["a", "b", "c", "d", "e"]
        await client.send("conversation.item.create", item=message("f"), previous_item_id="nobody")
        assert (await client.error("item_not_found"))["param"] == "previous_item_id"
        assert await items(server, client) == ["a", "b", "c", "d", "e"]


async def test_an_item_sent_again_is_there_once(server: RunningServer) -> None:
    """The same id and content is acknowledged to who sent it, marked as a duplicate; nobody else hears of it."""
    async with server.connect() as one, server.connect(session_id=one.session["id"]) as two:
        await one.say("Before")
        first = await one.say("Hello", id="mine")
        await two.send("conversation.item.create", item=message("Hello", id="mine"))
        for _ in range(2):
            await two.until("conversation.item.done")
        for kind in ("conversation.item.added", "conversation.item.done"):
            event = await two.expect(kind)
            assert (event["item"], event["duplicate"]) == (first, True)
            assert event["previous_item_id"] == one.events[1]["item"]["id"]
        await one.say("After")
        assert [e["item"]["content"][0]["text"] for e in one.events[1:]] == [
            *("Before", "Before", "Hello", "Hello", "After", "After")
        ]


async def test_another_item_of_the_same_id_is_a_conflict(server: RunningServer) -> None:
    """Other text or another role; the first stays as it is."""
    async with server.connect() as client:
        first = await client.say("Hello", id="mine")
        for other in (message("Hello!", id="mine"), message("Hello", role="system", id="mine")):
            await client.send("conversation.item.create", item=other)
            assert (await client.error("item_id_conflict"))["param"] == "item.id"
        await client.send("conversation.item.retrieve", item_id="mine")
        assert (await client.expect("conversation.item.retrieved"))["item"] == first


async def test_an_item_sent_by_many_at_once_is_there_once(server: RunningServer) -> None:
    """Tabs that retry side by side: one makes it, the others are told it is there."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(server.connect())
        rest = [await stack.enter_async_context(server.connect(session_id=first.session["id"])) for _ in range(3)]
        clients = [first, *rest]
        await asyncio.gather(*(c.send("conversation.item.create", item=message("Once", id="mine")) for c in clients))
        for client in clients:
            await client.until("conversation.item.done")
        assert await items(server, first) == ["mine"]


@pytest.mark.parametrize("id", ["", "x" * 65, "a b", "ü", "a\n", 'a"', "root", 7])
async def test_an_id_of_no_kind_is_refused(server: RunningServer, id: Any) -> None:
    """Ids stand in keys and messages as they are, so only harmless characters may; the session stays whole."""
    async with server.connect() as client:
        await client.send("conversation.item.create", item=message("Hello", id=id))
        assert (await client.error("invalid_value"))["param"] == "item.id"
        await client.say("Still here")
        await client.say("And again")


async def test_a_message_has_a_bound(server: RunningServer) -> None:
    """In bytes, over all its parts; the session stays as it was."""
    async with server.connect() as client:
        part = {"type": "input_text", "text": "ü" * 250}
        await client.send("conversation.item.create", item={**message(""), "content": [part, part]})
        await client.until("conversation.item.done")
        more = {"type": "input_text", "text": "!"}
        await client.send("conversation.item.create", item={**message(""), "content": [part, part, more]})
        assert (await client.error("string_above_max_length"))["param"] == "item.content"
        assert len(await items(server, client)) == 1


async def test_a_conversation_has_a_bound_of_bytes(server: RunningServer) -> None:
    """The message that is too much is refused, with the limit; the others stay."""
    async with server.connect() as client:
        for _ in range(4):
            await client.say("x" * 1000)
        await client.send("conversation.item.create", item=message("x" * 1000))
        assert "5000 bytes" in (await client.error("session_too_large"))["message"]
        assert len(await items(server, client)) == 4


async def test_a_conversation_has_a_bound(server: RunningServer) -> None:
    """One item more is refused, and so is an answer; what is deleted makes room."""
    async with server.connect() as client:
        for number in range(LIMITS.max_items):
            await client.say(str(number), id=f"item_{number}")
        await client.send("conversation.item.create", item=message("More"))
        await client.error("too_many_items")
        await client.send("response.create")
        await client.error("too_many_items")
        await client.say("0", id="item_0")  # a retry is no more
        await client.send("conversation.item.delete", item_id="item_0")
        await client.expect("conversation.item.deleted")
        await client.send("response.create")
        assert (await client.until("response.done"))["response"]["status"] == "completed"


async def test_a_deleted_item_is_gone_for_everybody(server: RunningServer) -> None:
    """All connections are told; it is no part of the next prompt; deleting it again is an error."""
    async with server.connect() as one, server.connect(session_id=one.session["id"]) as two:
        first = await one.say("Forget this")
        await one.say("Keep this")
        await one.send("conversation.item.delete", item_id=first["id"])
        for client in (one, two):
            assert (await client.until("conversation.item.deleted"))["item_id"] == first["id"]
        for kind in ("delete", "retrieve"):
            await one.send(f"conversation.item.{kind}", item_id=first["id"])
            assert (await one.error("item_not_found"))["param"] == "item_id"
        await one.send("response.create")
        answer = (await one.until("response.done"))["response"]["output"][0]
        assert one.texts[answer["id"]] == answer_for([{"role": "user", "content": "Keep this"}], QUICK.words)
        assert len(await items(server, one)) == 2


async def test_the_item_of_a_running_answer_can_not_be_deleted(server: RunningServer) -> None:
    """It is being written; it goes on as if nobody had asked."""
    async with server.connect() as client:
        response = await begun(client)
        [item_id] = client.texts
        await client.send("conversation.item.delete", item_id=item_id)
        while (event := await client.next())["type"] != "error":
            assert event["type"] == "response.output_text.delta"
        assert (event["error"]["code"], event["error"]["param"]) == ("item_in_progress", "item_id")
        done = (await client.until("response.done"))["response"]
        assert (done["id"], done["status"]) == (response["id"], "completed")


# --- answers


async def test_two_turns_remember_and_find_the_prefix_cached(server: RunningServer) -> None:
    """The prompt is the conversation; the engine's counts of it are told, and the second turn's is cached."""
    async with server.connect() as client:
        first = await client.turn("My name is Ann, remember that until the end of this conversation.")
        second = await client.turn("What is my name?")
        third = await client.turn("Are you sure?")
        told = [("user", first.user_item["content"][0]["text"]), ("assistant", first.text)]
        told += [("user", "What is my name?"), ("assistant", second.text), ("user", "Are you sure?")]
        prompt = [{"role": role, "content": content} for role, content in told]
        assert third.text == answer_for(prompt, QUICK.words)
        assert first.cached_tokens == 0 < second.cached_tokens < third.cached_tokens
        usage = third.response["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert usage["input_tokens"] > second.response["usage"]["total_tokens"]
        timing = third.response["timing"]
        assert 0 <= timing["queue_ms"] <= timing["ttft_ms"] <= timing["total_ms"]
        assert len({turn.response["engine"] for turn in (first, second, third)}) == 1


async def test_what_the_client_gives_an_answer_comes_back_with_it(server: RunningServer) -> None:
    """``metadata`` is the client's own; a program finds its request by it."""
    async with server.connect() as client:
        await client.say("Hello")
        await client.send("response.create", response={"metadata": {"request": "7"}})
        assert (await client.until("response.created"))["response"]["metadata"] == {"request": "7"}
        assert (await client.until("response.done"))["response"]["metadata"] == {"request": "7"}


async def test_only_one_answer_runs_at_a_time(server: RunningServer) -> None:
    """A second one is refused, from whichever connection; the first goes on untouched."""
    async with server.connect() as one, server.connect(session_id=one.session["id"]) as two:
        response = await begun(one)
        await two.until("response.created")
        await two.send("response.create")
        while (event := await two.next())["type"] != "error":
            assert event["type"] == "response.output_text.delta" or "added" in event["type"]
        assert event["error"]["code"] == "conversation_already_has_active_response"
        assert response["id"] in event["error"]["message"]
        for client in (one, two):
            assert (await client.until("response.done"))["response"]["status"] == "completed"
        assert one.texts == two.texts


async def test_of_two_asked_at_once_one_runs(server: RunningServer) -> None:
    """However close they come, one is an answer and the other an error."""
    async with server.connect() as one, server.connect(session_id=one.session["id"]) as two:
        await one.say("Hello")
        await two.until("conversation.item.done")
        await asyncio.gather(*(client.send("response.create") for client in (one, two)))
        refused = 0
        for client in (one, two):
            while client.events[-1]["type"] != "response.done":
                event = await client.next()
                refused += event["type"] == "error"
        assert refused == 1
        assert one.texts == two.texts


@pytest.mark.parametrize("running", [True, False])
async def test_the_answer_to_one_item_is_made_once(server: RunningServer, running: bool) -> None:
    """Asked twice, it is the same answer: while it runs nothing new happens; once it ended, it is said again."""
    async with server.connect() as client:
        item = await client.say(LONG)
        await client.send("response.create", in_reply_to=item["id"])
        created = await client.until("response.created")
        assert created["in_reply_to"] == item["id"]
        if not running:
            await client.until("response.done")
        await client.send("response.create", in_reply_to=item["id"])
        if running:
            done = await client.until("response.done")
            await client.send("response.create", in_reply_to=item["id"])
        else:
            done = client.events[-1]
        again = await client.expect("response.created")
        assert done["response"]["id"] == again["response"]["id"] == created["response"]["id"]
        assert (again["duplicate"], again["in_reply_to"]) == (True, item["id"])
        assert again["response"] == done["response"], "the whole answer, for who missed it"
        answer = done["response"]["output"][0]
        assert answer["in_reply_to"] == item["id"]
        assert await items(server, client) == [item["id"], answer["id"]]


async def test_deleting_an_answer_frees_its_item_for_another(server: RunningServer) -> None:
    """That is how a client regenerates; the prompt is the same, so the text is too."""
    async with server.connect() as client:
        item = await client.say("Hello")
        answers = []
        for _ in range(2):
            await client.send("response.create", in_reply_to=item["id"])
            done = await client.until("response.done")
            answers.append(done["response"]["output"][0])
            await client.send("conversation.item.delete", item_id=answers[-1]["id"])
            await client.expect("conversation.item.deleted")
        assert answers[0]["id"] != answers[1]["id"]
        assert answers[0]["content"] == answers[1]["content"]


async def test_an_answer_to_nothing_is_refused(server: RunningServer) -> None:
    """``in_reply_to`` must be an item of this conversation."""
    async with server.connect() as other, server.connect() as client:
        theirs = await other.say("Hello")
        await client.send("response.create", in_reply_to=theirs["id"])
        assert (await client.error("item_not_found"))["param"] == "in_reply_to"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"response": {"conversation": "none"}, "in_reply_to": "item_1"}, "invalid_value", "in_reply_to"),
        ({"response": {"input": [{"type": "item_reference", "id": "i"}]}}, "item_not_found", "response.input[0]"),
        ({"response": {"input": [{"type": "function_call"}]}}, "unsupported", "response.input[0].type"),
        (
            {"response": {"input": [{"type": "message", "role": "user", "content": []}]}},
            "invalid_value",
            "response.input[0].content",
        ),
        ({"response": {"tools": [{"type": "function"}]}}, "unsupported", "response.tools"),
        ({"if_active": "ignore"}, "invalid_value", "if_active"),
        ({"response": {"max_output_tokens": -1}}, "invalid_value", "response.max_output_tokens"),
        ({"response": {"n": 2}}, "unknown_parameter", "response.n"),
        ({"respones": {}}, "unknown_parameter", "respones"),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_what_can_not_be_answered_is_refused_before_it_begins(
    server: RunningServer, fields: dict[str, Any], code: str, param: str
) -> None:
    """The error names the field, and the conversation has no trace of it."""
    async with server.connect() as client:
        await client.say("Hello")
        await client.send("response.create", **fields)
        assert (await client.error(code))["param"] == param
        assert len(await items(server, client)) == 1


# --- cancelling


async def test_there_is_nothing_to_cancel(server: RunningServer) -> None:
    """Neither before, nor after, nor by a wrong id."""
    async with server.connect() as client:
        await client.send("response.cancel")
        await client.error("response_cancel_not_active")
        turn = await client.turn("Hello")
        for fields in ({}, {"response_id": turn.response["id"]}, {"response_id": "resp_none"}):
            await client.send("response.cancel", **fields)
            await client.error("response_cancel_not_active")


async def test_a_cancelled_answer_is_kept_as_it_was_told(server: RunningServer) -> None:
    """Its end says so, the engine is at rest by then, and the next prompt holds what was told."""
    async with (
        server.connect() as one,
        server.connect(session_id=one.session["id"], extensions=1) as two,
    ):
        response = await begun(one)
        await one.send("response.cancel")
        done = (await one.until("response.done"))["response"]
        assert [engine.engine.running for engine in server.engines] == [0, 0]
        assert (done["id"], done["status"]) == (response["id"], "cancelled")
        assert done["status_details"] == {"type": "cancelled", "reason": "client_cancelled"}
        [item] = done["output"]
        [text] = one.texts.values()
        assert (item["status"], item["content"][0]["text"]) == ("incomplete", text)
        whole = answer_for([{"role": "user", "content": LONG}])
        assert 0 < len(text) < len(whole)
        assert whole.startswith(text)
        await two.until("response.done")
        assert two.texts == one.texts
        turn = await one.turn("And now?")
        told = [("user", LONG), ("assistant", text), ("user", "And now?")]
        assert turn.text == answer_for([{"role": role, "content": content} for role, content in told], QUICK.words)


@pytest.mark.parametrize("seen", [0, 1, 25, 10**9])
async def test_the_text_is_cut_to_what_was_seen(server: RunningServer, seen: int) -> None:
    """For all connections, by code points, never past what was told; an answer of which nothing was seen is gone."""
    async with (
        server.connect(extensions=1) as one,
        server.connect(session_id=one.session["id"], extensions=1) as two,
    ):
        await begun(one)
        await one.send("response.cancel", seen=seen)
        done = (await one.until("response.done"))["response"]
        await two.until("response.done")
        assert two.texts == one.texts
        whole = answer_for([{"role": "user", "content": LONG}])
        if seen == 0:
            assert done["output"] == []
            assert "conversation.item.deleted" in one.types
            assert len(await items(server, one)) == 1
        else:
            [item] = done["output"]
            text = item["content"][0]["text"]
            assert whole.startswith(text)
            assert len(text) == seen or (seen == 10**9 and len(text) >= 30)
            assert item["status"] == "incomplete"
            assert one.texts[item["id"]] == text
            await one.send("conversation.item.retrieve", item_id=item["id"])
            assert (await one.expect("conversation.item.retrieved"))["item"] == item


async def test_an_answer_can_be_cancelled_before_its_first_word(server: RunningServer) -> None:
    """From the moment it was asked for; nothing was told of it, so nothing is kept, and the item can be answered."""
    async with server.connect() as client:
        item = await client.say(LONG)
        await client.send("response.create", in_reply_to=item["id"])
        await client.send("response.cancel")
        done = (await client.until("response.done"))["response"]
        assert (done["status"], done["output"], done["usage"]) == ("cancelled", [], None)
        assert "response.output_text.delta" not in client.types
        assert client.types[-2:] == ["conversation.item.deleted", "response.done"]
        assert [engine.engine.running for engine in server.engines] == [0, 0]
        assert await items(server, client) == [item["id"]]
        await client.send("response.create", in_reply_to=item["id"], response={"max_output_tokens": 5})
        assert (await client.until("response.done"))["response"]["status"] == "incomplete"


async def test_a_second_cancel_changes_nothing(server: RunningServer) -> None:
    """The first one's ``seen`` holds; there is one end."""
    async with server.connect(extensions=1) as client:
        response = await begun(client)
        await client.send("response.cancel", seen=9)
        await client.send("response.cancel", seen=3, response_id=response["id"])
        while client.events[-1]["type"] != "response.done":
            event = await client.next()
            assert event["type"] != "error" or event["error"]["code"] == "response_cancel_not_active"
        [item] = client.events[-1]["response"]["output"]
        assert len(item["content"][0]["text"]) == 9


async def test_any_tab_may_cancel(server: RunningServer) -> None:
    """Also one that joined in mid-answer."""
    async with server.connect(extensions=1) as one:
        response = await begun(one)
        async with server.connect(session_id=one.session["id"], extensions=1) as two:
            await two.until("response.output_text.delta")
            await two.send("response.cancel", response_id=response["id"])
            for client in (one, two):
                assert (await client.until("response.done"))["response"]["status"] == "cancelled"
