"""What each token's adapter adds to a product (LoRA), with many adapters in one batch."""

from pallas_kernels.lora_matmul.api import Backend, lora_matmul, select_backend
from pallas_kernels.lora_matmul.plan import LoraPlan, make_plan

__all__ = ["Backend", "LoraPlan", "lora_matmul", "make_plan", "select_backend"]
