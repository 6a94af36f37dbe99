"""The command line: what becomes of flags and variables, and what is said of mistakes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from chat_server import __version__
from chat_server.cli import LIMITS, main
from chat_server.core.principal import Principal
from chat_server.settings import EngineAddress, Limits, Secret, Settings

pytestmark = pytest.mark.server

#: Settings that no flag sets directly: they are made of several, or not for a person to choose.
OPTION_OF = {"engines": "engine", "redis_url": "redis", "api_keys": "api_key", "allow_origins": "allow_origin"}


class Ran:
    """What a command handed on."""

    settings: Settings
    log_level: str | None


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    """``serve`` and ``doctor`` are called but do nothing."""
    for name in [name for name in os.environ if name.startswith("CHAT_SERVER_") or name == "REDIS_URL"]:
        monkeypatch.delenv(name)
    ran = Ran()

    def serve(settings: Settings, log_level: str | None) -> int:
        ran.settings, ran.log_level = settings, log_level
        return 0

    def doctor(settings: Settings) -> int:
        ran.settings = settings
        return 1

    monkeypatch.setattr("chat_server.serve.run", serve)
    monkeypatch.setattr("chat_server.doctor.run", doctor)
    return ran


def invoke(*arguments: str, **env: str) -> Result:
    return CliRunner().invoke(main, list(arguments), env=env)


def options_of(command: str) -> list[click.Option]:
    found = main.commands[command]
    return [param for param in found.params if isinstance(param, click.Option)]


def test_without_flags_the_settings_are_the_defaults(ran: Ran) -> None:
    """The command line has no defaults of its own."""
    assert invoke("serve").exit_code == 0
    assert ran.settings == Settings()
    assert ran.log_level is None


def test_flags_become_settings(ran: Ran, tmp_path: Path) -> None:
    """Each kind of flag: a text, a number, a path, a repeatable one, a secret, a limit."""
    result = invoke(
        *("serve", "--host", "::1", "--port", "8123", "--engine", "a=http://a:1/v1", "--engine", "http://b:2"),
        *("--engine-api-key", "e", "--redis", "redis://r", "--api-key", "ann:k1", "--api-key", "t/bob:k2"),
        *("--allow-origin", "https://x", "--allow-origin", "https://y", "--root-path", "/chat"),
        *("--data-dir", str(tmp_path), "--max-answer-time", "5", "--max-items", "7", "--heartbeat", "2.5"),
        *("--workers", "3", "--drain-grace", "0"),
        *("--ping", "7.5", "--log-level", "debug"),
    )
    assert result.exit_code == 0, result.output
    settings = ran.settings
    assert (settings.host, settings.port, settings.root_path) == ("::1", 8123, "/chat")
    assert settings.engines == (EngineAddress("http://a:1", "a"), EngineAddress("http://b:2"))
    assert settings.engine_api_key == Secret("e")
    assert settings.redis_url == Secret("redis://r")
    assert settings.api_keys == ((Secret("k1"), Principal("default", "ann")), (Secret("k2"), Principal("t", "bob")))
    assert settings.allow_origins == ("https://x", "https://y")
    assert settings.data_dir == tmp_path
    assert (settings.workers, settings.drain_grace_s) == (3, 0.0)
    assert (settings.limits.max_answer_s, settings.limits.max_items) == (5.0, 7)
    assert (settings.heartbeat_s, settings.ping_s) == (2.5, 7.5)
    assert ran.log_level == "debug"


def test_variables_become_settings(ran: Ran) -> None:
    """The same by environment variables; what is repeatable is separated by spaces."""
    result = invoke(
        "serve",
        CHAT_SERVER_PORT="8124",
        CHAT_SERVER_ENGINE="http://a:1 http://b:2",
        CHAT_SERVER_API_KEY="ann:k1 bob:k2",
        CHAT_SERVER_MAX_FRAME_BYTES="1000",
        REDIS_URL="redis://r",
    )
    assert result.exit_code == 0, result.output
    assert ran.settings.port == 8124
    assert [address.url for address in ran.settings.engines] == ["http://a:1", "http://b:2"]
    assert [principal.user for _, principal in ran.settings.api_keys] == ["ann", "bob"]
    assert ran.settings.limits.max_frame_bytes == 1000
    assert ran.settings.redis_url == Secret("redis://r")


def test_a_flag_wins_over_its_variable(ran: Ran) -> None:
    """And our own variable wins over the common one."""
    invoke("serve", "--port", "1", CHAT_SERVER_PORT="2", CHAT_SERVER_REDIS="redis://ours", REDIS_URL="redis://common")
    assert ran.settings.port == 1
    assert ran.settings.redis_url == Secret("redis://ours")


def test_keys_come_from_a_file(ran: Ran, tmp_path: Path) -> None:
    """One per line, so that no secret is on a command line."""
    (tmp_path / "keys.txt").write_text("# people\nann:k1\n\nbob:k2\n")
    assert invoke("serve", "--api-key", str(tmp_path / "keys.txt")).exit_code == 0
    assert [principal.user for _, principal in ran.settings.api_keys] == ["ann", "bob"]


def test_secrets_do_not_show(ran: Ran) -> None:
    """Neither in the settings' repr nor in the help, which shows what a variable holds as default."""
    env = {"CHAT_SERVER_API_KEY": "ann:hush", "CHAT_SERVER_ENGINE_API_KEY": "hush", "REDIS_URL": "redis://:hush@r"}
    assert invoke("serve", **env).exit_code == 0
    assert "hush" not in repr(ran.settings)
    assert "hush" not in invoke("serve", "--help", **env).output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "ftp://a"], "is no http(s) URL"),
        (["--host", "0.0.0.0"], "without an API key"),
        (["--tls-cert", "cert.pem"], "belong together"),
        (["--engine", "http://a:1", "--simulate", "1"], "exclude each other"),
        (["--api-key", "ann:"], "is empty"),
    ],
)
def test_a_mistake_is_one_message(ran: Ran, arguments: list[str], message: str) -> None:
    """What happened and what to do, on one line, with status 1."""
    result = invoke("serve", *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("chat-server: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not hasattr(ran, "settings")


def test_a_value_of_the_wrong_kind_is_named() -> None:
    """The library's own words: which flag, and what is wrong with it."""
    result = invoke("serve", "--port", "many")
    assert result.exit_code == 2
    assert "'--port'" in result.stderr


def test_each_setting_has_a_flag() -> None:
    """Nothing of ``Settings`` can only be set in code."""
    names = {option.name for option in options_of("serve")}
    for field in dataclasses.fields(Settings):
        if field.name != "limits":
            assert OPTION_OF.get(field.name, field.name) in names, field.name
    assert {field.name for field in dataclasses.fields(Limits)} == set(LIMITS) <= names


@pytest.mark.parametrize("command", ["serve", "chat", "doctor"])
def test_each_flag_says_all_about_itself(command: str) -> None:
    """A help text, a unit or kind, the default where there is one, and its variable."""
    page = " ".join(invoke(command, "--help").output.split())
    for option in options_of(command):
        assert option.help, option.name
        assert option.metavar or isinstance(option.type, click.Choice), option.name
        variables = [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())
        assert variables, option.name
        for variable in variables:
            assert variable.startswith("CHAT_SERVER_") or variable == "REDIS_URL"
            assert variable in page
    assert "default: 127.0.0.1" in page or command != "serve"


def test_the_version_is_the_packages() -> None:
    """``--version`` says it."""
    assert invoke("--version").output == f"chat-server, version {__version__}\n"


def test_the_terminal_chat_gets_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exit status is ours."""
    got: list[Any] = []

    def run_terminal(*arguments: Any) -> int:
        got.extend(arguments)
        return 3

    monkeypatch.setattr("chat_server.client.terminal.run_terminal", run_terminal)
    assert invoke("chat", "--url", "http://h", "--key", "k", "--session", "s", "--model", "m").exit_code == 3
    assert got == ["http://h", "k", "s", "m"]


def test_the_doctor_gets_its_arguments(ran: Ran) -> None:
    """And its exit status is ours too."""
    result = invoke("doctor", "--engine", "http://a:1", "--redis", "redis://r", "--port", "8123")
    assert result.exit_code == 1
    assert ran.settings.engines == (EngineAddress("http://a:1"),)
    assert (ran.settings.redis_url, ran.settings.port) == (Secret("redis://r"), 8123)
    assert invoke("doctor", "--engine", "nonsense").exit_code == 1


def test_the_simulated_engine_has_variables_too() -> None:
    """It takes its own flags, through ours, and shows a variable for each."""
    page = invoke("simulate-engine", "--help").output
    assert "CHAT_SERVER_SIMULATED_TOKENS_PER_S" in page
    result = invoke("simulate-engine", CHAT_SERVER_SIMULATED_PORT="many")
    assert result.exit_code == 2
    assert "CHAT_SERVER_SIMULATED_PORT" in result.stderr or "'--port'" in result.stderr


def test_help_does_not_load_what_it_does_not_need() -> None:
    """``--help`` answers at once: no server, client or event loop is imported for it."""
    heavy = ("aiohttp", "uvicorn", "redis", "starlette", "rich", "asyncio", "msgspec")
    program = f"import sys, chat_server.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "[]\n"


def test_the_module_is_the_program() -> None:
    """``python -m chat_server`` is ``chat-server``."""
    done = subprocess.run(
        [sys.executable, "-m", "chat_server", "--version"], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout == f"chat-server, version {__version__}\n"
