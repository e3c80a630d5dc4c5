"""The view Chat: what a reader sees of an answer, and what a model cannot do to the page."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxserve.outputs import AdapterInfo
from tests.server.fake import FakeAdapters, FakeEngine

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

Open = Callable[..., "Page"]
Serve = Callable[..., str]
Shoot = Callable[["Page", str], None]

MARKDOWN = """## Reversing a list

Two ways, *both* short:

1. `items[::-1]` makes a **new** list
2. `items.reverse()` changes it in place

```python
def reverse(items: list[int]) -> list[int]:
    return items[::-1]
```

| way | new list |
|---|---|
| slice | yes |
| method | no |

> See [the documentation](https://docs.python.org/3/).
"""

ATTACK = """<script>alert(1)</script> <img src=x onerror="alert(2)">
<svg onload=alert(3)><a xlink:href="javascript:alert(4)">x</a></svg>
<iframe srcdoc="<script>alert(5)</script>"></iframe>
<style>body{display:none}</style> <form action="https://evil.test"><input name=key></form>

[click](javascript:alert(6)) [data](data:text/html,<script>alert(7)</script>) <a href="javascript:alert(8)">y</a>
![picture](https://evil.test/pixel.png) [good](https://good.test/) [rel](/abort)
["><img src=x onerror=alert(9)>](https://good.test/"onmouseover="alert(10))

```html"><script>alert(11)</script>
<script>alert(12)</script>
```
<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=1 onerror=alert(13)&gt;">
"""


def ask(page: Page, text: str) -> Locator:
    """Send a message; gives the answer's element."""
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")
    return page.locator(".answer").last


def finished(page: Page, answer: Locator) -> Locator:
    answer.and_(page.locator("[aria-busy=false]")).wait_for()
    return answer


def test_an_answer_grows_token_by_token_and_tells_what_it_cost(
    serve: Serve, open_page: Open, screenshot: Shoot
) -> None:
    engine = FakeEngine(says="one two three four five six seven eight", seconds_per_token=0.02)
    page = open_page(serve(engine))
    answer = ask(page, "Count, please, as far as you like to.")
    text = answer.locator(".markdown")
    lengths = {len(text.inner_text().strip())}
    while answer.get_attribute("aria-busy") == "true":
        lengths.add(len(text.inner_text().strip()))
        time.sleep(0.01)
    assert len(lengths) > 4
    assert text.inner_text() == engine.says
    stats = answer.locator(".stats").inner_text()
    assert re.search(r"First token \d+ ms", stats)
    speed = re.search(r"([\d.]+) tokens/s", stats)
    assert speed is not None
    assert 2 < float(speed[1]) < 250  # of 50, on whatever machine
    assert "39 tokens" in stats
    assert "16 of 57 prompt tokens cached" in stats
    details = answer.get_by_role("link", name="Details").get_attribute("href")
    assert details is not None
    assert re.fullmatch(r"#live/requests/chatcmpl-[0-9a-f]{32}", details)
    screenshot(page, "chat-short")


def test_stop_ends_the_request(serve: Serve, open_page: Open) -> None:
    engine = FakeEngine(seconds_per_token=0.02)
    page = open_page(serve(engine))
    stops: list[Callable[[], None]] = [
        page.get_by_role("button", name="Stop").click,
        lambda: page.keyboard.press("Escape"),
    ]
    for stop in stops:
        answer = ask(page, "Tell me a story.")
        answer.locator(".markdown").get_by_text("Hello").wait_for()
        stop()
        finished(page, answer)
        assert "Stopped" in answer.locator(".stats").inner_text()
        page.get_by_role("button", name="Send").wait_for()
        deadline = time.monotonic() + 5
        while engine.running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not engine.running
    assert engine.aborted == 2


def test_adapters_are_picked_by_name_and_settings_are_sent(serve: Serve, open_page: Open) -> None:
    info = AdapterInfo("sql-expert", "adapters/sql", None, "00", 8, ("q",), 512, True, 0, 1)
    engine = FakeEngine(says="ok", adapters=FakeAdapters(known={"sql-expert": info}))
    page = open_page(serve(engine))
    page.get_by_label("Model").select_option("sql-expert")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature", exact=True).fill("0.3")
    page.get_by_label("Top k, slider").fill("40")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Stop at").fill("###\n\nEND")
    answer = finished(page, ask(page, "Hi"))
    assert answer.locator(".who").inner_text() == "sql-expert"
    assert engine.adapters.used == ["sql-expert"]
    params = engine.submitted[0]["params"]
    assert (params.temperature, params.top_k, params.seed, list(params.stop)) == (0.3, 40, 7, ["###", "END"])
    assert params.top_p == 1.0
    assert bytes(engine.submitted[0]["ids"]) == b"<system>Be brief.</><user>Hi</><assistant>"
    page.get_by_label("Temperature", exact=True).fill("9")
    page.get_by_label("Your message").fill("more")
    page.keyboard.press("Enter")
    assert page.locator("#chat-temperature:invalid").count() == 1
    assert len(engine.submitted) == 1
    page.get_by_role("button", name="Reset").click()
    page.get_by_label("Your message").press("Enter")
    finished(page, page.locator(".answer").nth(1))
    assert engine.submitted[1]["params"].seed is None
    assert bytes(engine.submitted[1]["ids"]).endswith(b"<user>Hi</><assistant>ok</><user>more</><assistant>")


def test_earlier_messages_are_edited_and_answers_given_again(serve: Serve, open_page: Open) -> None:
    engine = FakeEngine(says="ok")
    page = open_page(serve(engine))
    for text in ("first", "second"):
        finished(page, ask(page, text))
    page.get_by_role("button", name="Answer once more").last.click()
    finished(page, page.locator(".answer").last)
    assert bytes(engine.submitted[2]["ids"]) == bytes(engine.submitted[1]["ids"])
    page.locator(".user").first.hover()
    page.get_by_role("button", name="Edit this message").first.click()
    assert page.get_by_label("Your message").input_value() == "first"
    finished(page, ask(page, "other"))
    assert bytes(engine.submitted[3]["ids"]) == b"<user>other</><assistant>"
    assert page.locator(".message").count() == 2
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".message").count() == 0


def test_markdown_and_code(serve: Serve, open_page: Open, screenshot: Shoot) -> None:
    page = open_page(serve(FakeEngine(says=MARKDOWN)), permissions=["clipboard-read", "clipboard-write"])
    answer = finished(page, ask(page, "How do I reverse a list in Python?"))
    assert answer.locator("ol > li").count() == 2
    assert answer.locator("td").count() == 4
    assert answer.locator(".code-bar").inner_text().split() == ["python", "Copy"]
    link = answer.get_by_role("link", name="the documentation")
    assert link.get_attribute("rel") == "noopener noreferrer nofollow"
    answer.get_by_role("button", name="Copy this code").click()
    answer.get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()").startswith("def reverse(items")
    answer.get_by_role("button", name="Copy this answer").click()
    page.wait_for_function("async () => (await navigator.clipboard.readText()).startsWith('## Reversing')")
    screenshot(page, "chat")
    page.emulate_media(color_scheme="dark")
    screenshot(page, "chat-dark")


def test_nothing_that_is_said_becomes_a_part_of_the_page(serve: Serve, open_page: Open, screenshot: Shoot) -> None:
    name = '"><img src=x onerror=alert(1)>'
    page = open_page(serve(FakeEngine(says=ATTACK, max_model_len=4096, model_name=name)))
    answer = finished(page, ask(page, ATTACK))
    assert answer.locator(".who").inner_text() == name
    assert page.locator("#served").inner_text() == name
    log = page.locator(".log")
    assert page.locator("img:not(.brand img)").count() == 0
    assert log.locator("script, img, svg, iframe, style, form, input, math, object, embed").count() == 0
    attributes = log.evaluate(
        "log => [...log.querySelectorAll('*')].flatMap(e => [...e.attributes].map(a => `${a.name}=${a.value}`))"
    )
    assert not [a for a in attributes if re.match(r"on|srcdoc=|style=|formaction=", a)]
    hrefs = log.evaluate("log => [...log.querySelectorAll('a[href]')].map(a => a.getAttribute('href'))")
    assert not [href for href in hrefs if not re.match(r"https://|#live/", href)]
    assert {"https://good.test/", "https://evil.test/pixel.png"} <= set(hrefs)
    for text in (log.locator(".bubble").inner_text(), answer.inner_text()):
        assert "<script>alert(1)</script>" in text
        assert 'onerror="alert(2)"' in text
    screenshot(page, "chat-attack")


def test_errors_are_readable(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(FakeEngine(fails_at=3)))
    answer = finished(page, ask(page, "x" * 600))
    assert "512" in answer.locator(".error").inner_text()
    page.get_by_role("button", name="New chat").click()
    answer = finished(page, ask(page, "Hi"))
    assert "Hel" in answer.locator(".markdown").inner_text()
    assert answer.locator(".error").inner_text() == "the engine failed to generate this answer: the fake fails."
    body = '{"error": {"message": "This model has no chat template to use: none", "type": "BadRequestError"}}'
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, body=body))
    answer = finished(page, ask(page, "Hi"))
    assert "POST /v1/completions" in answer.locator(".error").inner_text()
    page.unroute_all()
    page.context.set_offline(True)
    answer = finished(page, ask(page, "Hi"))
    assert answer.locator(".error").inner_text() == "The server cannot be reached."
    page.context.set_offline(False)
    with page.expect_request("**/v1/chat/completions") as asked:
        finished(page, ask(page, "Once more"))
    # Templates insist on turns: questions that were not answered are left out.
    assert [message["role"] for message in asked.value.post_data_json["messages"]] == ["user", "assistant", "user"]
