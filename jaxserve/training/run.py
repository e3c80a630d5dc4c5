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

from jaxserve.config import EngineConfig
from jaxserve.engine import LLM
from jaxserve.errors import ConfigError
from jaxserve.layers import embed
from jaxserve.training import eagle, medusa
from jaxserve.training.acceptance import Acceptance, draft_vocabulary
from jaxserve.training.distill import Texts, distill, read_texts
from jaxserve.training.eagle import Known
from jaxserve.training.options import TrainOptions
from jaxserve.training.prompts import FEWEST, read_lines, tokenise
from jaxserve.weights import default_drafts, open_model, save_eagle, save_medusa
from jaxserve.weights.digest import content_digest

__all__ = ["train_draft"]


def train_draft(
    config: EngineConfig, data: Path, options: TrainOptions, tell: Callable[[str], None]
) -> tuple[Acceptance, Acceptance]:
    """Train what guesses for the model of ``config`` on what it writes after the prompts of ``data``.

    ``tell`` is told of results, a line each. Returns how often guesses are right, before and after.

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
        _write_texts(config, lines, options, work, seed)
    with np.load(work / "start.npz") as file:
        vocabulary = file["vocabulary"] if file["vocabulary"].size else None
        known = Known(file["tokens"], file["embed"], file["table"], vocabulary)
    learn, held_out = read_texts(work / "texts")
    run = {"medusa": _medusa, "eagle": _eagle}[options.method]
    before, after = run(config, known, (learn, held_out), options, output, seed)
    num_learnt, num_measured = (int((texts.lengths - texts.prompts).sum()) for texts in (learn, held_out))
    for line in _report(before, after, num_learnt, num_measured):
        tell(line)
    tell(f"saved in {output}")
    return before, after


def _medusa(
    config: EngineConfig, known: Known, texts: tuple[Texts, Texts], options: TrainOptions, output: Path, seed: int
) -> tuple[Acceptance, Acceptance]:
    learn, held_out = (medusa.examples_of(some, options.num_heads) for some in texts)
    start = medusa.first_heads(jnp.asarray(known.table), options.num_heads, options.num_layers)
    before = medusa.measure(start, known.vocabulary, held_out)
    heads = medusa.train(learn, start, known.vocabulary, options, output / "training" / "checkpoints", seed)
    after = medusa.measure(heads, known.vocabulary, held_out)
    notes = {"medusa_choices": after.paths(), **_notes(after)}
    save_medusa(output, heads, config.model.model, known.vocabulary, notes)
    return before, after


def _eagle(
    config: EngineConfig, known: Known, texts: tuple[Texts, Texts], options: TrainOptions, output: Path, seed: int
) -> tuple[Acceptance, Acceptance]:
    learn, held_out = texts
    head = eagle.head_of(open_model(config.model).config)
    start = eagle.first_head(head, seed)
    before = eagle.measure(start, head, known, held_out, options.num_passes)
    fitted = eagle.fit_product(start, known, learn)
    params = eagle.train(learn, fitted, head, known, options, output / "training" / "checkpoints", seed)
    after = eagle.measure(params, head, known, held_out, options.num_passes)
    notes = {"base_model_name_or_path": config.model.model, **_notes(after)}
    save_eagle(output, params, head.layer, known.vocabulary, notes)
    return before, after


def _notes(after: Acceptance) -> dict[str, Any]:
    return {"held_out_acceptance": after.right[:, 0].round(4).tolist(), "held_out_length": round(after.length, 4)}


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


def _write_texts(
    config: EngineConfig, lines: list[dict[str, Any]], options: TrainOptions, work: Path, seed: int
) -> None:
    """All that training needs of the model: what it writes, the vocabulary of drafts, and rows of its tables."""
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
        learn, held_out = read_texts(work / "texts")
        num_tokens = llm.model_config.vocab_size
        vocabulary = draft_vocabulary(learn.written(), options.draft_vocab_size, num_tokens)
        params = llm.engine.runner.params
        tokens = np.unique(np.concatenate([learn.tokens, held_out.tokens]))
        guessed = np.arange(num_tokens) if vocabulary is None else vocabulary
        table = params.get("lm_head", params["embed"])
        np.savez(
            work / "start.unfinished.npz",
            tokens=tokens,
            embed=np.asarray(embed(params["embed"], jnp.asarray(tokens)), np.float32),
            table=np.asarray(embed(table, jnp.asarray(guessed)), np.float32),
            vocabulary=np.zeros(0, np.int32) if vocabulary is None else vocabulary,
        )
    (work / "start.unfinished.npz").rename(work / "start.npz")


def _report(before: Acceptance, after: Acceptance, num_learnt: int, num_measured: int) -> list[str]:
    lines = [f"trained on {num_learnt} tokens, measured on {num_measured} of other texts:"]
    for i, (was, now) in enumerate(zip(before.right[:, 0], after.right[:, 0], strict=True), start=1):
        lines.append(f"  guess {i}: right {now:.1%} of the time (untrained {was:.1%})")
    lines.append(f"  tokens per step of a chain: {after.length:.2f} (untrained {before.length:.2f})")
    return lines
