"""``suffix``: text to be filled in between two others, for models that were trained for it.

Such a model has tokens of its own for that; a tokenizer that knows none of these sets belongs to another, and the
parameter is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.errors import RequestError
from jaxserve.server.protocol import Tokenizer

__all__ = ["infill_ids"]

_PREFIX, _SUFFIX = "prefix", "suffix"

_FORMS = (
    # Qwen-Coder, CodeGemma, Granite 4
    ("<|fim_prefix|>", _PREFIX, "<|fim_suffix|>", _SUFFIX, "<|fim_middle|>"),
    # StarCoder, Granite Code
    ("<fim_prefix>", _PREFIX, "<fim_suffix>", _SUFFIX, "<fim_middle>"),
    # DeepSeek-Coder
    ("<｜fim▁begin｜>", _PREFIX, "<｜fim▁hole｜>", _SUFFIX, "<｜fim▁end｜>"),  # noqa: RUF001
    # Codestral
    ("[SUFFIX]", _SUFFIX, "[PREFIX]", _PREFIX),
)


def infill_ids(tokenizer: Tokenizer, prefix: str | Sequence[int], suffix: str) -> list[int]:
    """The prompt at whose end the model writes what stands between. RequestError: it cannot."""
    if not isinstance(prefix, str):
        raise RequestError("suffix needs a prompt of text, not of token ids.", "suffix")
    texts = {_PREFIX: prefix, _SUFFIX: suffix}
    for form in _FORMS:
        parts = [tokenizer.encode(texts.get(part, part), add_special_tokens=False) for part in form]
        marks = [ids for part, ids in zip(form, parts, strict=True) if part not in texts]
        if all(len(ids) == 1 and ids[0] in tokenizer.special_ids for ids in marks):
            return [*tokenizer.encode(""), *(token for ids in parts for token in ids)]
    raise RequestError("suffix is not supported: this model has no tokens for filling in (FIM).", "suffix")
