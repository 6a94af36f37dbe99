"""One replica of the world: the real server, but for sockets, engines and the store's connections."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from chat_server import app
from chat_server.core import close_codes
from chat_server.edge.auth import Keys
from chat_server.edge.gate import Gate
from chat_server.edge.realtime import Realtime
from chat_server.engine.fleet import Fleet
from chat_server.errors import StoreError
from chat_server.settings import EngineAddress, Limits, Secret, Settings
from chat_server.store.redis import Store
from tests.model.engines import URLS, EngineClient
from tests.model.network import Link, ModelServer
from tests.model.scheduler import Loop

if TYPE_CHECKING:
    from tests.model.world import World

_SETTINGS = Settings(redis_url=Secret("redis://model"), limits=Limits(max_queue_s=20.0, resume_window_s=60.0))


class Replica:
    """One server process: all of it that is above the sockets and below the store's connections is the real one."""

    def __init__(self, world: World, number: int) -> None:
        self.id = f"replica_{number}"
        self.world = world
        self.draining = False
        self.loop = Loop(world.clock, self._on_error)
        self.link = Link(self.id, self.loop)
        world.network.links[self.id] = self.link
        client = EngineClient(world.engines, self.id)
        self.store = Store(
            ModelServer(world.network, self.link),
            self.id,
            ttl_s=10**6,
            empty_ttl_s=10**6,
            max_items=10_000,
            max_session_bytes=1 << 30,
        )
        self.parts = app.Replica(_SETTINGS, self.store, Fleet([EngineAddress(url) for url in URLS], client), client)
        self.hub = self.parts.hub
        gate = Gate(_SETTINGS, Keys(()), self.parts.fleet, self.hub)
        self.realtime = Realtime(_SETTINGS, gate, self.hub, self.parts.commands, self.parts.conductor)
        self.connections: set[asyncio.Task[None]] = set()
        self._main = self.loop.create_task(self._run(), name=self.id)

    @property
    def dead(self) -> bool:
        return self.link.dead

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for work in self.parts.works():
                tasks.create_task(work)

    def serve(self, connection: Coroutine[Any, Any, None], name: str) -> None:
        """Let a connection run here."""
        task = self.loop.create_task(connection, name=name)
        self.connections.add(task)
        task.add_done_callback(self.connections.discard)

    def _on_error(self, context: dict[str, Any]) -> None:
        if not self.dead:
            self.world.fail(f"{self.id}: {context.get('message')}: {context.get('exception')!r}")

    def kill(self) -> None:
        """As ``kill -9``: nothing of it runs any more, its sockets break."""
        self.link.dead = True
        self.loop.stopped = True
        self.world.engines.hang_up(self.id)
        self._hang_up()

    def _hang_up(self) -> None:
        for client in self.world.clients:
            socket = client.socket
            if socket is not None and socket._replica is self:
                self.world.clock.after(client.delay(), partial(client.closed, socket, 1006))

    def drain(self) -> None:
        """As SIGTERM: answers are handed over, then it is gone in order."""
        self.draining = True
        self.loop.create_task(self._drain(), name=f"drain of {self.id}")

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(5.0):
                await self.parts.answers.hand_over()
        except TimeoutError:
            pass
        for live in self.hub.sessions:
            live.connections.close(close_codes.RESTART, "this replica goes away")
        if self.connections:
            await asyncio.wait(self.connections, timeout=5.0)
        for connection in self.connections:
            connection.cancel()
        self._main.cancel()
        await asyncio.wait([self._main])
        with suppress(StoreError):
            await self.store.replicas.drop_lease()
        self.world.trace(f"{self.id} is gone in order")
        self.world.kill(self)
