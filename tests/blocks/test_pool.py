"""The pool hands out, shares, revives and evicts blocks in the right order, and stops at misuse."""

from __future__ import annotations

import pytest

from jaxserve.blocks import BlockPool, block_hash, root_hash

ROOT = root_hash(None, None)


def publish_chain(pool: BlockPool, blocks: list[int], *contents: tuple[int, ...]) -> list[bytes]:
    parent = ROOT
    digests = []
    for block, tokens in zip(blocks, contents, strict=True):
        digest = block_hash(parent, tokens)
        assert pool.publish(block, digest, parent, tokens)
        digests.append(digest)
        parent = digest
    return digests


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4, 2)
    assert sorted(pool.take(3)) == [1, 2, 3]
    assert pool.num_free == 0


def test_taking_more_than_is_free_is_refused_and_changes_nothing() -> None:
    pool = BlockPool(4, 2)
    with pytest.raises(AssertionError, match="4 blocks taken, 3 are free"):
        pool.take(4)
    assert pool.num_free == 3


def test_a_block_is_free_after_its_last_reference() -> None:
    pool = BlockPool(3, 2)
    (block,) = pool.take(1)
    pool.share(block)
    pool.release([block])
    assert pool.num_free == 1
    pool.release([block])
    assert pool.num_free == 2


def test_releasing_twice_is_refused() -> None:
    pool = BlockPool(3, 2)
    (block,) = pool.take(1)
    pool.release([block])
    with pytest.raises(AssertionError, match="not in use"):
        pool.release([block])
    with pytest.raises(AssertionError, match="not in use"):
        pool.release([0])


def test_a_free_block_without_content_cannot_be_shared() -> None:
    with pytest.raises(AssertionError, match="holds nothing"):
        BlockPool(3, 2).share(1)


def test_a_cached_block_is_revived() -> None:
    pool = BlockPool(3, 2)
    blocks = pool.take(1)
    (digest,) = publish_chain(pool, blocks, (1, 2))
    pool.release(blocks)
    assert pool.lookup(digest) == blocks[0]
    pool.share(blocks[0])
    assert pool.take(1) != blocks
    assert pool.num_free == 0
    assert pool.lookup(digest) == blocks[0]


def test_blocks_without_content_are_reused_before_cached_ones() -> None:
    pool = BlockPool(4, 2)
    cached, plain, other = (pool.take(1) for _ in range(3))
    (digest,) = publish_chain(pool, cached, (1, 2))
    pool.release(cached)
    pool.release(plain)
    pool.release(other)
    assert pool.take(2) == other + plain
    assert pool.lookup(digest) is not None
    assert pool.take(1) == cached
    assert pool.lookup(digest) is None


def test_cached_blocks_are_evicted_least_recently_released_first_and_each_chain_from_its_tail() -> None:
    pool = BlockPool(5, 2)
    first, second = pool.take(2), pool.take(2)
    first_digests = publish_chain(pool, first, (1, 2), (3, 4))
    second_digests = publish_chain(pool, second, (5, 6), (7, 8))
    pool.release(first)
    pool.release(second)
    assert [pool.take(1)[0] for _ in range(4)] == [first[1], first[0], second[1], second[0]]
    assert all(pool.lookup(digest) is None for digest in first_digests + second_digests)
    assert pool.num_published == 0


def test_the_older_of_two_equal_blocks_stays_known() -> None:
    pool = BlockPool(4, 2)
    old, new = pool.take(2)
    digest = block_hash(ROOT, (1, 2))
    assert pool.publish(old, digest, ROOT, (1, 2))
    assert not pool.publish(new, digest, ROOT, (1, 2))
    assert pool.lookup(digest) == old
    pool.release([old, new])
    assert pool.take(2) == [new, 3]  # the duplicate is private, so it is reused before the cached block
    assert pool.lookup(digest) == old


def test_publishing_a_free_or_published_or_partial_block_is_refused() -> None:
    pool = BlockPool(4, 2)
    (block,) = pool.take(1)
    for bad, tokens in ((2, (1, 2)), (block, (1,))):
        with pytest.raises(AssertionError, match="published"):
            pool.publish(bad, block_hash(ROOT, tokens), ROOT, tokens)
    publish_chain(pool, [block], (1, 2))
    with pytest.raises(AssertionError, match="published"):
        pool.publish(block, block_hash(ROOT, (3, 4)), ROOT, (3, 4))


def test_children_are_found_by_parent_and_first_token_until_they_are_evicted() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.take(3)
    for block, tokens in zip(blocks, [(1, 2), (1, 3), (4, 5)], strict=True):
        pool.publish(block, block_hash(ROOT, tokens), ROOT, tokens)
    assert list(pool.children(ROOT, 1)) == [blocks[1], blocks[0]]
    assert list(pool.children(ROOT, 4)) == [blocks[2]]
    assert pool.tokens(blocks[1]) == (1, 3)
    pool.release(blocks[:1])
    pool.take(1)
    assert list(pool.children(ROOT, 1)) == [blocks[1]]


def test_reset_forgets_content_only_while_nothing_is_in_use() -> None:
    pool = BlockPool(3, 2)
    blocks = pool.take(1)
    (digest,) = publish_chain(pool, blocks, (1, 2))
    assert not pool.reset()
    assert pool.lookup(digest) == blocks[0]
    pool.release(blocks)
    assert pool.reset()
    assert pool.lookup(digest) is None
    assert list(pool.children(ROOT, 1)) == []
    assert pool.num_free == 2


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 4), (0, 4), (4, 0)])
def test_a_pool_without_room_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(num_blocks, block_size)
