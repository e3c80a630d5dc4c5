"""Weight leaves that are no plain arrays: packed for native products, quantised on load, or kept as GGUF's blocks.

Which leaf a parameter becomes is decided once, when it is loaded (``LeafMaker``); from then on its type says what is
done with it.
"""

from jaxserve.quantization.blocks import Blocks, merge
from jaxserve.quantization.gguf import KEPT_KINDS, from_gguf
from jaxserve.quantization.int8 import quantize_int8
from jaxserve.quantization.leaf import Leaf, PackedLeaf, describe, has_quantised
from jaxserve.quantization.maker import LeafMaker, as_factor
from jaxserve.sizing import WeightForm

__all__ = [
    "KEPT_KINDS",
    "Blocks",
    "Leaf",
    "LeafMaker",
    "PackedLeaf",
    "WeightForm",
    "as_factor",
    "describe",
    "from_gguf",
    "has_quantised",
    "merge",
    "quantize_int8",
]
