"""What may come next: constraints on the tokens of a request, and the mask that a step makes of them."""

from __future__ import annotations

from jaxserve.structured.constraints import All, AllowedTokens, BadWords, MinTokens, make_constraint
from jaxserve.structured.grammar import Grammar, Grammars
from jaxserve.structured.masks import all_tokens, num_words, pack, step_mask
from jaxserve.structured.protocol import Constraint
from jaxserve.structured.tools import calls_structure
from jaxserve.structured.vocabulary import Vocabulary

__all__ = [
    "All",
    "AllowedTokens",
    "BadWords",
    "Constraint",
    "Grammar",
    "Grammars",
    "MinTokens",
    "Vocabulary",
    "all_tokens",
    "calls_structure",
    "make_constraint",
    "num_words",
    "pack",
    "step_mask",
]
