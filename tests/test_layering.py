"""Who may import whom. The table below is the architecture; a change of it is a decision, not a detail."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]

#: What the pure modules may take from outside: no clock, no I/O, no event loop, no randomness.
# fmt: off
PURE_LIBRARIES = frozenset({
    "__future__", "abc", "array", "bisect", "codecs", "collections", "dataclasses", "enum", "functools", "hashlib",
    "heapq", "hmac", "itertools", "json", "math", "operator", "re", "string", "struct", "textwrap", "types", "typing",
    "unicodedata", "msgspec", "orjson", "xxhash",
})
# fmt: on

#: What every part may use: the pure core, and what describes a process.
COMMON = frozenset({"core", "errors", "settings"})

#: part (a module or a folder of the package) -> the parts that it may import, besides itself. From the bottom up.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "__init__": frozenset(),
    "errors": frozenset(),
    "core": frozenset({"errors"}),
    "settings": frozenset({"core", "errors"}),
    "tether": frozenset(),
    "children": frozenset({"errors", "settings", "tether"}),
    "process": frozenset({"errors"}),
    "client": frozenset({"errors"}),
    "store": COMMON | {"children"},
    "engine": COMMON | {"children"},
    "edge/outbox": COMMON,
    "placing": COMMON | {"store", "engine"},
    "outcomes": COMMON | {"engine", "placing"},
    "turn": COMMON | {"store", "engine", "placing", "outcomes"},
    "private": COMMON | {"store", "edge/outbox", "turn"},
    "connections": COMMON | {"edge/outbox"},
    "live": COMMON | {"store", "turn", "connections"},
    "joining": COMMON | {"store", "connections", "live"},
    "comparing": COMMON | {"store", "live"},
    "lease": COMMON | {"store"},
    "hub": COMMON | {"store", "lease", "connections", "live", "joining", "comparing"},
    "restoring": COMMON | {"store", "turn", "live", "hub"},
    "answers": COMMON | {"store", "turn", "live", "hub", "restoring"},
    "supervisor": COMMON | {"store", "live", "hub", "restoring", "answers"},
    "commands": COMMON | {"store", "private", "connections", "live", "hub", "restoring", "answers"},
    "edge": COMMON | {"engine", "edge/outbox", "turn", "private", "live", "joining", "hub", "commands"},
    "drain": COMMON | {"connections"},
    "app": COMMON
    | {"store", "engine", "turn", "hub", "restoring", "answers", "supervisor", "commands", "edge", "drain"},
    "workers": COMMON | {"tether", "process", "engine", "drain", "app"},
    "doctor": COMMON | {"store", "engine"},
    "serve": COMMON | {"process", "children", "store", "engine", "drain", "app", "workers"},
    "cli": COMMON | {"engine", "client", "doctor", "serve"},
    "__main__": frozenset({"cli"}),
}

#: Parts without I/O of their own, whose outside imports are checked too.
PURE = ("core", "errors")

#: New ids are random by their nature, and nothing that is decided depends on one.
MAY_DRAW_RANDOM = {"core/ids": frozenset({"secrets"})}

#: The environment is read once, by the command line; these hand it on to the processes that they start.
MAY_READ_ENVIRONMENT = {"cli", "children", "engine/launch", "engine/demo_model", "store/embedded"}

#: Whose output is for a person in front of a terminal.
MAY_PRINT = {"cli", "serve", "doctor", "client/terminal"}


def part_of(name: str) -> str:
    """The part that a module such as ``store/redis`` belongs to: itself if the table has it, else its folder."""
    return name if name in MAY_IMPORT else name.split("/", maxsplit=1)[0]


def sources() -> Iterator[tuple[str, str, ast.Module]]:
    """(name such as ``store/redis``, its part such as ``store``, syntax tree) of each module of the package."""
    package = ROOT / "chat_server"
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).with_suffix("").as_posix()
        yield name, part_of(name), ast.parse(path.read_text())


def imports(tree: ast.Module) -> Iterator[str]:
    """Dotted names that a module imports, wherever in it; relative imports are not used in this tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            if module == "chat_server":
                yield from (f"chat_server.{alias.name}" for alias in node.names)
            else:
                yield module


def test_each_part_imports_only_what_lies_below_it() -> None:
    """The table above holds, also for imports inside functions and for types only."""
    wrong = []
    for name, part, tree in sources():
        assert part in MAY_IMPORT, f"chat_server/{part} is new: say in MAY_IMPORT what it may import"
        for target in imports(tree):
            root, _, rest = target.partition(".")
            other = part_of(rest.replace(".", "/"))
            inside = root == "chat_server" and other in MAY_IMPORT
            if inside and other != part and other not in MAY_IMPORT[part]:
                wrong.append(f"{name} imports {target}")
    assert wrong == []


def test_no_part_lies_below_itself() -> None:
    """The table has no circle, so each part can be read, and tested, without those above it."""
    seen: set[str] = set()
    for part, below in MAY_IMPORT.items():
        assert below <= seen, f"{part} may import {sorted(below - seen)}, which the table lists after it"
        seen.add(part)


def test_the_pure_parts_import_only_pure_libraries() -> None:
    """Time, randomness and I/O come into ``core`` as arguments, so that its tests need neither sleeps nor fakes."""
    wrong = [
        f"{name} imports {target}"
        for name, part, tree in sources()
        if part in PURE
        for target in imports(tree)
        if target.split(".")[0] not in PURE_LIBRARIES | {"chat_server"} | MAY_DRAW_RANDOM.get(name, frozenset())
    ]
    assert wrong == []


def test_the_pure_parts_do_not_await() -> None:
    """A plain call can not be interrupted, so nothing slips in between a check and a write."""
    kinds = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
    wrong = [
        f"{name}:{node.lineno}"
        for name, part, tree in sources()
        if part in PURE
        for node in ast.walk(tree)
        if isinstance(node, kinds)
    ]
    assert wrong == []


def test_nothing_of_the_package_imports_the_tests() -> None:
    """An installed package has no tests beside it."""
    wrong = [name for name, _, tree in sources() for target in imports(tree) if target.split(".")[0] == "tests"]
    assert wrong == []


def test_only_the_command_line_reads_the_environment() -> None:
    """Settings reach everything else as arguments, so two servers can run in one process."""
    wrong = [
        f"{name}:{node.lineno}"
        for name, _, tree in sources()
        if name not in MAY_READ_ENVIRONMENT
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv"})
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and node.names[0].name in {"environ", "getenv"})
    ]
    assert wrong == []


def test_only_what_talks_to_a_terminal_prints() -> None:
    """Everything else logs, so that the operator can say where it goes."""
    wrong = [
        f"{name}:{node.lineno}"
        for name, _, tree in sources()
        if name not in MAY_PRINT
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert wrong == []
