"""From logits to tokens, on the device: a pure pipeline over arrays of parameters."""

from jaxserve.sampling.arrays import RowState, SamplingInput, history_counts, make_sampling_input, split_seeds
from jaxserve.sampling.sampler import Sampled, measure, rank_plainly, sample, sample_plainly, score_plainly

__all__ = [
    "RowState",
    "Sampled",
    "SamplingInput",
    "history_counts",
    "make_sampling_input",
    "measure",
    "rank_plainly",
    "sample",
    "sample_plainly",
    "score_plainly",
    "split_seeds",
]
