"""The YAML presets in ``configs/`` are valid configurations."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from jaxserve.config import EngineConfig

PRESETS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


def test_there_are_presets() -> None:
    assert {preset.stem for preset in PRESETS} >= {"cpu-small", "gpu-throughput", "low-latency"}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.stem)
def test_preset_loads_and_sets_what_it_says(preset: Path) -> None:
    values = yaml.safe_load(preset.read_text(encoding="utf-8"))
    config = EngineConfig.from_flat(values)
    assert values
    assert {name: config.flat()[name] for name in values} == values
    assert EngineConfig.from_flat(config.flat()) == config
