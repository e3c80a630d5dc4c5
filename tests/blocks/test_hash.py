"""Block hashes tell apart everything that a block's KV depends on."""

from __future__ import annotations

import pytest

from jaxserve.blocks import block_hash, root_hash


def chain(adapter: bytes | None, salt: str | None, *blocks: list[int]) -> bytes:
    digest = root_hash(adapter, salt)
    for tokens in blocks:
        digest = block_hash(digest, tokens)
    return digest


def test_equal_content_has_equal_hashes() -> None:
    assert chain(b"x", "s", [1, 2], [3, 4]) == chain(b"x", "s", [1, 2], [3, 4])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((b"x", None), (None, "x")),
        ((b"x", None), (None, None)),
        ((None, ""), (None, None)),
        ((b"", None), (None, None)),
        ((b"ab", "c"), (b"a", "bc")),
        ((b"x", "y"), (b"y", "x")),
        ((b"x" + b"salt:" + (1).to_bytes(8, "little") + b"y", None), (b"x", "y")),
    ],
)
def test_extra_keys_are_typed_and_reach_every_block(
    left: tuple[bytes | None, str | None], right: tuple[bytes | None, str | None]
) -> None:
    assert chain(*left) != chain(*right)
    assert chain(*left, [1, 2], [3, 4], [5, 6]) != chain(*right, [1, 2], [3, 4], [5, 6])


def test_a_hash_covers_the_whole_prefix() -> None:
    assert chain(None, None, [1, 2], [3, 4]) != chain(None, None, [2, 1], [3, 4])
    assert chain(None, None, [3, 4]) != chain(None, None, [1, 2], [3, 4])


def test_tokens_are_not_run_together() -> None:
    assert chain(None, None, [1, 23]) != chain(None, None, [12, 3])
    assert chain(None, None, [256]) != chain(None, None, [1])


def test_a_salt_may_be_any_json_string() -> None:
    assert root_hash(None, "\ud83d") != root_hash(None, "�")
