"""The parameter tree of the decoder, declared once.

    {"embed": [V, E], "layers": [{…} x L], "final_norm": [E], "lm_head": [V, E] unless tied}

A layer holds ``input_norm`` [E], ``qkv`` [E, (H+2K)*D], ``q_norm`` and ``k_norm`` [D], ``o`` [H*D, E], ``post_norm``
[E], ``gate_up`` [E, 2F], ``down`` [F, E], and ``…_bias`` beside each projection that has one. Matrices are stored as
they are multiplied, [in, out]; q, k, v and gate, up stand side by side in one matrix, since XLA does not merge them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.models.config import ModelConfig
from jaxserve.models.spec import ParamSpec, Source, Transform, Use

__all__ = ["ParamTree", "param_tree"]

ParamTree = dict[str, Any]  # nested dicts and lists with ParamSpec leaves


class _Part(NamedTuple):
    """One projection of a merged matrix; ``heads`` > 0 if its rows are in the order of interleaved RoPE."""

    name: str
    size: int
    heads: int = 0


def param_tree(cfg: ModelConfig, names: Mapping[str, str], interleaved: bool = False) -> ParamTree:
    """Tree of ParamSpec.

    Args:
        cfg: the model.
        names: our name of a part -> its name in the checkpoint, ``{i}`` for the layer.
        interleaved: the checkpoint holds q and k in the row order of interleaved RoPE.
    """
    tree: ParamTree = {
        "embed": _table(names["embed"], cfg, Use.LOGITS if cfg.tie_embeddings else Use.LOOKUP),
        "layers": [
            _layer(cfg, {k: n.format(i=i) for k, n in names.items()}, interleaved) for i in range(cfg.num_layers)
        ],
        "final_norm": _norm(names["final_norm"], cfg.hidden_size, "embed"),
    }
    if not cfg.tie_embeddings:
        tree["lm_head"] = _table(names["lm_head"], cfg, Use.LOGITS)
    return tree


def _layer(cfg: ModelConfig, names: Mapping[str, str], interleaved: bool) -> ParamTree:
    size, ffw, kv_size = cfg.hidden_size, cfg.intermediate_size, cfg.num_kv_heads * cfg.head_dim
    q = _Part(names["q"], cfg.num_heads * cfg.head_dim, cfg.num_heads if interleaved else 0)
    k = _Part(names["k"], kv_size, cfg.num_kv_heads if interleaved else 0)
    qkv = (q, k, _Part(names["v"], kv_size))
    gate_up = (_Part(names["gate"], ffw), _Part(names["up"], ffw))
    down = (_Part(names["down"], size),)
    o = (_Part(names["o"], size),)
    layer = {
        "input_norm": _norm(names["input_norm"], size, "embed"),
        "qkv": _linear(qkv, size, ("embed", "heads")),
        "o": _linear(o, q.size, ("heads", "embed")),
        "post_norm": _norm(names["post_norm"], size, "embed"),
        "gate_up": _linear(gate_up, size, ("embed", "ffw")),
        "down": _linear(down, ffw, ("ffw", "embed")),
    }
    if cfg.qkv_bias:
        layer["qkv_bias"] = _bias(qkv, "heads")
    if cfg.o_bias:
        layer["o_bias"] = _bias(o, "embed")
    if cfg.mlp_bias:
        layer["gate_up_bias"] = _bias(gate_up, "ffw")
        layer["down_bias"] = _bias(down, "embed")
    if cfg.qk_norm:
        # One weight for all heads, inside a head: it is never sharded, nor touched by the row order of q and k, since
        # families with a norm here keep the half-split order.
        layer["q_norm"] = _norm(names["q_norm"], cfg.head_dim, None)
        layer["k_norm"] = _norm(names["k_norm"], cfg.head_dim, None)
    return layer


def _table(name: str, cfg: ModelConfig, use: Use) -> ParamSpec:
    shape = (cfg.vocab_size, cfg.hidden_size)
    return ParamSpec(shape, ("vocab", "embed"), (Source(f"{name}.weight", shape),), use)


def _norm(name: str, size: int, axis: str | None) -> ParamSpec:
    return ParamSpec((size,), (axis,), (Source(f"{name}.weight", (size,)),))


def _linear(parts: Sequence[_Part], size_in: int, axes: tuple[str, str]) -> ParamSpec:
    sources = tuple(
        Source(
            f"{part.name}.weight",
            (part.size, size_in),
            Transform.UNPERMUTE_TRANSPOSE if part.heads else Transform.TRANSPOSE,
            part.heads,
        )
        for part in parts
    )
    return ParamSpec((size_in, sum(part.size for part in parts)), axes, sources, Use.MATRIX)


def _bias(parts: Sequence[_Part], axis: str) -> ParamSpec:
    sources = tuple(
        Source(f"{part.name}.bias", (part.size,), Transform.UNPERMUTE if part.heads else Transform.NONE, part.heads)
        for part in parts
    )
    return ParamSpec((sum(part.size for part in parts),), (axis,), sources)
