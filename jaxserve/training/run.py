"""A training from its first prompt to the folder that ``--speculative-model`` loads.

All that takes time leaves files in ``OUTPUT/training``, and nothing that is there is done again. The same command goes
on where it was stopped; a command that asks for something else is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxserve.config import EngineConfig
from jaxserve.engine import LLM
from jaxserve.errors import ConfigError
from jaxserve.layers import embed
from jaxserve.training.distill import distill, read_examples
from jaxserve.training.medusa import Acceptance, draft_vocabulary, first_heads, measure, train
from jaxserve.training.options import TrainOptions
from jaxserve.training.prompts import FEWEST, read_lines, tokenise
from jaxserve.weights import default_drafts, save_medusa
from jaxserve.weights.digest import content_digest

__all__ = ["train_draft"]


def train_draft(
    config: EngineConfig, data: Path, options: TrainOptions, tell: Callable[[str], None]
) -> tuple[Acceptance, Acceptance]:
    """Train heads for the model of ``config`` on what it writes after the prompts of ``data``.

    ``tell`` is told of results, a line each. Returns how often the heads are right, before and after.

    Raises:
        ConfigError: the data cannot be used, or the folder holds another training.
        LoadError: the model cannot be loaded.
    """
    model, seed = config.model.model, config.model.seed % 2**62
    output = Path(options.output).expanduser() if options.output else default_drafts(options.method, model)
    lines = read_lines(data)
    work = output / "training"
    _claim(work, {"model": model, "seed": seed, "data": content_digest([data]), **_lasting(options)})
    if not (work / "start.npz").exists():
        _write_examples(config, lines, options, work, seed)
    with np.load(work / "start.npz") as file:
        table, num_prompts = file["table"], int(file["num_prompts"])
        vocabulary: NDArray[np.int32] | None = file["vocabulary"] if file["vocabulary"].size else None
    learn, held_out = read_examples(work / "texts", num_prompts)
    start = first_heads(table, options.num_heads, options.num_layers)
    before = measure(start, vocabulary, held_out)
    heads = train(learn, start, vocabulary, options, work / "checkpoints", seed)
    after = measure(heads, vocabulary, held_out)
    notes = {
        "medusa_choices": after.paths(),
        "trained_on_tokens": len(learn.targets),
        "held_out_acceptance": after.right[:, 0].round(4).tolist(),
    }
    save_medusa(output, heads, model, vocabulary, notes)
    for line in _report(before, after, len(learn.targets), len(held_out.targets), output):
        tell(line)
    return before, after


def _lasting(options: TrainOptions) -> dict[str, Any]:
    """The options that a training cannot change halfway."""
    return {name: value for name, value in asdict(options).items() if name != "output"}


def _claim(work: Path, settings: dict[str, Any]) -> None:
    """Make the folder of a training, or find it as it was left. ConfigError: it is another training's."""
    path = work / "settings.json"
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        for name, value in settings.items():
            if before.get(name) != value:
                raise ConfigError(
                    f"output: {work} holds a training with another {name} ({before.get(name)!r}, now {value!r}): name "
                    "another folder, or remove it.",
                    "output",
                )
        return
    try:
        work.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"output: cannot write to {work}: {error.strerror}.", "output") from None


def _write_examples(
    config: EngineConfig, lines: list[dict[str, Any]], options: TrainOptions, work: Path, seed: int
) -> None:
    """All that training needs of the model: examples, the vocabulary of drafts, and its rows of the model's table."""
    with LLM(**config.flat()) as llm:
        most = llm.max_model_len - options.max_tokens
        if most < 1:
            raise ConfigError(
                f"max_tokens is {options.max_tokens}, but contexts reach {llm.max_model_len} tokens only.", "max_tokens"
            )
        prompts = tokenise(lines, llm.tokenizer, min(most, options.max_prompt_tokens), seed)
        if len(prompts) < FEWEST:
            raise ConfigError(f"the data must hold at least {FEWEST} prompts that are not empty, got {len(prompts)}.")
        distill(llm, prompts, options, work / "texts", seed)
        learn, _ = read_examples(work / "texts", len(prompts))
        num_tokens = llm.model_config.vocab_size
        vocabulary = draft_vocabulary(learn.targets, options.draft_vocab_size, num_tokens)
        tokens = np.arange(num_tokens, dtype=np.int32) if vocabulary is None else vocabulary
        params = llm.engine.runner.params
        table = embed(params.get("lm_head", params["embed"]), jnp.asarray(tokens))
        np.savez(
            work / "start.unfinished.npz",
            table=np.asarray(table, np.float32),
            vocabulary=np.zeros(0, np.int32) if vocabulary is None else vocabulary,
            num_prompts=len(prompts),
        )
    (work / "start.unfinished.npz").rename(work / "start.npz")


def _report(before: Acceptance, after: Acceptance, num_learnt: int, num_held_out: int, output: Path) -> list[str]:
    lines = [f"trained on {num_learnt} tokens, measured on {num_held_out} of other texts:"]
    for i, (was, now) in enumerate(zip(before.right[:, 0], after.right[:, 0], strict=True), start=1):
        lines.append(f"  head {i}: right {now:.1%} of the time (untrained {was:.1%})")
    lines.append(f"  tokens per step of a chain: {after.length:.2f} (untrained {before.length:.2f})")
    lines.append(f"saved in {output}")
    return lines
