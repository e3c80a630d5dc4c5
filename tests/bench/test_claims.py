"""The claims on a tiny engine: every figure is measured, and policies differ in what they should."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jaxserve.bench.claims import CLAIMS, FULL, QUICK, Claim, Figure, Outcome, Sizes, check_claims, choose, report, show
from jaxserve.bench.claims.claim import Figures, Measure
from jaxserve.bench.claims.run import claims_config
from jaxserve.cli import main
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from tests.equivalence.harness import CONTEXT

TINY = Sizes(
    context=CONTEXT,
    regions=2,
    mixed=((9, 30), (20, 4), (5, 20), (30, 2), (7, 25), (12, 9)),
    seats=2,
    prefix=64,
    own=6,
    later=5,
    streams=2,
    stream=(6, 30),
    long=(80, 2),
    num_long=1,
    chunk=8,
    copied=(24, 20),
    batches=(1, 2),
    tunes=1,  # several engines at once would have one runner here
)


pytestmark = pytest.mark.usefixtures("started")


def check(name: str, **settings: Any) -> Outcome:
    config = EngineConfig.from_flat({"block_size": 8, **settings})
    [outcome] = check_claims(config, choose(name), TINY, 1, lambda line: None)
    return outcome


def test_paged_kv_holds_more_sequences_and_wastes_less(started: list[EngineConfig]) -> None:
    outcome = check("paged-kv")
    contiguous, paged = outcome.medians["contiguous"], outcome.medians["paged"]
    assert [config.cache.num_gpu_blocks_override for config in started] == [1 + 2 * CONTEXT // 8] * 2
    assert contiguous["sequences at once"] == 2
    assert paged["sequences at once"] == 4
    assert paged["unused places per sequence"] < 8 < contiguous["unused places per sequence"] < CONTEXT
    assert outcome.checks[0].holds


def test_both_ways_take_turns_part_by_part() -> None:
    turns: list[str] = []

    @contextmanager
    def session(config: EngineConfig, sizes: Sizes) -> Iterator[Measure]:
        way = "on" if config.cache.enable_prefix_caching else "off"

        def parts(seed: int) -> Iterator[Figures]:
            for part in ("first", "second"):
                turns.append(f"{way} {part} {seed}")
                yield {part: len(turns)}

        yield parts

    ways = ({"enable_prefix_caching": False}, {"enable_prefix_caching": True})
    claim = Claim("turns", "", "off", "on", lambda sizes, config: ways, session, (), lambda off, on: [])
    [outcome] = check_claims(EngineConfig.from_flat({}), [claim], TINY, 2, lambda line: None)
    order = ["off first", "on first", "off second", "on second"]
    assert turns == [f"{turn} {seed}" for seed in (0, 1) for turn in order]
    assert outcome.repeats == {
        "off": [{"first": 1, "second": 3}, {"first": 5, "second": 7}],
        "on": [{"first": 2, "second": 4}, {"first": 6, "second": 8}],
    }


def test_continuous_batching_is_compared_with_static_batches(started: list[EngineConfig]) -> None:
    outcome = check("continuous-batching")
    assert [config.scheduler.batching for config in started] == ["static", "continuous"]
    assert {config.scheduler.max_num_seqs for config in started} == {2}
    assert all(figures[key] > 0 for figures in outcome.medians.values() for key in ("tokens/s", "mean latency"))


def test_prefix_caching_is_switched_off_and_on(started: list[EngineConfig]) -> None:
    outcome = check("prefix-caching", max_num_batched_tokens=8)
    assert [config.cache.enable_prefix_caching for config in started] == [False, True]
    off, on = outcome.medians.values()
    # Seventy tokens in steps of eight, or a step for what is not shared.
    assert on["later requests"] < off["later requests"]
    assert outcome.checks[0].holds


def test_chunked_prefill_is_compared_with_whole_prompts(started: list[EngineConfig]) -> None:
    outcome = check("chunked-prefill")
    sizes = [(c.scheduler.enable_chunked_prefill, c.scheduler.max_num_batched_tokens) for c in started]
    assert sizes == [(False, CONTEXT), (True, 8)]
    for figures in outcome.medians.values():
        assert 0 < figures["median gap"] <= figures["p99 gap"] <= figures["longest gap"]
        assert figures["total tokens/s"] > 0


def test_speculation_is_compared_with_plain_decoding(started: list[EngineConfig]) -> None:
    outcome = check("speculation", spec_method="ngram", spec_tokens=4, speculative_adaptive=False)
    assert [config.speculative.spec_method for config in started] == [None, "ngram"]
    off, on = outcome.medians.values()
    assert list(off) == list(on)
    for kind in ("copying", "code", "open"):
        assert off[f"{kind}, tokens per verify"] == 1 <= on[f"{kind}, tokens per verify"] <= 5
        assert all(figures[f"{kind}, {batch} at once"] > 0 for batch in (1, 2) for figures in (off, on))
    assert on["copying, tokens per verify"] > 1
    ways = CLAIMS["speculation"].settings(FULL, EngineConfig())
    assert [way["speculative_model"] for way in ways] == [None, "[ngram]"]


@pytest.fixture
def few_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few, which most engines have slots for, so that they share a runner."""
    for name, count in {"_ROWS": 4, "_HELD": 4, "_SLOTS": 2, "_LOADED": 3, "_PAUSE": 0.01}.items():
        monkeypatch.setattr(f"jaxserve.bench.claims.lora.{name}", count)


@pytest.mark.usefixtures("few_adapters")
def test_adapters_are_compared_with_engines_and_with_none(started: list[EngineConfig]) -> None:
    config = EngineConfig.from_flat({"block_size": 8, "max_lora_rank": 4})
    claims = choose("lora-servers,lora-unused,lora-memory,lora-loading")
    servers, unused, memory, loading = check_claims(config, claims, TINY, 1, lambda line: None)
    assert [config.lora.enable_lora for config in started[:2]] == [False, True]
    off, on = servers.medians.values()
    assert 0 < off["weights and adapters"] < on["weights and adapters"]  # of one fine-tune
    assert not servers.checks[0].holds
    for outcome in (servers, unused):
        assert all(figures["tokens/s"] > 0 for figures in outcome.medians.values())
    off, on = memory.medians.values()
    assert (off["slots"], off["all"]) == (0, off["weights"])
    assert on["weights"] == off["weights"]
    assert on["all"] > on["weights"] + on["slots"]
    for figures in loading.medians.values():
        assert 0 < figures["median gap"] <= figures["p99 gap"] <= figures["longest gap"]
        assert figures["until an answer"] > 0
    assert loading.medians["resident"]["loads"] == 0
    assert loading.medians["loading"]["loads"] == 3


@pytest.mark.parametrize(("asked", "seats"), [(None, 16), (4, 9), (12, 12)])
def test_long_prompts_find_a_seat_beside_the_streams(asked: int | None, seats: int) -> None:
    config = claims_config(EngineConfig.from_flat({"max_num_seqs": asked}), FULL)
    ways = CLAIMS["chunked-prefill"].settings(FULL, config)
    assert [way["max_num_seqs"] for way in ways] == [seats, seats]
    assert [way["max_num_batched_tokens"] for way in ways] == [2048, 512]


def test_the_command_prints_and_saves_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jaxserve.bench.claims.QUICK", TINY)
    monkeypatch.setenv("COLUMNS", "120")
    svg, figures = tmp_path / "claims.svg", tmp_path / "claims.json"
    argv = ["--quick", "--claims", "paged-kv,prefix-caching", "--repeats", "2", "--block-size", "8"]
    code = main(["bench", "claims", *argv, "--json", str(figures), "--output", str(svg)])
    saved = json.loads(figures.read_text())
    assert list(saved["claims"]) == ["paged-kv", "prefix-caching"]
    assert len(saved["claims"]["paged-kv"]["repeats"]["paged"]) == 2
    assert code == (0 if all(c["holds"] for claim in saved["claims"].values() for c in claim["checks"]) else 1)
    out = capsys.readouterr().out
    assert "paged-kv: KV memory of one size: contiguous regions, or blocks (median of 2)" in out
    assert re.search(r"sequences at once +│ +2 │ +4 │ +2.00", out)
    assert re.search(r"  contiguous █+ 2\n  paged +█+ 4\n", out)
    assert "holds  more sequences in the same memory: 4.0 > 2.0" in out
    assert svg.read_text().startswith("<svg")


def test_memory_and_context_are_those_of_the_user_where_given() -> None:
    config = claims_config(EngineConfig(), FULL)
    assert (config.model.max_model_len, config.cache.num_gpu_blocks_override) == (2048, 1 + 8 * 128)
    given = {"max_model_len": 4000, "kv_cache_memory_bytes": 10**9}
    config = claims_config(EngineConfig.from_flat(given), QUICK)
    assert (config.model.max_model_len, config.cache.num_gpu_blocks_override) == (4000, None)
    with pytest.raises(ConfigError, match="need contexts of 2016 tokens; --max-model-len is 1024"):
        claims_config(EngineConfig.from_flat({"max_model_len": 1024}), FULL)


def test_claims_are_chosen_by_name() -> None:
    assert [claim.name for claim in choose(None)] == list(CLAIMS)
    assert [claim.name for claim in choose("prefix-caching, paged-kv")] == ["prefix-caching", "paged-kv"]
    assert [claim.name for claim in choose("paged-kv, paged-kv")] == ["paged-kv"]
    assert {claim.name for claim in choose("lora")} == {name for name in CLAIMS if name.startswith("lora-")}
    with pytest.raises(ConfigError, match="there is no claim 'speed'; there are paged-kv, continuous-batching"):
        choose("speed")


def outcome_of(medians: Mapping[str, Mapping[str, float]], foreign: float | None) -> Outcome:
    claim = replace(CLAIMS["prefix-caching"], figures=(Figure("later requests", "ms", False),))
    assert isinstance(claim, Claim)
    return Outcome(claim, medians, {way: [figures] for way, figures in medians.items()}, foreign)


@pytest.mark.parametrize(
    ("foreign", "words"),
    [
        (None, "cannot be measured on this system"),
        (0.01, "Other processes used 1.0 % of the machine."),
        (0.5, "Other processes used 50.0 % of the machine: too much to trust the figures."),
    ],
)
def test_a_claim_that_fails_is_shown_as_such(foreign: float | None, words: str) -> None:
    outcome = outcome_of({"cache off": {"later requests": 10.0}, "cache on": {"later requests": 20.0}}, foreign)
    console = Console(file=io.StringIO(), record=True, width=100)
    show([outcome], console)
    text = console.export_text()
    assert "FAILS  later requests start sooner (ms): 20.0 < 10.0" in text
    assert re.search(r"later requests, ms │ +10.0 │ +20.0 │ +2.00", text)
    assert words in text
    assert report([outcome])["prefix-caching"]["checks"] == [
        {"text": "later requests start sooner (ms): 20.0 < 10.0", "holds": False}
    ]
