"""What the server asks of an engine and of its tokenizer: everything it knows about either."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from jaxserve.config import EngineConfig
from jaxserve.outputs import EngineStats, RequestOutput
from jaxserve.sampling_params import SamplingParams

__all__ = ["Engine", "Tokenizer"]


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def chat_template(self) -> str | None: ...

    @property
    def longest_token(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], /, skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int, /) -> str: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation.

        Options are ``add_generation_prompt``, ``continue_final_message``, ``tools``, ``chat_template``, and
        variables of the template. RequestError: the template refuses the messages.
        """
        ...


class Engine(Protocol):
    """An engine as seen from an event loop."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def hidden_size(self) -> int:
        """Numbers of an embedding."""
        ...

    def generate(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        stream: bool = True,
        pooling: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request: deltas, or with ``stream`` off one whole. Closing it aborts the request.

        With ``pooling`` ("mean", "last") the last one holds an embedding of the prompt, and no text.

        RequestError: bad input, at the first iteration. QueueFullError, EngineDeadError: no work is taken.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request early; its stream gets a last output with the finish reason "abort"."""
        ...

    def open_requests(self) -> list[str]:
        """Ids of the requests whose generators are open."""
        ...

    async def pause(self, how: str) -> None:
        """Let new requests wait; running ones are aborted ("abort"), finished ("wait"), or stand still ("keep")."""
        ...

    async def resume(self) -> None: ...

    @property
    def is_paused(self) -> bool: ...

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing is done, while any request runs."""
        ...

    def stats(self) -> EngineStats: ...

    def check_health(self) -> None:
        """EngineDeadError: the engine has stopped."""
        ...

    async def shutdown(self, drain_seconds: float) -> None: ...
