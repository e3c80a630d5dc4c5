"""From logits to tokens, on the device: a pure pipeline over arrays of parameters."""

from jaxserve.sampling.arrays import RowState, SamplingInput, history_counts, make_sampling_input
from jaxserve.sampling.sampler import Sampled, sample

__all__ = [
    "RowState",
    "Sampled",
    "SamplingInput",
    "history_counts",
    "make_sampling_input",
    "sample",
]
