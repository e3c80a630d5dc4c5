"""The engine: the one room that knows both the scheduler and the runner, and the APIs around it."""

from jaxserve.engine.async_engine import AsyncLLM
from jaxserve.engine.engine import Engine
from jaxserve.engine.llm import LLM
from jaxserve.engine.lora_request import LoRARequest

__all__ = ["LLM", "AsyncLLM", "Engine", "LoRARequest"]
