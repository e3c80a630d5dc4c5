"""From the body of a request to the token ids of its prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from jaxserve.errors import RequestError
from jaxserve.server.messages import render
from jaxserve.server.protocol import Tokenizer
from jaxserve.server.schema import ChatRequest
from jaxserve.server.turns import Turn

__all__ = ["chat_prompt", "prompt_of"]

_SHORT = 2000
"""Characters up to which a conversation takes less time than a thread takes to wake for it."""

_TEMPLATE_OWN = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "messages", "return_dict", "tokenize", "tools"}
)
"""Names that ``chat_template_kwargs`` must leave alone: other parameters decide them."""


async def prompt_of(tokenizer: Tokenizer, body: ChatRequest, turn: Turn) -> Sequence[int]:
    """``chat_prompt`` without holding the event loop for long, unless it was made when the body was read."""
    if body.prompt_ids:
        return body.prompt_ids
    parts = [part for message in body.messages for part in message.content or ()]
    if sum(len(part.text) + 100 for part in parts) <= _SHORT and not turn.tools and body.chat_template is None:
        return chat_prompt(tokenizer, body, turn)
    return await asyncio.to_thread(chat_prompt, tokenizer, body, turn)


def chat_prompt(tokenizer: Tokenizer, body: ChatRequest, turn: Turn) -> list[int]:
    """The conversation as token ids, special tokens and all."""
    continued = bool(body.continue_final_message)
    generation_prompt = not continued if body.add_generation_prompt is None else body.add_generation_prompt
    settings = body.chat_template_kwargs or {}
    if clash := _TEMPLATE_OWN & settings.keys():
        name = f"chat_template_kwargs.{min(clash)}"
        raise RequestError(f"{name} is not allowed; there is a parameter for it, or it is not supported.", name)
    messages, options = turn.put(render(body.messages))
    return tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=generation_prompt,
        continue_final_message=continued,
        chat_template=body.chat_template,
        **options,
        **settings,
    )
