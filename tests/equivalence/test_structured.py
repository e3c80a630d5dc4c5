"""Outputs with a structure satisfy it, and are the same with drafts and without."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from jaxserve.outputs import TokenEvent
from jaxserve.request import FinishReason
from jaxserve.sampling_params import SamplingParams, StructuredOutputsParams
from jaxserve.speculative import NgramProposer
from jaxserve.structured import Grammars, make_constraint
from tests.equivalence.harness import MODEL, Ask, Comparison, build, run
from tests.structured.vocabulary import EOS, VOCABULARY, encode, text_of

NGRAM = NgramProposer(num_drafts=4, longest=3, shortest=1)
GRAMMARS = Grammars(lambda: VOCABULARY)
SCHEMA = {
    "type": "object",
    "properties": {
        "abc": {"type": "string", "maxLength": 4},
        "n": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 40}, "minItems": 2, "maxItems": 3},
    },
    "required": ["abc", "n"],
    "additionalProperties": False,
}
WANTED = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
PROMPT = tuple(encode('{"abc":"ab","n":[1,2]}' * 2))


def ask(temperature: float, seed: int = 5, **more: Any) -> Ask:
    params = SamplingParams(temperature=temperature, max_tokens=60, structured_outputs=WANTED, **more)

    def constraint() -> Any:
        return make_constraint(
            params,
            vocab_size=MODEL.vocab_size,
            stop_ids=frozenset({EOS}),
            bad_word_ids=[],
            grammar=GRAMMARS.get(WANTED),
        )

    return Ask(PROMPT, params, seed, stop_ids=frozenset({EOS}), constraint=constraint)


FREE = Ask(PROMPT, SamplingParams(temperature=0.7, max_tokens=30))
# One after the other, or two at once: few sizes of steps are few programs.
BATCHES = [
    {"greedy": ask(0.0), "free": FREE},
    *({f"sampled{seed}": ask(1.0, seed)} for seed in range(4)),
    {"several": ask(1.0, 50, n=2)},
    {"late": ask(1.0, 60, ignore_eos=True, min_tokens=5)},
]


@pytest.mark.parametrize("overlap", [True, False])
def test_outputs_satisfy_the_schema_and_drafts_change_no_token(overlap: bool) -> None:
    plain, drafted = build(overlap=overlap), build(overlap=overlap, proposer=NGRAM)
    texts = set()
    for batch in BATCHES:
        expected, got = run(plain, batch), run(drafted, batch)
        for name, one in batch.items():
            for i in range(one.params.n):
                tokens = expected[f"{name}.{i}"]
                Comparison().same(one, i, got[f"{name}.{i}"], tokens)
                if one is not FREE:
                    assert tokens[-1] == EOS
                    texts.add(text_of(tokens))
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(texts) > 3
    assert drafted.stats().speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("overlap", [True, False])
def test_a_constraint_that_fails_ends_its_request_alone(overlap: bool) -> None:
    class Failing:
        error: str | None = None
        count = 0

        def mask(self, bits: Any) -> None:
            self.error = "a limit was reached" if self.count >= 3 else None

        def advance(self, tokens: tuple[int, ...]) -> None:
            self.count += len(tokens)

        def rollback(self, num_tokens: int) -> None:
            self.count -= num_tokens

    engine = build(overlap=overlap)
    bad = Ask(PROMPT, SamplingParams(max_tokens=20), constraint=Failing)
    engine.add([*bad.requests("bad"), *FREE.requests("free")])
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
    ends = {event.request_id: (event.finish, event.error) for event in events if event.finish}
    assert ends == {
        "bad.0": (FinishReason.ERROR, "structured_outputs: a limit was reached"),
        "free.0": (FinishReason.LENGTH, None),
    }
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
