"""Names for the content of a block: a hash chained over everything that its KV depends on.

The KV at a position depends on all tokens up to it and on the weights that computed it. So a block's hash covers its
own tokens and its parent's hash, and the chain starts from a root that covers the rest: the adapter and the cache salt.
Being in the root, these extra keys reach every block of the chain.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

__all__ = ["block_hash", "root_hash"]


def root_hash(adapter: bytes | None, cache_salt: str | None) -> bytes:
    """Hash [32 bytes] from which the chains of one adapter and one salt start.

    Each key is written with its type and its length, so that no adapter can be taken for a salt, nor one pair of keys
    for another pair that concatenates to the same bytes.
    """
    root = sha256(b"jaxserve blocks")
    if adapter is not None:
        root.update(_typed(b"adapter:", adapter))
    if cache_salt is not None:
        # A salt is any string that JSON can carry, lone surrogates included.
        root.update(_typed(b"salt:", cache_salt.encode("utf-8", "surrogatepass")))
    return root.digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash [32 bytes] of a full block that holds ``tokens`` and follows the block (or root) of hash ``parent``."""
    return sha256(parent + array("q", tokens).tobytes()).digest()


def _typed(kind: bytes, value: bytes) -> bytes:
    return kind + len(value).to_bytes(8, "little") + value
