"""What a client holds of an answer that it gets over several connections."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.support import ws
from tests.support.ws import WsClient

DELTA = "response.output_text.delta"


@dataclass
class Held:
    """What a client has of one answer, by the offset rule, over any number of connections."""

    session_id: str
    response_id: str
    item_id: str
    epoch: str = ""
    text: str = ""
    done: dict[str, Any] | None = None

    @classmethod
    async def begin(cls, client: WsClient, text: str, **response: Any) -> Held:
        """Ask, and wait until the answer has its place."""
        await client.say(text)
        await client.send("response.create", response=response)
        added = await client.until("response.output_item.added")
        return cls(client.session["id"], added["response_id"], added["item"]["id"])

    @asynccontextmanager
    async def back(self, url: str, **query: Any) -> AsyncIterator[WsClient]:
        """The client comes back to any replica."""
        point: dict[str, Any] = {"response_id": self.response_id, "epoch": self.epoch, "offset": len(self.text)}
        async with ws.connect(url, session_id=self.session_id, extensions=1, **point, **query) as client:
            client.texts[self.item_id] = self.text
            yield client

    def take(self, event: dict[str, Any]) -> None:
        if event.get("response_id") == self.response_id and event["type"] == DELTA:
            assert event["offset"] <= len(self.text), "a gap"
            self.text = self.text[: event["offset"]] + event["delta"]
            self.epoch = event["epoch"]
        if event["type"] == "response.done" and event["response"]["id"] == self.response_id:
            assert self.done is None, "told twice"
            self.done = event["response"]

    async def read(self, client: WsClient, deltas: int | None = None) -> None:
        """Read that many deltas, or to the end."""
        while self.done is None and deltas != 0:
            event = await client.next()
            self.take(event)
            if event["type"] == DELTA and deltas is not None:
                deltas -= 1
