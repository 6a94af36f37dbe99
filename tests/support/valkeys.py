"""Several Valkey servers that belong together: a cluster, or a server with a replica and daemons of Sentinel."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis.asyncio
from redis.crc import key_slot
from redis.exceptions import RedisError

from chat_server.store import keys
from chat_server.store.embedded import find_binary

#: Seconds for anything here to become so; it takes a fraction.
PATIENCE_S = 20.0
#: Milliseconds after which a server that is silent counts as gone.
GONE_MS = 700
_SLOTS = 16384


@dataclass(eq=False)
class Valkey:
    """One process. ``data`` is its folder."""

    port: int
    folder: Path
    arguments: tuple[str, ...]
    binary: Path
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start, and wait until it answers; after ``end`` again, with the same data."""
        self.folder.mkdir(exist_ok=True)
        log = self.folder / "log"
        with log.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                str(self.binary), *self.arguments, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
            )
        await until(self.answers, f"the server on port {self.port} answers")

    async def answers(self) -> bool:
        return bool(await self.ask("PING"))

    async def ask(self, *command: Any) -> Any:
        """One command to this very server; None if it does not answer now."""
        client = redis.asyncio.Redis(port=self.port, decode_responses=True, socket_timeout=5)
        try:
            return await client.execute_command(*command)  # type: ignore[no-untyped-call]
        except (RedisError, OSError):
            return None
        finally:
            await client.aclose()

    def tell(self, signum: int) -> None:
        """Freeze it, or let it go on."""
        assert self.process is not None
        self.process.send_signal(signum)

    async def end(self, signum: int = signal.SIGTERM) -> None:
        """Send a signal and wait until it is gone."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signum)
            await self.process.wait()


@dataclass
class Cluster:
    """Three primaries, a third of the slots each; ``replica`` is one of the first."""

    primaries: list[Valkey] = field(default_factory=list)
    replica: Valkey = field(init=False)

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in self.primaries)

    def primary_of(self, session_id: str) -> int:
        """Which primary, by its place in ``primaries``, holds a session, while nothing has failed over."""
        return self.primary_with(keys.session_keys(session_id)[0])

    def primary_with(self, key: str) -> int:
        """Which one holds a key."""
        return key_slot(key.encode()) * len(self.primaries) // _SLOTS

    async def promoted(self) -> None:
        """Wait until the replica has become a primary."""

        async def is_primary() -> bool:
            role = await self.replica.ask("ROLE")
            return role is not None and role[0] == "master"

        await until(is_primary, "the replica is promoted")


@asynccontextmanager
async def valkey_cluster(folder: Path) -> AsyncIterator[Cluster]:
    """A cluster with its data in ``folder``."""
    async with AsyncExitStack() as stack:
        binary = await asyncio.to_thread(find_binary)
        cluster = Cluster()
        ports = free_ports(8)
        servers = []
        for port, bus in zip(ports[:4], ports[4:], strict=True):
            arguments = ("--cluster-enabled", "yes", "--cluster-port", str(bus), "--cluster-node-timeout", str(GONE_MS))
            alone = ("--cluster-require-full-coverage", "no")
            servers.append(server := _server(binary, folder, port, *arguments, *alone))
            stack.push_async_callback(server.end, signal.SIGKILL)
        await asyncio.gather(*(server.start() for server in servers))
        *cluster.primaries, cluster.replica = servers
        for at, server in enumerate(cluster.primaries):
            first, after = (-(-_SLOTS * n // 3) for n in (at, at + 1))
            await server.ask("CLUSTER ADDSLOTSRANGE", first, after - 1)
        for server, bus in zip(servers[1:], ports[5:], strict=True):
            await servers[0].ask("CLUSTER MEET", "127.0.0.1", server.port, bus)
        node = await servers[0].ask("CLUSTER MYID")

        async def is_replica() -> bool:
            return bool(await cluster.replica.ask("CLUSTER REPLICATE", node))

        async def is_whole() -> bool:
            states = [await server.ask("CLUSTER INFO") or {} for server in servers]
            return all((s.get("cluster_state"), s.get("cluster_known_nodes")) == ("ok", "4") for s in states)

        await until(is_replica, "the replica knows its primary")
        await until(is_whole, "the cluster is whole")
        await until(lambda: follows(cluster.replica), "the replica follows")
        yield cluster


@asynccontextmanager
async def valkey_pair(folder: Path) -> AsyncIterator[tuple[Valkey, Valkey]]:
    """A server and its replica, with their data in ``folder``."""
    binary = await asyncio.to_thread(find_binary)
    first, second = free_ports(2)
    server = _server(binary, folder, first)
    replica = _server(binary, folder, second, "--replicaof", "127.0.0.1", str(first))
    try:
        await server.start()
        await replica.start()
        await until(lambda: follows(replica), "the replica follows")
        yield server, replica
    finally:
        await replica.end(signal.SIGKILL)
        await server.end(signal.SIGKILL)


@asynccontextmanager
async def lone_cluster(folder: Path, port: int, seen_at: int) -> AsyncIterator[None]:
    """A cluster of one on ``port``, which tells that it is to be reached on ``seen_at``."""
    arguments = (
        "--cluster-enabled",
        "yes",
        "--cluster-announce-ip",
        "127.0.0.1",
        "--cluster-announce-port",
        str(seen_at),
    )
    [bus] = free_ports(1)
    server = _server(await asyncio.to_thread(find_binary), folder, port, *arguments, "--cluster-port", str(bus))
    try:
        await server.start()
        await server.ask("CLUSTER ADDSLOTSRANGE", 0, _SLOTS - 1)

        async def is_whole() -> bool:
            return ((await server.ask("CLUSTER INFO")) or {}).get("cluster_state") == "ok"

        await until(is_whole, "the cluster is whole")
        yield
    finally:
        await server.end(signal.SIGKILL)


@dataclass
class Watched:
    """A server with a replica, and the daemons of Sentinel that watch over both."""

    server: Valkey
    replica: Valkey
    daemons: list[Valkey]

    @property
    def url(self) -> str:
        return "redis+sentinel://" + ",".join(f"127.0.0.1:{daemon.port}" for daemon in self.daemons) + "/main"


@asynccontextmanager
async def valkey_sentinel(folder: Path, *, daemons: int = 1) -> AsyncIterator[Watched]:
    """A server, its replica and so many daemons, with their data in ``folder``; the service is named ``main``."""
    async with AsyncExitStack() as stack:
        server, replica = await stack.enter_async_context(valkey_pair(folder))
        quorum = daemons // 2 + 1
        watched = Watched(server, replica, [_daemon(folder, port, server, quorum) for port in free_ports(daemons)])
        for daemon in watched.daemons:
            stack.push_async_callback(daemon.end, signal.SIGKILL)
            await daemon.start()

        async def know_all() -> bool:
            masters = [await daemon.ask("SENTINEL MASTERS") or {} for daemon in watched.daemons]
            found = [each.get("main", {}) for each in masters]
            return all((m.get("num-slaves"), m.get("num-other-sentinels")) == (1, daemons - 1) for m in found)

        await until(know_all, "the daemons know the replica and each other")
        yield watched


async def follows(replica: Valkey) -> bool:
    """Whether a replica has all that its primary has."""
    info = await replica.ask("INFO", "replication") or {}
    return bool(info.get("role") == "slave" and info.get("master_link_status") == "up")


async def until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait until something holds; fails, saying what did not, after PATIENCE_S."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not await holds():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not within {PATIENCE_S} s: {what}") from None


def _server(binary: Path, folder: Path, port: int, *arguments: str) -> Valkey:
    own = folder / str(port)
    return Valkey(
        port,
        own,
        (
            *("--port", str(port), "--bind", "127.0.0.1", "--dir", str(own), "--save", ""),
            *("--appendonly", "yes", "--repl-diskless-sync-delay", "0", "--enable-debug-command", "yes"),
            *arguments,
        ),
        binary,
    )


def _daemon(folder: Path, port: int, server: Valkey, quorum: int) -> Valkey:
    """The same binary is Sentinel when it is called so; it keeps what it learns in its configuration."""
    own = folder / str(port)
    own.mkdir(parents=True)
    binary = own / "valkey-sentinel"
    binary.symlink_to(server.binary)
    settings = own / "sentinel.conf"
    settings.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {own}\n"
        f"sentinel monitor main 127.0.0.1 {server.port} {quorum}\n"
        f"sentinel down-after-milliseconds main {GONE_MS}\nsentinel failover-timeout main 3000\n"
    )
    return Valkey(port, own, (str(settings), "--sentinel"), binary)


def free_ports(count: int) -> list[int]:
    """So many ports, all different, that nothing listens on at the moment."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
