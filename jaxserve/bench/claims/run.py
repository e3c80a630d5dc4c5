"""Checks claims one after the other.

Both ways of a claim have the same model, memory and requests, and run in one process. They take turns, part by part of
what is measured: a machine that is slow for a while is so for both. Figures are medians over repeats; each repeat has
other text of the same lengths, so that no cache answers it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from math import ceil
from typing import Any

from jaxserve.bench.claims.claim import Claim, Figures, Measure, Outcome, Sizes
from jaxserve.bench.claims.registry import CLAIMS
from jaxserve.bench.machine import CpuMeter
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError

__all__ = ["check_claims", "choose", "claims_config", "report"]

_KV_SIZES = ("num_gpu_blocks_override", "kv_cache_memory_bytes")


def choose(names: str | None) -> list[Claim]:
    """The claims of these names, with commas; None is all, and ``lora`` those that begin with ``lora-``.

    ConfigError: there is none of a name.
    """
    if names is None:
        return list(CLAIMS.values())
    found: dict[str, Claim] = {}
    for name in (name.strip() for name in names.split(",")):
        meant = {known: claim for known, claim in CLAIMS.items() if known == name or known.startswith(f"{name}-")}
        if not meant:
            raise ConfigError(f"there is no claim {name!r}; there are {', '.join(CLAIMS)}.")
        found |= meant
    return list(found.values())


def claims_config(config: EngineConfig, sizes: Sizes) -> EngineConfig:
    """``config``, with the context and the KV memory of ``sizes`` where it leaves them open.

    Memory is kept small, as sequences would never compete for it otherwise. ConfigError: the context is too short.
    """
    settings = config.flat()
    context = settings["max_model_len"] = config.model.max_model_len or sizes.context
    needed = max(sizes.prefix + sizes.own + 2, sum(sizes.long), sum(sizes.stream), *map(sum, sizes.mixed))
    if context < needed:
        raise ConfigError(f"the claims need contexts of {needed} tokens; --max-model-len is {context}.")
    if all(settings[name] is None for name in _KV_SIZES):
        settings["num_gpu_blocks_override"] = 1 + sizes.regions * ceil(context / config.cache.block_size)
    return EngineConfig.from_flat(settings)


def check_claims(
    config: EngineConfig, claims: Sequence[Claim], sizes: Sizes, repeats: int, tell: Callable[[str], None]
) -> list[Outcome]:
    """Measure both ways of each claim. ``tell`` is given a line about what is being done."""
    base = claims_config(config, sizes)
    return [_check(claim, base, sizes, repeats, tell) for claim in claims]


def _check(claim: Claim, config: EngineConfig, sizes: Sizes, repeats: int, tell: Callable[[str], None]) -> Outcome:
    ways = (claim.off, claim.on)
    measured: dict[str, list[Figures]] = {way: [] for way in ways}
    shares: list[float | None] = []
    with ExitStack() as engines:
        measures: list[Measure] = []
        for way, settings in zip(ways, claim.settings(sizes, config), strict=True):
            tell(f"{claim.name}: starting an engine ({way})")
            flat = {**config.flat(), **settings}
            measures.append(engines.enter_context(claim.session(EngineConfig.from_flat(flat), sizes)))
        for repeat in range(repeats):
            tell(f"{claim.name}: run {repeat + 1} of {repeats}")
            with CpuMeter() as meter:
                parts = zip(*(measure(config.model.seed + repeat) for measure in measures), strict=True)
                for way, figures in zip(ways, _merged(parts), strict=True):
                    measured[way].append(figures)
            shares.append(meter.foreign)
    medians = {way: _medians(figures) for way, figures in measured.items()}
    return Outcome(claim, medians, measured, max((share for share in shares if share is not None), default=None))


def _merged(parts: Iterable[tuple[Figures, ...]]) -> list[Figures]:
    """All figures of each way."""
    return [{key: value for part in way for key, value in part.items()} for way in zip(*parts, strict=True)]


def _medians(repeats: Sequence[Figures]) -> Figures:
    return {key: statistics.median(figures[key] for figures in repeats) for key in repeats[0]}


def report(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Everything measured, by claim, as plain data."""
    return {
        outcome.claim.name: {
            "medians": outcome.medians,
            "repeats": outcome.repeats,
            "checks": [{"text": check.text, "holds": check.holds} for check in outcome.checks],
            "foreign_cpu": outcome.foreign,
        }
        for outcome in outcomes
    }
