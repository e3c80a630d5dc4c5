"""What a model takes of a device's memory, and what that leaves: arithmetic over configurations, without a device.

An engine sizes itself with it when it starts, and ``jaxserve plan`` says beforehand what an engine would find. So both
say the same, and where they part, a test fails.
"""

from jaxserve.sizing.blocks import (
    KVSize,
    block_bytes,
    check_chunking,
    check_context,
    check_draft_context,
    check_ram,
    fit_context,
    largest_context,
    most_useful_blocks,
    size_cache,
)
from jaxserve.sizing.forms import GGUF_BLOCKS, GROUP, Stored, WeightForm, check_rounding, choose_form
from jaxserve.sizing.limits import activation_dtype, step_limits
from jaxserve.sizing.memory import Memory, cpu_memory, cpu_room, free_ram, gpu_memory, gpu_room, total_ram
from jaxserve.sizing.options import PlanOptions
from jaxserve.sizing.plan import Drafts, MemoryPlan, Parts, plan_memory
from jaxserve.sizing.sessions import Kept, Mix, mix_of
from jaxserve.sizing.state import Guesses, draft_bytes, mask_bytes, row_arrays, row_bytes
from jaxserve.sizing.weights import FLOAT_BYTES, all_specs, leaf_bytes, weight_sizes
from jaxserve.sizing.workspace import Workspace, workspace_bound

__all__ = [
    "FLOAT_BYTES",
    "GGUF_BLOCKS",
    "GROUP",
    "Drafts",
    "Guesses",
    "KVSize",
    "Kept",
    "Memory",
    "MemoryPlan",
    "Mix",
    "Parts",
    "PlanOptions",
    "Stored",
    "WeightForm",
    "Workspace",
    "activation_dtype",
    "all_specs",
    "block_bytes",
    "check_chunking",
    "check_context",
    "check_draft_context",
    "check_ram",
    "check_rounding",
    "choose_form",
    "cpu_memory",
    "cpu_room",
    "draft_bytes",
    "fit_context",
    "free_ram",
    "gpu_memory",
    "gpu_room",
    "largest_context",
    "leaf_bytes",
    "mask_bytes",
    "mix_of",
    "most_useful_blocks",
    "plan_memory",
    "row_arrays",
    "row_bytes",
    "size_cache",
    "step_limits",
    "total_ram",
    "weight_sizes",
    "workspace_bound",
]
