"""EAGLE heads guess what an independent computation over the whole text guesses, and change no token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from jaxserve.engine import Engine
from jaxserve.plan import Drafts
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler import FixedSpeculation
from jaxserve.speculative import EagleProposer
from tests.equivalence.harness import BACKEND, Ask, Comparison, build, run
from tests.equivalence.heads import HEADS, Oracle
from tests.equivalence.test_speculation import ASKS, LOOP

SIZES: dict[str, Any] = {"max_rows": 2, "max_tokens": 8}
CHAINS = {kind: EagleProposer(3, head, "float32", BACKEND, 1, 3) for kind, head in HEADS.items()}
TREE = EagleProposer(6, HEADS["EAGLE"], "float32", BACKEND, 2, 3)
GREEDY = {
    "long": Ask(LOOP, SamplingParams(temperature=0, max_tokens=30)),
    "short": Ask((5,), SamplingParams(temperature=0, max_tokens=45)),
    "alike": Ask((*LOOP[:30], 9, 9), SamplingParams(temperature=0, max_tokens=20)),
    "late": Ask(LOOP, SamplingParams(temperature=0, max_tokens=8)),
}
ARRIVALS = {"alike": 12, "late": 25}


@dataclass
class Recorded:
    """What was proposed after which text."""

    drafts: list[tuple[list[int], Drafts]] = field(default_factory=list)

    @classmethod
    def of(cls, engine: Engine) -> Recorded:
        """Listens to an engine."""
        recorded, policy = cls(), engine.scheduler.speculation
        note = policy.note

        def listen(request: Request, num_drafts: int, tokens: tuple[int, ...], proposed: Drafts) -> None:
            recorded.drafts.append(([*request.prompt, *request.output, *tokens], proposed))
            note(request, num_drafts, tokens, proposed)

        policy.note = listen  # type: ignore[method-assign]
        return recorded

    def share(self, kind: str, count: int) -> float:
        """Which share of the drafts is what the oracle guesses."""
        oracle = Oracle(kind)
        wanted = [oracle.chain(text, count) for text, _ in self.drafts]
        return float(
            np.mean([list(drafts.tokens) == some for (_, drafts), some in zip(self.drafts, wanted, strict=True)])
        )


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("EAGLE", {}),
        ("EAGLE", {"overlap": False}),
        ("EAGLE", {"num_blocks": 18}),
        ("EAGLE-3", {"prefix": False}),
    ],
    ids=str,
)
def test_chains_are_what_the_whole_text_says(kind: str, way: dict[str, Any]) -> None:
    """Prompts come whole and in chunks, from the prefix cache, and again after a preemption."""
    engine = build(proposer=CHAINS[kind], **SIZES, **way)
    recorded = Recorded.of(engine)
    expected, got = run(build(**SIZES), GREEDY), run(engine, GREEDY, arrivals=ARRIVALS)
    for name, ask in GREEDY.items():
        Comparison().same(ask, 0, got[f"{name}.0"], expected[f"{name}.0"])
    assert len(recorded.drafts) > 40
    # What is preempted before the head has seen its newest tokens comes back from the prefix cache without them.
    assert recorded.share(kind, 3) > (0.9 if "num_blocks" in way else 0.97)
    assert (engine.stats().preemptions_total > 0) == ("num_blocks" in way)
    assert (engine.stats().prefix_hits_total > 0) == (way.get("prefix", True))


def test_trees_are_the_most_likely_paths() -> None:
    engine = build(proposer=TREE, **SIZES)
    recorded, oracle = Recorded.of(engine), Oracle("EAGLE")
    expected, got = run(build(**SIZES), GREEDY), run(engine, GREEDY, arrivals=ARRIVALS)
    for name, ask in GREEDY.items():
        Comparison().same(ask, 0, got[f"{name}.0"], expected[f"{name}.0"])
    same = []
    for text, drafts in recorded.drafts:
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(drafts.tokens, drafts.parents, strict=True):
            paths.append((*paths[parent], token))
        assert len(set(paths)) == 7
        chances = oracle.tree(text, 2, 3)
        best = sorted(chances.values())[-6:]
        same.append(sorted(chances.get(path, -np.inf) for path in paths[1:]) == pytest.approx(best, abs=1e-3))
    assert len(same) > 40
    assert np.mean(same) > 0.97


@pytest.mark.parametrize("proposer", [*CHAINS.values(), TREE], ids=["EAGLE", "EAGLE-3", "tree"])
def test_drafts_change_no_token(proposer: EagleProposer) -> None:
    asks = {name: ask for name, ask in ASKS.items() if name in ("sampled", "cold", "penalised", "tied and sampled")}
    asks["known"] = replace(
        ASKS["sampled"], params=SamplingParams(temperature=0.9, max_tokens=60, logit_bias={7: 9.0, 8: 9.0})
    )
    engine = build(proposer=proposer, **SIZES)
    expected, got = run(build(**SIZES), asks), run(engine, asks)
    for name, ask in asks.items():
        for i in range(ask.params.n):
            Comparison().same(ask, i, got[f"{name}.{i}"], expected[f"{name}.{i}"])
    assert engine.stats().speculation.num_accepted_tokens > 0


class Resting(FixedSpeculation):
    """Proposes in some steps only."""

    steps = 0

    @property
    def proposes(self) -> bool:
        return self.steps % 7 > 3

    def choose(self, requests: Sequence[Request], num_others: int) -> Mapping[str, int]:
        were_made = self.proposes
        self.steps += 1
        return super().choose(requests, num_others) if were_made else {}


def test_what_was_missed_is_caught_up_with() -> None:
    engine = build(proposer=CHAINS["EAGLE"], **SIZES, prefix=False)
    engine.scheduler.speculation = Resting(3, engine.runner.proposer.lookahead)
    recorded = Recorded.of(engine)
    expected, got = run(build(**SIZES), GREEDY), run(engine, GREEDY, arrivals=ARRIVALS)
    for name, ask in GREEDY.items():
        Comparison().same(ask, 0, got[f"{name}.0"], expected[f"{name}.0"])
    recorded.drafts = [pair for pair in recorded.drafts if pair[1].tokens]
    assert len(recorded.drafts) > 15
    assert recorded.share("EAGLE", 3) > 0.97
