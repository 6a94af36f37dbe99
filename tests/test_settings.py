"""Settings keep secrets, and refuse what can not work or is not safe with what to do about it."""

from __future__ import annotations

import dataclasses
import logging
import traceback
from pathlib import Path
from typing import Any

import pytest
import trustme
from starlette.applications import Starlette

from chat_server import app, hub
from chat_server.core.principal import Principal
from chat_server.edge import socket as socket_module
from chat_server.errors import StartError
from chat_server.settings import (
    EngineAddress,
    Limits,
    Secret,
    Settings,
    is_loopback,
    parse_api_keys,
    parse_engine,
)

pytestmark = pytest.mark.pure

HIDDEN = "s3cret"
KEY = (Secret(HIDDEN), Principal("acme", "ada"))


def keys(*values: str) -> list[tuple[str, str]]:
    """What these ``--api-key`` values give: each key, and whose it is."""
    return [(secret.reveal(), principal.key) for secret, principal in parse_api_keys(values)]


def refusal(settings: Settings) -> str:
    with pytest.raises(StartError) as refused:
        settings.check()
    return str(refused.value)


# --- Secret


@pytest.mark.parametrize(
    "show",
    [
        repr,
        str,
        lambda secret: f"{secret}",
        lambda secret: f"{secret!r:>30}",
        lambda secret: f"{secret!s}",
        "{}".format,
        lambda secret: "%s %r" % (secret, secret),  # noqa: UP031
        lambda secret: repr([secret, {secret: secret}]),
        ascii,
        lambda secret: str(ValueError(secret)),
    ],
)
def test_a_secret_does_not_show_itself(show: Any) -> None:
    """However it gets into a text."""
    assert HIDDEN not in show(Secret(HIDDEN))
    assert "***" in show(Secret(HIDDEN))


def test_a_secret_is_revealed_only_where_one_asks() -> None:
    """By name, so that a search finds all places."""
    assert Secret(HIDDEN).reveal() == HIDDEN


def test_settings_show_no_secret() -> None:
    """Not in ``repr``, nor in what a dataclass gives of itself."""
    settings = Settings(
        engine_api_key=Secret(HIDDEN), redis_url=Secret(f"redis://:{HIDDEN}@db:6379/0"), api_keys=(KEY,)
    )
    for shown in (repr(settings), str(settings), str(dataclasses.astuple(settings))):
        assert HIDDEN not in shown
    assert "acme" in repr(settings), "who has a key is no secret"


def test_a_log_and_a_traceback_show_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    """Also not one that shows local variables."""
    settings = Settings(engine_api_key=Secret(HIDDEN), api_keys=(KEY,))
    with caplog.at_level(logging.INFO):
        logging.getLogger("test").info("Starting with %s and %r", settings, settings.engine_api_key)
    assert HIDDEN not in caplog.text
    try:
        raise ValueError(settings.engine_api_key, settings)
    except ValueError as error:
        shown = "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())
    assert HIDDEN not in shown


def test_secrets_are_compared_by_value() -> None:
    """So a doubled key is found; a plain string equals none."""
    assert Secret("a") == Secret("a")
    assert hash(Secret("a")) == hash(Secret("a"))
    assert Secret("a") != Secret("b")
    assert Secret("a") != "a"


def test_a_secret_has_no_attributes_to_dump() -> None:
    """``vars`` and what serialises by it find nothing."""
    with pytest.raises(TypeError):
        vars(Secret(HIDDEN))


# --- parse_engine


@pytest.mark.parametrize(
    ("text", "url", "name"),
    [
        ("http://10.0.0.5:8000", "http://10.0.0.5:8000", None),
        ("https://gpu.example.org", "https://gpu.example.org", None),
        ("http://10.0.0.5:8000/", "http://10.0.0.5:8000", None),
        ("http://10.0.0.5:8000/v1", "http://10.0.0.5:8000", None),
        ("http://10.0.0.5:8000/v1/", "http://10.0.0.5:8000", None),
        ("https://proxy.example.org/models/a/v1", "https://proxy.example.org/models/a", None),
        ("http://[::1]:8000/v1", "http://[::1]:8000", None),
        ("gpu-1=http://10.0.0.5:8000/v1", "http://10.0.0.5:8000", "gpu-1"),
        ("http://10.0.0.5:8000/a=b", "http://10.0.0.5:8000/a=b", None),
        ("gpu=http://10.0.0.5:8000/a=b", "http://10.0.0.5:8000/a=b", "gpu"),
    ],
)
def test_an_engine_is_a_url_and_maybe_a_name(text: str, url: str, name: str | None) -> None:
    """The base is kept, for the API and the metrics both stand under it."""
    assert parse_engine(text) == EngineAddress(url, name)


@pytest.mark.parametrize(
    "text", ["", "10.0.0.5:8000", "localhost:8000", "ftp://10.0.0.5", "http://", "http:///v1", "gpu=10.0.0.5", "gpu="]
)
def test_what_is_no_url_of_an_engine_is_refused(text: str) -> None:
    """The message shows what was given and what is wanted."""
    with pytest.raises(StartError, match="Example: --engine http://") as refused:
        parse_engine(text)
    assert repr(text) in str(refused.value)


# --- parse_api_keys


def test_without_keys_there_are_none() -> None:
    """Everybody is ``local`` then."""
    assert parse_api_keys([]) == ()


@pytest.mark.parametrize(
    ("value", "key", "owner"),
    [
        ("sk-abc", "sk-abc", "default/key-1"),
        ("ada:sk-abc", "sk-abc", "default/ada"),
        ("acme/ada:sk-abc", "sk-abc", "acme/ada"),
        ("  acme/ada:sk-abc  ", "sk-abc", "acme/ada"),
        ("ada@example.org:sk-abc", "sk-abc", "default/ada@example.org"),
    ],
)
def test_a_key_says_whose_it_is(value: str, key: str, owner: str) -> None:
    """Or is its own user."""
    assert keys(value) == [(key, owner)]


def test_keys_without_a_name_are_users_by_their_place() -> None:
    """Callers with different keys do not see each other's sessions."""
    assert keys("a", "ada:b", "c") == [("a", "default/key-1"), ("b", "default/ada"), ("c", "default/key-3")]


def test_a_user_may_have_several_keys() -> None:
    """A key is changed by adding the new one before the old one goes."""
    assert keys("ada:old", "ada:new") == [("old", "default/ada"), ("new", "default/ada")]


@pytest.mark.parametrize("second", ["same", "ada:same", "acme/ada:same"])
def test_a_doubled_key_is_refused(second: str) -> None:
    """Whose it is would not be clear. The message does not show it."""
    with pytest.raises(StartError) as refused:
        parse_api_keys(["bob:same", second])
    assert "same (the second belongs to" in str(refused.value)
    assert "same" not in str(refused.value).replace("are the same", "")


@pytest.mark.parametrize("value", ["ada:", "acme/ada:", ":"])
def test_an_empty_key_is_refused(value: str) -> None:
    """An unset variable in a script makes one."""
    with pytest.raises(StartError, match="is empty"):
        parse_api_keys([value])


@pytest.mark.parametrize("value", [f":{HIDDEN}", f"/ada:{HIDDEN}", f"acme/:{HIDDEN}", f"a/b/c:{HIDDEN}"])
def test_a_name_that_is_no_name_is_refused(value: str) -> None:
    """With the form that is wanted, and without the key."""
    with pytest.raises(StartError, match="USER or TENANT/USER") as refused:
        parse_api_keys([value])
    assert HIDDEN not in str(refused.value)


def test_keys_come_from_a_file(tmp_path: Path) -> None:
    """A line each, blank lines and comments left out: others on the machine can not read it off the command line."""
    file = tmp_path / "keys"
    file.write_text("# staff\nada:one\n\n  bob:two  \n\t\n# acme/eve:three\nfour\n")
    assert keys(str(file)) == [("one", "default/ada"), ("two", "default/bob"), ("four", "default/key-3")]


def test_keys_come_from_files_and_the_command_line_together(tmp_path: Path) -> None:
    """In the order in which they are given; a key in both is doubled."""
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"user-{name}:key-{name}\n")
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    assert [key for key, _ in keys(first, "x", second)] == ["key-a", "x", "key-b"]
    with pytest.raises(StartError):
        parse_api_keys([first, "key-a"])


def test_a_bad_line_in_a_file_is_refused(tmp_path: Path) -> None:
    """As on the command line."""
    file = tmp_path / "keys"
    file.write_text("ada:\n")
    with pytest.raises(StartError, match="is empty"):
        parse_api_keys([str(file)])


# --- check


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_without_keys_the_server_listens_on_this_machine(host: str) -> None:
    """Nobody else can reach it."""
    Settings(host=host).check()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "chat.example.org", ""])
def test_without_keys_the_server_listens_nowhere_else(host: str) -> None:
    """The message says why, and both ways out. A key is one of them."""
    message = refusal(Settings(host=host))
    assert "--api-key" in message
    assert "127.0.0.1" in message
    Settings(host=host, api_keys=(KEY,)).check()


def test_a_certificate_and_its_key_belong_together(tmp_path: Path) -> None:
    """One alone does not serve TLS, and silence about that would be plain text."""
    one, other = tmp_path / "one.pem", tmp_path / "other.pem"
    for pem in (one, other):
        trustme.CA().issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(pem))
    for half in (Settings(tls_cert=one), Settings(tls_key=one), Settings(tls_cert=one, tls_key=other)):
        message = refusal(half)
        assert "--tls-cert" in message
        assert "--tls-key" in message
    Settings(tls_cert=one, tls_key=one).check()


def test_a_file_that_is_no_certificate_is_refused(tmp_path: Path) -> None:
    """Text, and nothing at all."""
    pem = tmp_path / "cert.pem"
    for content in ("x", ""):
        pem.write_text(content)
        assert "can not be used" in refusal(Settings(tls_cert=pem, tls_key=pem))


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"root_path": "/ä"}, "--root-path"),
        ({"root_path": "chat"}, "--root-path"),
        ({"root_path": "/chat/"}, "--root-path"),
        ({"allow_origins": ("*",)}, "--allow-origin"),
        ({"allow_origins": ("null",)}, "--allow-origin"),
        ({"allow_origins": ("https://a.example/",)}, "--allow-origin"),
        ({"heartbeat_s": float("nan")}, "heartbeat"),
        ({"drain_grace_s": float("inf")}, "drain grace"),
        ({"ping_s": float("inf")}, "ping"),
        ({"limits": Limits(max_queue_s=float("inf"))}, "max queue"),
    ],
)
def test_a_value_that_can_not_work_is_refused(setting: dict[str, Any], named: str) -> None:
    """It would fail later, or let in whom nobody meant."""
    assert named in refusal(Settings(**setting))


@pytest.mark.parametrize("missing", ["tls_cert", "tls_key"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    """A folder is none either."""
    pem = tmp_path / "cert.pem"
    pem.write_text("x")
    for path in (tmp_path / "gone.pem", tmp_path):
        files: dict[str, Any] = {"tls_cert": pem, "tls_key": pem, missing: path}
        assert str(path) in refusal(Settings(**files))


def test_real_and_simulated_engines_exclude_each_other() -> None:
    """Else simulated answers could reach people who think that they are real."""
    engines = (EngineAddress("http://10.0.0.5:8000"),)
    message = refusal(Settings(engines=engines, simulate=2))
    assert "--engine" in message
    assert "--simulate" in message
    Settings(engines=engines).check()
    Settings(simulate=2).check()


def test_only_a_store_of_ones_own_can_have_replicas() -> None:
    """Waiting for those of the one that is started here would be for ever."""
    assert "--redis-wait-replicas" in refusal(Settings(redis_wait_replicas=1))
    Settings(redis_wait_replicas=1, redis_url=Secret("redis://store")).check()


# --- the rest


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("10.0.0.5", False),
        ("192.168.1.1", False),
        ("localhost.example.org", False),
        ("127.0.0.1.example.org", False),
        ("0x7f000001", False),
        ("2130706433", False),
        ("127.1", False),
    ],
)
def test_which_hosts_only_this_machine_reaches(host: str, loopback: bool) -> None:
    """In doubt: none."""
    assert is_loopback(host) is loopback


def test_a_model_is_known_by_the_last_part_of_its_folder(tmp_path: Path) -> None:
    """Clients name the model, not where it lies."""
    (tmp_path / "My-Model").mkdir()
    assert Settings(model=str(tmp_path / "My-Model")).model_name() == "My-Model"
    assert Settings(model=f"{tmp_path}/My-Model/").model_name() == "My-Model"


def test_a_model_of_a_hub_is_known_by_its_whole_name() -> None:
    """As vLLM serves it."""
    assert Settings(model="Qwen/Qwen3-0.6B").model_name() == "Qwen/Qwen3-0.6B"


def test_settings_do_not_change() -> None:
    """What was checked is what runs."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().host = "0.0.0.0"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Limits().max_items = 1  # type: ignore[misc]


def test_the_defaults_are_safe() -> None:
    """Loopback only, and a bound for everything that one caller may use."""
    Settings().check()
    assert all(value > 0 for value in dataclasses.asdict(Limits()).values())


@pytest.mark.parametrize(
    "text",
    ["http://[::1", "http://h:99999", "http://h:x", "=http://h", "ftp://h", "h:8000", ""],
)
def test_an_engine_address_that_can_not_be_meant_is_refused(text: str) -> None:
    """Also ports and brackets that the URL parser stumbles over: StartError, with an example."""
    with pytest.raises(StartError, match="Example"):
        parse_engine(text)


def test_a_password_in_an_engine_address_is_refused_and_not_shown() -> None:
    """It would stand in logs; the flag for it is named."""
    with pytest.raises(StartError, match="--engine-api-key") as caught:
        parse_engine("http://user:hunter2@h:8000")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("value", ["/no/such/file", "ada:sk:abc", "", "a b", "a/b/c:key", ":key", "ada:"])
def test_a_key_that_can_not_be_meant_is_refused(value: str) -> None:
    """A mistyped path, a colon too many, nothing at all: never a key that nobody knows of."""
    with pytest.raises(StartError):
        parse_api_keys([value])


def test_a_file_without_a_key_is_refused(tmp_path: Path) -> None:
    """Else the server would be open, although keys were asked for."""
    file = tmp_path / "keys.txt"
    file.write_text("# none yet\n\n")
    with pytest.raises(StartError, match="holds no key"):
        parse_api_keys([str(file)])


def test_a_file_in_this_folder_needs_no_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--api-key keys.txt`` means the file if there is one."""
    monkeypatch.chdir(tmp_path)
    Path("keys.txt").write_text("ada:sk-1\n")
    ((key, principal),) = parse_api_keys(["keys.txt"])
    assert (key.reveal(), principal.user) == ("sk-1", "ada")


def test_a_key_without_a_name_never_gets_anothers(tmp_path: Path) -> None:
    """``key-2`` by its place, but somebody was given that name: two callers would share their conversations."""
    with pytest.raises(StartError, match="Name it"):
        parse_api_keys(["key-2:A", "B"])


def test_a_silent_peer_is_gone_in_35_seconds_by_the_defaults() -> None:
    """Whether nothing waits for it, or text does from the beginning, or from just before its next ping."""
    settings = Settings()
    uvicorn = app._uvicorn_config(settings, Starlette())
    assert uvicorn.ws_ping_interval is not None
    assert uvicorn.ws_ping_timeout is not None
    close = socket_module._CLOSE_S
    takes_nothing = settings.limits.send_timeout_s + hub._TICK_S + close
    answers_nothing = uvicorn.ws_ping_interval + uvicorn.ws_ping_timeout + close
    # A ping behind text that is still taken has more time; who is silent takes none after that.
    stops_at_the_ping = uvicorn.ws_ping_interval + takes_nothing
    assert max(takes_nothing, answers_nothing, stops_at_the_ping) <= 35
