"""Ragged paged attention: prompt chunks, decodes and multi-token verifies of one step, in one call."""

from pallas_kernels.paged_attention.api import Backend, paged_attention, select_backend
from pallas_kernels.paged_attention.plan import AttentionPlan, make_plan

__all__ = ["AttentionPlan", "Backend", "make_plan", "paged_attention", "select_backend"]
