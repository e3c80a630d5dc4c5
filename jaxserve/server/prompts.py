"""From the body of a request to the token ids of its prompts."""

from __future__ import annotations

from jaxserve.errors import RequestError
from jaxserve.server.messages import render
from jaxserve.server.protocol import Tokenizer
from jaxserve.server.schema import ChatRequest
from jaxserve.server.turns import Turn

__all__ = ["chat_prompt"]

_TEMPLATE_OWN = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "messages", "return_dict", "tokenize", "tools"}
)
"""Names that ``chat_template_kwargs`` must leave alone: other parameters decide them."""


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
