"""How weights are held in memory: what is asked for, and what that means for one parameter."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from jaxserve.config import ModelOptions
from jaxserve.errors import ConfigError
from jaxserve.models.spec import ParamSpec

__all__ = ["GGUF_BLOCKS", "GROUP", "Stored", "WeightForm", "check_rounding", "choose_form"]

GROUP = 32
"""Inputs that share a scale."""


class Stored(NamedTuple):
    """How a leaf is stored.

    Attributes:
        values: a float's name, int8 or int4.
        has_offset: whether quantised values have offsets beside their scales.
        is_packed: whether it lies in panels.
    """

    values: str
    has_offset: bool = False
    is_packed: bool = True


GGUF_BLOCKS: Mapping[str, Stored] = MappingProxyType(
    {
        "Q4_0": Stored("int4", has_offset=True),  # int8 without offsets if one of -8 scales is beyond float16
        "Q4_1": Stored("int4", has_offset=True),
        "Q5_0": Stored("int8"),
        "Q5_1": Stored("int8", has_offset=True),
        "Q8_0": Stored("int8"),
    }
)
"""Kinds of GGUF's blocks that are kept in memory, and what becomes of them."""


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How weights are held in memory.

    Attributes:
        quantization: "none"; "int8" made on load; or "gguf", the blocks of a GGUF file as they are.
        packed: matrices of floats are packed too, for the backend's sake.
        backend: who computes products with packed leaves.
        activation_bits: 8 if products with quantised values round the other factor too, else 16.
    """

    quantization: str = "none"
    packed: bool = False
    backend: str = "reference"
    activation_bits: int = 16

    @property
    def is_quantised(self) -> bool:
        """Whether some leaves may be no floats."""
        return self.quantization != "none"

    def keeps_blocks(self, spec: ParamSpec) -> bool:
        """Whether GGUF's blocks are wanted for a parameter, where the file has them."""
        return self.quantization == "gguf" and spec.is_factor

    def makes_int8(self, spec: ParamSpec) -> bool:
        """Whether a parameter of floats is quantised to int8."""
        return self.quantization == "int8" and spec.is_factor and spec.size_in % GROUP == 0

    def packs(self, spec: ParamSpec) -> bool:
        """Whether a parameter that stays floats is packed."""
        return self.packed and spec.is_factor

    def stored(self, spec: ParamSpec, dtype: str, kinds: Sequence[str | None] = ()) -> Stored:
        """How a parameter is stored, in ``dtype`` if it stays floats.

        ``kinds`` are GGML's names of the quantised tensors that it is made of, None for tensors of floats.
        """
        if self.keeps_blocks(spec) and kinds and all(kind in GGUF_BLOCKS for kind in kinds):
            parts = {GGUF_BLOCKS[kind] for kind in kinds if kind}
            return parts.pop() if len(parts) == 1 else Stored("int8", has_offset=True)
        if self.makes_int8(spec):
            return Stored("int8")
        return Stored(dtype, is_packed=self.packs(spec))


def choose_form(
    options: ModelOptions, kept_kinds: Collection[str], *, backend: str, has_random_weights: bool = False
) -> WeightForm:
    """The form that the flags ask for.

    Args:
        options: the flags.
        kept_kinds: kinds of GGUF's quantised blocks that the model's matrices have and that can be kept.
        backend: who computes products with packed weights; the native kernels of the "cpu" take floats packed, too.
        has_random_weights: its weights are made up, in any form.

    Raises:
        ConfigError: the model has no blocks to keep, or nothing for rounded activations to be multiplied with.
    """
    asked, native = options.quantization, backend == "cpu"
    activation_bits = 8 if options.activation_quantization == "int8" else 16
    if asked == "gguf" and not (kept_kinds or has_random_weights):
        raise ConfigError(
            f"--quantization gguf keeps the blocks of a quantised GGUF file, but no matrix of {options.model} is of a "
            f"kind that can be kept ({', '.join(GGUF_BLOCKS)}). Use auto, none or int8."
        )
    if asked == "auto":
        asked = "gguf" if native and kept_kinds else "none"
    form = WeightForm(asked, packed=native, backend=backend, activation_bits=activation_bits)
    if activation_bits == 8 and not form.is_quantised:
        raise ConfigError(
            "--activation-quantization int8 needs quantised weights, and those of this model are floats: add "
            "--quantization int8 or, for a quantised GGUF file, --quantization gguf"
        )
    return form


def check_rounding(form: WeightForm, model: str, *, has_quantised: bool) -> None:
    """ConfigError: activations are to be rounded, but no matrix of ``model`` is one that could be quantised."""
    if form.activation_bits == 8 and not has_quantised:
        raise ConfigError(
            f"--activation-quantization int8 needs quantised weights, and --quantization {form.quantization} found no "
            f"matrix of {model} that it could quantise. Leave it at none."
        )
