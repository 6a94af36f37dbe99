"""Each module has its test file, where one looks for it, and each test file has its module."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "chat_server"
TESTS = ROOT / "tests"

#: Folders that test several modules together, or help the tests.
NOT_MIRRORED = {"e2e", "vllm", "support", "loadtest", "model"}
#: Tests of the tree as a whole.
GUARDS = {Path("test_layering.py"), Path("test_mirror.py"), Path("test_version.py")}


def has_code(path: Path) -> bool:
    """Whether there is anything to test: a function or a class, not just imports and constants."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return any(isinstance(node, kinds) for node in ast.walk(ast.parse(path.read_text())))


def modules() -> set[Path]:
    return {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if has_code(path)}


def mirrored_tests() -> set[Path]:
    found = {path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    return {path for path in found if path.parts[0] not in NOT_MIRRORED} - GUARDS


def test_each_module_has_its_test_file() -> None:
    """``chat_server/engine/sse.py`` is tested by ``tests/engine/test_sse.py``."""
    wanted = {module.with_name(f"test_{module.name}") for module in modules()}
    assert sorted(map(str, wanted - mirrored_tests())) == []


def test_each_test_file_has_its_module() -> None:
    """A test file is named after the module that it tests, so that a rename can not leave it behind.

    What holds for any input may stand in a file of its own: ``test_codec_properties.py``.
    """
    known = {
        module.with_name(f"test_{module.stem}{suffix}.py") for module in modules() for suffix in ("", "_properties")
    }
    assert sorted(map(str, mirrored_tests() - known)) == []
