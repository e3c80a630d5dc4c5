"""The view Live: blocks that rise and fall, what is said of them, and what a stream's end does to it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import httpx
import pytest

from jaxserve.config import ServerConfig
from jaxserve.server import bind
from tests.browser.feed import Feed
from tests.server.fake import FakeEngine
from tests.server.serving import running

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

Open = Callable[..., "Page"]
Shoot = Callable[["Page", str], None]
Watch = Callable[..., "Page"]


@pytest.fixture
def servers() -> Iterator[ExitStack]:
    """Servers that outlive the pages that look at them."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def watch(servers: ExitStack, open_page: Open) -> Watch:
    """Opens the view on a feed, with options of ``open_page``, and waits until it shows something."""

    def watch(feed: Feed, view: str = "live", **options: object) -> Page:
        sock = servers.enter_context(bind(ServerConfig(port=0)))
        page = open_page(f"{servers.enter_context(running(feed.app(), sock))}/#{view}", **options)
        page.locator(f"#{view} .card").first.wait_for()
        if view == "live":
            status(page, "Connected")
        return page

    return watch


def status(page: Page, text: str) -> None:
    """Wait until the view says this of its stream."""
    page.locator("#live-status", has_text=text).wait_for()


def until(holds: Callable[[], object], what: str) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def all_blocks(page: Page) -> dict[str, int]:
    """How many blocks of each kind the table beside the map counts, all of one moment."""
    rows = [row.split("\t") for row in page.locator("#live-counts tbody tr").all_inner_texts()]
    return {kind.strip(): int(number.replace(",", "")) for kind, number, *_ in rows}


def blocks(page: Page, kind: str) -> int:
    """How many blocks of a kind the table counts."""
    return all_blocks(page)[kind]


def pixel(page: Page, x: int, y: int) -> list[int]:
    """A pixel of the map, in CSS pixels."""
    return list(
        page.locator(".map-canvas").evaluate(
            "(c, [x, y]) => [...c.getContext('2d').getImageData(x, y, 1, 1).data]", [x, y]
        )
    )


def test_blocks_rise_and_fall(watch: Watch, screenshot: Shoot) -> None:
    feed = Feed(num_blocks=600, max_running=6)
    page = watch(feed)
    until(lambda: blocks(page, "Active") > 100 and blocks(page, "Shared") > 0 and blocks(page, "Cached") > 0, "a load")
    counts = all_blocks(page)
    assert counts["Free"] + counts["Cached"] + counts["Active"] == 600
    until(lambda: page.locator("#live-latency tbody td").first.inner_text() == "82 ms", "latencies")
    screenshot(page, "live")
    first = pixel(page, 4, 4)
    feed.is_idle = True
    until(lambda: blocks(page, "Active") == 0, "the end")
    assert (blocks(page, "Shared"), page.locator("#live-running").inner_text()) == (0, "0")
    assert page.locator("#live-requests-note").inner_text() == "None."
    until(lambda: pixel(page, 4, 4) != first, "the map follows")
    feed.is_idle = False
    until(lambda: blocks(page, "Active") > 0, "another load")


def test_all_figures_are_shown(watch: Watch) -> None:
    page = watch(Feed())
    until(lambda: page.locator("#live-latency tbody td").first.inner_text() == "82 ms", "latencies")
    latency = page.locator("#live-latency tbody tr").all_inner_texts()
    assert [row.split("\t")[:4] for row in latency] == [
        ["TTFT", "82 ms", "136 ms", "426 ms"],
        ["ITL", "4.1 ms", "6.8 ms", "21.3 ms"],
    ]
    for name in ("generation", "prompt", "running", "queue", "hits", "waste", "preemptions", "recomputed"):
        assert page.locator(f"#live-{name}").inner_text() not in ("", "–"), name
    assert page.locator("#live-drafts .value").all_inner_texts() == ["88 %", "70 %", "48 %", "30 %"]
    assert page.locator("#live-misses .name").all_inner_texts() == ["never seen", "evicted", "less than a block"]
    assert page.locator("#live-adapters .value").all_inner_texts() == [
        "4 · slot 0 · 4.10 MiB",
        "2 · slot 1 · 4.10 MiB",
        "0 · host · 8.20 MiB",
    ]
    assert "of what was computed is padding" in page.locator("#steps-summary").inner_text()


def test_blocks_and_steps_are_told_by_mouse_and_keyboard(watch: Watch) -> None:
    feed = Feed(num_blocks=600, max_running=6)
    page = watch(feed)
    said, frame = page.locator("#map-cell"), page.locator("#map")
    until(lambda: blocks(page, "Shared") > 0, "sharing")
    frame.hover(position={"x": 4, "y": 4})
    until(lambda: "references, shared" in said.inner_text(), "a shared block")
    assert said.inner_text().startswith("Block 1: cmpl-0")
    page.mouse.move(0, 0)
    frame.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert said.inner_text().startswith("Block 2: ")
    page.keyboard.press("End")
    assert said.inner_text().startswith("Block 600: ")
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="Close").wait_for()
    page.keyboard.press("Escape")
    assert said.inner_text().startswith("Point at a block")
    feed.is_idle = True
    until(lambda: blocks(page, "Active") == 0, "the end")
    page.locator("#steps").focus()
    page.keyboard.press("ArrowLeft")
    # A step whose size is that of a bucket has no padding to tell of.
    said = r"(decode|verify) step of tokens: \d+ [^;]+; \d+ rows?, .* ms\."
    assert re.match(said, page.locator("#step-said").inner_text())


def test_a_request_is_shown_with_its_blocks(watch: Watch, screenshot: Shoot) -> None:
    feed = Feed(num_blocks=600, max_running=6)
    page = watch(feed)
    running = page.locator("#live-requests tbody tr", has_text="running")
    until(lambda: running.count() > 3, "requests")
    running.last.get_by_role("link").click()  # the newest: it runs for a while yet
    detail = page.locator("#live-detail")
    detail.get_by_text("Prefill chunks").wait_for()
    name = detail.locator("h2 .mono").inner_text()
    assert name.startswith("cmpl-")
    assert name.endswith("<b>")
    assert detail.locator(".phases").get_attribute("aria-label") == (
        "1.63 s in all: preparing 2 ms, in the queue 13 ms, prefill 210 ms, decode 1.4 s"
    )
    assert detail.locator("#detail-misses .name").all_inner_texts() == ["never seen"]
    assert detail.locator("#detail-drafts .value").all_inner_texts() == ["9", "6", "4", "2"]
    screenshot(page, "live-request")
    feed.is_idle = True  # the list of those that have ended is short
    until(lambda: "finished, stop" in detail.inner_text(), "its end")
    page.reload()
    detail.get_by_text("finished, stop").wait_for()
    detail.get_by_role("link", name="Close").click()
    assert not detail.is_visible()
    page.get_by_text("Finished lately").click()
    page.locator(".finished a", has_text=name).click()
    detail.get_by_text("finished, stop").wait_for()
    page.get_by_label("Request id").fill("nobody's")
    page.get_by_role("button", name="Show").click()
    detail.get_by_text("""The request "nobody's" is not known.""").wait_for()


def test_the_blocks_of_a_chosen_request_stand_out(watch: Watch) -> None:
    feed = Feed(num_blocks=600, max_running=2)
    page = watch(feed)
    until(lambda: page.locator("#live-requests tbody tr").count() > 1, "requests")
    page.get_by_role("button", name="Pause").click()
    until(lambda: feed.num_watchers == 0, "a pause")
    owner = page.evaluate("document.querySelector('#live-requests a').textContent")
    own, free = pixel(page, 4, 4), pixel(page, 200, 300)
    page.locator("#live-requests a").first.click()
    until(lambda: pixel(page, 200, 300) != free, f"others than those of {owner} are dimmed")
    assert pixel(page, 4, 4) == own


def test_a_stream_that_ends_is_opened_again(watch: Watch) -> None:
    feed = Feed()
    page = watch(feed)
    feed.is_broken = True
    status(page, "Connection lost. The server ended the stream. Trying again in 1 s.")
    feed.is_broken = False
    status(page, "Connected")
    until(lambda: feed.num_watchers == 1, "one stream")


def test_nothing_is_asked_while_nobody_looks(watch: Watch) -> None:
    feed = Feed()
    page = watch(feed)
    until(lambda: feed.num_watchers == 1, "a stream")
    page.get_by_role("button", name="Pause").click()
    until(lambda: feed.num_watchers == 0, "a pause")
    assert page.locator("#live-status").inner_text() == "Paused"
    page.get_by_role("button", name="Pause").click()
    until(lambda: feed.num_watchers == 1, "going on")
    page.get_by_role("link", name="Chat").click()
    until(lambda: feed.num_watchers == 0, "another view")
    page.get_by_role("link", name="Live").click()
    until(lambda: feed.num_watchers == 1, "back")
    hide = """(isHidden) => { Object.defineProperty(document, "hidden", { value: isHidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange")); }"""
    page.evaluate(hide, True)
    until(lambda: feed.num_watchers == 0, "a tab in the background")
    page.evaluate(hide, False)
    until(lambda: feed.num_watchers == 1, "the tab in front")
    page.get_by_label("Updates").select_option("every second")
    until(lambda: feed.intervals[-1] == 1000 and feed.num_watchers == 1, "another interval")


def test_who_wants_less_motion_gets_less(watch: Watch) -> None:
    feed = Feed()
    watch(feed, reduced_motion="reduce")
    assert feed.intervals == [1000]


def test_a_large_pool_is_shown_whole(watch: Watch, screenshot: Shoot) -> None:
    page = watch(Feed(num_blocks=100_000, max_running=60), color_scheme="dark")
    until(lambda: blocks(page, "Active") > 2000, "a load")
    frame = page.locator("#map")
    assert frame.evaluate("e => e.scrollHeight <= e.clientHeight + 1")
    screenshot(page, "live-100000-dark")
    page.get_by_label("Larger blocks").click()
    page.get_by_label("Larger blocks").click()
    frame.focus()
    page.keyboard.press("Home")
    page.keyboard.press("End")
    assert page.locator("#map-cell").inner_text().startswith("Block 100,000: ")
    assert frame.evaluate("e => e.scrollTop") > 0
    page.get_by_label("Blocks as large as fit").click()
    assert frame.evaluate("e => e.scrollHeight <= e.clientHeight + 1")


def test_it_fits_a_phone(watch: Watch, screenshot: Shoot) -> None:
    phone = {"viewport": {"width": 375, "height": 667}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}
    page = watch(Feed(num_blocks=600, max_running=6), **phone)
    until(lambda: blocks(page, "Active") > 100, "a load")
    page.locator("#map").tap(position={"x": 4, "y": 4})
    page.locator("#live-detail").get_by_text("Prefill chunks").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    screenshot(page, "phone-live-request")


def test_the_calculator_stands_beside_the_pool(watch: Watch) -> None:
    feed = Feed(num_blocks=600)
    page = watch(feed, "calculator")
    pool: Locator = page.locator("#calculator-live")
    until(lambda: "of 600 blocks in use" in pool.inner_text(), "the pool")
    assert "paged" in pool.inner_text()
    page.get_by_label("Model", exact=True).select_option("stand-in (served here)")
    assert page.locator("#calculator-token").inner_text() == "22.5 KiB"
    assert page.get_by_role("spinbutton", name="Weights").input_value() == "0.2505"
    assert page.get_by_role("spinbutton", name="Longest context").get_attribute("max") == "8192"
    page.get_by_role("link", name="Chat").click()
    until(lambda: feed.num_watchers == 0, "another view")


def test_a_server_is_seen_from_its_first_request_to_its_last(
    serve: Callable[..., str], open_page: Open, screenshot: Shoot
) -> None:
    url = serve(FakeEngine(seconds_per_token=0.02, says="word " * 40))
    page = open_page(f"{url}/#live")
    status(page, "Connected")
    assert all_blocks(page) == {"Free": 100, "Cached": 0, "Active": 0, "Shared": 0}
    body = {"model": "fake-model", "prompt": "x" * 200, "max_tokens": 200}
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=30) for _ in range(4)]
        until(lambda: blocks(page, "Active") >= 4 and page.locator("#live-requests tbody tr").count() == 4, "a load")
        page.locator("#live-requests a").first.click()
        detail = page.locator("#live-detail")
        detail.get_by_text("running").first.wait_for()
        until(lambda: "Block table: " in detail.inner_text(), "its blocks")
        screenshot(page, "live-served")
        ids = {answer.result().raise_for_status().json()["id"] for answer in answers}
    until(lambda: blocks(page, "Active") == 0 and page.locator("#live-running").inner_text() == "0", "the end")
    detail.get_by_text("finished, ").wait_for()
    assert detail.locator("h2 .mono").inner_text() in ids
    assert int(page.locator("#live-latency tbody tr").first.locator("td").last.inner_text()) > 0
    page.get_by_label("Request id").fill("nobody")
    page.get_by_role("button", name="Show").click()
    detail.get_by_text("is known").wait_for()
