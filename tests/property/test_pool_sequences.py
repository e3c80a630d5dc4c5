"""Random sequences of pool operations against a plain model that knows nothing of free lists or indices."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.blocks import BlockPool, block_hash, root_hash

SIZE = 2
ROOT = root_hash(None, None)


class PoolSequences(RuleBasedStateMachine):
    """Tables of several owners; the model counts their uses and remembers what was published last."""

    @initialize(num_blocks=st.integers(2, 9))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, SIZE)
        self.tables: list[list[int]] = []
        self.held: dict[int, bytes] = {}

    @rule(num=st.integers(1, 4))
    def take(self, num: int) -> None:
        if num > self.pool.num_free:
            return
        plain = [block for block in self.pool.free_blocks() if block not in self.held]
        blocks = self.pool.take(num)
        assert set(blocks[: len(plain)]) <= set(plain), "a cached block is evicted while plain ones are free"
        for block in blocks:
            self.held.pop(block, None)
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), tokens=st.tuples(st.integers(0, 1), st.integers(0, 1)))
    def publish(self, data: st.DataObject, tokens: tuple[int, int]) -> None:
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.tables))))
        if block in self.held:
            return
        digest = block_hash(ROOT, tokens)
        assert self.pool.publish(block, digest, ROOT, tokens) == (digest not in self.held.values())
        if digest not in self.held.values():
            self.held[block] = digest

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.share(block)
        self.tables.append([block])

    @rule()
    def reset(self) -> None:
        assert self.pool.reset() == (not self.tables)
        if not self.tables:
            self.held.clear()

    @invariant()
    def references_are_table_uses(self) -> None:
        uses = Counter(block for table in self.tables for block in table)
        assert list(self.pool.refs) == [1, *(uses[block] for block in range(1, self.pool.num_blocks))]

    @invariant()
    def free_and_used_are_all(self) -> None:
        free = self.pool.free_blocks()
        used = {block for table in self.tables for block in table}
        assert len(free) == len(set(free)) == self.pool.num_free
        assert set(free).isdisjoint(used)
        assert set(free) | used == set(range(1, self.pool.num_blocks))

    @invariant()
    def published_content_is_found_exactly(self) -> None:
        assert self.pool.num_published == len(self.held)
        for block, digest in self.held.items():
            assert self.pool.lookup(digest) == block
            assert block in self.pool.children(ROOT, self.pool.tokens(block)[0])
        children = [block for first in (0, 1) for block in self.pool.children(ROOT, first)]
        assert sorted(children) == sorted(self.held)

    @invariant()
    def unpublished_free_blocks_come_first(self) -> None:
        cached = [block in self.held for block in self.pool.free_blocks()]
        assert cached == sorted(cached)


PoolSequences.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestPoolSequences = PoolSequences.TestCase
