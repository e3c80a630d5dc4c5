"""Text to token ids and back: the one room that knows what a token looks like."""

from __future__ import annotations

from jaxserve.tokenizer.detokenize import IncrementalDetokenizer
from jaxserve.tokenizer.load import load_tokenizer
from jaxserve.tokenizer.stop import StopMatcher
from jaxserve.tokenizer.tokenizer import Tokenizer, replace_surrogates

__all__ = ["IncrementalDetokenizer", "StopMatcher", "Tokenizer", "load_tokenizer", "replace_surrogates"]
