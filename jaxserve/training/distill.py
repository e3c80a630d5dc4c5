"""What the served model writes after each prompt, and its hidden state at each of these tokens.

Prompts are taken in groups, and each group becomes a file, so that a run that was stopped begins with the first group
that has none. The hidden states come from the functional decoder with the engine's own weights.

Letters: M examples (positions), E hidden size, K heads, T tokens of a forward pass, R sequences in it, S block size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from jaxserve.engine import LLM
from jaxserve.layers import KVCache
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import decode
from jaxserve.models.ragged import ragged_step
from jaxserve.sampling_params import SamplingParams
from jaxserve.training.options import TrainOptions

__all__ = ["Examples", "distill", "read_examples"]

_GROUP = 32  # prompts
_STATES_TOKENS, _STATES_ROWS, _BLOCK = 1024, 32, 16  # T, R and S of the pass that gives hidden states
_NONE = -1


@dataclass(frozen=True)
class Examples:
    """Positions to learn from.

    Attributes:
        hidden: [M, E] bfloat16, the state that the next token is sampled from.
        targets: [M, K] int32, the tokens after the next; -1 past the end of the text.
    """

    hidden: NDArray[Any]
    targets: NDArray[np.int32]


def distill(llm: LLM, prompts: Sequence[list[int]], options: TrainOptions, folder: Path, seed: int) -> None:
    """Write one file per group of prompts to ``folder``, but for those that are there."""
    folder.mkdir(parents=True, exist_ok=True)
    states = _Hidden(llm, max(_STATES_TOKENS, options.max_prompt_tokens + options.max_tokens))
    for group in tqdm(range(-(-len(prompts) // _GROUP)), desc="writing", unit="group", disable=None):
        path = folder / f"{group:06d}.npz"
        if path.exists():
            continue
        first = group * _GROUP
        some = prompts[first : first + _GROUP]
        params = [
            SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, seed=seed + first + i)
            for i in range(len(some))
        ]
        outputs = llm.generate(some, params, use_tqdm=False)
        texts = [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(some, outputs, strict=True)]
        examples = [
            _examples(text, len(prompt), hidden, options.num_heads)
            for text, prompt, hidden in zip(texts, some, states(texts), strict=True)
        ]
        _write(path, examples)


def read_examples(folder: Path, num_prompts: int) -> tuple[Examples, Examples]:
    """The examples of nine prompts out of ten, and those of the others (of one at least), which come last."""
    held_out = max(1, num_prompts // 10)
    hidden, targets, counts = [], [], []
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as file:
            hidden.append(file["hidden"].view(ml_dtypes.bfloat16))
            targets.append(file["targets"])
            counts.append(file["counts"])
    cut = int(np.concatenate(counts)[: num_prompts - held_out].sum())
    all_hidden, all_targets = np.concatenate(hidden), np.concatenate(targets)
    return Examples(all_hidden[:cut], all_targets[:cut]), Examples(all_hidden[cut:], all_targets[cut:])


def _examples(text: list[int], num_prompt: int, hidden: NDArray[Any], num_heads: int) -> Examples:
    """Those of one text: the states that its own tokens were sampled from, and what came after these tokens."""
    first, last = num_prompt - 1, len(text) - 2  # positions with a next token of the model's, and one more after it
    padded = np.array([*text, *[_NONE] * num_heads], np.int32)
    at = np.arange(first, max(first, last))
    return Examples(hidden[at], padded[at[:, None] + 2 + np.arange(num_heads)])


def _write(path: Path, examples: list[Examples]) -> None:
    """Complete or not at all."""
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        np.savez(
            file,
            hidden=np.concatenate([part.hidden for part in examples]).view(np.uint16),
            targets=np.concatenate([part.targets for part in examples]),
            counts=np.array([len(part.targets) for part in examples]),
        )
    os.replace(unfinished, path)


class _Hidden:
    """Hidden states after the final norm, of several texts in one pass.

    Args:
        llm: whose model.
        most: T, at least as many as the longest text has.
    """

    def __init__(self, llm: LLM, most: int) -> None:
        runner = llm.engine.runner
        self._params, self._most = runner.params, most
        self._forward: Callable[..., jax.Array] = jax.jit(
            partial(_forward, config=runner.config, backend=runner.shape.backend, dtype=runner.shape.dtype)
        )

    def __call__(self, texts: Sequence[list[int]]) -> Iterator[NDArray[Any]]:
        """Hidden states [tokens, E] bfloat16 of each text."""
        waiting: list[list[int]] = []
        for text in texts:
            if len(waiting) == _STATES_ROWS or sum(map(len, waiting)) + len(text) > self._most:
                yield from self._run(waiting)
                waiting = []
            waiting.append(text)
        if waiting:
            yield from self._run(waiting)

    def _run(self, texts: list[list[int]]) -> Iterator[NDArray[Any]]:
        tokens = np.zeros(self._most, np.int32)
        query_start = np.zeros(_STATES_ROWS + 1, np.int32)
        query_start[1 : len(texts) + 1] = np.cumsum([len(text) for text in texts])
        query_start[len(texts) + 1 :] = query_start[len(texts)]
        tokens[: query_start[-1]] = np.concatenate(texts)
        rows = np.searchsorted(query_start[1:], np.arange(self._most), side="right")
        tables = np.zeros((_STATES_ROWS, -(-self._most // _BLOCK)), np.int32)
        next_block = 1
        for i, text in enumerate(texts):
            count = -(-len(text) // _BLOCK)
            tables[i, :count] = np.arange(next_block, next_block + count)
            next_block += count
        rows = np.minimum(rows, _STATES_ROWS - 1).astype(np.int32)
        hidden = np.asarray(self._forward(self._params, tokens, rows, query_start, tables))
        for i in range(len(texts)):
            yield hidden[query_start[i] : query_start[i + 1]]


def _forward(
    params: dict[str, Any],
    tokens: jax.Array,
    token_rows: jax.Array,
    query_start: jax.Array,
    tables: jax.Array,
    *,
    config: ModelConfig,
    backend: str,
    dtype: jnp.dtype,
) -> jax.Array:
    """Hidden states [T, E] bfloat16 of whole texts, from their first token on."""
    num_rows = tables.shape[0]
    num_blocks = 1 + -(-tokens.shape[0] // _BLOCK) + num_rows
    kv = KVCache.zeros(config.num_layers, (num_blocks, _BLOCK, config.num_kv_heads, config.head_dim), dtype)
    nothing = jnp.zeros(num_rows, jnp.int32)
    step = ragged_step(tokens, token_rows, query_start, nothing, tables, jnp.int32(0), kv, queries=1, has_prefill=True)
    hidden, _ = decode(params, config, step, kv, backend=backend)
    return hidden.astype(jnp.bfloat16)
