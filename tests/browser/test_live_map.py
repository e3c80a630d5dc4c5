"""The block map's parts by themselves: how long 100,000 blocks take, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.server.fake import FakeEngine

if TYPE_CHECKING:
    from playwright.sync_api import Page

MOST_MS = 16  # a frame at 60 Hz

MEASURE = """async ([size, share, zoom]) => {
    const [{ BlockMap }, { Pool }] = await Promise.all([import("/ui/live_map.js"), import("/ui/live_model.js")]);
    const encode = (array) => {
        const bytes = new Uint8Array(array.buffer), parts = [];
        for (let i = 0; i < bytes.length; i += 8192) parts.push(String.fromCharCode(...bytes.subarray(i, i + 8192)));
        return btoa(parts.join(""));
    };
    const map = new BlockMap({ describe: () => "", oncell: () => {} });
    document.getElementById("live").append(map.root);
    const none = { owners: encode(new Uint16Array(size)), refs: encode(new Uint8Array(size)) };
    const pool = new Pool({ num_blocks: size, ...none });
    map.show(pool);
    if (zoom) map.zoom(zoom);
    const pixels = map.root.querySelector("canvas").getContext("2d");
    const count = Math.round(size * share), times = [];
    for (let round = 0; round < 100; round += 1) {
        const cells = Uint32Array.from({ length: count }, (_, i) => (round * 7919 + i * 47) % size);
        const changed = {
            blocks: encode(cells),
            owners: encode(Uint16Array.from(cells, (_, i) => 2 + (round * 31 + i) % 500)),
            refs: encode(Uint8Array.from(cells, (_, i) => 1 + i % 3)),
        };
        const start = performance.now();
        map.changed(pool.apply(changed));
        map.draw();
        pixels.getImageData(0, 0, 1, 1);  // waits until it is drawn
        times.push(performance.now() - start);
    }
    map.root.remove();
    times.sort((a, b) => a - b);
    return [pool.active, times[50], times[95]];
}"""


@pytest.fixture
def page(serve: Callable[..., str], open_page: Callable[..., Page]) -> Page:
    page = open_page(f"{serve(FakeEngine())}/#live")
    page.get_by_role("button", name="Pause").click()
    return page


def test_a_hundred_thousand_blocks_do_not_lag(page: Page) -> None:
    for share, zoom in ((0.02, 0), (0.02, 5), (0.1, 0)):
        active, middle, most = page.evaluate(MEASURE, [100_000, share, zoom])
        print(f"{share:.0%} of 100,000 blocks change, zoom {zoom}: {middle:.1f} ms, one in twenty {most:.1f} ms")
        assert active > 50_000
        assert middle < MOST_MS, f"{share:.0%} of all change: {middle:.1f} ms, one in twenty {most:.1f} ms"


def test_changes_that_cannot_be_are_refused(page: Page) -> None:
    apply = """async (changed) => {
        const { Pool } = await import("/ui/live_model.js");
        const pool = new Pool({ num_blocks: 8, owners: btoa("\\0".repeat(16)), refs: btoa("\\0".repeat(8)) });
        try { pool.apply(changed); } catch (error) { return error.name; }
        return "";
    }"""
    good = {"blocks": "BwAAAA==", "owners": "AgA=", "refs": "AQ=="}
    assert page.evaluate(apply, good) == ""
    assert page.evaluate(apply, good | {"owners": "AgACAA=="}) == "RangeError"  # two owners for one cell
    assert page.evaluate(apply, good | {"blocks": "AAAA"}) == "RangeError"  # three bytes of four
    assert page.evaluate(apply, good | {"blocks": "CAAAAA=="}) == "RangeError"  # cell 8 of 0 to 7
    assert page.evaluate(apply, good | {"refs": "?"}) == "InvalidCharacterError"
