"""All KV blocks of the device: reference counts, the free list, and the index of known content.

A block is *used* (references > 0) or *free*. A free block may still hold published content: it is then a cached block,
found again by its hash, until ``take`` hands it out for something else. The free list is kept in the order of reuse:
blocks without published content first, then published ones, least recently released first. Every operation is O(1) per
block. Block 0 is the null block, which pads block tables on the device; it is never handed out.

Misuse (releasing a free block, publishing twice) is a bug of the caller and raises AssertionError: answering one user
out of another user's KV would be worse than a stopped engine.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["BlockPool"]


@dataclass(frozen=True, slots=True)
class _Content:
    """What a published block holds."""

    digest: bytes
    parent: bytes
    tokens: tuple[int, ...]


class BlockPool:
    """Counts references to blocks and remembers what published blocks hold.

    Attributes:
        num_cached: free blocks that still hold published content.

    Args:
        num_blocks: number of blocks on the device, the null block included; at least 2.
        block_size: tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ValueError(f"num_blocks must be >= 2 and block_size >= 1, got {num_blocks} and {block_size}.")
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Flat memory, of which ``state`` can take a copy in microseconds.
        self.refs = array("I", [1] + [0] * (num_blocks - 1))
        self._published = bytearray(num_blocks)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._content: dict[int, _Content] = {}
        self._by_hash: dict[bytes, int] = {}
        # Blocks by what they follow and start with, newest last: the candidates for a partial match.
        self._children: dict[tuple[bytes, int], dict[int, None]] = {}
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self.num_cached = 0

    @property
    def num_free(self) -> int:
        """Number of blocks that ``take`` could hand out now."""
        return len(self._free)

    @property
    def num_published(self) -> int:
        """Number of blocks whose content can be found by hash."""
        return len(self._content)

    def free_blocks(self) -> list[int]:
        """Free block ids in the order of their reuse."""
        return list(self._free)

    def state(self) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
        """Of each block, the null block included: its references, and 1 if its content can be found by hash."""
        return np.array(self.refs), np.frombuffer(bytes(self._published), np.uint8)

    def take(self, num: int) -> list[int]:
        """Hand out ``num`` blocks with one reference each; published content that they held is forgotten."""
        if num > len(self._free):
            raise AssertionError(f"{num} blocks taken, {len(self._free)} are free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(num)]
        for block in blocks:
            self.refs[block] = 1
            if block in self._content:
                self._note_evicted(self._content[block].digest)
                self._forget(block)
                self.num_cached -= 1
        return blocks

    def share(self, block: int) -> None:
        """Add a reference to a used block, or revive a cached one."""
        if self.refs[block] == 0:
            if block not in self._content:
                raise AssertionError(f"block {block} is shared, but it is free and holds nothing")
            del self._free[block]
            self.num_cached -= 1
        self.refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block of a table, given in table order.

        The tail goes first, so that a chain is later evicted from its end: without its parent a block cannot be found.
        """
        for block in reversed(blocks):
            if block == 0 or self.refs[block] <= 0:
                raise AssertionError(f"block {block} is released, but it is not in use")
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self._free[block] = None
                if block in self._content:
                    self.num_cached += 1
                else:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, digest: bytes, parent: bytes, tokens: tuple[int, ...]) -> bool:
        """Make a full used block findable by its hash; False where another block is already known for it.

        Then the older block stays the known one, and this one stays private to its request.
        """
        if self.refs[block] <= 0 or block in self._content or len(tokens) != self.block_size:
            raise AssertionError(f"block {block} is published, but it is free, published before or not full")
        if digest in self._by_hash:
            return False
        self._content[block] = _Content(digest, parent, tokens)
        self._by_hash[digest] = block
        self._published[block] = 1
        self._children.setdefault((parent, tokens[0]), {})[block] = None
        return True

    def lookup(self, digest: bytes) -> int | None:
        """The block that holds the content of this hash, used or cached."""
        return self._by_hash.get(digest)

    def was_evicted(self, digest: bytes) -> bool:
        """Whether content of this hash had to give way lately; as many are remembered as there are blocks."""
        return digest in self._evicted

    def children(self, parent: bytes, first_token: int) -> Iterator[int]:
        """Published blocks that follow ``parent`` and start with ``first_token``, newest first."""
        return reversed(self._children.get((parent, first_token), {}))

    def tokens(self, block: int) -> tuple[int, ...]:
        """Token ids that a published block holds."""
        return self._content[block].tokens

    def reset(self) -> bool:
        """Forget all published content; False, and nothing is done, while any block is in use."""
        if len(self._free) != self.num_blocks - 1:
            return False
        self._content.clear()
        self._published = bytearray(self.num_blocks)
        self._evicted.clear()
        self.num_cached = 0
        self._by_hash.clear()
        self._children.clear()
        return True

    def _note_evicted(self, digest: bytes) -> None:
        self._evicted[digest] = None
        self._evicted.move_to_end(digest)
        if len(self._evicted) > self.num_blocks:
            self._evicted.popitem(last=False)

    def _forget(self, block: int) -> None:
        content = self._content.pop(block)
        self._published[block] = 0
        del self._by_hash[content.digest]
        key = (content.parent, content.tokens[0])
        siblings = self._children[key]
        del siblings[block]
        if not siblings:
            del self._children[key]
