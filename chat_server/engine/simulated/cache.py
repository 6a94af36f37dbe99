"""The prefix cache of a simulated engine: full blocks, chained hashes, least recently used out first.

As vLLM's (``docs/design/prefix_caching``): a block is found by the hash of its tokens and of the block before it, the
first one with the salt; blocks of running requests stay; when freed, the last block of a request goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import xxhash


class PrefixCache:
    """``blocks`` blocks of ``block_size`` tokens."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        #: blocks that running requests use, and by how many
        self._used: dict[bytes, int] = {}
        #: cached blocks that none uses, the least recently used first
        self._free: OrderedDict[bytes, None] = OrderedDict()

    def hashes(self, tokens: Sequence[str], salt: str = "") -> list[bytes]:
        """One hash for each full block of ``tokens``."""
        size = self.block_size
        out: list[bytes] = []
        before = salt.encode()
        for start in range(0, len(tokens) - size + 1, size):
            block = "\0".join(tokens[start : start + size])
            before = xxhash.xxh3_128_digest(before + block.encode("utf-8", "surrogatepass"))
            out.append(before)
        return out

    def hits(self, hashes: Sequence[bytes], prompt_tokens: int) -> int:
        """Tokens of a prompt that are cached. Never all: the last one has to be computed for the first new one."""
        found = 0
        for block in hashes:
            if block not in self._used and block not in self._free:
                break
            found += 1
        return min(found, (prompt_tokens - 1) // self.block_size) * self.block_size

    def use(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Cache these blocks and keep them until ``release`` of what is returned.

        Blocks for which there is no room, as running requests use all, are left out.
        """
        kept: list[bytes] = []
        for block in hashes:
            if block in self._used:
                self._used[block] += 1
            else:
                if block in self._free:
                    del self._free[block]
                elif self.cached >= self.blocks:
                    if not self._free:
                        break
                    self._free.popitem(last=False)
                self._used[block] = 1
            kept.append(block)
        return kept

    def release(self, kept: Sequence[bytes]) -> None:
        """Blocks that ``use`` returned are no longer used; they stay cached until others need the room."""
        for block in reversed(kept):
            self._used[block] -= 1
            if not self._used[block]:
                del self._used[block]
                self._free[block] = None

    @property
    def cached(self) -> int:
        """Blocks that are held, used or not."""
        return len(self._used) + len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that running requests use, 0 to 1."""
        return len(self._used) / self.blocks
