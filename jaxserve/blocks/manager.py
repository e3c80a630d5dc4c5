"""Every request's block table: taken, grown, shared, forked, published, released.

Why no step ever reads or overwrites another request's KV, although steps are planned while one is in flight and blocks
are handed on the moment they are released:

* Steps run on the device in the order of their plans, and within a step copies come first, then in each layer all
  writes, then the reads of attention. So a block released now may be handed out in the next plan (or later in this
  one): whatever still writes to it for its old owner belongs to a step dispatched earlier.
* A row writes positions from its request's ``computed`` on. A block shared by reference lies wholly below the
  ``computed`` of all its users: a match leaves the last known token out, a fork copies the block of the last prompt
  token, and a block is published only below ``min(computed, known)``. So nobody ever writes into a shared or published
  block by a plan made later; and the row that a finished request still has in flight writes the position after its last
  settled token but one: that is in no published block, or completes one with exactly the token that was settled there.
* A block published by the plan in the making may be shared by reference in the same plan (writes before reads), but not
  copied (copies before writes); the cache leaves it out as a source.
* A copy's source may be evicted and handed out again within the plan: it is read before anything is written. Copies may
  run all at once or one after another in their order: a target is fresh, so it is never the source of a later copy of
  the plan, and a later target can only overwrite the source of an earlier copy. If the fresh block *is* the source, its
  content is in place and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxserve.blocks.pool import BlockPool
from jaxserve.blocks.prefix import NoPrefixCache, Prefix, PrefixCache
from jaxserve.config import CacheConfig
from jaxserve.plan import BlockCopy
from jaxserve.request import Request

__all__ = ["BlockManager", "ContiguousBlockManager", "make_blocks"]


class BlockManager:
    """Owns the pool, the prefix cache and the block tables.

    Args:
        num_blocks: number of blocks on the device, the null block included.
        block_size: tokens per block.
        enable_prefix_caching: whether blocks are reused between requests with a common prefix.

    Attributes:
        recomputed_tokens_total: tokens that requests computed once more after they were preempted.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.block_size = block_size
        self.recomputed_tokens_total = 0
        self._cache = PrefixCache(self.pool) if enable_prefix_caching else NoPrefixCache()

    @property
    def num_blocks(self) -> int:
        """Number of blocks on the device, the null block included."""
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        """Number of blocks that no request uses."""
        return self.pool.num_free

    @property
    def prefix_queries_total(self) -> int:
        """Tokens that new requests looked up in the prefix cache."""
        return self._cache.queries_total

    @property
    def prefix_hits_total(self) -> int:
        """Tokens that they found there."""
        return self._cache.hits_total

    @property
    def prefix_misses(self) -> Mapping[str, int]:
        """Tokens that they did not find there, by the reason why."""
        return self._cache.misses

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def missing(self, request: Request, num_tokens: int) -> int:
        """Number of blocks that the request lacks to hold ``num_tokens`` tokens."""
        return max(0, self.blocks_for(num_tokens) - len(request.blocks))

    def begin_step(self) -> None:
        """A new step is being planned; to be called first."""
        self._cache.begin_step()

    def match(self, request: Request) -> Prefix:
        """What the prefix cache knows of the request's known tokens; nothing if its prompt is to be read."""
        return Prefix() if request.reads_prompt else self._cache.match(request)

    def fork(self, request: Request, sibling: Request) -> Prefix:
        """The prompt of ``sibling`` but for its last token; steps before this one must have computed all of it."""
        num_tokens = len(request.prompt) - 1
        full, rest = divmod(num_tokens, self.block_size)
        return Prefix(tuple(sibling.blocks[:full]), num_tokens, sibling.blocks[full] if rest else None, forked=True)

    def fits(self, prefix: Prefix, num_tokens: int, reserved: int) -> bool:
        """Whether a request that starts from ``prefix`` can grow to ``num_tokens`` and leave ``reserved`` blocks."""
        revived = sum(self.pool.refs[block] == 0 for block in prefix.blocks)
        fresh = self.blocks_for(num_tokens) - len(prefix.blocks)
        return fresh + revived + reserved <= self.pool.num_free

    def allocate(self, request: Request, prefix: Prefix, num_tokens: int) -> BlockCopy | None:
        """Give the request a table for ``num_tokens`` tokens that starts with ``prefix``, and advance it to its end.

        Returns the copy that the step must make first, if any. The blocks must be free (see ``fits``).
        """
        for block in prefix.blocks:  # before taking others, which could evict them
            self.pool.share(block)
        fresh = self.pool.take(self.blocks_for(num_tokens) - len(prefix.blocks))
        request.blocks = [*prefix.blocks, *fresh]
        request.computed = prefix.num_tokens
        request.published = len(prefix.blocks)
        request.owed = request.known
        if request.preemptions:
            lost = request.known - prefix.num_tokens
            request.recomputed += lost
            self.recomputed_tokens_total += lost
        elif not prefix.forked:
            request.cached = prefix.num_tokens
            self._cache.count(request, prefix.num_tokens)
        if prefix.copy_from is None or prefix.copy_from == fresh[0]:
            return None
        return BlockCopy(prefix.copy_from, fresh[0])

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Extend the request's table to hold ``num_tokens`` tokens; False, and nothing is done, if blocks are short."""
        missing = self.missing(request, num_tokens)
        if missing > self.pool.num_free:
            return False
        if missing:
            request.blocks += self.pool.take(missing)
        return True

    def publish(self, request: Request) -> None:
        """Make the request's settled full blocks findable for others."""
        self._cache.publish(request)

    def release(self, request: Request) -> None:
        """Take all blocks from the request; what it published stays findable until the blocks are handed out again."""
        self.pool.release(request.blocks)
        request.blocks = []
        request.computed = 0
        request.published = 0

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing is done, while any request has blocks."""
        return self._cache.reset()


class ContiguousBlockManager(BlockManager):
    """What a server with contiguous KV memory can hold, for comparison.

    A table has the size of a whole region from its first token to its last, whatever the request makes of it. It never
    grows, so nobody is preempted; a region belongs to one request, so nothing is shared.

    Args:
        num_blocks, block_size: as in ``BlockManager``.
        region_tokens: length of a region, the longest context that is served.
    """

    def __init__(self, num_blocks: int, block_size: int, *, region_tokens: int) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching=False)
        self._region = super().blocks_for(region_tokens)

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks of a region."""
        return self._region

    def fork(self, request: Request, sibling: Request) -> Prefix:
        """Nothing: the request computes its prompt in its own region."""
        return Prefix()


def make_blocks(config: CacheConfig, num_blocks: int, max_context: int) -> BlockManager:
    """The manager that the configuration asks for, over ``num_blocks`` blocks; ``max_context`` is in tokens."""
    if config.kv_reservation == "contiguous":
        return ContiguousBlockManager(num_blocks, config.block_size, region_tokens=max_context)
    return BlockManager(num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching)
