"""What a decoder computes, as one frozen, hashable value; made from a Hugging Face config or GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ModelConfig", "RopeScaling"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """RoPE scaling, names as in transformers' ``rope_scaling``; ``kind`` is llama3, linear, dynamic, yarn or factors.

    ``factors`` divides each of the D/2 inverse frequencies by a number of its own, as GGUF files carry llama3 scaling.
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()

    def reach(self, max_position: int) -> int:
        """Longest context in tokens: YaRN is meant to be used beyond the ``max_position`` that the files state."""
        return (
            max(max_position, round(self.factor * self.original_max_position)) if self.kind == "yarn" else max_position
        )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and quirks of one decoder.

    Attributes:
        family: name of the module in ``models`` that maps its weights (llama, mistral, qwen2, qwen3, smollm3).
        vocab_size, hidden_size, intermediate_size: V, E, F.
        num_layers, num_heads, num_kv_heads, head_dim: L, H, K, D.
        max_position: longest context the model was made for, tokens.
        rms_eps: epsilon of RMSNorm.
        rope_theta, rope_scaling: rotary embedding (half-split layout, as in transformers).
        tie_embeddings: the output head is the embedding.
        qkv_bias, o_bias, mlp_bias: which projections have a bias.
        qk_norm: RMSNorm over each head of q and k before RoPE (Qwen3).
        windows: per layer the sliding window in tokens, None for full attention.
        rope_layers: per layer whether RoPE is applied (SmolLM3 leaves it out of every fourth).
        soft_cap: soft cap of attention scores, None for none.
        eos_token_ids: all tokens that end a text (union of config and generation config).
        bos_token_id: None if there is none.
        checkpoint_dtype: dtype the weights are stored in, as a numpy name (float32, bfloat16, float16).
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    rope_layers: tuple[bool, ...] = ()
    soft_cap: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    checkpoint_dtype: str = "float32"

    @property
    def qkv_size(self) -> int:
        """Columns of the merged q, k, v projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
