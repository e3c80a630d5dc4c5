"""What a user has without a serving engine: transformers on torch, on the CPU.

Greedy, and exactly as many tokens as asked: the end-of-sequence token is ignored, as on jaxserve's side.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from jaxserve.bench.workloads import Job
from jaxserve.weights import resolve

__all__ = ["Baseline", "Timing", "locate"]

PAD = 0


def locate(model: str) -> dict[str, str]:
    """Arguments of transformers' ``from_pretrained`` for a model named as for jaxserve."""
    files = resolve(model)
    if files.gguf is not None:
        return {"pretrained_model_name_or_path": str(files.gguf.parent), "gguf_file": files.gguf.name}
    return {"pretrained_model_name_or_path": str(files.folder)}


class Timing:
    """A streamer that keeps the time of the first token; seconds of ``time.perf_counter``."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.first = 0.0
        self.finished = 0.0
        self._seen_prompt = False

    def put(self, value: object) -> None:
        """Called by ``generate`` with the prompt, then with every token."""
        if self._seen_prompt and not self.first:
            self.first = time.perf_counter()
        self._seen_prompt = True

    def end(self) -> None:
        """Called by ``generate`` after the last token."""
        self.finished = time.perf_counter()


class Baseline:
    """A model of transformers."""

    def __init__(self, model: str, dtype: str) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(**locate(model), dtype=getattr(torch, dtype)).eval()
        self._model.generation_config = GenerationConfig(do_sample=False, pad_token_id=PAD)  # no end-of-sequence token

    def one(self, job: Job) -> Timing:
        """Generate for one prompt; the plain loop calls this for one request after the other."""
        timing = Timing()
        tokens = torch.tensor([job.prompt])
        self._generate(tokens, torch.ones_like(tokens), job.max_tokens, timing)
        return timing

    def batch(self, jobs: Sequence[Job]) -> None:
        """Generate for a static batch: prompts padded on the left to the longest, all as long as the longest output."""
        width = max(len(job.prompt) for job in jobs)
        tokens = torch.tensor([[PAD] * (width - len(job.prompt)) + list(job.prompt) for job in jobs])
        mask = torch.tensor([[0] * (width - len(job.prompt)) + [1] * len(job.prompt) for job in jobs])
        self._generate(tokens, mask, max(job.max_tokens for job in jobs), None)

    def _generate(self, tokens: torch.Tensor, mask: torch.Tensor, max_tokens: int, streamer: Timing | None) -> None:
        with torch.inference_mode():
            output = self._model.generate(tokens, attention_mask=mask, max_new_tokens=max_tokens, streamer=streamer)
        if output.shape[1] != tokens.shape[1] + max_tokens:
            raise RuntimeError(f"{output.shape[1] - tokens.shape[1]} tokens were generated, {max_tokens} were asked.")
