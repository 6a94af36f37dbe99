"""The first look at a store, on real servers and on what is none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import redis.asyncio

from chat_server.errors import StartError, StoreUnavailable
from chat_server.settings import Secret
from chat_server.store import probe
from chat_server.store.embedded import EmbeddedValkey
from chat_server.store.probe import probe_store
from tests.support.valkeys import valkey_cluster, valkey_sentinel

pytestmark = pytest.mark.valkey


async def test_a_store_says_who_it_is(tmp_path: Path) -> None:
    """Server, version, and whether it keeps what it is told."""
    store = EmbeddedValkey(tmp_path)
    try:
        facts = await probe_store(Secret(await store.start()))
    finally:
        await store.stop()
    assert facts.server == "Valkey"
    assert int(facts.version.partition(".")[0]) >= 7
    assert facts.append_only


async def test_a_cluster_is_asked_as_a_whole(tmp_path: Path) -> None:
    """Each primary has to keep its data; and whoever takes a node for a single server is told."""
    async with valkey_cluster(tmp_path) as cluster:
        facts = await probe_store(Secret(cluster.url))
        assert (facts.place, facts.server, facts.append_only) == (cluster.url, "Valkey", True)
        await cluster.primaries[2].ask("CONFIG SET", "appendonly", "no")
        assert not (await probe_store(Secret(cluster.url))).append_only
        with pytest.raises(StartError, match=r"write redis\+cluster://"):
            await probe_store(Secret(f"redis://127.0.0.1:{cluster.primaries[1].port}"))
        for server in (*cluster.primaries, cluster.replica):
            await server.ask("CONFIG SET", "requirepass", "right")
        with pytest.raises(StartError, match="refuses us") as error:
            await probe_store(Secret(cluster.url.replace("//", "//:wrong-one@")))
        assert "wrong-one" not in str(error.value)
        assert (await probe_store(Secret(cluster.url.replace("//", "//:right@")))).server == "Valkey"


async def test_what_sentinel_names_is_asked(tmp_path: Path) -> None:
    """Not the daemon, which is told from a store; a name that it does not know may come to be known."""
    async with valkey_sentinel(tmp_path) as watched:
        facts = await probe_store(Secret(watched.url))
        assert (facts.place, facts.append_only) == (watched.url, True)
        with pytest.raises(StoreUnavailable, match="look at its name"):
            await probe_store(Secret(watched.url.replace("/main", "/other")))
        with pytest.raises(StartError, match=r"write redis\+sentinel://"):
            await probe_store(Secret(f"redis://127.0.0.1:{watched.daemons[0].port}"))
        with pytest.raises(StoreUnavailable, match="is a replica"):
            await probe_store(Secret(f"redis://127.0.0.1:{watched.replica.port}"))
        with pytest.raises(StartError, match="is no cluster"):
            await probe_store(Secret(f"redis+cluster://127.0.0.1:{watched.server.port}"))
        await watched.server.ask("CONFIG SET", "requirepass", "right")
        with pytest.raises(StartError, match="refuses us"):
            await probe_store(Secret(watched.url))
        assert (await probe_store(Secret(watched.url.replace("//", "//:right@")))).server == "Valkey"


async def test_a_wrong_password_is_not_waited_for(tmp_path: Path) -> None:
    """No waiting mends it, so it is an error of the start; the password is not shown."""
    store = EmbeddedValkey(tmp_path)
    try:
        url = await store.start()
        client = redis.asyncio.Redis.from_url(url)
        await client.config_set("requirepass", "right")
        await client.aclose()
        with pytest.raises(StartError, match="refuses us") as error:
            await probe_store(Secret(url.replace("unix://", "unix://:wrong-one@")))
        assert "wrong-one" not in str(error.value)
        with pytest.raises(StartError, match="refuses us"):
            await probe_store(Secret(url))
        assert (await probe_store(Secret(url.replace("unix://", "unix://:right@")))).server == "Valkey"
    finally:
        await store.stop()


async def test_a_store_that_is_away_may_come() -> None:
    """Nobody listens: another kind of error, for waiting may help."""
    with pytest.raises(StoreUnavailable, match=r"redis://127\.0\.0\.1:1 can not be reached"):
        await probe_store(Secret("redis://:secret@127.0.0.1:1"))


async def test_a_silent_store_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody listens and says nothing: the look has its deadline."""
    monkeypatch.setattr(probe, "DEADLINE_S", 0.2)
    done = asyncio.Event()

    async def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await done.wait()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(StoreUnavailable, match="no answer"):
            await probe_store(Secret(f"redis://127.0.0.1:{port}"))
        done.set()


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ("redis_version:6.2.14\r\n", r"Redis 6\.2\.14; version 7 or later is needed"),
        (None, "still reading its data"),
    ],
)
async def test_what_a_store_answers_is_understood(info: str | None, message: str) -> None:
    """Too old a version, and one that still loads its data, in the words of the protocol."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            if line.strip().upper() == b"INFO":
                text = info or ""
                reply = f"${len(text)}\r\n{text}\r\n" if info else "-LOADING Redis is loading the dataset in memory\r\n"
                writer.write(reply.encode())
            elif line.strip().upper() in (b"HELLO", b"CLIENT"):
                writer.write(b"-ERR unknown command\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises((StartError, StoreUnavailable), match=message):
            await probe_store(Secret(f"redis://127.0.0.1:{port}?protocol=2"))


async def test_what_is_no_store_is_not_waited_for() -> None:
    """Something else answers at the address, or the URL asks for what nobody knows."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(StartError, match="is no Redis or Valkey"):
            await probe_store(Secret(url))
        with pytest.raises(StartError, match="not known"):
            await probe_store(Secret(f"{url}?foo=bar"))
        for kind in ("cluster://a", "sentinel://a/main"):
            with pytest.raises(StartError, match="not known"):
                await probe_store(Secret(f"redis+{kind}?foo=bar"))
