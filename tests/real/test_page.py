"""The page before a real model: a conversation whose second question finds the first in the cache."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.browser.test_chat import ask, finished

if TYPE_CHECKING:
    from playwright.sync_api import Page


def test_a_conversation(server: str, open_page: Callable[..., Page]) -> None:
    page = open_page(server)
    page.get_by_label("Max tokens", exact=True).fill("24")
    page.get_by_label("Temperature", exact=True).fill("0")
    answer = ask(page, "Name three rivers of Europe.")
    lengths = set()
    while answer.get_attribute("aria-busy") == "true":
        lengths.add(len(answer.locator(".markdown").inner_text()))
        time.sleep(0.01)
    assert len(lengths) > 3
    assert re.search("Danube|Rhine|Volga|Rhône|Thames", finished(page, answer).inner_text())
    stats = finished(page, ask(page, "And one more?")).locator(".stats").inner_text()
    cached = re.search(r"(\d+) of (\d+) prompt tokens cached", stats)
    assert cached is not None
    assert 0 < int(cached[1]) < int(cached[2])
