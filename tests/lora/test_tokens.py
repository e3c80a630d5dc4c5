"""Adapters that PEFT has made give the tokens of transformers with merged weights, alone and beside all others."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve import LLM, LoRARequest, SamplingParams
from jaxserve.errors import ConfigError, ModelNotFoundError, RequestError
from tests.lora.adapters import ALL, ATTENTION, edit_config, make_adapter, merged_tokens, write_base

SETTINGS: dict[str, Any] = {
    "max_model_len": 96,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "num_gpu_blocks_override": 300,
    "warmup": False,
    "weight_cache_dir": "off",
    "enable_lora": True,
    "max_lora_rank": 12,
}
MADE: dict[str, dict[str, Any]] = {
    "all": {"targets": ALL},
    "attention": {"targets": ["q_proj", "v_proj"], "rank": 12, "size": 0.4},
    "one": {"targets": ["down_proj"], "rank": 1, "size": 0.8},
    "rslora": {"targets": ATTENTION, "rank": 8, "use_rslora": True},
    "patterns": {
        "targets": ALL,
        "rank": 3,
        "rank_pattern": {"q_proj": 6, r"layers\.1\.mlp\.up_proj": 2},
        "alpha_pattern": {"k_proj": 20, "layers.0.self_attn.o_proj": 2},
    },
    "upper": {"targets": ["o_proj", "gate_proj"], "layers_to_transform": [1]},
}
COUNT = 16
PROMPTS = [[5 + (7 * i) % 80 for i in range(1, 44)], [9, 30, 77, 2], list(range(100, 130))]
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    write_base(folder / "base.gguf")
    for seed, (name, settings) in enumerate(MADE.items()):
        make_adapter(folder / name, seed, **settings)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str | None, list[list[int]]]:
    made: list[str | None] = [None, *MADE]
    return {name: merged_tokens(None if name is None else folder / name, PROMPTS, COUNT) for name in made}


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    """Three slots for six adapters."""
    with LLM(folder / "base.gguf", max_loras=3, max_cpu_loras=4, lora_dir=str(folder), **SETTINGS) as llm:
        yield llm


def request(name: str | None, folder: Path) -> LoRARequest | None:
    return None if name is None else LoRARequest(name, 1 + list(MADE).index(name), str(folder / name))


def tokens(llm: LLM, asked: list[tuple[str | None, int]], folder: Path) -> list[list[int]]:
    """Output of (adapter, prompt) pairs in one batch."""
    prompts = [PROMPTS[prompt] for _, prompt in asked]
    adapters = [request(name, folder) for name, _ in asked]
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, GREEDY, lora_request=adapters, use_tqdm=False)]


def test_adapters_differ(expected: dict[str | None, list[list[int]]]) -> None:
    assert len({tuple(outputs[0]) for outputs in expected.values()}) == len(MADE) + 1
    assert all(len(set(outputs[0])) > 4 for outputs in expected.values())


@pytest.mark.parametrize("name", MADE)
def test_alone(name: str, llm: LLM, folder: Path, expected: dict[str | None, list[list[int]]]) -> None:
    assert tokens(llm, [(name, 0)], folder) == [expected[name][0]]


def test_mixed_with_all_others_and_base_rows(
    llm: LLM, folder: Path, expected: dict[str | None, list[list[int]]]
) -> None:
    asked: list[tuple[str | None, int]] = [(name, prompt) for prompt in range(3) for name in (*MADE, None)]
    for _ in range(2):  # prompts are computed, then cached
        assert tokens(llm, asked, folder) == [expected[name][prompt] for name, prompt in asked]
    assert llm.stats().prefix_hits_total > 0


def test_no_prefix_is_found_across_adapters_and_versions(llm: LLM, folder: Path) -> None:
    """And what a name stands for changes at once when it is loaded in place."""
    prompt, params = [list(range(200, 240))], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def run(asked: LoRARequest | None) -> tuple[int, list[int]]:
        before = llm.stats().prefix_hits_total
        (output,) = llm.generate(prompt, params, lora_request=asked, use_tqdm=False)
        return llm.stats().prefix_hits_total - before, list(output.outputs[0].token_ids)

    first = LoRARequest("changing", 9, str(folder / "all"))
    outputs = []
    for asked in (None, first, request("attention", folder)):
        hits, output = run(asked)
        assert hits == 0
        outputs.append(output)
    assert run(first) == (39, outputs[1])
    hits, changed = run(LoRARequest("changing", 9, str(folder / "rslora"), load_inplace=True))
    assert hits == 0
    assert changed != outputs[1]
    assert run(LoRARequest("changing", 9)) == (39, changed)
    assert run(LoRARequest("changing", 9, str(folder / "all"), load_inplace=True)) == (39, outputs[1])
    llm.adapters.unload("changing")
    with pytest.raises(ModelNotFoundError, match="there is no adapter 'changing'"):
        run(LoRARequest("changing", 9))


def test_completions_of_one_prompt_share_the_adapter(llm: LLM, folder: Path) -> None:
    params = SamplingParams(n=3, temperature=0.9, seed=3, max_tokens=6, ignore_eos=True)
    together = llm.generate(PROMPTS[:1], params, lora_request=request("all", folder), use_tqdm=False)[0].outputs
    alone = llm.generate(
        PROMPTS[:1],
        SamplingParams(temperature=0.9, seed=3, max_tokens=6, ignore_eos=True),
        lora_request=request("all", folder),
        use_tqdm=False,
    )
    assert together[0].token_ids == alone[0].outputs[0].token_ids
    assert len({tuple(output.token_ids) for output in together}) == 3


def test_one_whose_files_have_changed_since_ends_with_the_reason(llm: LLM, folder: Path, tmp_path: Path) -> None:
    own = shutil.copytree(folder / "one", tmp_path / "own")
    edit_config(own, lora_alpha=5)
    llm.adapters.load("own", str(own))
    tokens(llm, [(name, 0) for name in MADE], folder)  # it makes room for these, on the device and the host
    edit_config(own, lora_alpha=6)
    (output,) = llm.generate(PROMPTS[:1], GREEDY, lora_request=LoRARequest("own", 1), use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"
    assert "has changed since it was loaded: load it again" in (output.outputs[0].error or "")
    llm.adapters.unload("own")


def test_requests_name_adapters_that_are_there(llm: LLM, folder: Path) -> None:
    with pytest.raises(RequestError, match="a list of 1, one per prompt"):
        llm.generate([[1, 2]], GREEDY, lora_request=[None, None], use_tqdm=False)
    with pytest.raises(ModelNotFoundError, match=r"there is no adapter 'al'\. Did you mean 'all'"):
        llm.generate([[1, 2]], GREEDY, lora_request=LoRARequest("al", 1), use_tqdm=False)
    with pytest.raises(RequestError, match="no such folder"):
        llm.generate([[1, 2]], GREEDY, lora_request=LoRARequest("new", 1, str(folder / "nothing")), use_tqdm=False)
    with pytest.raises(RequestError, match=r"loaded already, from .*; set load_inplace"):
        llm.generate([[1, 2]], GREEDY, lora_request=LoRARequest("all", 1, str(folder / "one")), use_tqdm=False)
    with pytest.raises(RequestError, match="lora_int_id must be an integer of at least 1, got 0"):
        LoRARequest("all", 0)


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_are_adapted_where_there_is_room(tied: bool, tmp_path: Path) -> None:
    """Each for itself, also where the base model ties them; merged weights would not do that."""
    base = write_base(tmp_path / "base.gguf", tied=tied)
    made = {
        "tables": make_adapter(tmp_path / "tables", 1, targets=["embed_tokens", "lm_head"], tied=tied),
        "head": make_adapter(tmp_path / "head", 2, targets=["lm_head", "q_proj"], rank=2, tied=tied),
        "embed": make_adapter(tmp_path / "embed", 3, targets=["embed_tokens"], rank=6, size=0.6, tied=tied),
    }
    asked: list[str | None] = [*made, None]
    own: dict[str, Any] = {"tied": tied, "merged": not tied}
    expected = [merged_tokens(made.get(name or ""), PROMPTS[:1], 12, **own)[0] for name in asked]
    assert len({tuple(output) for output in expected}) == 4
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    small = {**SETTINGS, "max_num_seqs": 2, "max_num_batched_tokens": 8, "max_loras": 2}
    room: dict[str, Any] = {"lora_embeddings": True, "lora_target_modules": ["q_proj"]}
    with LLM(base, lora_dir=str(tmp_path), **room, **small) as llm:
        adapters = [None if name is None else LoRARequest(name, 1) for name in asked]
        outputs = llm.generate(PROMPTS[:1] * 4, params, lora_request=adapters, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(
            (
                {"enable_lora": False, "max_lora_rank": 16, name: value},
                f"{name} has no effect without --enable-lora",
            )
            for name, value in {
                "lora_modules": ["a=b"],
                "max_lora_rank": 12,
                "max_loras": 3,
                "max_cpu_loras": 3,
                "lora_dir": ".",
                "lora_dtype": "float16",
                "lora_target_modules": ["q_proj"],
                "lora_embeddings": True,
            }.items()
        ),
        ({"lora_modules": ["sql"]}, "lora_modules must hold name=path, or JSON objects"),
        ({"lora_modules": [{"name": "a", "rank": 3}]}, "lora_modules must hold name=path, or JSON objects"),
        ({"lora_modules": ["a=/nothing"]}, "--lora-modules a: There is no adapter '/nothing'"),
        ({"lora_target_modules": ["q"]}, "lora_target_modules must be some of q_proj, .*, down_proj, got 'q'"),
        ({"lora_dir": "/nothing"}, "lora_dir must be a folder, got '/nothing'"),
        ({"max_loras": 10**6}, "max_loras must be an integer from 1 to 1024"),
        ({"max_lora_rank": 0}, "max_lora_rank must be an integer from 1 to 512"),
    ],
)
def test_flags_that_cannot_work_are_refused(settings: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(folder / "base.gguf", **{**SETTINGS, **settings})


def test_slots_that_the_device_has_no_room_for_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr("jaxserve.runner.adapters.Bank.zeros", full)
    with pytest.raises(ConfigError, match=r"no room: 2 slots for adapters \(--max-loras\) of rank 12 .* take 0 MiB"):
        LLM(folder / "base.gguf", max_loras=2, **SETTINGS)


def test_modules_of_the_flags_are_loaded_at_start(folder: Path) -> None:
    modules = [f"a={folder / 'all'}", {"name": "b", "path": str(folder / "one"), "base_model_name": "tiny"}]
    with LLM(folder / "base.gguf", lora_modules=modules, **SETTINGS) as llm:
        assert [(info.name, info.rank, info.base_model) for info in llm.adapters.infos()][1] == ("b", 1, "tiny")
        assert llm.adapters.num_bytes > 0
        with pytest.raises(RequestError, match="is loaded already"):
            llm.adapters.load("a", str(folder / "one"))
