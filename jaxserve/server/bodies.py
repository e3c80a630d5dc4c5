"""What is left of large bodies when another process has read them: parameters, and prompts as token ids.

That fits the model's context, or is refused there; so what has to come back, and be freed here, is small.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import BaseModel

from jaxserve.config import ServerConfig
from jaxserve.errors import PromptTooLongError, RequestError
from jaxserve.server.jsonio import parse_object
from jaxserve.server.prompts import chat_prompt, completion_prompts
from jaxserve.server.protocol import Tokenizer
from jaxserve.server.schema import ChatRequest, CompletionRequest
from jaxserve.server.turns import Turns

__all__ = [
    "Rules",
    "check_rest",
    "packed_chat",
    "packed_prompt",
    "read_chat",
    "read_completion",
    "read_large_chat",
    "read_large_completion",
]

_MOST_BESIDES = 2**20  # bytes of a large body that are not prompt


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


def read_chat(rules: Rules, data: bytes) -> ChatRequest:
    """The body of a chat. RequestError: bad."""
    return ChatRequest.parse(parse_object(data), strict=rules.config.strict_params)


def read_large_chat(rules: Rules, data: bytes) -> ChatRequest:
    """As ``read_chat``, but of the messages only their prompt is left."""
    return packed_chat(rules, read_chat(rules, data))


def read_completion(rules: Rules, data: bytes) -> CompletionRequest:
    """The body of a completion. RequestError: bad."""
    return CompletionRequest.parse(parse_object(data), strict=rules.config.strict_params)


def read_large_completion(rules: Rules, data: bytes) -> CompletionRequest:
    """As ``read_completion``, but prompts are token ids, unless they are to be echoed."""
    body = read_completion(rules, data)
    check_rest(body.model_copy(update={"prompt": []}))
    shaped = completion_prompts(rules.tokenizer, body, rules.max_model_len)
    prompts = [prompt if body.echo and isinstance(prompt, str) else packed_prompt(rules, prompt) for prompt in shaped]
    done = dict.fromkeys(("suffix", "add_special_tokens", "truncate_prompt_tokens"))
    return body.model_copy(update={"prompt": prompts, **done})


def packed_chat(rules: Rules, body: ChatRequest) -> ChatRequest:
    """A chat without its messages, but with the prompt that they are. RequestError: it is too long, or the rest is."""
    prompt = chat_prompt(rules.tokenizer, body, rules.turns.plan(body), rules.max_model_len)
    if len(prompt) >= rules.max_model_len:
        raise RequestError(str(PromptTooLongError.of_tokens(rules.max_model_len, len(prompt))), "messages")
    rest = body.model_copy(update={"messages": []})
    check_rest(rest)
    rest.prompt_ids = array("q", prompt)
    return rest


def packed_prompt(rules: Rules, prompt: str | Sequence[int], param: str = "prompt") -> array[int]:
    """Token ids of a prompt. RequestError about ``param``: it does not fit the model's context, or holds no ids."""
    try:
        ids = rules.tokenizer.encode_prompt(prompt, rules.max_model_len) if isinstance(prompt, str) else prompt
        if len(ids) >= rules.max_model_len:
            raise PromptTooLongError.of_tokens(rules.max_model_len, len(ids))
    except PromptTooLongError as error:
        raise RequestError(str(error), param) from None
    try:
        return array("q", ids)
    except OverflowError:
        largest = max(ids, key=abs)
        raise RequestError(f"{param}: token id {largest} is outside the vocabulary.", param) from None


def check_rest(body: BaseModel) -> None:
    """RequestError: what is left of a body is large itself."""
    size = len(pickle.dumps(body))
    if size > _MOST_BESIDES:
        raise RequestError(
            f"the body's parameters beside the prompt take {size} bytes; the limit is {_MOST_BESIDES} bytes."
        )
