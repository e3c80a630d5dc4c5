"""A user's request to engine requests: tokenised, checked against the model, given seeds.

Everything that can be wrong with a request is found here or in ``SamplingParams``, before the engine sees it. A request
for n completions becomes n engine requests; the later ones name the first as the sibling whose prompt they share.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from jaxserve.errors import PromptTooLongError, RequestError
from jaxserve.models.config import ModelConfig
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured import Grammars, Vocabulary, make_constraint
from jaxserve.tokenizer import Tokenizer

__all__ = ["MAX_CACHE_SALT", "InputProcessor"]

MAX_CACHE_SALT = 128


class InputProcessor:
    """Makes engine requests; may be used from several threads.

    Attributes:
        grammars: what compiles ``structured_outputs``. ``prepare`` waits for it; those who must not wait see to it
            before that the grammar is ready.
    """

    def __init__(self, tokenizer: Tokenizer, model_config: ModelConfig, max_model_len: int, seed: int) -> None:
        """``max_model_len`` is in tokens; ``seed`` is that of the engine, for requests that give none."""
        self._tokenizer = tokenizer
        self._vocab_size = model_config.vocab_size
        self._eos_ids = frozenset((*model_config.eos_token_ids, *tokenizer.eos_token_ids))
        self._max_model_len = max_model_len
        self._seed = seed
        self._unseeded = itertools.count()
        self.grammars = Grammars(self._vocabulary)

    def prepare(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: bytes | None = None,
        pooling: str = "",
    ) -> list[Request]:
        """Engine requests of one user request, ``params.n`` of them.

        Their ids are ``request_id`` if it is one, else ``request_id-i``. Where ``max_tokens`` asks for more than is
        left of the context, what is left is the limit. The prompt is read for one of them only: its ``pooling``
        ("mean", "last", or "" for none) and the log probabilities of its tokens.

        Raises RequestError naming the field at fault.
        """
        ids = self._prompt_ids(prompt)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", params.logit_bias)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        _check_routing(priority, cache_salt)
        structure = params.structured_outputs
        grammar = None if structure is None else self.grammars.get(structure)
        # An output with a structure has an end, even if it is to be as late as possible.
        endless = params.ignore_eos and grammar is None
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if endless else self._eos_ids)
        bad_word_ids = self._bad_word_ids(params.bad_words)
        room = self._max_model_len if params.max_tokens is None else len(ids) + max(1, params.max_tokens)
        seed = self._request_seed(params.seed)
        single = params if params.n == 1 else replace(params, n=1)  # which checks all anew
        requests: list[Request] = []
        for i in range(params.n):
            requests.append(
                Request(
                    id=request_id if params.n == 1 else f"{request_id}-{i}",
                    prompt=ids,
                    params=single,
                    seed=_child_seed(seed, i),
                    stop_ids=stop_ids,
                    max_total=min(self._max_model_len, room),
                    fork_of=requests[0] if requests else None,
                    adapter=adapter,
                    cache_salt=cache_salt,
                    priority=priority,
                    pooling=pooling,
                    is_read=bool(requests),
                    constraint=make_constraint(
                        single,
                        vocab_size=self._vocab_size,
                        stop_ids=stop_ids,
                        bad_word_ids=bad_word_ids,
                        grammar=grammar,
                    ),
                )
            )
        return requests

    def _vocabulary(self) -> Vocabulary:
        tokenizer = self._tokenizer
        return Vocabulary(
            tokens=[tokenizer.token_bytes(token) for token in range(self._vocab_size)],
            special_ids=frozenset(token for token in tokenizer.special_ids if token < self._vocab_size),
            eos_ids=tuple(sorted(token for token in self._eos_ids if token < self._vocab_size)),
            encode=partial(tokenizer.encode, add_special_tokens=False),
        )

    def _prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            ids = self._tokenizer.encode_prompt(prompt, self._max_model_len)
        else:
            ids = self._token_ids(prompt)
        if not ids:
            raise RequestError("prompt must not be empty: it holds no token.", "prompt")
        self._check_ids("prompt", ids)
        return ids

    def _token_ids(self, prompt: object) -> list[int]:
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
            raise RequestError(
                f"prompt must be a string or a list of token ids, got {type(prompt).__name__}.", "prompt"
            )
        if len(prompt) >= self._max_model_len:  # known before millions of ids are looked at
            raise PromptTooLongError.of_tokens(self._max_model_len, len(prompt))
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int):
                raise RequestError(f"prompt must be a string or a list of token ids, got {token!r} in it.", "prompt")
        return list(prompt)

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        for token in ids:
            if not 0 <= token < self._vocab_size:
                raise RequestError(
                    f"{name}: token id {token} is outside the vocabulary (0 to {self._vocab_size - 1}).", name
                )

    def _bad_word_ids(self, words: Iterable[str]) -> list[list[int]]:
        """Token sequences of words as they stand at the start of a text and, after a space, within it."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            spellings = (word,) if word[0].isspace() else (word, " " + word)
            sequences = [tuple(self._tokenizer.encode(form, add_special_tokens=False)) for form in spellings]
            if not sequences[0]:
                raise RequestError(f"bad_words: {word!r} holds no token.", "bad_words")
            found.update(dict.fromkeys(sequences))
        return [list(ids) for ids in found]

    def _request_seed(self, seed: int | None) -> int:
        if seed is None:
            return _hash64("request", self._seed, next(self._unseeded))
        return seed & (2**64 - 1)


def _check_routing(priority: int, cache_salt: str | None) -> None:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RequestError(f"priority must be an integer, got {priority!r}.", "priority")
    if cache_salt is None:
        return
    if not isinstance(cache_salt, str) or not cache_salt:
        raise RequestError(f"cache_salt must be a non-empty string, got {cache_salt!r}.", "cache_salt")
    if len(cache_salt) > MAX_CACHE_SALT:
        raise RequestError(f"cache_salt has {len(cache_salt)} characters; the limit is {MAX_CACHE_SALT}.", "cache_salt")


def _child_seed(seed: int, index: int) -> int:
    """The first of n completions is the one that n = 1 would give."""
    return seed if index == 0 else _hash64("child", seed, index)


def _hash64(purpose: str, *parts: int) -> int:
    text = ":".join((purpose, *map(str, parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
