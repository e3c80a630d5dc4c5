"""A tokenizer out of GGUF metadata.

A GGUF file holds tokens, merges or scores, and the name of a pre-tokeniser, but not the tokenizer itself. Two kinds are
built here: byte-level BPE ("gpt2") and SentencePiece BPE ("llama"). A pre-tokeniser whose name is unknown is refused: a
near miss would give ids that look right and are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxserve.errors import CorruptFileError, UnsupportedModelError
from jaxserve.logging import get_logger

__all__ = ["from_gguf"]

_log = get_logger(__name__)
_KEY = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How text is cut before BPE, and what else a name in ``tokenizer.ggml.pre`` stands for.

    Attributes:
        patterns: each is applied to the parts that the one before left.
        whole_words: a part that is a token is taken as it is, whatever the merges say.
        add_bos: whether BOS is added if the metadata does not say.
        nfc: text is normalised first.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    nfc: bool = False


_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _PreTokenizer((_WORDS.format(digits=r"\p{N}{1,3}"),), whole_words=True, add_bos=True)

_PRE_TOKENIZERS = {
    "default": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _PreTokenizer((_GPT2_WORDS,)),
    "smollm": _PreTokenizer((r"\p{N}", _GPT2_WORDS)),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "smaug-bpe": replace(_LLAMA3, whole_words=False, add_bos=False),
    "qwen2": _PreTokenizer((_WORDS.format(digits=r"\p{N}"),), nfc=True),
}


def from_gguf(metadata: Mapping[str, Any]) -> tuple[Any, tuple[int, ...]]:
    """A transformers ``PreTrainedTokenizerFast`` and the ids that end a text.

    Raises UnsupportedModelError naming the kind or pre-tokeniser that is not known, CorruptFileError naming the key
    that is missing or malformed.
    """
    from transformers import PreTrainedTokenizerFast  # slow to import, and only needed when a model is loaded

    kind = metadata.get(_KEY + "model")
    tokens = [str(token) for token in _needed(metadata, "tokens")]
    if kind == "gpt2":
        backend, add_bos = _byte_level_bpe(metadata, tokens)
    elif kind == "llama":
        backend, add_bos = _sentencepiece_bpe(metadata, tokens), True
    else:
        raise UnsupportedModelError(f"GGUF tokenizer model {kind!r} is not supported; gpt2 and llama are.")
    # Decided by token type: control tokens stay out of the text, user-defined ones are only never split.
    backend.add_tokens(
        [
            AddedToken(token, special=int(type_) != _USER_DEFINED, normalized=False)
            for token, type_ in zip(tokens, metadata.get(_KEY + "token_type", ()), strict=False)
            if int(type_) in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )
    named = {
        f"{name}_token": tokens[index]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (index := _token_id(metadata, key, len(tokens))) is not None
    }
    _add_outer_tokens(backend, metadata, named, add_bos)
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=_chat_templates(metadata),
        clean_up_tokenization_spaces=False,
        **named,
    )
    ends = (_token_id(metadata, key, len(tokens)) for key in ("eos", "eot", "eom"))
    return hf, tuple(end for end in ends if end is not None)


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    name = metadata.get(_KEY + "pre")
    if name is None:
        _log.warning(
            "the GGUF file names no pre-tokeniser (%spre): taking 'default', which may cut text wrongly.", _KEY
        )
        name = "default"
    pre = _PRE_TOKENIZERS.get(name)
    if pre is None:
        raise UnsupportedModelError(
            f"GGUF pre-tokeniser {name!r} is not supported; {', '.join(sorted(_PRE_TOKENIZERS))} are."
        )
    merges = [tuple(str(merge).split(" ")) for merge in _needed(metadata, "merges")]
    backend = _bpe(tokens, merges, ignore_merges=pre.whole_words)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    scores = [float(score) for score in _needed(metadata, "scores")]
    if len(scores) != len(tokens):
        raise CorruptFileError(f"{_KEY}scores has {len(scores)} entries for {len(tokens)} tokens.")
    unknown = _token_id(metadata, "unknown", len(tokens))
    backend = _bpe(
        tokens,
        _merges_by_score(tokens, scores),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    prefix = bool(metadata.get(_KEY + "add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _merges_by_score(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores best: all splits of each token, best token first."""
    ids = {token: i for i, token in enumerate(tokens)}
    merges = []
    for i in sorted(range(len(tokens)), key=lambda i: -scores[i]):
        token = tokens[i]
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(ids[left], ids[right]) for left, right in halves if left in ids and right in ids]
        merges += [(tokens[left], tokens[right]) for left, right in sorted(known)]
    return merges


def _bpe(tokens: list[str], merges: list[Any], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, **options))
    except Exception as error:  # the library raises bare Exception for a merge of unknown tokens
        raise CorruptFileError(f"{_KEY}tokens and merges make no tokenizer: {error}") from error


def _add_outer_tokens(backend: Tokenizer, metadata: Mapping[str, Any], named: Mapping[str, str], add_bos: bool) -> None:
    wanted = (("bos", metadata.get(_KEY + "add_bos_token", add_bos)), ("eos", metadata.get(_KEY + "add_eos_token")))
    outer = {name: named[f"{name}_token"] for name, add in wanted if add and f"{name}_token" in named}
    if outer:
        backend.post_processor = processors.TemplateProcessing(
            single=" ".join(filter(None, (outer.get("bos"), "$A", outer.get("eos")))),
            special_tokens=[(token, backend.token_to_id(token)) for token in outer.values()],
        )


def _chat_templates(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    default = metadata.get("tokenizer.chat_template")
    others = {
        name: metadata[f"tokenizer.chat_template.{name}"] for name in metadata.get("tokenizer.chat_templates", ())
    }
    return {"default": default, **others} if default and others else default


def _needed(metadata: Mapping[str, Any], key: str) -> Any:
    value = metadata.get(_KEY + key)
    if value is None:
        raise CorruptFileError(f"the GGUF file has no {_KEY}{key}.")
    return value


def _token_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    value = metadata.get(f"{_KEY}{name}_token_id")
    if value is None:
        return None
    if not 0 <= int(value) < num_tokens:
        raise CorruptFileError(f"{_KEY}{name}_token_id is {value}, outside of the {num_tokens} tokens.")
    return int(value)
