"""One tokenizer, as the engine and the server use it.

A thin wrapper: encoding is the ``tokenizers`` library, chat templates are transformers', decoding is ``pieces``. Only
operations that leave the library's tokenizer unchanged are used, so one object serves a thread pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxserve.errors import PromptTooLongError, UnsupportedModelError
from jaxserve.tokenizer.chat import render
from jaxserve.tokenizer.detokenize import IncrementalDetokenizer
from jaxserve.tokenizer.pieces import Pieces

__all__ = ["Tokenizer", "replace_surrogates"]


class Tokenizer:
    """Text to token ids and back, and chats to prompts.

    Attributes:
        vocab_size: largest token id plus one, added tokens included.
        longest_token: most characters that one token stands for.
        eos_token_ids: tokens that end a text, as far as the tokenizer knows.
        bos_token_id: token that starts a text, None if there is none.
        special_ids: tokens that are left out of text with ``skip_special_tokens``.
        pieces: bytes per token id.
    """

    def __init__(self, hf: Any, eos_token_ids: Iterable[int] = ()) -> None:
        """Wrap a transformers ``PreTrainedTokenizerFast``; ``eos_token_ids`` are added to its own.

        Raises UnsupportedModelError for a tokenizer without a ``tokenizers`` backend, or with a decoder that cannot be
        taken apart (see ``pieces``).
        """
        backend = getattr(hf, "backend_tokenizer", None)
        if backend is None:
            raise UnsupportedModelError(
                f"{type(hf).__name__} has no fast tokenizer behind it; a tokenizer.json is needed."
            )
        # A tokenizer.json may come with padding or truncation for training: a server must do neither.
        backend.no_truncation()
        backend.no_padding()
        self._hf = hf
        self._backend = backend
        self.pieces = Pieces(backend)
        own = () if hf.eos_token_id is None else (hf.eos_token_id,)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys((*own, *eos_token_ids)))
        self.bos_token_id: int | None = hf.bos_token_id
        self._adds_bos = self.bos_token_id is not None and backend.encode("").ids[:1] == [self.bos_token_id]
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        self.longest_token: int = max(map(len, vocabulary), default=0)

    def token(self, token_id: int) -> str | None:
        """The token of an id as the vocabulary spells it, None if there is none."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def first_difference(self, other: Tokenizer) -> int | None:
        """The first id that stands for another token in ``other``, None if the vocabularies are the same."""
        own, others = (t._backend.get_vocab(with_added_tokens=True) for t in (self, other))
        return min((own.get(token, others.get(token)) for token, _ in own.items() ^ others.items()), default=None)

    @property
    def chat_template(self) -> str | None:
        """The chat template (the default one of several), None if the model has none."""
        template = self._hf.chat_template
        return template.get("default") if isinstance(template, dict) else template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, where lone surrogates count as U+FFFD, with BOS and EOS as the model has it.

        A text that begins with BOS, as one made by a chat template does, gets no second one.
        """
        # Only the batched calls release the interpreter's lock, without which the server would stand still meanwhile.
        [encoding] = self._backend.encode_batch_fast([replace_surrogates(text)], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        doubled = add_special_tokens and self._adds_bos and ids[1:2] == [self.bos_token_id]
        return ids[1:] if doubled else ids

    def encode_prompt(self, text: str, max_model_len: int) -> list[int]:
        """``encode`` for a prompt; PromptTooLongError: it leaves no room for output in so many tokens.

        A text that cannot fit is not encoded, which would take a minute for millions of tokens.
        """
        most = max_model_len * self.longest_token
        if len(text) > most:
            raise PromptTooLongError.of_characters(max_model_len, len(text), most)
        ids = self.encode(text)
        if len(ids) >= max_model_len:
            raise PromptTooLongError.of_tokens(max_model_len, len(ids))
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        detokenizer = IncrementalDetokenizer(self, (), skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to a text; maybe only part of a character."""
        return self.pieces[token_id]

    def token_text(self, token_id: int) -> str:
        """``token_bytes`` as text, with U+FFFD for parts of characters."""
        return self.pieces[token_id].decode("utf-8", "replace")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt's text for a chat; ``kwargs`` are variables of the template.

        Raises RequestError for messages that are malformed or that the template refuses.
        """
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        return render(self._hf, messages, tools, chat_template, {**kwargs, **options})

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of ``render_chat`` with the same options; no BOS is added, since templates write their own."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)


def replace_surrogates(text: str) -> str:
    """``text`` with lone surrogates as U+FFFD and separate pairs joined; such strings come from JSON escapes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
