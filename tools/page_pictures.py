"""Takes the pictures of the page that README.md shows, from a server that runs: chat, live view under load, calculator.

    jaxserve serve smollm2-135m &
    python tools/page_pictures.py http://127.0.0.1:8000

Needs chromium and playwright, as the tests of the page do.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import threading
from pathlib import Path

import httpx
from playwright.sync_api import Page, sync_playwright

FOLDER = Path(__file__).parents[1] / "docs" / "images"
QUESTION = "Explain in a short list why leaves are green, then show a Python function that adds two numbers."
TOPICS = ("rivers", "bread", "the moon", "clocks", "whales", "bridges", "tea", "maps")


def main() -> int:
    """Writes chat.png, live.png and calculator.png."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url", help="address of a server that runs")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the pictures (default: docs/images)")
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("page_pictures: there is no chromium (on Debian: apt install chromium).", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme=options.theme)
        page.set_default_timeout(120_000)
        page.goto(options.url)
        _chat(page)
        page.screenshot(path=options.out / "chat.png")
        ended = _load(options.url)
        _show(page, "Live")
        page.wait_for_timeout(6_000)
        page.screenshot(path=options.out / "live.png")
        _show(page, "Calculator")
        page.wait_for_timeout(500)
        page.screenshot(path=options.out / "calculator.png")
        browser.close()
    for thread in ended:
        thread.join()
    return 0


def _chat(page: Page) -> None:
    """Two questions, so that the second one's prompt is partly cached."""
    page.get_by_label("Max tokens", exact=True).fill("160")
    page.get_by_label("Temperature", exact=True).fill("0")
    for question in ("Hello, who are you?", QUESTION):
        page.get_by_label("Your message").fill(question)
        page.keyboard.press("Enter")
        page.locator(".answer").last.and_(page.locator("[aria-busy=false]")).wait_for()


def _show(page: Page, view: str) -> None:
    page.get_by_role("link", name=view, exact=True).click()


def _load(url: str) -> list[threading.Thread]:
    """Requests that share the beginning of their prompts."""

    def ask(topic: str) -> None:
        messages = [
            {"role": "system", "content": "You are a patient teacher. " * 12},
            {"role": "user", "content": f"Tell me a long story about {topic}."},
        ]
        body = {"messages": messages, "max_tokens": 300, "ignore_eos": True}
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).raise_for_status()

    threads = [threading.Thread(target=ask, args=(topic,)) for topic in TOPICS]
    for thread in threads:
        thread.start()
    return threads


if __name__ == "__main__":
    sys.exit(main())
