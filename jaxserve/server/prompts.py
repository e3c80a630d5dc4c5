"""From the body of a request to the token ids of its prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from jaxserve.errors import RequestError
from jaxserve.server.infill import infill_ids
from jaxserve.server.messages import render
from jaxserve.server.protocol import Tokenizer
from jaxserve.server.schema import ChatRequest, CompletionRequest
from jaxserve.server.turns import Turn

__all__ = ["chat_prompt", "completion_prompts", "prompt_of", "prompts_of", "truncated"]

_SHORT = 2000
"""Characters up to which a conversation takes less time than a thread takes to wake for it."""

_TEMPLATE_OWN = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "messages", "return_dict", "tokenize", "tools"}
)
"""Names that ``chat_template_kwargs`` must leave alone: other parameters decide them."""


async def prompt_of(tokenizer: Tokenizer, body: ChatRequest, turn: Turn, max_model_len: int) -> Sequence[int]:
    """``chat_prompt`` without holding the event loop for long, unless it was made when the body was read."""
    if body.prompt_ids:
        return body.prompt_ids
    parts = [part for message in body.messages for part in message.content or ()]
    if sum(len(part.text) + 100 for part in parts) <= _SHORT and not turn.tools and body.chat_template is None:
        return chat_prompt(tokenizer, body, turn, max_model_len)
    return await asyncio.to_thread(chat_prompt, tokenizer, body, turn, max_model_len)


def chat_prompt(tokenizer: Tokenizer, body: ChatRequest, turn: Turn, max_model_len: int) -> Sequence[int]:
    """The conversation as token ids, special tokens and all."""
    continued = bool(body.continue_final_message)
    generation_prompt = not continued if body.add_generation_prompt is None else body.add_generation_prompt
    settings = body.chat_template_kwargs or {}
    if body.documents is not None:
        if "documents" not in (body.chat_template or tokenizer.chat_template or ""):
            raise RequestError("documents: the chat template knows none.", "documents")
        settings = {**settings, "documents": body.documents}
    if clash := _TEMPLATE_OWN & settings.keys():
        name = f"chat_template_kwargs.{min(clash)}"
        raise RequestError(f"{name} is not allowed; there is a parameter for it, or it is not supported.", name)
    messages, options = turn.put(render(body.messages))
    ids = tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=generation_prompt,
        continue_final_message=continued,
        chat_template=body.chat_template,
        **options,
        **settings,
    )
    return truncated(ids, body.truncate_prompt_tokens, max_model_len)


async def prompts_of(
    tokenizer: Tokenizer, body: CompletionRequest, max_model_len: int
) -> Sequence[str | Sequence[int]]:
    """``completion_prompts`` without holding the event loop for long, nor waiting for a thread without need."""
    if _as_they_came(body):
        return body.prompt
    return await asyncio.to_thread(completion_prompts, tokenizer, body, max_model_len)


def completion_prompts(
    tokenizer: Tokenizer, body: CompletionRequest, max_model_len: int
) -> Sequence[str | Sequence[int]]:
    """The prompts as they came, or as token ids where the request says more of them than what they hold."""
    special = body.add_special_tokens is not False
    if _as_they_came(body):
        return body.prompt

    def ids(prompt: str | Sequence[int]) -> Sequence[int]:
        if body.suffix:
            return infill_ids(tokenizer, prompt, body.suffix)
        return tokenizer.encode(prompt, add_special_tokens=special) if isinstance(prompt, str) else prompt

    return [truncated(ids(prompt), body.truncate_prompt_tokens, max_model_len) for prompt in body.prompt]


def _as_they_came(body: CompletionRequest) -> bool:
    return not body.suffix and body.add_special_tokens is not False and body.truncate_prompt_tokens is None


def truncated(ids: Sequence[int], most: int | None, max_model_len: int) -> Sequence[int]:
    """The last tokens of a prompt, at most ``most``; -1 is as many as leave room for one more."""
    if most is None:
        return ids
    if most == 0 or most >= max_model_len:
        raise RequestError(
            f"truncate_prompt_tokens must be -1 or from 1 to {max_model_len - 1}, got {most}.", "truncate_prompt_tokens"
        )
    return ids[-(max_model_len - 1 if most == -1 else most) :]
