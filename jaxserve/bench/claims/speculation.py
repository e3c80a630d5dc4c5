"""The claim of speculative decoding: more tokens per second where a text is easy to guess, and none lost where not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from jaxserve.bench.claims.claim import Check, Claim, Figure, Figures, Sizes, Ways, exactly, offline
from jaxserve.bench.workloads import Text
from jaxserve.config import EngineConfig, SpeculativeConfig
from jaxserve.engine import LLM
from jaxserve.sampling_params import SamplingParams

__all__ = ["SPECULATION"]

_BEGINNING = 32
"""Tokens of the text that are given a second time, so that the model goes on copying it."""

_LEAST_GAIN, _MOST_LOSS = 1.8, 0.97


def _speculation(llm: LLM, sizes: Sizes, text: Text) -> Figures:
    size, num_tokens = sizes.copied
    copies = [text.window(size) for _ in range(sizes.copies)]
    copying = [copy + copy[:_BEGINNING] for copy in copies]
    own = [text.window(size // 2) for _ in range(sizes.copies)]
    hot = SamplingParams(temperature=1.0, max_tokens=num_tokens, ignore_eos=True, seed=1)
    greedy = exactly(num_tokens)
    before = llm.engine.stats().speculation
    figures = {
        "copying, one at a time": _rate(llm, [[prompt] for prompt in copying[:3]], greedy),
        "copying, all at once": _rate(llm, [copying], greedy),
    }
    after = llm.engine.stats().speculation
    num_drafts = after.num_drafts - before.num_drafts
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    return {
        **figures,
        "right drafts per verify": accepted / num_drafts if num_drafts else 0.0,
        "open text, one at a time": _rate(llm, [[prompt] for prompt in own[:3]], hot),
        "open text, all at once": _rate(llm, [own], hot),
    }


def _rate(llm: LLM, batches: Sequence[Sequence[tuple[int, ...]]], params: SamplingParams) -> float:
    """Tokens per second of decoding, over batches one after the other: from first tokens to last ones."""
    num_tokens, seconds = 0, 0.0
    for batch in batches:
        outputs = llm.generate(list(batch), params, use_tqdm=False)
        num_tokens += sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
        first = min(output.metrics.first_token_at for output in outputs)
        seconds += max(output.metrics.finished_at for output in outputs) - first
    return num_tokens / seconds


def _ways(sizes: Sizes, config: EngineConfig) -> Ways:
    """No speculation, or the one that the configuration asks for: n-grams if it asks for none."""
    names = [f.name for f in fields(SpeculativeConfig)]
    off = {f.name: f.default for f in fields(SpeculativeConfig)}
    on = {name: getattr(config.speculative, name) for name in names}
    return off, on if on != off else {**off, "speculative_model": "[ngram]"}


def _checks(off: Figures, on: Figures) -> list[Check]:
    gain = on["copying, one at a time"] / off["copying, one at a time"]
    kept = [on[key] / off[key] for key in ("open text, one at a time", "open text, all at once")]
    return [
        Check(f"copying is at least {_LEAST_GAIN} times as fast: {gain:.2f}", gain >= _LEAST_GAIN),
        Check(f"open text loses at most 3 %: {min(kept):.2f} ≥ {_MOST_LOSS}", min(kept) >= _MOST_LOSS),
    ]


SPECULATION = Claim(
    "speculation",
    "tokens per second where a text repeats itself, and where nothing can be guessed (temperature 1)",
    "plain",
    "drafts",
    _ways,
    offline(_speculation),
    (
        Figure("copying, one at a time", "", True),
        Figure("copying, all at once", "", True),
        Figure("right drafts per verify", "", True, 2),
        Figure("open text, one at a time", "", True),
        Figure("open text, all at once", "", True),
    ),
    _checks,
)
