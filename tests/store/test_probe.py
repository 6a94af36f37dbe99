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
from chat_server.store.probe import place_of, probe_store

pytestmark = pytest.mark.valkey


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://store", "redis://store:6379"),
        ("rediss://user:pass@store:7000/2?x=y", "rediss://store:7000"),
        ("unix:///run/valkey.sock?db=1", "unix:///run/valkey.sock"),
    ],
)
def test_a_place_shows_no_secret(url: str, place: str) -> None:
    """What is shown of a URL has neither user nor password."""
    assert place_of(Secret(url)) == place


@pytest.mark.parametrize("url", ["store:6379", "http://store", "redis://", "redis://store:many", "redis://[::1", ""])
def test_what_is_no_store_is_said_so(url: str) -> None:
    """A wrong URL gives an example of a right one, and is not shown: it may hold a password."""
    with pytest.raises(StartError, match="Example: --redis") as error:
        place_of(Secret(url))
    assert len(url) < 9 or url not in str(error.value)


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
