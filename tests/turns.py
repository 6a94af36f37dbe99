"""One turn without a server: a conductor whose store, committer and fleet are played by the test."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any, cast

from chat_server.core.items import Item, Part
from chat_server.core.placement import Binding
from chat_server.core.principal import LOCAL
from chat_server.core.response import Begun, Response
from chat_server.engine.fleet import Engine
from chat_server.engine.vllm import ChatRequest, EngineListener, Finish, Usage, VllmClient
from chat_server.errors import EngineRefused, StoreUnavailable
from chat_server.settings import Limits
from chat_server.store import messages
from chat_server.store.committer import Writer
from chat_server.store.messages import ResponseEnded
from chat_server.turn import Conductor, Turn

#: The one message of these conversations.
ASKED = "Tell me more, in 200 words."


class Script:
    """Stands for the store, the committer and the fleet of one conductor, and records what they get.

    Engines that failed stay in the fleet, so that nothing waits for a probe. Without a ``client`` it also stands for
    that, and says ``parts``: one attempt each, of texts, ``None`` for a thought, and an error that ends it.
    """

    def __init__(
        self,
        *parts: Sequence[str | Exception | None],
        engines: Sequence[str] = ("http://engine",),
        client: VllmClient | None = None,
        store: random.Random | None = None,
        model: str = "simulated",
    ) -> None:
        self.parts = list(parts) or [["Hello"]]
        self.engines = [
            Engine(f"engine-{number}", url, state="healthy", epoch="1", models=(model,), max_model_len=8192)
            for number, url in enumerate(engines, 1)
        ]
        self.client: Any = client or self
        self.model = model
        #: if given, when it takes text and has it is left to chance; else at once
        self.store = store
        self.requests: list[tuple[str, ChatRequest]] = []
        self.failures: list[str] = []
        self.migrations: list[tuple[str, str]] = []
        self.ends: list[dict[str, Any]] = []
        self.told: list[ResponseEnded] = []
        self.away = 0
        self.counts = True
        self.turns: list[Turn] = []
        self.on_settle: Callable[[], None] = lambda: None
        #: called with the end when it was told
        self.on_told: Callable[[ResponseEnded], None] = lambda _: None
        self.bound: Binding | None = None

    # the fleet
    def healthy(self, model: str) -> list[Engine]:
        return self.engines

    def failed(self, engine_id: str, reason: str) -> None:
        self.failures.append(engine_id)

    # the engine
    async def stream(self, engine: str, url: str, request: ChatRequest, listener: EngineListener) -> Finish:
        self.requests.append((engine, request))
        if self.client is not self:
            return await self.client.stream(engine, url, request, listener)  # type: ignore[no-any-return]
        for part in self.parts.pop(0) if len(self.parts) > 1 else self.parts[0]:
            if isinstance(part, Exception):
                raise part
            if part is None:
                listener.on_thinking()
            else:
                listener.on_text(part)
        return Finish("stop", Usage(3, 2, 1))

    async def count_tokens(self, url: str, model: str, text: str, *, engine: str | None = None) -> int:
        if not self.counts:
            raise EngineRefused(f"What is {text!r}?", engine=engine or url, status=404)
        if self.client is not self:
            return await self.client.count_tokens(url, model, text, engine=engine)  # type: ignore[no-any-return]
        return len(text)

    # the committer
    def add(self, writer: Writer) -> None:
        response = writer.response
        if self.store is None:
            if response.take_commit():
                response.stored_in_flight()
        elif self.store.random() < 0.3:
            if response.in_flight:
                response.stored_in_flight()
            else:
                response.take_commit()

    async def settle(self, writer: Writer) -> None:
        self.on_settle()
        if writer.response.in_flight:
            writer.response.stored_in_flight()

    # the store
    async def bind(self, session_id: str, read: Binding | None, new: Binding) -> Binding | None:
        self.bound = new
        return new

    async def end(self, session_id: str, response_id: str, token: str, item: Any, **how: Any) -> bytes:
        if self.away:
            self.away -= 1
            raise StoreUnavailable("away")
        self.ends.append({"item": item, **how})
        body = messages.end_body(response_id, how["rest_offset"], how["rest"], how["outcome"])
        return b'{"kind":"end","session":"s","before":1,"version":2,' + body + b"}"

    # the hub
    async def on_migrate(self, reason: str) -> None:
        told = self.turns[-1].response
        self.migrations.append((reason, told.text(0)))

    def turn(self, *, asked: str = ASKED, stored: str = "", attempts: int = 0, **begun: Any) -> Turn:
        """A turn that begins, or one that was taken over with text that is ``stored``."""
        fields: dict[str, Any] = {
            "id": "resp_1",
            "item_id": "item_2",
            "replica": "replica_1",
            "epochs": [("epoch_1", 0)],
            "created_ms": 0,
            "model": self.model,
            "instructions": "",
            "max_output_tokens": None,
            "temperature": None,
            "top_p": None,
            "stop": (),
            "metadata": None,
        }
        response = Response(Begun(**{**fields, **begun}), previous_item_id="item_1")
        if stored:
            response.on_stored(stored, len(stored.encode()))
        writer = Writer("s", "token_1", response, lambda: None, lambda: None, lambda reply: None, lambda: None)
        item = Item(id="item_1", status="completed", role="user", content=[Part(type="input_text", text=asked)])
        turn = Turn(
            session_id="s",
            principal=LOCAL,
            response=response,
            writer=writer,
            prompt=(item,),
            binding=None,
            committer=cast("Any", self),
            attempts=attempts,
            on_migrate=self.on_migrate,
        )
        self.turns.append(turn)
        return turn

    async def run(self, turn: Turn, limits: Limits | None = None) -> ResponseEnded:
        """Make the answer; returns its one end."""
        part = cast("Any", self)
        conductor = Conductor(store=part, committer=part, fleet=part, client=part, limits=limits or Limits())
        await conductor.run(turn, self._told, asyncio.Lock())
        assert all(engine.in_flight == 0 for engine in self.engines)
        [end] = self.told
        return end

    async def _told(self, message: bytes) -> None:
        change = messages.decode(message)
        assert isinstance(change, ResponseEnded)
        self.told.append(change)
        self.on_told(change)
