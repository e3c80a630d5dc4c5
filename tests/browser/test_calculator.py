"""The view Calculator: its arithmetic against the same in Python, and sliders as a hand or a keyboard moves them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import pytest

from jaxserve.models.config import ModelConfig
from jaxserve.roofline.memory import kv_token_bytes, weight_bytes
from jaxserve.roofline.models import MODELS
from jaxserve.roofline.precision import Precision
from jaxserve.sizing.sessions import mix_of
from tests.server.fake import FakeEngine

if TYPE_CHECKING:
    from playwright.sync_api import Page

Open = Callable[..., "Page"]
Serve = Callable[..., str]
Shoot = Callable[["Page", str], None]

KIB, GIB = 2**10, 2**30
GOLDEN = (math.sqrt(5) - 1) / 2

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


@pytest.fixture
def page(serve: Serve, open_page: Open) -> Page:
    page = open_page(f"{serve(FakeEngine())}/#calculator")
    page.get_by_label("Model", exact=True).wait_for()
    return page


def in_page(page: Page, expression: str, given: object = None) -> Any:
    """What an expression of calculator_model.js (m) and something given (g) comes to."""
    return page.evaluate(
        f"async (g) => {{ const m = await import('/ui/calculator_model.js'); return {expression}; }}", given
    )


def expected(given: dict[str, float]) -> dict[str, Any]:
    """What compare() has to say, from the formulas alone."""
    variance = math.log1p(given["spread"] ** 2)
    center = math.log(given["mean"]) - variance / 2
    size, longest = int(given["blockSize"]), int(given["maxLength"])

    def context(i: int) -> int:
        drawn = math.exp(center + math.sqrt(variance) * NormalDist().inv_cdf((0.5 + i * GOLDEN) % 1))
        return int(min(max(math.floor(drawn + 0.5), 1), longest))

    usable = given["poolBytes"] // (size * given["tokenBytes"]) - 1
    contexts = [context(i) for i in range(int(given["sessions"]))]
    taken, fits = 0, 0
    while (taken := taken + -(-context(fits) // size)) <= usable:
        fits += 1
    region, blocks = -(-longest // size), sum(-(-each // size) for each in contexts)
    return {
        "contexts": contexts,
        "tokens": sum(contexts),
        "poolBlocks": usable,
        "contiguous": (region * size * len(contexts), usable // region),
        "paged": (blocks * size, fits),
    }


GIVEN = {
    "tokenBytes": 128 * KIB,
    "poolBytes": 57 * GIB,
    "sessions": 128,
    "mean": 2048,
    "spread": 0.6,
    "maxLength": 8192,
    "blockSize": 16,
}


def test_both_ways_are_compared_as_in_python(page: Page) -> None:
    for changed in (
        {},
        {"spread": 0},
        {"spread": 2, "blockSize": 128},
        {"mean": 100, "maxLength": 100, "blockSize": 8, "sessions": 7},
        {"poolBytes": 10 * GIB, "tokenBytes": 320 * KIB, "blockSize": 1, "sessions": 512},
    ):
        given = GIVEN | changed
        found, wanted = in_page(page, "m.compare(g)", given), expected(given)
        for name in ("contexts", "tokens", "poolBlocks"):
            assert found[name] == wanted[name], changed
        for side in ("contiguous", "paged"):
            reserved, fits = wanted[side]
            assert found[side] == {
                "reserved": reserved,
                "bytes": reserved * given["tokenBytes"],
                "waste": pytest.approx(1 - wanted["tokens"] / reserved),
                "fits": fits,
            }, changed
    wide = in_page(page, "m.compare(g)", GIVEN | {"maxLength": 131072})
    assert wide["tokens"] / 128 == pytest.approx(2048, rel=0.02)
    empty = in_page(page, "m.compare(g)", GIVEN | {"poolBytes": 0})
    assert (empty["poolBlocks"], empty["contiguous"]["fits"], empty["paged"]["fits"]) == (0, 0, 0)


def test_sessions_fit_as_planned(page: Page) -> None:
    for context, size in ((8192, 16), (1000, 16), (1000, 128), (1, 8)):
        given = GIVEN | {"mean": context, "spread": 0, "blockSize": size}
        found = in_page(page, "m.compare(g)", given)
        mix = mix_of(
            [context], num_blocks=found["poolBlocks"] + 1, block_size=size, max_context=8192, token_bytes=128 * KIB
        )
        for side in ("paged", "contiguous"):
            planned = getattr(mix, side)
            assert found[side]["fits"] == planned.sessions
            assert found[side]["reserved"] / given["sessions"] == planned.tokens
            assert found[side]["waste"] == pytest.approx(planned.wasted)


def test_many_small_sessions_are_counted_from_their_mean(page: Page) -> None:
    given = {
        "tokenBytes": 1,
        "poolBytes": 1e9,
        "sessions": 1,
        "mean": 100,
        "spread": 0,
        "maxLength": 100,
        "blockSize": 10,
    }
    assert in_page(page, "m.compare(g).paged.fits", given) == (10**8 - 1) // 10


def test_shapes_weigh_what_the_roofline_says(page: Page) -> None:
    names = {
        "SmolLM2 135M": "smollm2-135m",
        "Llama 3.2 1B": "llama-3.2-1b",
        "Llama 3.1 8B": "llama-3.1-8b",
        "Llama 3.1 70B": "llama-3.1-70b",
    }
    found = in_page(
        page,
        """m.SHAPES.map((shape) => [shape.name, shape.maxLength, m.bytesPerToken(shape, 2), m.bytesPerToken(shape, 4),
            ...m.WEIGHT_FORMS.slice(0, 3).map((form) => m.weightBytes(shape, form))])""",
    )
    shapes = {name: numbers for name, *numbers in found}
    for name, ours in names.items():
        model: ModelConfig = MODELS[ours]
        assert shapes[name] == [
            model.max_position,
            kv_token_bytes(model, Precision()),
            kv_token_bytes(model, Precision(kv="float32")),
            weight_bytes(model, Precision("float32", "float32")),
            weight_bytes(model, Precision()),
            weight_bytes(model, Precision(weights="int8")),
        ]


REFUSED: list[tuple[Any, str]] = [
    ("{", "This is not JSON: "),
    ("[]", "A config.json is an object with fields, { … }."),
    ({"num_hidden_layers": None}, "num_hidden_layers is missing."),
    ({"num_hidden_layers": 0}, "num_hidden_layers: a whole number from 1 to 2147483648 is needed, not 0."),
    ({"num_hidden_layers": "80"}, 'num_hidden_layers: a whole number from 1 to 2147483648 is needed, not "80".'),
    ({"hidden_size": 1e300}, "hidden_size: a whole number from 1 to 2147483648 is needed, not 1e+300."),
    ({"num_key_value_heads": 7}, "num_key_value_heads: 7 does not divide num_attention_heads 64."),
    ({"hidden_size": 100}, "head_dim is missing, and hidden_size 100 is no multiple of num_attention_heads 64."),
    ({"kv_lora_rank": 512}, "kv_lora_rank: this model compresses its KV; the formula does not hold for it."),
    ({"vocab_size": {"a": "b" * 99}}, "vocab_size: a whole number"),
]


def test_a_config_that_is_none_is_refused_in_one_line(page: Page) -> None:
    page.get_by_text("Another model: its config.json").click()
    chosen = page.get_by_label("Model", exact=True).input_value()
    for changed, says in REFUSED:
        text = changed if isinstance(changed, str) else json.dumps(CONFIG | changed)
        page.get_by_label("Paste it here").fill(text)
        page.get_by_role("button", name="Use it").click()
        error = page.locator("#calculator-config-error").text_content() or ""
        assert error.startswith(says)
        assert len(error) < 160
        assert "\n" not in error
        assert page.get_by_label("Model", exact=True).input_value() == chosen


def test_a_config_is_taken_from_a_file_and_by_hand(page: Page) -> None:
    nested = {"architectures": ["<img src=x onerror=alert(1)>"], "text_config": {**CONFIG, "head_dim": 64}}
    model = page.locator("#calculator-model option:checked")
    page.get_by_text("Another model: its config.json").click()
    page.get_by_label("Paste it here").fill(json.dumps(nested))
    page.get_by_role("button", name="Use it").click()
    assert model.text_content() == "<img src=x onerror=alert(1)>"
    assert page.locator("#calculator-token").text_content() == "160 KiB"
    experts = {**CONFIG, "num_local_experts": 8, "sliding_window": 4096}
    page.get_by_label("A config.json from this computer").set_input_files(
        {"name": "config.json", "mimeType": "application/json", "buffer": json.dumps(experts).encode()}
    )
    page.get_by_text("A mixture of experts").wait_for()
    assert page.locator("#calculator-token").text_content() == "320 KiB"
    assert model.text_content() == "LlamaForCausalLM"


def test_the_70b_model_takes_what_it_is_known_to(page: Page, screenshot: Shoot) -> None:
    page.get_by_label("Model", exact=True).select_option("Llama 3.1 70B")
    for name, value in (
        ("Mean context", "8192"),
        ("Spread", "0"),
        ("Concurrent sessions", "32"),
        ("GPU memory", "320"),
    ):
        page.get_by_role("spinbutton", name=name).fill(value)
    text = {name: page.locator(f"#calculator-{name}").text_content() for name in ("token", "session", "all")}
    assert text == {"token": "320 KiB", "session": "2.5 GiB", "all": "80 GiB"}
    rows = page.locator("#calculator-table tbody tr").all_inner_texts()
    assert rows[0].split("\t") == ["KV reserved", "80 GiB", "80 GiB"]
    screenshot(page, "calculator-70b")


def test_sliders_move_with_the_keyboard_and_say_where_they_are(page: Page) -> None:
    fits = page.locator("#paged-title ~ .verdict strong").first
    waste = page.locator("#paged-title ~ .verdict strong").last
    before = int(fits.inner_text().replace(",", ""))
    memory = page.get_by_role("slider", name="GPU memory")
    memory.focus()
    page.keyboard.press("ArrowRight")
    assert memory.get_attribute("aria-valuetext") == "96 GiB"
    assert page.get_by_role("spinbutton", name="GPU memory").input_value() == "96"
    assert int(fits.inner_text().replace(",", "")) > before
    blocks = page.get_by_role("slider", name="Block size")
    blocks.focus()
    page.keyboard.press("End")
    assert blocks.get_attribute("aria-valuetext") == "1,024 tokens"
    largest = waste.inner_text()
    page.keyboard.press("Home")
    wanted = expected(GIVEN | {"blockSize": 1024})
    share = 100 * (1 - wanted["tokens"] / wanted["paged"][0])
    assert (largest, waste.inner_text()) == (f"{share:.0f} %", "0 %")
    page.get_by_text("Paged memory holds", exact=False).first.wait_for()


def test_a_number_out_of_range_is_told_and_not_computed_with(page: Page) -> None:
    number = page.get_by_role("spinbutton", name="Concurrent sessions")
    headline = page.locator("#calculator-headline")
    before = headline.inner_text()
    for wrong in ("0", "513", "1.5", ""):
        number.fill(wrong)
        assert page.locator("#calculator-sessions-error").inner_text() == "A whole number from 1 to 512, please."
        assert headline.inner_text() == before
    number.blur()
    assert number.input_value() == "128"
    assert page.locator("#calculator-sessions-error").inner_text() == ""
    number.fill("3")
    assert headline.inner_text().startswith("All 3 sessions fit")


def test_weights_that_fill_the_memory_are_told(page: Page) -> None:
    page.get_by_role("spinbutton", name="GPU memory").fill("8")
    assert page.locator("#calculator-headline").inner_text() == "The weights alone fill this memory."
    page.get_by_label("Weights as").select_option("Q4_0 (4.5 bit)")
    assert page.locator("#calculator-headline").inner_text() != "The weights alone fill this memory."


def test_columns_are_drawn_as_high_as_they_are(page: Page, screenshot: Shoot) -> None:
    page.get_by_role("spinbutton", name="Concurrent sessions").fill("4")
    page.get_by_role("spinbutton", name="Mean context").fill("4096")
    page.get_by_role("spinbutton", name="Spread").fill("0")
    filled = """(canvas) => [.25, .75].map((y) => {
        const [red, green, blue, alpha] = canvas.getContext("2d").getImageData(8, y * canvas.height, 1, 1).data;
        return alpha ? `${red} ${green} ${blue}` : "";
    })"""
    contiguous, paged = (page.locator(f"#{side}-title ~ canvas").evaluate(filled) for side in ("contiguous", "paged"))
    assert contiguous[0] != contiguous[1]
    assert "" not in contiguous
    assert paged == ["", contiguous[1]]
    screenshot(page, "calculator")
