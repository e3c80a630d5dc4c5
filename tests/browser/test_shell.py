"""The page around the views: the key, themes, the keyboard, phones, and a proxy in front."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.browser.test_chat import ask, finished
from tests.server.fake import FakeEngine

if TYPE_CHECKING:
    from playwright.sync_api import Page

Open = Callable[..., "Page"]
Serve = Callable[..., str]
Shoot = Callable[["Page", str], None]

VIEWS = ("Chat", "Live", "Calculator")
PHONE = {"width": 375, "height": 667}


def test_a_key_is_asked_for_and_kept_for_the_tab(serve: Serve, open_page: Open, screenshot: Shoot) -> None:
    url = serve(FakeEngine(says="ok"), api_key=("secret",))
    page = open_page(url)
    dialog = page.get_by_role("dialog", name="This server needs a key")
    dialog.wait_for()
    screenshot(page, "key")
    for _ in range(2):
        page.keyboard.press("Escape")
        dialog.wait_for()
    page.get_by_label("API key").fill("wrong")
    page.keyboard.press("Enter")
    dialog.get_by_text("The server does not accept this key.").wait_for()
    page.get_by_label("API key").fill(" secret ")
    page.keyboard.press("Enter")
    finished(page, ask(page, "Hi"))
    page.reload()
    finished(page, ask(page, "Hi"))
    assert not dialog.is_visible()
    assert page.evaluate("JSON.stringify([sessionStorage, localStorage, document.cookie])").count("secret") == 1


def test_a_browser_that_stores_nothing_shows_the_page(serve: Serve, open_page: Open) -> None:
    url = serve(FakeEngine(says="ok"), api_key=("secret",))
    refuses = "{ get() { throw new DOMException('denied', 'SecurityError'); } }"
    script = f"for (const name of ['localStorage', 'sessionStorage']) Object.defineProperty(window, name, {refuses});"
    page = open_page(url, init_script=script)
    page.get_by_label("API key").fill("secret")
    page.keyboard.press("Enter")
    finished(page, ask(page, "Hi"))


def test_themes_follow_the_system_until_one_is_chosen(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(FakeEngine()), color_scheme="dark")

    def is_light() -> bool:
        return int(page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")) > 128

    button = page.get_by_role("button", name="Theme")
    assert not is_light()
    page.emulate_media(color_scheme="light")
    assert is_light()
    for _ in range(2):
        button.click()
    page.reload()
    assert not is_light()
    button.click()
    assert is_light()
    page.emulate_media(color_scheme="dark")
    assert not is_light()
    button.click()
    assert is_light()


def test_on_a_phone_nothing_is_wider_than_the_screen(serve: Serve, open_page: Open, screenshot: Shoot) -> None:
    url = serve(FakeEngine(says="A table:\n\n|" + "a long title|" * 9 + "\n|" + "---|" * 9 + "\n\n`" + "x" * 99 + "`"))
    page = open_page(url, viewport=PHONE, has_touch=True, is_mobile=True, device_scale_factor=2)
    finished(page, ask(page, "https://example.org/" + "long" * 40))
    for view in VIEWS:
        page.get_by_role("link", name=view, exact=True).click()
        page.locator(f"#{view.lower()}").wait_for()
        screenshot(page, f"phone-{view.lower()}")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], view
    page.get_by_role("link", name="Chat", exact=True).click()
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature", exact=True).wait_for()
    screenshot(page, "phone-settings")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


NAME_OF = """e => e.getAttribute("aria-label") ?? e.labels?.[0]?.textContent ?? e.textContent.trim()"""


def test_everything_has_a_name_and_can_be_reached_with_the_keyboard(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(FakeEngine(says="ok")))
    finished(page, ask(page, "Hi"))
    wanted = {"Skip to the content", *VIEWS, "Conversation", "Copy this answer", "Your message", "Send", "New chat"}
    wanted |= {"Settings", "Model", "System prompt", "Temperature", "Seed"}
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            f"[({NAME_OF})(document.activeElement), getComputedStyle(document.activeElement).outlineStyle]"
        )
        # The frame of the message's field changes its colour instead.
        assert outline != "none" or name == "Your message" or page.evaluate("document.activeElement === document.body")
        reached.add(name)
        if wanted <= reached:
            break
    assert wanted - reached == set()
    page.get_by_role("link", name="Calculator").focus()
    page.keyboard.press("Enter")
    page.locator("#calculator").wait_for()
    used = "button, input, select, textarea, a[href], summary"
    for view in VIEWS:
        page.get_by_role("link", name=view, exact=True).click()
        page.locator(f"#{view.lower()}").wait_for()
        assert page.get_by_role("link", name=view, exact=True).get_attribute("aria-current") == "page"
        assert page.title() == f"{view} · jaxserve"
        assert page.evaluate(f"[...document.querySelectorAll('{used}')].filter(e => !({NAME_OF})(e)).length") == 0


def test_a_proxy_may_show_it_anywhere(serve: Serve, open_page: Open) -> None:
    url = serve(FakeEngine(says="ok"))
    # What a proxy does that takes a path off.
    context = open_page(url).context
    page = context.new_page()
    page.route("**/llm/**", lambda route: route.continue_(url=route.request.url.replace("/llm/", "/")))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{url}/llm/#chat")
    finished(page, ask(page, "Hi"))
    assert len(asked) > 5
    assert [one for one in asked if not one.startswith(f"{url}/llm/")] == []
