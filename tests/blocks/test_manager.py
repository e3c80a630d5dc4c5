"""Block tables: what is matched, shared, copied, published and given back."""

from __future__ import annotations

import pytest

from jaxserve.blocks import BlockManager, Prefix
from jaxserve.plan import BlockCopy
from jaxserve.request import Request
from tests.property.simulated import check_blocks, make_request

SIZE = 4


def compute(blocks: BlockManager, request: Request) -> BlockCopy | None:
    """Admit a request and compute all its known tokens in one plan of its own."""
    blocks.begin_step()
    copy = blocks.allocate(request, blocks.match(request), request.known)
    request.computed = request.known
    blocks.publish(request)
    return copy


def done(blocks: BlockManager, id: str, prompt: list[int], **kwargs: bytes | str) -> list[int]:
    """Compute a prompt and release it; returns the blocks it had."""
    request = make_request(id, prompt, **kwargs)  # type: ignore[arg-type]
    compute(blocks, request)
    table = request.blocks
    blocks.release(request)
    blocks.begin_step()
    return table


def test_full_blocks_are_shared_and_the_rest_of_a_block_is_copied() -> None:
    blocks = BlockManager(20, SIZE)
    table = done(blocks, "a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    request = make_request("b", [1, 2, 3, 4, 5, 6, 0, 0, 0, 0])
    assert blocks.match(request) == Prefix((table[0],), 6, table[1])
    copy = compute(blocks, request)
    assert request.blocks[0] == table[0]
    assert table[1] not in request.blocks
    assert copy == BlockCopy(table[1], request.blocks[1])
    assert request.cached == 6
    assert (blocks.prefix_queries_total, blocks.prefix_hits_total) == (19, 6)


@pytest.mark.parametrize("length", range(1, 14))
def test_a_fully_cached_prompt_computes_exactly_one_token(length: int) -> None:
    blocks = BlockManager(20, SIZE)
    done(blocks, "a", list(range(16)))
    assert blocks.match(make_request("b", list(range(length)))).num_tokens == length - 1


def test_the_longest_of_several_partial_matches_wins() -> None:
    blocks = BlockManager(20, SIZE)
    done(blocks, "a", [1, 2, 0, 0])
    (best,) = done(blocks, "b", [1, 2, 3, 0])
    done(blocks, "c", [1, 0, 0, 0])
    assert blocks.match(make_request("d", [1, 2, 3, 4, 5])) == Prefix((), 3, best)


def test_another_salt_or_adapter_shares_nothing() -> None:
    blocks = BlockManager(20, SIZE)
    prompt = list(range(9))
    done(blocks, "a", prompt, adapter=b"x")
    for other in (
        make_request("b", prompt),
        make_request("c", prompt, adapter=b"y"),
        make_request("d", prompt, cache_salt="x"),
        make_request("e", prompt, adapter=b"x", cache_salt="x"),
    ):
        assert blocks.match(other) == Prefix()
    assert blocks.match(make_request("f", prompt, adapter=b"x")).num_tokens == 8


def test_a_block_published_in_this_plan_is_shared_but_not_copied() -> None:
    blocks = BlockManager(20, SIZE)
    first = make_request("a", list(range(8)))
    compute(blocks, first)
    twin = make_request("b", list(range(8)))
    assert blocks.match(twin) == Prefix((first.blocks[0],), 4, None)
    blocks.begin_step()
    assert blocks.match(twin) == Prefix((first.blocks[0],), 7, first.blocks[1])


def test_only_settled_and_computed_tokens_are_published() -> None:
    blocks = BlockManager(20, SIZE)
    request = make_request("a", [1, 2, 3])
    compute(blocks, request)
    request.pending = 1
    blocks.grow(request, 4)
    request.computed = 4  # the fourth token is computed, but its id is not known yet
    blocks.publish(request)
    assert blocks.pool.num_published == 0
    request.output.append(9)
    blocks.publish(request)
    assert blocks.pool.num_published == 1
    request.output += [8, 7, 6, 5]  # known, but not computed
    blocks.publish(request)
    assert blocks.pool.num_published == 1


def test_the_output_of_a_request_is_found_by_the_next_turn() -> None:
    blocks = BlockManager(20, SIZE)
    request = make_request("a", [1, 2, 3])
    compute(blocks, request)
    request.output += [4, 5, 6, 7, 8]
    blocks.grow(request, 8)
    request.computed = 8
    blocks.publish(request)
    blocks.release(request)
    assert len(blocks.match(make_request("b", [1, 2, 3, 4, 5, 6, 7, 8, 9])).blocks) == 2


def test_a_copy_source_that_is_handed_out_as_the_target_needs_no_copy() -> None:
    blocks = BlockManager(3, SIZE)
    table = done(blocks, "a", list(range(8)))
    request = make_request("b", list(range(7)))
    prefix = blocks.match(request)
    assert prefix == Prefix((table[0],), 6, table[1])
    assert blocks.fits(prefix, request.known, reserved=0)
    assert blocks.allocate(request, prefix, request.known) is None
    assert request.blocks == table


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_a_fork_shares_the_prompt_and_copies_at_most_its_last_block(length: int, caching: bool) -> None:
    blocks = BlockManager(20, SIZE, enable_prefix_caching=caching)
    sibling = make_request("a", list(range(length)))
    compute(blocks, sibling)
    blocks.begin_step()
    fork = make_request("b", list(range(length)), fork_of=sibling)
    prefix = blocks.fork(fork, sibling)
    copy = blocks.allocate(fork, prefix, length)
    full, rest = divmod(length - 1, SIZE)
    assert fork.computed == length - 1
    assert fork.blocks[:full] == sibling.blocks[:full]
    assert fork.blocks[full] != sibling.blocks[full]
    assert copy == (BlockCopy(sibling.blocks[full], fork.blocks[full]) if rest else None)
    assert blocks.prefix_hits_total == 0
    check_blocks(blocks, [sibling, fork])
    blocks.release(sibling)
    blocks.release(fork)
    assert blocks.num_free == blocks.num_blocks - 1 == 19


def test_revived_blocks_count_as_taken_when_asked_what_fits() -> None:
    blocks = BlockManager(5, SIZE)
    done(blocks, "a", list(range(12)))
    request = make_request("b", list(range(13)))
    prefix = blocks.match(request)
    assert len(prefix.blocks) == 3
    assert blocks.num_free == 4
    assert blocks.fits(prefix, 16, reserved=0)
    assert not blocks.fits(prefix, 16, reserved=1)
    assert not blocks.fits(prefix, 17, reserved=0)


def test_growing_is_all_or_nothing() -> None:
    blocks = BlockManager(4, SIZE)
    request = make_request("a", [1])
    compute(blocks, request)
    assert not blocks.grow(request, 13)
    assert len(request.blocks) == 1
    assert blocks.grow(request, 12)
    assert len(request.blocks) == 3


def test_a_switched_off_cache_always_misses() -> None:
    blocks = BlockManager(20, SIZE, enable_prefix_caching=False)
    done(blocks, "a", list(range(12)))
    assert blocks.match(make_request("b", list(range(12)))) == Prefix()
    assert blocks.pool.num_published == 0
    assert blocks.reset_prefix_cache()


def test_resumed_requests_are_not_counted_as_hits() -> None:
    blocks = BlockManager(20, SIZE)
    request = make_request("a", list(range(9)))
    compute(blocks, request)
    blocks.release(request)
    request.preemptions = 1
    compute(blocks, request)
    assert (blocks.prefix_queries_total, blocks.prefix_hits_total, request.cached) == (9, 0, 0)


def test_the_cache_is_reset_only_while_no_request_has_blocks() -> None:
    blocks = BlockManager(20, SIZE)
    request = make_request("a", list(range(9)))
    compute(blocks, request)
    assert not blocks.reset_prefix_cache()
    blocks.release(request)
    assert blocks.reset_prefix_cache()
    assert blocks.match(make_request("b", list(range(9)))) == Prefix()


def test_a_cache_that_is_off_is_not_asked() -> None:
    blocks = BlockManager(20, SIZE, enable_prefix_caching=False)
    compute(blocks, make_request("a", list(range(9))))
    assert (blocks.prefix_queries_total, blocks.prefix_hits_total) == (0, 0)


def test_misses_have_reasons() -> None:
    blocks = BlockManager(8, SIZE)

    def misses(id: str, prompt: list[int], **kwargs: bytes | str) -> dict[str, int]:
        before = dict(blocks.prefix_misses)
        done(blocks, id, prompt, **kwargs)
        return {why: now - before.get(why, 0) for why, now in blocks.prefix_misses.items() if now != before.get(why, 0)}

    prompt = list(range(10))
    assert misses("a", prompt) == {"cold": 10}
    assert misses("b", prompt) == {"partial_block": 2}
    assert misses("c", [*prompt[:8], 50, 51, 52]) == {"partial_block": 3}
    assert misses("d", [*prompt[:8], 50, 51, 52, 53, 54]) == {"cold": 5}
    assert misses("e", prompt, cache_salt="s") == {"salt": 10}
    assert misses("f", prompt, adapter=b"x") == {"lora": 10}
    done(blocks, "g", list(range(100, 127)))  # takes all blocks
    assert misses("h", prompt) == {"evicted": 10}


def test_what_a_preempted_request_computes_again_is_counted() -> None:
    blocks = BlockManager(20, SIZE)
    request = make_request("a", list(range(10)))
    compute(blocks, request)
    blocks.release(request)
    request.preemptions = 1
    compute(blocks, request)
    assert blocks.recomputed_tokens_total == 2
    assert blocks.prefix_queries_total == 10
