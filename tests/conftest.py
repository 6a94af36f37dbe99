"""What holds for every test: one category each, no blocking call on the event loop, failures that can be repeated."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from blockbuster import blockbuster_ctx

if TYPE_CHECKING:
    from tests.support.server import RunningServer

#: What a test needs to run. The markers and their meaning are in pyproject.toml.
CATEGORIES = frozenset({"pure", "valkey", "server", "browser", "vllm"})

#: (file, functions) that may read files: our own once, before the first connection is taken, and what libraries look up
#: about themselves.
MAY_BLOCK = [
    ("chat_server/store/server.py", {"library"}),
    ("redis/utils.py", {"get_lib_version"}),
]

# As a terminal starts programs: under nohup, or behind `&`, what tests start would inherit that these are ignored.
for _signum in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, signal.default_int_handler if _signum == signal.SIGINT else signal.SIG_DFL)

# A failed example prints the line that repeats it. No deadline per example: machines of CI are slow at times.
hypothesis.settings.register_profile("chat-server", print_blob=True, deadline=None)
hypothesis.settings.load_profile("chat-server")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse to run a test module that does not say, once, what it needs."""
    for module in {item.getparent(pytest.Module) for item in items}:
        assert module is not None
        found = sorted(CATEGORIES.intersection(mark.name for mark in module.own_markers))
        if len(found) != 1:
            raise pytest.UsageError(
                f"{module.nodeid}: the module must set `pytestmark` to exactly one of {sorted(CATEGORIES)}, "
                f"it has {found or 'none'}"
            )


@pytest.fixture(autouse=True)
def no_blocking_calls(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which the package makes a blocking call on the event loop: every other chat would wait for it."""
    if request.node.get_closest_marker("browser") or request.node.get_closest_marker("vllm"):
        yield  # these drive other processes; the same code runs under the detector in the server tests
        return
    with blockbuster_ctx("chat_server") as detector:
        for call in detector.functions.values():
            for file, functions in MAY_BLOCK:
                call.can_block_in(file, functions)
        yield


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    """Our server with two simulated engines and a store of its own."""
    from tests.support.server import running_server  # pure tests do without the server's imports

    async with running_server(tmp_path) as running:
        yield running
