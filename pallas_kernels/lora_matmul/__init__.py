"""What each token's adapter adds to a product (LoRA), with many adapters in one batch."""

from pallas_kernels.lora_matmul.api import Backend, lora_matmul, select_backend
from pallas_kernels.lora_matmul.plan import LoraPlan, make_plan
from pallas_kernels.lora_matmul.weights import LoraWeights

__all__ = ["Backend", "LoraPlan", "LoraWeights", "lora_matmul", "make_plan", "select_backend"]
