"""Bodies of requests: small ones are read at once, large ones in a process of their own.

Python holds its lock while it parses JSON, checks it, and frees what is left: 0.3 s for 17 MB of token ids, 2 s for
100,000 messages, in threads too, while no other request gets its tokens. Another process takes such a body apart, down
to its prompts as token ids, which fit the model's context or are refused there; what comes back is small.
"""

from __future__ import annotations

import asyncio
import pickle
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from starlette.requests import Request

from jaxserve.config import ServerConfig
from jaxserve.errors import PromptTooLongError, QueueFullError, RequestError
from jaxserve.server.helper import Helper
from jaxserve.server.jsonio import check_type, parse_object, read_chunks
from jaxserve.server.prompts import chat_prompt, completion_prompts
from jaxserve.server.protocol import Tokenizer
from jaxserve.server.schema import ChatRequest, CompletionRequest
from jaxserve.server.turns import Turns

__all__ = ["Intake", "Rules"]

LARGE = 32 * 2**10
"""Bytes from which a body is worth the detour: the worst of this size takes 6 ms."""

_MOST_WAITING = 256 * 2**20  # bytes of large bodies that are being read, or wait for that
_MOST_BESIDES = 2**20  # bytes of a large body that are not prompt

Body = TypeVar("Body")


@dataclass(frozen=True)
class Rules:
    """What reading a body takes, in this process and the other."""

    tokenizer: Tokenizer
    config: ServerConfig
    max_model_len: int

    @cached_property
    def turns(self) -> Turns:
        return Turns(self.tokenizer, self.config)

    def __reduce__(self) -> tuple[Any, ...]:
        return Rules, (self.tokenizer, self.config, self.max_model_len)  # turns are made anew


class Intake:
    """Reads the bodies of one app's requests."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._helper = Helper(rules)
        # Large bodies wait for each other and not for the threads that serve all.
        self._waiting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jaxserve-intake")
        self._num_waiting = 0  # bytes

    async def chat(self, request: Request) -> ChatRequest:
        """The body of a chat request; of a large one only its prompt is left of the messages. RequestError: bad."""
        return await self._read(request, _chat, _large_chat)

    async def completion(self, request: Request) -> CompletionRequest:
        """The body of a completion request; of a large one the prompts are token ids. RequestError: bad."""
        return await self._read(request, _completion, _large_completion)

    async def _read(
        self, request: Request, small: Callable[[Rules, bytes], Body], large: Callable[[Rules, bytes], Body]
    ) -> Body:
        check_type(request)
        chunks = await read_chunks(request)
        size = sum(map(len, chunks))
        if size < LARGE:
            return small(self.rules, b"".join(chunks))
        if self._num_waiting + size > _MOST_WAITING and self._num_waiting:
            raise QueueFullError("too many large bodies are waiting to be read.")
        # In pieces: copying 16 MB takes milliseconds.
        self._num_waiting += size
        reading = asyncio.get_running_loop().run_in_executor(self._waiting, self._helper.call, large, chunks)
        reading.add_done_callback(lambda _: self._let_go(size))
        return await reading

    def _let_go(self, size: int) -> None:
        self._num_waiting -= size

    def close(self) -> None:
        """End the other process; what it has not read is not answered."""
        self._waiting.shutdown(wait=False, cancel_futures=True)
        self._helper.close()


def _chat(rules: Rules, data: bytes) -> ChatRequest:
    return ChatRequest.parse(parse_object(data), strict=rules.config.strict_params)


def _completion(rules: Rules, data: bytes) -> CompletionRequest:
    return CompletionRequest.parse(parse_object(data), strict=rules.config.strict_params)


def _large_chat(rules: Rules, data: bytes) -> ChatRequest:
    body = _chat(rules, data)
    prompt = chat_prompt(rules.tokenizer, body, rules.turns.plan(body), rules.max_model_len)
    if len(prompt) >= rules.max_model_len:
        raise RequestError(str(PromptTooLongError.of_tokens(rules.max_model_len, len(prompt))), "messages")
    rest = body.model_copy(update={"messages": []})
    _check_rest(rest)
    rest.prompt_ids = array("q", prompt)
    return rest


def _large_completion(rules: Rules, data: bytes) -> CompletionRequest:
    body = _completion(rules, data)
    _check_rest(body.model_copy(update={"prompt": []}))
    shaped = completion_prompts(rules.tokenizer, body, rules.max_model_len)
    prompts = [prompt if body.echo and isinstance(prompt, str) else _packed(rules, prompt) for prompt in shaped]
    done = dict.fromkeys(("suffix", "add_special_tokens", "truncate_prompt_tokens"))
    return body.model_copy(update={"prompt": prompts, **done})


def _packed(rules: Rules, prompt: str | Sequence[int]) -> array[int]:
    if isinstance(prompt, str):
        prompt = rules.tokenizer.encode_prompt(prompt, rules.max_model_len)
    if len(prompt) >= rules.max_model_len:
        raise PromptTooLongError.of_tokens(rules.max_model_len, len(prompt))
    try:
        return array("q", prompt)
    except OverflowError:
        largest = max(prompt, key=abs)
        raise RequestError(f"prompt: token id {largest} is outside the vocabulary.", "prompt") from None


def _check_rest(body: ChatRequest | CompletionRequest) -> None:
    size = len(pickle.dumps(body))
    if size > _MOST_BESIDES:
        raise RequestError(
            f"the body's parameters beside the prompt take {size} bytes; the limit is {_MOST_BESIDES} bytes."
        )
