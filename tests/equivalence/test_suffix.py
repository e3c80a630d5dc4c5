"""With a corpus of earlier answers: the same tokens, and a second answer that the first one foretells."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.sampling_params import SamplingParams
from jaxserve.speculative import SuffixProposer
from tests.equivalence.harness import Ask, Comparison, build, run
from tests.equivalence.test_speculation import ASKS

SUFFIX = SuffixProposer(num_drafts=4, longest=6, shortest=3, corpus_size=512)
SMALL = {"max_rows": 2, "max_tokens": 16}

QUESTION = Ask(tuple(range(20, 44)), SamplingParams(temperature=1.0, max_tokens=40), seed=3)
"""Its prompt repeats nothing, nor does its answer at this temperature."""


def test_drafts_change_no_token() -> None:
    plain, drafted = build(**SMALL), build(proposer=SUFFIX, **SMALL)
    expected = run(plain, ASKS)
    for got in (run(drafted, ASKS), run(drafted, ASKS)):
        for name, ask in ASKS.items():
            for i in range(ask.params.n):
                Comparison().same(ask, i, got[f"{name}.{i}"], expected[f"{name}.{i}"])
    assert drafted.stats().speculation.accepted_by_position[3] > 0


@pytest.mark.parametrize(("salt", "least", "most"), [(None, 0.9, 1.0), ("s", 0.0, 0.2)], ids=["shared", "private"])
def test_a_repeated_answer_is_foretold_unless_it_was_private(salt: str | None, least: float, most: float) -> None:
    first = replace(QUESTION, seed=100 + len(salt or ""), salt=salt)
    engine, accepted, steps = build(proposer=SUFFIX, **SMALL), [], []
    for name, ask in (("first", first), ("again", replace(first, salt=None)), ("third", replace(first, salt=None))):
        before = engine.stats()
        got = run(engine, {name: ask})
        Comparison().same(ask, 0, got[f"{name}.0"], run(build(**SMALL), {name: ask})[f"{name}.0"])
        accepted.append(engine.stats().speculation.num_accepted_tokens - before.speculation.num_accepted_tokens)
        steps.append(engine.stats().steps_total - before.steps_total)
    assert accepted[0] <= 4
    num_tokens = 40
    assert least * num_tokens * 4 / 5 <= accepted[1] <= most * num_tokens
    assert accepted[2] >= 0.7 * num_tokens  # the second answer was shared
    assert steps[2] < steps[0] / 3
