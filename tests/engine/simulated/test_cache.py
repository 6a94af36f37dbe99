"""The prefix cache of a simulated engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_server.engine.simulated.cache import PrefixCache

pytestmark = pytest.mark.pure


def ask(cache: PrefixCache, prompt: str, salt: str = "") -> int:
    """One request, begun and ended: the tokens that were cached. A letter is a token."""
    hashes = cache.hashes(list(prompt), salt)
    found = cache.hits(hashes, len(prompt))
    cache.release(cache.use(hashes))
    return found


def test_a_prompt_finds_its_own_beginning() -> None:
    """Full blocks that were computed before are found, the rest is not."""
    cache = PrefixCache(blocks=10, block_size=4)
    assert ask(cache, "aaaabbbbcc") == 0
    assert ask(cache, "aaaabbbbccdd") == 8
    assert ask(cache, "aaaaXXXXcccc") == 4


def test_a_block_counts_only_behind_the_same_blocks() -> None:
    """The same tokens behind another beginning are another block."""
    cache = PrefixCache(blocks=10, block_size=4)
    ask(cache, "aaaabbbb")
    assert ask(cache, "ccccbbbb-") == 0


def test_the_last_token_is_always_computed() -> None:
    """A prompt that is cached whole misses its last block: without its last token there is no next one."""
    cache = PrefixCache(blocks=10, block_size=4)
    ask(cache, "aaaabbbb")
    assert ask(cache, "aaaabbbb") == 4
    assert ask(cache, "aaaabbbbc") == 8


def test_a_salt_separates_tenants() -> None:
    """What one tenant asked is not to be found by another."""
    cache = PrefixCache(blocks=10, block_size=4)
    ask(cache, "aaaabbbb-", salt="one")
    assert ask(cache, "aaaabbbb-", salt="two") == 0
    assert ask(cache, "aaaabbbb-", salt="one") == 8


def test_the_least_recently_used_goes_first() -> None:
    """When the room is needed, the prompt that was asked last stays."""
    cache = PrefixCache(blocks=4, block_size=4)
    ask(cache, "aaaabbbb-")
    ask(cache, "ccccdddd-")
    ask(cache, "aaaabbbb-")
    ask(cache, "eeeeffff-")  # needs the two of c and d
    assert ask(cache, "aaaabbbb-") == 8
    assert ask(cache, "ccccdddd-") == 0


def test_the_end_of_a_prompt_goes_before_its_beginning() -> None:
    """A beginning without its end is of use, an end without its beginning is not."""
    cache = PrefixCache(blocks=3, block_size=4)
    ask(cache, "aaaabbbbcccc-")
    ask(cache, "xxxx-")
    assert ask(cache, "aaaabbbbcccc-") == 8


def test_blocks_in_use_are_not_evicted() -> None:
    """A running request keeps its blocks; what finds no room is not cached."""
    cache = PrefixCache(blocks=2, block_size=4)
    kept = cache.use(cache.hashes(list("aaaabbbb")))
    assert cache.usage == 1.0
    assert cache.use(cache.hashes(list("cccc"))) == []
    assert ask(cache, "aaaabbbb-") == 8
    cache.release(kept)
    assert cache.usage == 0.0


def test_two_requests_share_their_blocks() -> None:
    """The second user of a block keeps it when the first one leaves."""
    cache = PrefixCache(blocks=2, block_size=4)
    hashes = cache.hashes(list("aaaabbbb"))
    first, second = cache.use(hashes), cache.use(hashes)
    cache.release(first)
    assert cache.usage == 1.0
    cache.release(second)
    assert cache.usage == 0.0


@given(st.lists(st.text(alphabet="ab", max_size=30), max_size=30))
def test_it_never_holds_more_than_its_blocks(prompts: list[str]) -> None:
    """Whatever is asked, in use and free blocks together stay within the number."""
    cache = PrefixCache(blocks=5, block_size=2)
    open_requests = []
    for number, prompt in enumerate(prompts):
        open_requests.append(cache.use(cache.hashes(list(prompt))))
        assert cache.cached <= 5
        if number % 2:
            cache.release(open_requests.pop(0))
    for kept in open_requests:
        cache.release(kept)
    assert cache.usage == 0.0
    assert cache.cached <= 5
