"""KV blocks: who owns them, what is in them, and which of them can be shared. Host side, pure Python.

``pool`` counts references and remembers content, ``hash`` names content, ``prefix`` finds a request's known prefix,
``manager`` keeps every request's block table.
"""

from __future__ import annotations

from jaxserve.blocks.hash import block_hash, root_hash
from jaxserve.blocks.manager import BlockManager, ContiguousBlockManager, make_blocks
from jaxserve.blocks.pool import BlockPool
from jaxserve.blocks.prefix import NoPrefixCache, Prefix, PrefixCache

__all__ = [
    "BlockManager",
    "BlockPool",
    "ContiguousBlockManager",
    "NoPrefixCache",
    "Prefix",
    "PrefixCache",
    "block_hash",
    "make_blocks",
    "root_hash",
]
