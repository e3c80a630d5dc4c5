"""The claim of speculative decoding: more tokens per second where a text is easy to guess, and none lost where not.

Four kinds of text, by how well they can be guessed: a text that is copied, code that is continued (this package's own),
chats, and open text at temperature 1, which nobody can guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from itertools import cycle

from jaxserve.bench.claims.claim import Check, Claim, Figure, Figures, Sizes, Ways, decoding, offline
from jaxserve.bench.workloads import Text
from jaxserve.config import EngineConfig, SpeculativeConfig
from jaxserve.engine import LLM
from jaxserve.sampling_params import SamplingParams

__all__ = ["SPECULATION"]

Prompt = tuple[int, ...]

_BEGINNING = 32
"""Tokens of the text that are given a second time, so that the model goes on copying it."""

_ALONE = 3
"""Requests, one after the other, of which a rate at batch 1 is taken."""

_BATCHES = (1, 8, 32)
_LEAST = {"copying": 1.8, "code": 1.4}  # at batch 1, of the methods that are made for it
_MOST_LOSS = 0.97

_QUESTIONS = (
    "What makes a good cup of coffee?",
    "How do I ask for a day off?",
    "Explain how a bicycle stays upright.",
    "Which books about the sea would you recommend?",
    "Write a short note of thanks to a neighbour.",
    "Why is the sky dark at night?",
    "How can I learn to cook without recipes?",
    "Describe a quiet morning in a small town.",
)


@dataclass(frozen=True)
class _Kind:
    """A kind of text: its prompts, endlessly many, and the temperature at which it goes on."""

    prompts: Callable[[LLM, Sizes, Text], Iterator[Prompt]]
    temperature: float = 0.0


def _copying(llm: LLM, sizes: Sizes, text: Text) -> Iterator[Prompt]:
    while True:
        window = text.window(sizes.copied[0])
        yield window + window[:_BEGINNING]


def _code(llm: LLM, sizes: Sizes, text: Text) -> Iterator[Prompt]:
    rooms = (room for room in files("jaxserve").iterdir() if room.is_dir() and not room.name.startswith("_"))
    sources = sorted((file for room in rooms for file in room.iterdir() if file.name.endswith(".py")), key=str)
    code = "\n\n".join(source.read_text(encoding="utf-8") for source in sources)
    own = text.of_other(llm.tokenizer.encode(code, add_special_tokens=False))
    while True:
        yield own.window(sizes.copied[0] // 2)


def _chats(llm: LLM, sizes: Sizes, text: Text) -> Iterator[Prompt]:
    for question in cycle(_QUESTIONS):
        asked = [{"role": "user", "content": question}]
        yield tuple(llm.tokenizer.apply_chat_template(asked, add_generation_prompt=True))


def _open(llm: LLM, sizes: Sizes, text: Text) -> Iterator[Prompt]:
    while True:
        yield text.window(sizes.copied[0] // 2)


_KINDS = {
    "copying": _Kind(_copying),
    "code": _Kind(_code),
    "chat": _Kind(_chats, 0.7),
    "open": _Kind(_open, 1.0),
}


def _speculation(llm: LLM, sizes: Sizes, text: Text) -> Iterator[Figures]:
    for name, kind in _KINDS.items():
        if kind.prompts is _chats and not llm.tokenizer.chat_template:
            continue
        prompts = kind.prompts(llm, sizes, text)
        before = llm.engine.stats().speculation
        for i, batch in enumerate(sizes.batches):
            groups = [[next(prompts) for _ in range(batch)] for _ in range(_ALONE if batch == 1 else 1)]
            params = SamplingParams(temperature=kind.temperature, max_tokens=sizes.copied[1], ignore_eos=True, seed=i)
            yield {f"{name}, {batch} at once": _rate(llm, groups, params)}
        after = llm.engine.stats().speculation
        verifies = after.num_drafts - before.num_drafts
        right = after.num_accepted_tokens - before.num_accepted_tokens
        yield {f"{name}, tokens per verify": 1 + right / verifies if verifies else 1.0}


def _rate(llm: LLM, batches: Sequence[Sequence[tuple[int, ...]]], params: SamplingParams) -> float:
    """Tokens per second of decoding, over batches one after the other: from first tokens to last ones."""
    num_tokens, seconds = 0, 0.0
    for batch in batches:
        outputs = llm.generate(list(batch), params, use_tqdm=False)
        new, spent = decoding(outputs)
        num_tokens += new
        seconds += spent
    return num_tokens / seconds


def _ways(sizes: Sizes, config: EngineConfig) -> Ways:
    """No speculation, or the one that the configuration asks for: n-grams if it asks for none."""
    names = [f.name for f in fields(SpeculativeConfig)]
    off = {f.name: f.default for f in fields(SpeculativeConfig)}
    on = {name: getattr(config.speculative, name) for name in names}
    return off, on if on != off else {**off, "speculative_model": "[ngram]"}


def _checks(off: Figures, on: Figures) -> list[Check]:
    """What some method must reach, and that none loses anything."""
    gains = {key: on[key] / off[key] for key in off if key.endswith("at once")}
    worst = min(gains, key=lambda key: gains[key])
    checks = []
    for kind, least in _LEAST.items():
        gain = gains[f"{kind}, 1 at once"]
        checks.append(Check(f"{kind} alone is at least {least} times as fast: {gain:.2f}", gain >= least))
    checks.append(
        Check(f"nothing loses more than 3 %: {worst}, {gains[worst]:.2f} ≥ {_MOST_LOSS}", gains[worst] >= _MOST_LOSS)
    )
    return checks


SPECULATION = Claim(
    "speculation",
    "tokens per second by kind of text, from one that repeats itself to one that nobody can guess",
    "plain",
    "drafts",
    _ways,
    offline(_speculation),
    tuple(
        figure
        for kind in _KINDS
        for figure in (
            *(Figure(f"{kind}, {batch} at once", "", True) for batch in _BATCHES),
            Figure(f"{kind}, tokens per verify", "", True, 2),
        )
    ),
    _checks,
)
