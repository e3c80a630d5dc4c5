"""The head of EAGLE: one decoder layer that guesses the model's next hidden state (Li et al. 2024, arXiv:2401.15077).

It reads pairs: a token, and the model's hidden state at the token before it, which that token was sampled from. Out of
all pairs so far it makes a guess at the hidden state at the newest token, hence, through the model's own output head,
at the token after it; then the guess takes the place of the state in the next pair.

EAGLE-3 (Li et al. 2025, arXiv:2503.01840) reads states from within the model: what goes into three of its layers. The
head makes one vector of them, normalises both halves of a pair, and has an output head of its own.

Pair p lies at position p of the head's KV cache, so that it depends on nothing but tokens 0 … p and blocks are shared
as those of the model are. The first token has no state before it: its pair is zeros.

Letters: T tokens, E hidden size, Z size of what the model keeps of a token, W tokens that can be guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.layers import embed, linear, unembed
from jaxserve.models.config import ModelConfig
from jaxserve.models.layer import Attend, Kept, Rotation, run_layer
from jaxserve.models.names import HF_NAMES
from jaxserve.models.params import ParamTree, param_tree
from jaxserve.models.spec import ParamSpec, Source, Transform, Use
from pallas_kernels.rms_norm import rms_norm

__all__ = ["EagleHead", "eagle_specs", "fuse", "guess_logits", "run_head"]


@dataclass(frozen=True)
class EagleHead:
    """What a head computes.

    Attributes:
        layer: its layer, as a model of one.
        taps: layers of the model whose inputs are read; none for its final states, which is EAGLE-1 and 2.
        has_bias: whether the product that makes one vector of several has a bias.
    """

    layer: ModelConfig
    taps: tuple[int, ...] = ()
    has_bias: bool = False

    @property
    def state_size(self) -> int:
        """Z."""
        return self.layer.hidden_size * max(1, len(self.taps))


def fuse(params: dict[str, Any], head: EagleHead, states: jax.Array) -> jax.Array:
    """States [T, Z] of the model as the head reads them, [T, E]."""
    return linear(states, params["fc"], params.get("fc_bias")) if head.taps else states


def run_head(
    params: dict[str, Any],
    head: EagleHead,
    tokens: jax.Array,
    states: jax.Array,
    positions: jax.Array,
    rotation: Rotation,
    attend: Attend[Kept],
    *,
    backend: str,
) -> tuple[jax.Array, Kept]:
    """Guess the states [T, E] at tokens [T], from the states [T, E] (fused) at the tokens before.

    Returns them and what ``attend`` returns besides.
    """
    norm = partial(rms_norm, eps=head.layer.rms_eps, backend=backend)
    first = (positions == 0)[:, None]
    vectors = jnp.where(first, 0, embed(params["embed"], tokens)).astype(states.dtype)
    states = jnp.where(first, 0, states)
    layer = params["layer"]
    if head.taps:
        seen = jnp.concatenate([norm(vectors, layer["input_norm"]), norm(states, layer["hidden_norm"])], axis=1)
    else:
        seen = states = linear(jnp.concatenate([vectors, states], axis=1), params["fc"], params.get("fc_bias"))
    return run_layer(states, seen, layer, rotation, attend, config=head.layer, norm=norm)


def guess_logits(params: dict[str, Any], head: EagleHead, states: jax.Array, *, backend: str) -> jax.Array:
    """Logits [T, W] float32 of the tokens that follow guessed states [T, E]."""
    if head.taps:
        states = rms_norm(states, params["norm"], head.layer.rms_eps, backend=backend)
    return unembed(states, params["out"])


def eagle_specs(head: EagleHead, num_guessed: int) -> ParamTree:
    """The parameters of a head that are its own, with the names that the authors' checkpoints have.

    ``{"fc": [2 E or Z, E], "layer": …}``, in EAGLE-3 with ``"norm": [E]`` and ``"out": [W, E]``; W is ``num_guessed``.
    """
    size = head.layer.hidden_size
    layer: ParamTree = param_tree(head.layer, HF_NAMES)["layers"][0]
    if head.taps:
        layer = _renamed(layer, "model.layers.0.", "midlayer.")
        layer["qkv"] = _twice_as_tall(layer["qkv"])
        layer["hidden_norm"] = _vector("midlayer.hidden_norm.weight", size)
    else:
        layer = _renamed(layer, "model.layers.0.", "layers.0.")
        del layer["input_norm"]
    size_in = head.state_size if head.taps else 2 * size
    source = Source("fc.weight", (size, size_in), Transform.TRANSPOSE)
    specs: ParamTree = {"layer": layer, "fc": ParamSpec((size_in, size), ("embed", None), (source,), Use.MATRIX)}
    if head.has_bias:
        specs["fc_bias"] = _vector("fc.bias", size)
    if head.taps:
        specs["norm"] = _vector("norm.weight", size)
        shape = (num_guessed, size)
        specs["out"] = ParamSpec(shape, ("vocab", "embed"), (Source("lm_head.weight", shape),), Use.LOGITS)
    return specs


def _vector(name: str, size: int) -> ParamSpec:
    return ParamSpec((size,), (None,), (Source(name, (size,)),))


def _renamed(layer: ParamTree, old: str, new: str) -> ParamTree:
    return {
        key: ParamSpec(
            spec.shape,
            spec.axes,
            tuple(Source(new + s.name.removeprefix(old), s.shape, s.transform, s.heads) for s in spec.sources),
            spec.use,
        )
        for key, spec in layer.items()
    }


def _twice_as_tall(spec: ParamSpec) -> ParamSpec:
    """The same product over a token's vector and its state, side by side."""
    height, width = spec.shape
    sources = tuple(Source(s.name, (s.shape[0], 2 * s.shape[1]), s.transform, s.heads) for s in spec.sources)
    return ParamSpec((2 * height, width), spec.axes, sources, spec.use)
