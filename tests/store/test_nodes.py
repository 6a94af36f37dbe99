"""The store on several machines: a cluster, a server with a replica, Sentinel; all of them real."""

from __future__ import annotations

import asyncio
import random
import signal
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio
import trustme
from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from chat_server.core.ids import new_id
from chat_server.core.items import SessionSettings
from chat_server.core.placement import Binding
from chat_server.errors import StoreUnavailable
from chat_server.store import keys
from chat_server.store import nodes as nodes_module
from chat_server.store import server as server_module
from chat_server.store.address import parse_address
from chat_server.store.nodes import Daemons, connect
from chat_server.store.redis import Store
from chat_server.store.replies import Held, TextCommit
from tests.store.sessions import ANN, MODEL, add, begin, commit, end, ids, item, new_session, store_at
from tests.support.proxy import proxy_to
from tests.support.valkeys import Cluster, free_ports, lone_cluster, valkey_cluster, valkey_pair, valkey_sentinel

pytestmark = [pytest.mark.valkey, pytest.mark.asyncio(loop_scope="module")]

T = TypeVar("T")
#: Seconds in which another server must have taken over.
FAILOVER_S = 20.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One cluster for those tests that leave it whole."""
    async with valkey_cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def stores(cluster: Cluster) -> AsyncIterator[Callable[..., Store]]:
    """Makes stores on the cluster, one for each replica that a test plays."""
    async with AsyncExitStack() as stack:

        def make(**how: Any) -> Store:
            store = store_at(cluster.url, **how)
            stack.push_async_callback(store.close)
            return store

        await make().open()
        yield make


async def sessions_on_each(cluster: Cluster, store: Store) -> list[str]:
    """A new session on each primary, in their order."""
    found: dict[int, str] = {}
    while len(found) < len(cluster.primaries):
        session_id = await new_session(store)
        found[cluster.primary_of(session_id)] = session_id
    return [found[at] for at in sorted(found)]


async def as_soon_as_it_can(operation: Callable[[], Awaitable[T]]) -> T:
    """Repeat an operation as long as the store is away, as everything in the server does."""
    async with asyncio.timeout(FAILOVER_S):
        while True:
            try:
                return await operation()
            except StoreUnavailable:
                await asyncio.sleep(0.05)


async def put(store: Store, one: TextCommit) -> str:
    """Store one piece of text; raises StoreUnavailable."""
    [reply] = await store.commit([one])
    if isinstance(reply, StoreUnavailable):
        raise reply
    return reply


async def test_a_cluster_does_all_that_one_server_does(cluster: Cluster, stores: Callable[..., Store]) -> None:
    """Each session on its node; text of all of them in one round trip; what belongs to no session too."""
    store = stores()
    sessions = await sessions_on_each(cluster, store)
    asked = [(await begin(store, session_id))[0] for session_id in sessions]
    for before, text in (("", "Hello"), ("Hello", "!")):
        replies = await store.commit(
            [commit(session_id, one, text, before) for session_id, one in zip(sessions, asked, strict=True)]
        )
        assert replies == ["ok"] * 3
    for session_id, one in zip(sessions, asked, strict=True):
        assert await store.bind(session_id, None, Binding("engine", "1")) == Binding("engine", "1")
        assert isinstance(await end(store, session_id, one, "Hello!", stored="Hello!"), bytes)
        await add(store, session_id, item(id="mine"))
        stored = await store.get_item(session_id, one.item_id)
        assert stored is not None
        assert stored.text == "Hello!"
        assert await ids(store, session_id) == [one.item_id, "mine"]
        await store.note_session(ANN, session_id, 10_000_000)
    assert await store.session_count(ANN, 10_000_000) == 3
    await store.ping()
    other = stores()
    await store.replicas.renew_lease(1_000_000)
    assert await other.replicas.is_alive(store.replica_id)
    await other.replicas.forget_all()
    assert not await other.replicas.is_alive(store.replica_id)
    await store.replicas.renew_lease(1_000_000)
    await store.replicas.drop_lease()
    assert not await other.replicas.is_alive(store.replica_id)


async def test_every_node_hears_what_any_node_tells(cluster: Cluster, stores: Callable[..., Store]) -> None:
    """Wherever a replica is subscribed, and wherever the session lies."""
    teller = stores()
    sessions = await sessions_on_each(cluster, teller)
    for _ in range(8):  # each subscription is on a node drawn by chance
        listener = stores()
        async with listener.replicas.inbox() as inbox:
            for session_id in sessions:
                await listener.watch(session_id)
                added = await teller.add_item(session_id, item(), None)
                assert added is not None
                async with asyncio.timeout(5):
                    assert await anext(inbox) == added.message
                await listener.unwatch(session_id)


async def test_functions_that_one_node_lost_are_loaded_again(cluster: Cluster, stores: Callable[..., Store]) -> None:
    """By whichever operation comes to it first, while the others have them."""
    store = stores()
    sessions = await sessions_on_each(cluster, store)
    for server, session_id in zip(cluster.primaries, sessions, strict=True):
        await server.ask("FUNCTION FLUSH")
        assert await store.watch(session_id) is not None
    asked = [(await begin(store, session_id))[0] for session_id in sessions]
    await cluster.primaries[1].ask("FUNCTION FLUSH")
    commits = [commit(session_id, one, "Hello") for session_id, one in zip(sessions, asked, strict=True)]
    assert await store.commit(commits) == ["ok"] * 3


async def test_slots_may_move(cluster: Cluster, stores: Callable[..., Store]) -> None:
    """A node that has given a session's slot away names the new one, and that one is asked."""
    store, session_id = stores(), new_id("sess")
    while cluster.primary_of(session_id) != 1:
        session_id = new_id("sess")
    before = await new_session(store)
    slot = key_slot(keys.session_keys(session_id)[0].encode())
    old, new = cluster.primaries[1], cluster.primaries[2]
    try:
        await give(cluster, slot, await new.ask("CLUSTER MYID"))
        await store.create_session(session_id, ANN, MODEL, SessionSettings())
        await add(store, session_id, item())
        asked, _ = await begin(store, session_id)
        assert await store.commit([commit(session_id, asked, "Hello")]) == ["ok"]
        assert await new.ask("CLUSTER COUNTKEYSINSLOT", slot) > 0
        assert await store.watch(before) is not None
    finally:
        for key in keys.session_keys(session_id):
            await new.ask("DEL", key)
        await give(cluster, slot, await old.ask("CLUSTER MYID"))


async def give(cluster: Cluster, slot: int, node: str) -> None:
    """Tell every primary who has a slot, which is empty."""
    for server in (*cluster.primaries[1:], cluster.primaries[0]):
        assert await server.ask("CLUSTER SETSLOT", slot, "NODE", node)


async def test_many_calls_share_few_connections(cluster: Cluster, stores: Callable[..., Store]) -> None:
    """Who finds none waits; nobody is refused."""
    store = stores(max_connections=3, max_items=1000)
    sessions = await sessions_on_each(cluster, store)
    await asyncio.gather(*(add(store, session_id, item()) for _ in range(60) for session_id in sessions))
    assert [len(await ids(store, session_id)) for session_id in sessions] == [60] * 3
    for server in cluster.primaries:
        clients = await server.ask("CLIENT LIST", "TYPE", "NORMAL")
        assert len(clients) < 40


async def test_a_call_to_a_cluster_can_be_cancelled_at_any_moment(
    cluster: Cluster, stores: Callable[..., Store]
) -> None:
    """The cancellation is never lost, and nobody gets the answer to another's question."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    store = stores()
    sessions = await sessions_on_each(cluster, store)
    for session_id in sessions:
        await add(store, session_id, item(session_id, id="mine"))

    async def look_for_ever() -> None:
        while True:
            session_id = dice.choice(sessions)
            found = await store.get_item(session_id, "mine")
            assert found is not None
            assert found.text == session_id

    for _ in range(200):
        tasks = [asyncio.create_task(look_for_ever()) for _ in range(3)]
        for _ in range(dice.randrange(30)):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        done, late = await asyncio.wait(tasks, timeout=5)
        assert not late, "the cancellation was swallowed"
        for task in done:
            with suppress(asyncio.CancelledError):
                await task


@pytest.mark.parametrize("hang", [(1,), (0, 2)])
async def test_nodes_that_hang_leave_the_others(
    cluster: Cluster, stores: Callable[..., Store], monkeypatch: pytest.MonkeyPatch, hang: tuple[int, ...]
) -> None:
    """What lies on them is away, after a deadline; what lies elsewhere is not, also in the same question.

    However many calls wait for them. Then all goes on.
    """
    monkeypatch.setattr(server_module, "_TIMEOUT_S", 1.0)
    store = stores(max_connections=3)
    sessions = await sessions_on_each(cluster, store)
    asked = [(await begin(store, session_id))[0] for session_id in sessions]
    for at in hang:
        cluster.primaries[at].tell(signal.SIGSTOP)
    waiting = [asyncio.create_task(store.watch(sessions[at])) for at in hang for _ in range(5)]
    try:
        await asyncio.sleep(0)
        replies, renewed, held, unwatched = await asyncio.gather(
            store.commit([commit(session_id, one, "Hello") for session_id, one in zip(sessions, asked, strict=True)]),
            store.renew_watch(sessions),
            store.held(sessions),
            store.unwatched_ms(sessions),
        )
        for at, session_id in enumerate(sessions):
            if at in hang:
                assert isinstance(replies[at], StoreUnavailable)
                assert (renewed[at], held[at], unwatched[at]) == (None, None, None)
            else:
                assert replies[at] == "ok"
                (version,) = {one.version for one in (renewed[at], held[at]) if one is not None}
                assert {renewed[at], held[at]} <= {Held(version, 0), Held(version, len("Hello"))}
                assert unwatched[at] is not None
                await add(store, session_id, item())
    finally:
        for at in hang:
            cluster.primaries[at].tell(signal.SIGCONT)
        done = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(one) for one in done} == {StoreUnavailable}
    for at in hang:
        await as_soon_as_it_can(lambda at=at: add(store, sessions[at], item()))  # type: ignore[misc]
    assert None not in await store.held(sessions)
    assert len({store.shard(session_id) for session_id in sessions}) == 3


async def test_a_replica_of_a_cluster_takes_over(tmp_path: Path) -> None:
    """With all that was stored, and the functions loaded again if it lacks them; others' sessions go on meanwhile."""
    async with valkey_cluster(tmp_path) as cluster, AsyncExitStack() as stack:
        store = store_at(cluster.url)
        stack.push_async_callback(store.close)
        await store.open()
        sessions = await sessions_on_each(cluster, store)
        asked, _ = await begin(store, sessions[0])
        await store.commit([commit(sessions[0], asked, "Hello")])
        await cluster.primaries[0].end(signal.SIGKILL)
        with pytest.raises(StoreUnavailable):
            await put(store, commit(sessions[0], asked, "!", "Hello"))
        for session_id in sessions[1:]:
            await add(store, session_id, item())
        await cluster.promoted()
        await as_soon_as_it_can(lambda: store.watch(sessions[0]))
        await cluster.replica.ask("FUNCTION FLUSH")
        assert await store.commit([commit(sessions[0], asked, "!", "Hello")]) == ["ok"]
        assert isinstance(await end(store, sessions[0], asked, "Hello!", stored="Hello!"), bytes)


@pytest.mark.parametrize("daemons", [1, 3])
async def test_sentinel_names_the_new_server(tmp_path: Path, daemons: int) -> None:
    """The old one died: the replica becomes the server, for calls and for the inbox."""
    async with valkey_sentinel(tmp_path, daemons=daemons) as watched, AsyncExitStack() as stack:
        one, two = store_at(watched.url), store_at(watched.url)
        for store in (one, two):
            stack.push_async_callback(store.close)
        await one.open()
        session_id = await new_session(one)
        asked, _ = await begin(one, session_id)
        await one.commit([commit(session_id, asked, "Hello")])
        async with two.replicas.inbox() as inbox:
            await watched.server.end(signal.SIGKILL)
            with pytest.raises(StoreUnavailable):
                await anext(inbox)
        more = commit(session_id, asked, "!", "Hello")
        assert await as_soon_as_it_can(lambda: put(one, more)) == "ok"
        await two.watch(session_id)
        async with two.replicas.inbox() as inbox:
            message = await end(one, session_id, asked, "Hello!", stored="Hello!")
            async with asyncio.timeout(5):
                assert await anext(inbox) == message


class PlayedDaemon:
    """A daemon that is gone, or knows the server."""

    def __init__(self, *, gone: bool) -> None:
        self._gone = gone

    async def sentinel_masters(self) -> dict[str, dict[str, Any]]:
        await asyncio.sleep(0)
        if self._gone:
            raise RedisConnectionError("nobody is there")
        state = {"is_master": True, "is_sdown": False, "is_odown": False, "num-other-sentinels": 2}
        return {"main": state | {"ip": "10.0.0.1", "port": 6379}}


async def test_no_daemon_is_forgotten_when_many_ask_at_once() -> None:
    """Whoever answers is asked first from then on, and all of them are there when that one is gone."""
    sentinel = Daemons([("a", 1), ("b", 2), ("c", 3)])  # type: ignore[no-untyped-call]
    await sentinel.aclose()
    daemons: list[Any] = [PlayedDaemon(gone=True), PlayedDaemon(gone=True), PlayedDaemon(gone=False)]
    sentinel.sentinels = list(daemons)
    async with asyncio.timeout(5):
        found = await asyncio.gather(*(sentinel.discover_master("main") for _ in range(10)))
    assert set(found) == {("10.0.0.1", 6379)}
    assert sentinel.sentinels[0] is daemons[2]
    assert set(sentinel.sentinels) == set(daemons)


@pytest.mark.parametrize("kind", ["cluster", "sentinel"])
async def test_a_machine_that_falls_silent_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """It neither answers nor closes its connections: whoever takes over is found all the same, by calls and inbox."""
    monkeypatch.setattr(server_module, "_TIMEOUT_S", 1.5)
    async with AsyncExitStack() as stack:
        if kind == "cluster":
            cluster = await stack.enter_async_context(valkey_cluster(tmp_path))
            url, silent = cluster.url, cluster.primaries[0]
        else:
            watched = await stack.enter_async_context(valkey_sentinel(tmp_path))
            url, silent = watched.url, watched.server
        one, two = (store_at(url, max_items=1000) for _ in range(2))
        for store in (one, two):
            stack.push_async_callback(store.close)
        await one.open()
        session_id = await new_session(one)
        while kind == "cluster" and cluster.primary_of(session_id) != 0:
            session_id = await new_session(one)
        asked, _ = await begin(one, session_id)
        for _ in range(3):  # many connections that are used again
            await asyncio.gather(*(one.watch(session_id) for _ in range(10)))
        subscribed = asyncio.Event()
        heard: asyncio.Queue[bytes] = asyncio.Queue()

        async def listen() -> None:
            while True:
                with suppress(StoreUnavailable):
                    async with two.replicas.inbox() as inbox:
                        await two.watch(session_id)
                        subscribed.set()
                        async for message in inbox:
                            heard.put_nowait(message)
                subscribed.clear()
                await asyncio.sleep(0.05)

        listening = asyncio.create_task(listen())
        try:
            await subscribed.wait()
            silent.tell(signal.SIGSTOP)
            text = commit(session_id, asked, "Hello")
            assert await as_soon_as_it_can(lambda: put(one, text)) == "ok"
            while not heard.empty():
                heard.get_nowait()
            async with asyncio.timeout(FAILOVER_S):
                while heard.empty():
                    await as_soon_as_it_can(lambda: add(one, session_id, item()))
                    await asyncio.sleep(0.1)
        finally:
            listening.cancel()
            await asyncio.wait([listening])
            silent.tell(signal.SIGCONT)


async def test_each_kind_of_store_may_speak_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate is checked against ``ssl_ca_certs``; without it nothing is told to whoever answers."""
    monkeypatch.setattr(nodes_module, "_CONNECT_TIMEOUT_S", 1.5)
    authority = trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    [port] = free_ports(1)
    async with (
        proxy_to(f"redis://127.0.0.1:{port}", tls) as proxy,
        lone_cluster(tmp_path, port, proxy.port),
        valkey_sentinel(tmp_path) as watched,
        proxy_to(f"redis://127.0.0.1:{watched.server.port}", tls) as server,
        proxy_to(f"redis://127.0.0.1:{watched.daemons[0].port}", tls) as daemon,
    ):
        for at in (f"rediss://127.0.0.1:{server.port}", f"rediss+cluster://127.0.0.1:{proxy.port}"):
            store, blind = store_at(f"{at}?ssl_ca_certs={tmp_path}/ca.pem"), store_at(at)
            try:
                await store.open()
                session_id = await new_session(store)
                await add(store, session_id, item(id="mine"))
                assert await ids(store, session_id) == ["mine"]
                with pytest.raises(StoreUnavailable):
                    await blind.open()
            finally:
                await store.close()
                await blind.close()
        # The daemon is reached; the server that it names is spoken to in TLS too, which this one does not understand.
        nodes = connect(
            parse_address(f"rediss+sentinel://127.0.0.1:{daemon.port}/main?ssl_ca_certs={tmp_path}/ca.pem"),
            max_connections=1,
            timeout_s=1.0,
        )
        try:
            with pytest.raises(RedisTimeoutError, match="connecting"):
                await nodes.info()
        finally:
            await nodes.aclose()


async def test_what_must_not_be_lost_waits_for_a_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Begin and an End are done when a replica has them, however often they are told; other calls do not wait."""
    monkeypatch.setattr(server_module, "_WAIT_MS", 100)
    async with valkey_pair(tmp_path) as (server, replica), AsyncExitStack() as stack:
        # The second time over another connection, as after a lost reply: it writes nothing, and still must wait.
        first, again = (store_at(f"redis://127.0.0.1:{server.port}", "replica_1", wait_replicas=1) for _ in range(2))
        for store in (first, again):
            stack.push_async_callback(store.close)
        await first.open()
        session_id = await new_session(first)
        answer = {"id": new_id("resp"), "item_id": new_id("item")}
        replica.tell(signal.SIGSTOP)
        await add(first, session_id, item())
        for store in (first, again):
            with pytest.raises(StoreUnavailable, match="too few replicas"):
                await begin(store, session_id, **answer)
        replica.tell(signal.SIGCONT)
        asked, _ = await as_soon_as_it_can(lambda: begin(again, session_id, **answer))
        assert (await replica.ask("LRANGE", keys.session_keys(session_id)[2], 0, -1))[-1] == asked.item_id
        replica.tell(signal.SIGSTOP)
        assert await first.commit([commit(session_id, asked, "Hello")]) == ["ok"]
        third = store_at(f"redis://127.0.0.1:{server.port}", "replica_1", wait_replicas=1)
        stack.push_async_callback(third.close)
        for store in (first, third):
            with pytest.raises(StoreUnavailable, match="too few replicas"):
                await end(store, session_id, asked, "Hello", stored="Hello")
        replica.tell(signal.SIGCONT)
        told = await as_soon_as_it_can(lambda: end(third, session_id, asked, "Hello", stored="Hello"))
        assert isinstance(told, bytes)


async def test_a_store_with_too_few_replicas_is_away_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For leases as for answers: this replica is not ready, and the log has one line, until a replica follows again."""
    async with valkey_pair(tmp_path) as (server, replica), AsyncExitStack() as stack:
        store = store_at(f"redis://127.0.0.1:{server.port}", wait_replicas=1)
        stack.push_async_callback(store.close)
        await store.open()
        session_id = await new_session(store)
        for _ in range(2):
            caplog.clear()
            await as_soon_as_it_can(lambda: store.replicas.renew_lease(1))
            await replica.end(signal.SIGKILL)
            caplog.clear()
            for _ in range(2):
                with pytest.raises(StoreUnavailable, match="too few"):
                    await store.replicas.renew_lease(1)
            with pytest.raises(StoreUnavailable, match="too few"):
                await begin(store, session_id)
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            await replica.start()
