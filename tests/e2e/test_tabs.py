"""Several tabs of one conversation on several replicas."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from chat_server.engine.simulated import answer_for
from tests.support.prompts import prompt
from tests.support.server import QUICK, another, two_replicas
from tests.support.ws import WsClient
from tests.test_hub import story

pytestmark = pytest.mark.server

DELTA = "response.output_text.delta"
LONG = "Tell me more, in 200 words."
#: These come as text comes, which is not at the same moment everywhere.
AS_IT_COMES = {DELTA, "response.content_part.added"}


async def all_read(clients: tuple[WsClient, ...], points: int) -> None:
    """Until each of them has so many code points of the second answer."""
    for client in clients:
        while len(client.texts) < 2 or len(list(client.texts.values())[-1]) < points:
            await client.until(DELTA)


async def test_an_idle_tab_on_another_replica_sees_all_that_two_others_do(tmp_path: Path) -> None:
    """Items, settings, answers, one that is cut, one that is cancelled while it waits, and what is deleted."""
    slow = replace(QUICK, tokens_per_s=300.0)
    async with (
        two_replicas(tmp_path, simulated=slow) as (first, second),
        another(first) as third,
        first.connect(extensions=1) as one,
        second.connect(session_id=one.session["id"], extensions=1) as two,
        third.connect(session_id=one.session["id"], extensions=1) as idle,
    ):
        tabs = (one, two, idle)
        hello = await one.turn("Hello")
        await two.until("response.done")
        await two.send("session.update", session={"instructions": "Be kind."})
        await one.until("session.updated")
        await two.say(LONG)
        await two.send("response.create")
        await one.until("response.created")
        await one.say("By the way")
        await one.send("response.create", if_active="queue")
        queued = await two.until("response.queued")
        await two.send("response.cancel", response_id=queued["response_id"])
        await two.until("response.done")
        await all_read(tabs, 9)
        await one.send("response.cancel", seen=9)
        while one.events[-1]["type"] != "response.done" or one.events[-1]["response"]["output"] == []:
            await one.next()
        await one.send("conversation.item.delete", item_id=hello.user_item["id"])
        for tab in tabs:
            while tab.events[-1].get("item_id") != hello.user_item["id"] or "deleted" not in tab.types[-1]:
                await tab.next()
        asked = prompt(("system", "Be kind."), ("user", "Hello"), ("assistant", hello.text), ("user", LONG))
        told = [[event for event in story(tab) if event["type"] not in AS_IT_COMES] for tab in tabs]
        for tab, events in zip(tabs, told, strict=True):
            assert list(tab.texts.values()) == [hello.text, answer_for(asked)[:9]]
            assert events == told[0]
        kinds = Counter(event["type"] for event in told[2])
        assert kinds["session.updated"] == 1
        assert (kinds["response.created"], kinds["response.queued"], kinds["response.done"]) == (3, 1, 3)
        assert kinds["conversation.item.deleted"] == 2, "the place of the one that waited, and what was deleted"
