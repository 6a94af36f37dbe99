"""The conversation -> the messages that an engine is asked with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from chat_server.core.items import Item, Usage


def messages(instructions: str, items: Iterable[Item], partial: str = "") -> tuple[dict[str, str], ...]:
    """The prompt: instructions first, always as the same bytes, so the engine's cached prefix holds; then the items.

    Answers that ended early are there as they were seen. Items without text are left out, for templates stumble over
    them. ``partial`` is the text of the answer that an engine is to go on with: the last message, the assistant's.
    """
    prompt = [{"role": "system", "content": instructions}] if instructions else []
    prompt += [{"role": item.role, "content": item.text} for item in items if item.text]
    if partial:
        prompt.append({"role": "assistant", "content": partial})
    return tuple(prompt)


#: tokens that a chat template adds round a message, at most.
_TEMPLATE_TOKENS = 16


#: bytes of UTF-8 in a token, rather few: English has four or five in one, Chinese three or four, code three.
_BYTES_PER_TOKEN = 3


def estimated_tokens(text: str) -> int:
    """About how many tokens ``text`` has, where no engine says so: rather too many than too few."""
    return -(-len(text.encode()) // _BYTES_PER_TOKEN)


def output_budget(
    wanted: int | None, *, limit: int, window: int | None, instructions: str, items: Sequence[Item]
) -> int | None:
    """How many tokens an answer may have: what the client wants, else the server's ``limit``, in tokens.

    The limit is left to the engine (None: what is left of its ``window``) where it may not fit beside the prompt, for
    an engine refuses a request that asks for more than its window. The prompt's size is known from the usage of the
    last answer; what came after it has at most one token per byte. All engines that write on an answer share it.
    """
    if wanted is not None:
        return min(wanted, limit)
    if window is None:
        return limit
    size = len(instructions.encode()) + _TEMPLATE_TOKENS
    for item in reversed(items):
        if isinstance(item.usage, Usage):
            size = item.usage.total_tokens + size  # instructions may have changed since, so they count again
            break
        size += len(item.text.encode()) + _TEMPLATE_TOKENS
    return limit if size + limit <= window else None
