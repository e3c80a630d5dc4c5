"""The loop of a training: AdamW, a learning rate that rises and falls, and a state on disk to go on from."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import optax
from tqdm.auto import tqdm

from jaxserve.training.checkpoints import restore, save
from jaxserve.training.options import TrainOptions

__all__ = ["descend"]

_WARM_UP = 0.05  # share of the steps
_SAVE_SECONDS = 60.0

Params = TypeVar("Params")
Draw = Callable[[np.random.Generator], Any]
"""What a step learns from, chosen at random."""


def descend(
    start: Params, loss: Callable[[Params, Any], jax.Array], draw: Draw, options: TrainOptions, folder: Path, seed: int
) -> Params:
    """The parameters after all steps; goes on from the newest checkpoint in ``folder``, and leaves some there.

    ``loss`` is pure, of parameters and what ``draw`` gives (a tree of arrays, of the same shapes every time); a step's
    draw follows from the seed and its number.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, options.learning_rate, max(1, round(_WARM_UP * options.steps)), options.steps + 1
    )
    optimiser = optax.adamw(schedule, weight_decay=0.0)
    state = (start, optimiser.init(start))
    first, state = restore(folder, state)
    update = jax.jit(partial(_update, loss=loss, optimiser=optimiser), donate_argnums=0)
    saved = time.monotonic()
    with tqdm(total=options.steps, initial=first, desc="training", unit="step", disable=None) as bar:
        for step in range(first, options.steps):
            state, value = update(state, draw(np.random.default_rng([seed, step])))
            bar.update()
            if step % 20 == 19:
                bar.set_postfix(loss=f"{float(value):.3f}")
            if time.monotonic() - saved > _SAVE_SECONDS or step + 1 == options.steps:
                save(folder, step + 1, state)
                saved = time.monotonic()
    return state[0]


def _update(
    state: tuple[Any, Any],
    batch: Any,
    *,
    loss: Callable[[Any, Any], jax.Array],
    optimiser: optax.GradientTransformation,
) -> tuple[tuple[Any, Any], jax.Array]:
    params, memory = state
    value, gradient = jax.value_and_grad(loss)(params, batch)
    change, memory = optimiser.update(gradient, memory, params)
    return (optax.apply_updates(params, change), memory), value
