"""What an engine is asked."""

from __future__ import annotations


def prompt(*turns: tuple[str, str]) -> list[dict[str, str]]:
    """The messages of a prompt, each of a role and a text."""
    return [{"role": role, "content": content} for role, content in turns]
