"""Random EAGLE heads in the authors' form, and what they guess by an independent, dense computation in torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jaxserve.layers import KVCache
from jaxserve.models.decoder import decode
from jaxserve.models.ragged import ragged_step
from jaxserve.speculative import EagleHead, eagle_specs
from jaxserve.weights import load_params
from tests.equivalence.harness import BACKEND, CONTEXT, MODEL, params

__all__ = ["HEADS", "Oracle", "checkpoint", "proposer_params"]

F, D = 40, MODEL.head_dim
HEADS_SIZE, KV_SIZE = MODEL.num_heads * D, MODEL.num_kv_heads * D
LAYER = replace(MODEL, num_layers=1, intermediate_size=F, windows=(None,), rope_layers=(True,))
HEADS = {
    "EAGLE": EagleHead(LAYER, has_bias=True),
    "EAGLE-3": EagleHead(LAYER, taps=(1, 0, 1)),  # of a model of two layers, in an order of their own
}
NUM_GUESSED = {"EAGLE": 6, "EAGLE-3": 40}


@cache
def checkpoint(kind: str) -> dict[str, torch.Tensor]:
    """Tensors by the names that the authors give them."""
    fused, count = bool(HEADS[kind].taps), NUM_GUESSED[kind]
    random = torch.Generator().manual_seed(21)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random) * 0.3

    size = MODEL.hidden_size
    layer, width = ("midlayer", 2 * size) if fused else ("layers.0", size)
    tensors = {
        f"{layer}.self_attn.q_proj.weight": normal(HEADS_SIZE, width),
        f"{layer}.self_attn.k_proj.weight": normal(KV_SIZE, width),
        f"{layer}.self_attn.v_proj.weight": normal(KV_SIZE, width),
        f"{layer}.self_attn.o_proj.weight": normal(size, HEADS_SIZE),
        f"{layer}.mlp.gate_proj.weight": normal(F, size),
        f"{layer}.mlp.up_proj.weight": normal(F, size),
        f"{layer}.mlp.down_proj.weight": normal(size, F),
        f"{layer}.post_attention_layernorm.weight": 1 + normal(size),
        "fc.weight": normal(size, (3 if fused else 2) * size),
        "embed_tokens.weight": normal(MODEL.vocab_size, size),  # a copy in true heads; it must not be read
    }
    if not fused:
        return tensors | {"fc.bias": normal(size)}
    tokens = torch.randperm(MODEL.vocab_size, generator=random)[:count].sort().values
    return tensors | {
        "midlayer.hidden_norm.weight": 1 + normal(size),
        "midlayer.input_layernorm.weight": 1 + normal(size),
        "norm.weight": 1 + normal(size),
        "lm_head.weight": normal(count, size),
        "d2t": tokens - torch.arange(count),
        "t2d": torch.isin(torch.arange(MODEL.vocab_size), tokens),
    }


class _Reader:
    """A checkpoint in memory."""

    files = ()

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def read(self, name: str) -> Any:
        return self._tensors[name].numpy()

    def dtype(self, name: str) -> str:
        return "float32"

    def raw(self, name: str) -> None:
        return None


@cache
def proposer_params(head: EagleHead) -> dict[str, Any]:
    """The parameters of the head of HEADS, as they are loaded."""
    kind = next(kind for kind, known in HEADS.items() if known == head)
    tensors = checkpoint(kind)
    loaded = load_params(eagle_specs(head, NUM_GUESSED[kind]), _Reader(tensors), "float32")
    guessed = jnp.asarray(vocabulary(kind).numpy(), jnp.int32)
    table = params()["lm_head"][guessed]
    return {"out": table, **loaded, "embed": params()["embed"], "vocabulary": guessed}


def vocabulary(kind: str) -> torch.Tensor:
    """The tokens that a head guesses: some by choice, or those that its checkpoint names."""
    if kind == "EAGLE":
        return torch.arange(6, 6 + NUM_GUESSED[kind])
    return torch.arange(NUM_GUESSED[kind]) + checkpoint(kind)["d2t"]


@dataclass(frozen=True)
class Oracle:
    """What a head of HEADS guesses, computed anew from the whole text each time, without a cache."""

    kind: str

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return checkpoint(self.kind)

    @property
    def head(self) -> EagleHead:
        return HEADS[self.kind]

    def chain(self, text: list[int], count: int) -> list[int]:
        """The greedy guesses after a text."""
        states, tokens = self._states(text), list(text)
        for _ in range(count):
            guessed = self._run(tokens, states)
            states.append(guessed[-1])
            tokens.append(int(self._chances(guessed[-1]).argmax()))
        return tokens[len(text) :]

    def tree(self, text: list[int], width: int, depth: int) -> dict[tuple[int, ...], float]:
        """All paths that an EAGLE-2 tree is chosen from, with the logarithms of their chances."""
        base = self._states(text)
        open_paths, made = [((), 0.0, base)], {}
        for _ in range(depth):
            found = []
            for path, chance, states in open_paths:
                guessed = self._run([*text, *path], states)[-1]
                chances = self._chances(guessed).log()
                for token in chances.topk(width).indices.tolist():
                    found.append(((*path, token), chance + float(chances[token]), [*states, guessed]))
            made |= {path: chance for path, chance, _ in found}
            open_paths = sorted(found, key=lambda item: -item[1])[:width]
        return made

    def _states(self, text: list[int]) -> list[torch.Tensor]:
        """The states before each token of a text, as the head reads them: zeros before the first."""
        kept = torch.from_numpy(model_states(tuple(text), self.head.taps).copy()).double()
        if self.head.taps:
            kept = kept @ self.tensors["fc.weight"].double().T
        return [torch.zeros(kept.shape[1], dtype=torch.float64), *kept[:-1]]

    def _chances(self, guessed: torch.Tensor) -> torch.Tensor:
        tokens = vocabulary(self.kind)
        if self.head.taps:
            scores = self._norm(guessed, "norm") @ self.tensors["lm_head.weight"].double().T
        else:
            scores = torch.from_numpy(np.array(params()["lm_head"])).double()[tokens] @ guessed
        every = torch.zeros(MODEL.vocab_size, dtype=torch.float64)
        return every.index_put((tokens,), scores.softmax(-1))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.head.layer.rms_eps).rsqrt()
        return x * scale * self.tensors[f"{name}.weight"].double()

    def _run(self, tokens: list[int], before: list[torch.Tensor]) -> torch.Tensor:
        """Guessed states [tokens, E] from the states before them."""
        vectors = torch.from_numpy(np.array(params()["embed"])).double()[tokens]
        vectors[0] = 0
        states = torch.stack(before)
        if self.head.taps:
            seen = torch.cat(
                [self._norm(vectors, "midlayer.input_layernorm"), self._norm(states, "midlayer.hidden_norm")], 1
            )
        else:
            weight, bias = self.tensors["fc.weight"].double(), self.tensors["fc.bias"].double()
            seen = states = torch.cat([vectors, states], 1) @ weight.T + bias
        layer = "midlayer" if self.head.taps else "layers.0"
        states = states + self._attend(seen, layer)
        normed = self._norm(states, f"{layer}.post_attention_layernorm")
        gate, up, down = (self.tensors[f"{layer}.mlp.{name}_proj.weight"].double().T for name in ("gate", "up", "down"))
        return states + (torch.nn.functional.silu(normed @ gate) * (normed @ up)) @ down

    def _attend(self, seen: torch.Tensor, layer: str) -> torch.Tensor:
        q, k, v = (
            (seen @ self.tensors[f"{layer}.self_attn.{name}_proj.weight"].double().T).view(len(seen), -1, D)
            for name in ("q", "k", "v")
        )
        angles = torch.arange(len(seen))[:, None] * MODEL.rope_theta ** (
            -torch.arange(0, D, 2, dtype=torch.float64) / D
        )
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]

        def rotate(x: torch.Tensor) -> torch.Tensor:
            a, b = x.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        q, k = rotate(q), rotate(k).repeat_interleave(q.shape[1] // k.shape[1], 1)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * D**-0.5
        scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(seen), -1)
        return mixed @ self.tensors[f"{layer}.self_attn.o_proj.weight"].double().T


@cache
def model_states(text: tuple[int, ...], taps: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What the model says at each token of a text: final states [tokens, E], or those of ``taps`` side by side."""
    padded = np.zeros(CONTEXT, np.int32)
    padded[: len(text)] = text
    return np.asarray(_kept(params(), padded, taps=taps))[: len(text)]


@partial(jax.jit, static_argnames="taps")
def _kept(model: dict[str, Any], tokens: jax.Array, *, taps: tuple[int, ...]) -> jax.Array:
    shape = (CONTEXT + 1, 1, MODEL.num_kv_heads, MODEL.head_dim)
    size = MODEL.hidden_size * max(1, len(taps))
    kv = KVCache.zeros(MODEL.num_layers, shape, jnp.dtype("float32"), state_size=size)
    nothing = jnp.zeros(1, jnp.int32)
    step = ragged_step(
        tokens,
        jnp.zeros(CONTEXT, jnp.int32),
        jnp.array([0, CONTEXT]),
        nothing,
        jnp.arange(1, CONTEXT + 1)[None],
        nothing[0],
        kv,
        queries=1,
        has_prefill=True,
    )
    _, kv = decode(model, MODEL, step, kv, backend=BACKEND, taps=taps)
    assert kv.states is not None
    return kv.states.reshape(-1, kv.states.shape[-1])[step.slots]
