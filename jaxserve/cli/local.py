"""Answers from a model in this process."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from jaxserve.errors import JaxserveError
from jaxserve.request import FinishReason
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.protocol import Engine

__all__ = ["LocalBackend"]


class LocalBackend:
    """Uses an engine, and stops it in the end."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def complete(self, prompt: str, sampling: dict[str, Any]) -> AsyncGenerator[str, None]:
        async with aclosing(self._generate(prompt, SamplingParams(**sampling))) as pieces:
            async for piece in pieces:
                yield piece

    async def chat(self, messages: Sequence[dict[str, str]], sampling: dict[str, Any]) -> AsyncGenerator[str, None]:
        prompt = self._engine.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
        # As on a server, a chat's answer may fill the context.
        params = SamplingParams(**{"max_tokens": None, **sampling})
        async with aclosing(self._generate(prompt, params)) as pieces:
            async for piece in pieces:
                yield piece

    async def close(self) -> None:
        await self._engine.shutdown(0.0)

    async def _generate(self, prompt: str | list[int], params: SamplingParams) -> AsyncGenerator[str, None]:
        async with aclosing(self._engine.generate(prompt, params, uuid.uuid4().hex)) as results:
            async for result in results:
                for output in result.outputs:
                    if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                        why = "." if output.error is None else f": {output.error}"
                        raise JaxserveError(f"the engine failed to generate this answer{why}")
                    yield output.text
