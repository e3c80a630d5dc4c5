"""How callers of ``LLM`` name an adapter, in vLLM's shape."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.errors import RequestError

__all__ = ["LoRARequest"]


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter for a request.

    Attributes:
        lora_name: its name; one that is not loaded yet is loaded from ``lora_path``.
        lora_int_id: a number from 1, as vLLM wants one; here adapters are told apart by their names.
        lora_path: PEFT folder or hub id; may be empty for a name that is loaded.
        base_model_name: name of the base model, to be shown.
        load_inplace: read the files again, and use what they hold now.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise RequestError(f"lora_name must be a non-empty string, got {self.lora_name!r}.", "lora_name")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise RequestError(
                f"lora_int_id must be an integer of at least 1, got {self.lora_int_id!r}.", "lora_int_id"
            )
