"""Finding the part of a request whose KV exists already.

A ``Prefix`` is what admission starts from: whole blocks to share by reference and, past them, a block of which the
first tokens are right and which is therefore copied. It comes from the prefix cache (below) or from a sibling that
computes the same prompt (``BlockManager.fork``). A cache that is switched off is a cache that never finds anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType

from jaxserve.blocks.hash import block_hash, root_hash
from jaxserve.blocks.pool import BlockPool
from jaxserve.request import Request

__all__ = ["NoPrefixCache", "Prefix", "PrefixCache"]

_MAX_CANDIDATES = 64
"""Most blocks compared for a partial match: bounds the work where very many texts begin alike."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """KV that a request need not compute.

    Attributes:
        blocks: full blocks to share by reference.
        num_tokens: tokens that are covered, by ``blocks`` and by the copy.
        copy_from: block whose first tokens continue ``blocks``, None if none does.
        forked: it comes from a sibling, not from the cache.
    """

    blocks: tuple[int, ...] = ()
    num_tokens: int = 0
    copy_from: int | None = None
    forked: bool = False


class PrefixCache:
    """Full blocks of all requests, prompt and output, by the hash of their content.

    Attributes:
        queries_total, hits_total: tokens asked for, and found, by new requests (see ``count``).
        misses: tokens that were not found, by the reason why.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._unwritten: set[int] = set()
        self.queries_total = 0
        self.hits_total = 0
        self.misses: Counter[str] = Counter()

    def begin_step(self) -> None:
        """A new step is being planned: all steps planned before it run, and write, before it."""
        self._unwritten.clear()

    def match(self, request: Request) -> Prefix:
        """The longest known prefix, at most all known tokens but one: the last must be computed to give logits."""
        size = self._pool.block_size
        limit = request.known - 1
        blocks: list[int] = []
        for index in range(limit // size):
            block = self._pool.lookup(self._hash(request, index))
            if block is None:
                break
            blocks.append(block)
        start = len(blocks) * size
        source, hit = self._partial(self._parent(request, len(blocks)), request.tokens(start, min(start + size, limit)))
        return Prefix(tuple(blocks), start + hit, source)

    def count(self, request: Request, num_found: int) -> None:
        """Note that a new request asked for all its tokens, and ``num_found`` of them were there."""
        self.queries_total += request.known
        self.hits_total += num_found
        request.miss = self._why(request, num_found)
        self.misses[request.miss] += request.known - num_found

    def publish(self, request: Request) -> None:
        """Offer all blocks that are full of settled tokens and whose KV is written by the steps planned so far."""
        size = self._pool.block_size
        full = min(request.computed, request.known) // size
        for index in range(request.published, full):
            digest = self._hash(request, index)
            tokens = tuple(request.tokens(index * size, (index + 1) * size))
            if self._pool.publish(request.blocks[index], digest, self._parent(request, index), tokens):
                self._unwritten.add(request.blocks[index])
            request.published = index + 1

    def reset(self) -> bool:
        """Forget everything; False, and nothing is done, while any block is in use."""
        return self._pool.reset()

    def _why(self, request: Request, num_found: int) -> str:
        """Why the tokens after those found are missing."""
        size = self._pool.block_size
        index = num_found // size
        if request.reads_prompt:
            return "read"  # nobody looked
        if index == request.known // size or num_found == request.known - 1:
            return "partial_block"  # no full block is missing; the last token is computed in any case
        if self._pool.was_evicted(self._hash(request, index)):
            return "evicted"
        if num_found < size and (request.adapter, request.cache_salt) != (None, None):
            plain = block_hash(root_hash(None, None), request.tokens(0, size))
            if self._pool.lookup(plain) is not None:
                return "lora" if request.adapter is not None else "salt"
        return "cold"

    def _partial(self, parent: bytes, tokens: list[int]) -> tuple[int | None, int]:
        """The published child of ``parent`` that begins most like ``tokens``, and how many tokens are alike."""
        best, longest = None, 0
        candidates = self._pool.children(parent, tokens[0]) if tokens else iter(())
        for block in islice(candidates, _MAX_CANDIDATES):
            # A block published in this very plan is written by the step itself, after the step's copies.
            if block in self._unwritten:
                continue
            alike = _common_prefix(self._pool.tokens(block), tokens)
            if alike > longest:
                best, longest = block, alike
            if alike == len(tokens):
                break
        return best, longest

    def _hash(self, request: Request, index: int) -> bytes:
        """Hash of the request's full block ``index``, kept on the request: known tokens never change."""
        size = self._pool.block_size
        while len(request.hashes) <= index:
            at = len(request.hashes)
            tokens = request.tokens(at * size, (at + 1) * size)
            request.hashes.append(block_hash(self._parent(request, at), tokens))
        return request.hashes[index]

    def _parent(self, request: Request, index: int) -> bytes:
        """Hash of what comes before block ``index``."""
        return request.hashes[index - 1] if index else root_hash(request.adapter, request.cache_salt)


class NoPrefixCache:
    """The prefix cache switched off: it keeps nothing, always misses, and nobody asks it."""

    queries_total = 0
    hits_total = 0
    misses: Mapping[str, int] = MappingProxyType({})

    def begin_step(self) -> None:
        """Nothing to forget."""

    def match(self, request: Request) -> Prefix:
        """Nothing is known."""
        return Prefix()

    def count(self, request: Request, num_found: int) -> None:
        """There was no query."""
        request.miss = "off"

    def publish(self, request: Request) -> None:
        """Nothing is kept."""

    def reset(self) -> bool:
        """There is nothing to forget, so it always succeeds."""
        return True


def _common_prefix(left: tuple[int, ...], right: list[int]) -> int:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
