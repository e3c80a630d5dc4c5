"""What the server asks of an engine and of its tokenizer: everything it knows about either."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from jaxserve.config import EngineConfig
from jaxserve.live import EngineShape, Journal, Snapshot
from jaxserve.outputs import AdapterInfo, EngineStats, RequestOutput
from jaxserve.sampling_params import SamplingParams

__all__ = ["Adapters", "Engine", "LiveEngine", "Tokenizer"]


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
    def encode_prompt(self, text: str, max_model_len: int, /) -> list[int]:
        """Token ids of a prompt. PromptTooLongError: they leave no room in a context of so many."""
        ...

    def decode(self, ids: Sequence[int], /, skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int, /) -> str: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation.

        Options are ``add_generation_prompt``, ``continue_final_message``, ``tools``, ``chat_template``, and
        variables of the template. RequestError: the template refuses the messages.
        """
        ...


class Adapters(Protocol):
    """Adapters by name; from any thread.

    Attributes:
        num_slots, num_bytes: slots on the device, and bytes of all of them.
    """

    @property
    def num_slots(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    def has(self, name: str) -> bool:
        """Whether a request may ask for an adapter of this name, be it loaded or not."""
        ...

    def infos(self) -> list[AdapterInfo]:
        """All that are loaded."""
        ...

    def load(self, name: str, path: str, *, base_model: str | None = None, replace: bool = False) -> AdapterInfo:
        """Read an adapter, which takes a while. RequestError: the name is taken. LoadError: it cannot be served."""
        ...

    def unload(self, name: str, *, wait: float | None = None) -> None:
        """Free an adapter, or wait up to so many seconds until it can be. RequestError: it is in use, or unknown."""
        ...


class LiveEngine(Protocol):
    """What an engine shows of itself while it works, to its event loop."""

    @property
    def shape(self) -> EngineShape: ...

    @property
    def journal(self) -> Journal: ...

    def watched(self) -> AbstractContextManager[None]:
        """While this is open by anybody, the engine notes steps and waits, and snapshots can be taken."""
        ...

    async def snapshot(self) -> Snapshot:
        """This moment, also of an engine that is idle or paused. EngineDeadError: it has stopped."""
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

    @property
    def adapters(self) -> Adapters: ...

    @property
    def live(self) -> LiveEngine: ...

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
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

    def has_begun(self, request_id: str) -> bool:
        """Whether an open request has a first token, even if it is answered as a whole."""
        ...

    def stats(self) -> EngineStats: ...

    def check_health(self) -> None:
        """EngineDeadError: the engine has stopped."""
        ...

    async def shutdown(self, drain_seconds: float) -> None: ...
