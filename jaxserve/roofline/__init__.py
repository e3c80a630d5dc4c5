"""What a step costs at least: bytes moved and operations done, against what a chip can move and do.

Pure arithmetic over a ``ModelConfig``, the shape of a step and a chip (the roofline model: Williams, Waterman and
Patterson 2009, doi:10.1145/1498765.1498785). A figure from here is a lower bound on time: no kernel, however good, goes
below it.
"""

from jaxserve.roofline.bound import Bound, kernels_bound, step_bound
from jaxserve.roofline.chips import CHIPS, Chip
from jaxserve.roofline.memory import kv_token_bytes, weight_bytes
from jaxserve.roofline.models import MODELS
from jaxserve.roofline.precision import Precision
from jaxserve.roofline.work import StepShape, Work, step_work

__all__ = [
    "CHIPS",
    "MODELS",
    "Bound",
    "Chip",
    "Precision",
    "StepShape",
    "Work",
    "kernels_bound",
    "kv_token_bytes",
    "step_bound",
    "step_work",
    "weight_bytes",
]
