"""The version of the package and the changelog move together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import chat_server

pytestmark = pytest.mark.pure


def test_the_newest_changelog_entry_is_the_version_of_the_package() -> None:
    """Whoever raises one of them has to say in the other what changed for the user."""
    changelog = (Path(__file__).parents[1] / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (\d+\.\d+\.\d+\S*)", changelog, re.MULTILINE)
    assert versions[:1] == [chat_server.__version__]
