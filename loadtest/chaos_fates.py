"""What befalls the system while clients talk: replicas are killed, the store is restarted, all sockets are cut."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

import aiohttp

from loadtest.chaos_client import Scene
from loadtest.chaos_model import Asked
from loadtest.chaos_plan import Fates, Pool
from loadtest.chaos_report import DOUBLES, KILLS, LOSSES, RESTARTS, ROLLS, STOP, STORMS
from loadtest.chaos_talk import Talk
from loadtest.chaos_world import LOST_S, Replica

#: seconds after a kill in which the others take its answers over, before anything else befalls the system.
TAKE_OVER_S = 6.0
#: seconds after its grace time when a replica that is told to stop is stuck.
STUCK_S = 5.0
#: seconds after a restart of the store in which it may still show.
SETTLE_S = 2.0
#: seconds after a kill, a roll or a loss in which a connection may still be asked to come back for it.
CLOSES_S = 10.0
#: seconds for which the store is away, at most.
MOST_DOWN_S = 1.5
#: seconds in which an answer must be under way that a kill can hit.
BUSY_S = 5.0


class Conductor:
    """Lets them happen one after another, spread over the run, while answers are under way."""

    def __init__(
        self, scene: Scene, talks: Sequence[Talk], pool: Pool, *, http: aiohttp.ClientSession, fates: Fates, seed: str
    ) -> None:
        self._scene = scene
        self._talks = talks
        self._pool = pool
        self._http = http
        self._choose = random.Random(f"{seed} fates")
        self._todo = [
            *(self._kill for _ in range(fates.kills)),
            *(self._roll for _ in range(fates.rolls)),
            *(self._restart for _ in range(fates.redis_restarts)),
            *(self._lose for _ in range(fates.redis_losses)),
            *(self._double for _ in range(fates.double_faults)),
            *(self._storm for _ in range(fates.storms)),
        ]
        self._choose.shuffle(self._todo)

    @property
    def left(self) -> int:
        """How many are still to come: clients must talk on until then."""
        return len(self._todo)

    async def run(self) -> None:
        """All of them, each when its share of the turns is done."""
        total = len(self._todo)
        for number in range(total):
            while self._pool.progress < (number + 0.5) / (total + 0.5):  # noqa: ASYNC110 (it is no event)
                await asyncio.sleep(0.05)
            await self._until_busy()
            await self._todo[0]()
            self._todo.pop(0)

    async def _until_busy(self) -> None:
        """Wait until several answers are in the middle: a fault that hits nothing proves nothing."""
        deadline = time.monotonic() + BUSY_S
        while time.monotonic() < deadline:
            busy = [talk for talk in self._talks if (answer := talk.answer) is not None and answer.in_the_middle]
            if len(busy) * 3 >= len(self._talks):
                return
            await asyncio.sleep(0.02)

    def _begin(self, what: str, *, closes: bool = False) -> None:
        """``closes``: connections may be asked to come back."""
        self._scene.tally.counts[what] += 1
        if closes:
            self._scene.unsettled_until = float("inf")
        self._scene.shaken_at = float("inf")  # until it is over
        for talk in self._talks:
            talk.client.note(f"! {what}")

    async def _settle(self, seconds: float) -> None:
        """It is over, but it shows for a while; latencies count again, of whatever was not hit."""
        self._scene.shaken_at = now = time.monotonic()
        self._scene.unsettled_until = min(self._scene.unsettled_until, now + CLOSES_S)
        await asyncio.sleep(seconds)

    async def _kill(self) -> None:
        """``kill -9`` one replica, and start it again on its port."""
        scene, world = self._scene, self._scene.world
        running = [(talk, answer) for talk in self._talks if (answer := talk.answer) is not None and not answer.status]
        owners = await asyncio.gather(*(scene.audit.owner(talk.session_id, answer.id) for talk, answer in running))
        hit = {owner for (_, answer), owner in zip(running, owners, strict=True) if answer.in_the_middle}
        replica = self._choose.choice([one for one in world.replicas if one.id in hit] or world.replicas)
        self._begin(KILLS, closes=True)
        at = await self._kill_now(replica)
        for (talk, answer), owner in zip(running, owners, strict=True):
            if owner == replica.id and not answer.status and talk.answer is answer:
                talk.bereaved(at)
                scene.tally.counts["answers whose replica was killed"] += 1
        await asyncio.sleep(self._choose.uniform(0, 1))
        await world.start_replica(replica, self._http)
        await self._settle(TAKE_OVER_S)

    async def _roll(self) -> None:
        """A rolling restart: each replica in its turn is told to stop, and started again on its port."""
        scene, world = self._scene, self._scene.world
        for replica in world.replicas:
            self._begin("replicas told to stop, in a rolling restart", closes=True)
            under_way = sum((answer := talk.answer) is not None and not answer.status for talk in self._talks)
            scene.tally.counts["answers under way when a replica was told to stop"] += under_way
            noting = asyncio.create_task(self._note_moves())
            try:
                async with asyncio.timeout(scene.tally.grace_s + STUCK_S):
                    took = await world.stop_replica(replica)
            finally:
                noting.cancel()
            scene.tally.latencies[STOP].append(took)
            await world.start_replica(replica, self._http)
            await self._settle(SETTLE_S)
        scene.tally.counts[ROLLS] += 1

    async def _note_moves(self) -> None:
        """While a replica leaves its answers to others, each answer may be made once more, also one that begins now."""
        noted: list[Asked | None] = [None for _ in self._talks]
        while True:
            noted = [talk.killed(already) for talk, already in zip(self._talks, noted, strict=True)]
            await asyncio.sleep(0.02)

    async def _kill_now(self, replica: Replica) -> float:
        """Kill it, and tell all whose answers it may make, also those that began while we were about it."""
        noted = [talk.killed() for talk in self._talks]
        at = await self._scene.world.kill_replica(replica)
        for talk, already in zip(self._talks, noted, strict=True):
            talk.killed(already)
        return at

    async def _restart(self) -> None:
        """Restart the store; nothing is lost."""
        scene = self._scene
        self._begin(RESTARTS)
        scene.restarting, scene.back_at = True, None
        for talk in self._talks:
            talk.store_went()
        _, scene.back_at = await scene.world.valkey.restart(down_s=self._choose.uniform(0, MOST_DOWN_S))
        await self._settle(SETTLE_S)
        scene.restarting = False

    async def _lose(self) -> None:
        """Restart the store; its last second is lost."""
        self._begin(LOSSES, closes=True)
        self._scene.losses.append(time.monotonic())
        for talk in self._talks:
            talk.lost_data(double_fault=False)
        _, self._scene.back_at = await self._scene.world.valkey.restart(lose=True)
        await self._settle(TAKE_OVER_S)

    async def _double(self) -> None:
        """The store loses its last second, and a replica is killed in the same moment."""
        scene, world = self._scene, self._scene.world
        replica = self._choose.choice(world.replicas)
        self._begin(DOUBLES, closes=True)
        scene.losses.append(time.monotonic())
        for talk in self._talks:
            talk.lost_data(double_fault=True)
        at = await self._kill_now(replica)
        scene.audit.forget_ends(at - 2 * LOST_S)
        _, scene.back_at = await world.valkey.restart(lose=True)
        await world.start_replica(replica, self._http)
        await self._settle(TAKE_OVER_S)

    async def _storm(self) -> None:
        """All sockets of all clients are reset at once, and all come back."""
        self._begin(STORMS)
        for talk in self._talks:
            talk.cut_now()
        await self._settle(0.5)
