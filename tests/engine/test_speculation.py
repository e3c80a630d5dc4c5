"""The flags of speculation: three ways to say the same, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.speculation import SpeculativeSettings, resolve
from jaxserve.errors import ConfigError
from jaxserve.speculative import TypicalAcceptance

NGRAM = SpeculativeSettings("ngram", None, num_drafts=5, longest=4, shortest=2, adaptive=True)


def settings(**flags: Any) -> SpeculativeSettings | None:
    return resolve(EngineConfig.from_flat(flags).speculative, max_tokens=64)


def test_off_by_default() -> None:
    assert settings() is None


@pytest.mark.parametrize(
    "flags",
    [
        {"speculative_model": "[ngram]"},
        {"spec_method": "ngram"},
        {"spec_model": "ngram", "spec_tokens": 5},
        {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 5}'},
        {"speculative_config": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}},
        {"speculative_model": "[ngram]", "spec_tokens": 5, "speculative_config": {"num_speculative_tokens": 5}},
    ],
)
def test_every_way_gives_the_same(flags: dict[str, Any]) -> None:
    assert settings(**flags) == NGRAM


def test_a_path_is_a_draft_model() -> None:
    wanted = SpeculativeSettings("draft_model", "/a/model", num_drafts=4, longest=0, shortest=0, adaptive=True)
    assert settings(speculative_model="/a/model") == wanted
    assert settings(spec_method="draft_model", spec_model="/a/model") == wanted


def test_values_are_taken_over() -> None:
    given = {"num_speculative_tokens": 3, "ngram_prompt_lookup_max": 9, "ngram_prompt_lookup_min": 1}
    wanted = SpeculativeSettings("ngram", None, num_drafts=3, longest=9, shortest=1, adaptive=False)
    assert settings(speculative_model="[ngram]", speculative_adaptive=False, **given) == wanted
    alone = settings(speculative_model="[ngram]", ngram_prompt_lookup_min=7)
    assert alone is not None
    assert (alone.longest, alone.shortest) == (7, 7)


def test_a_corpus_has_a_size() -> None:
    plain = SpeculativeSettings("suffix", None, num_drafts=8, longest=8, shortest=2, adaptive=True, corpus_size=65536)
    assert settings(speculative_model="suffix") == settings(spec_method="suffix") == plain
    for flags in ({"speculative_corpus_size": 4096}, {"speculative_config": {"corpus_size": 4096}}):
        assert settings(speculative_model="[suffix]", **flags) == replace(plain, corpus_size=4096)


def test_typical_acceptance_is_asked_for_by_name() -> None:
    way = "typical_acceptance_sampler"
    assert settings(spec_method="ngram", spec_decoding_acceptance_method="rejection_sampler") == NGRAM
    for flags, rule in (
        ({"spec_decoding_acceptance_method": way}, TypicalAcceptance(0.09, 0.3)),
        ({"speculative_config": {"acceptance_method": way, "posterior_threshold": 0.25}}, TypicalAcceptance(0.25, 0.5)),
        (
            {"spec_decoding_acceptance_method": way, "typical_acceptance_sampler_posterior_alpha": 1},
            TypicalAcceptance(0.09, 1.0),
        ),
    ):
        assert settings(spec_method="ngram", **flags) == replace(NGRAM, typical=rule)


@pytest.mark.parametrize(
    ("flags", "num_drafts", "width", "depth"),
    [
        ({}, 4, 1, None),
        ({"speculative_num_steps": 6}, 6, 1, None),
        ({"speculative_eagle_topk": 4}, 8, 4, 4),
        ({"speculative_eagle_topk": 4, "speculative_num_steps": 1}, 4, 4, 1),
        ({"speculative_config": {"eagle_topk": 2, "num_steps": 3, "num_speculative_tokens": 10}}, 10, 2, 3),
    ],
)
def test_eagle_drafts_chains_or_trees(flags: dict[str, Any], num_drafts: int, width: int, depth: int | None) -> None:
    for method in ({"speculative_model": "eagle"}, {"spec_method": "eagle3"}):
        found = settings(**method, **flags)
        assert found is not None
        assert (found.method, found.model) == ("eagle", None)
        assert (found.num_drafts, found.width, found.depth) == (num_drafts, width, depth)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"num_speculative_tokens": 3}, "--num-speculative-tokens needs a method"),
        (
            {"spec_method": "magic"},
            "--spec-method must be one of ngram, suffix, draft_model, medusa, eagle, got 'magic'",
        ),
        (
            {"spec_method": "ngram", "speculative_corpus_size": 4096},
            "--speculative-corpus-size is for suffix; the method ngram has no use for it",
        ),
        (
            {"spec_method": "medusa", "ngram_prompt_lookup_min": 2},
            "--ngram-prompt-lookup-min is for ngram and suffix; the method medusa has no use for it",
        ),
        (
            {"spec_method": "suffix", "speculative_corpus_size": 100},
            "--speculative-corpus-size must be an integer from 256 to 16777216, got 100",
        ),
        (
            {"spec_method": "ngram", "spec_decoding_acceptance_method": "typical"},
            "must be one of rejection_sampler, typical_acceptance_sampler, got 'typical'",
        ),
        (
            {"spec_method": "ngram", "typical_acceptance_sampler_posterior_alpha": 0.3},
            "posterior-alpha needs --spec-decoding-acceptance-method typical_acceptance_sampler",
        ),
        (
            {
                "spec_method": "ngram",
                "spec_decoding_acceptance_method": "typical_acceptance_sampler",
                "typical_acceptance_sampler_posterior_threshold": 0.0,
            },
            "posterior-threshold must be a number above 0, at most 1, got 0.0",
        ),
        ({"spec_decoding_acceptance_method": "rejection_sampler"}, "acceptance-method needs a method"),
        ({"spec_method": "draft_model"}, "draft_model needs a model"),
        ({"spec_method": "draft_model", "speculative_model": "[ngram]"}, "draft_model needs a model"),
        ({"spec_method": "ngram", "speculative_model": "/a/model"}, "'/a/model', but the method ngram has no model"),
        ({"spec_method": "ngram", "spec_tokens": 0}, "--spec-tokens must be an integer from 1 to 63, got 0"),
        ({"spec_method": "ngram", "spec_tokens": 64}, "--spec-tokens must be an integer from 1 to 63, got 64"),
        (
            {"spec_method": "ngram", "spec_tokens": 3, "num_speculative_tokens": 4},
            "is 4, but --spec-tokens is 3",
        ),
        ({"spec_method": "ngram", "ngram_prompt_lookup_max": 0}, "--ngram-prompt-lookup-max must be an integer from 1"),
        (
            {"spec_method": "ngram", "ngram_prompt_lookup_max": 2, "ngram_prompt_lookup_min": 3},
            r"--ngram-prompt-lookup-min \(3\) must not be more than --ngram-prompt-lookup-max \(2\)",
        ),
        ({"speculative_config": "{"}, "--speculative-config is no JSON"),
        ({"speculative_config": "[1]"}, "must be a JSON object"),
        ({"speculative_config": '{"methd": "ngram"}'}, "unknown key 'methd'. Did you mean 'method'"),
        (
            {"speculative_config": json.dumps({"method": "ngram", "num_speculative_tokens": "3"})},
            "'num_speculative_tokens' of --speculative-config must be an integer from 1 to 63, got '3'",
        ),
        ({"speculative_config": {"method": ["ngram"]}}, "must be a text"),
        (
            {"spec_method": "ngram", "speculative_eagle_topk": 2},
            "--speculative-eagle-topk is for eagle; the method ngram has no use for it",
        ),
        (
            {"spec_method": "eagle", "ngram_prompt_lookup_min": 2},
            "--ngram-prompt-lookup-min is for ngram and suffix; the method eagle has no use for it",
        ),
        (
            {"spec_method": "eagle", "speculative_num_steps": 3, "spec_tokens": 4},
            "--speculative-num-steps is 3, but --spec-tokens is 4: without a tree",
        ),
        (
            {"spec_method": "eagle", "speculative_eagle_topk": 2, "speculative_num_steps": 2, "spec_tokens": 7},
            "--spec-tokens is 7, but trees of 2 steps and top-k 2 have 6 guesses",
        ),
        (
            {"spec_method": "eagle", "speculative_config": '{"eagle_topk": 0}'},
            "'eagle_topk' of --speculative-config must be an integer from 1 to 32, got 0",
        ),
    ],
)
def test_what_cannot_work_is_named(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**flags)
