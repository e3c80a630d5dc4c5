"""The page's files as a browser gets them: types, caching, the policy, and who may have what."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import httpx
import pytest

from tests.server.test_access import bearer, client_of

pytestmark = pytest.mark.anyio

ASSETS = Path(str(resources.files("jaxserve.server.ui").joinpath("assets")))
SCRIPTS = sorted(path.relative_to(ASSETS).as_posix() for path in ASSETS.rglob("*.*js"))


async def test_the_page_and_its_files(client: httpx.AsyncClient) -> None:
    page = await client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    linked = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert {"ui/app.js", "ui/style.css", "ui/icon.svg"} <= set(linked)
    types = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
    for name in {*linked, *(f"ui/{script}" for script in SCRIPTS)}:
        assert not name.startswith("/"), "a proxy may show the page under a path"
        file = await client.get(f"/{name}")
        assert file.status_code == 200, name
        assert file.headers["content-type"] == types[name.rpartition(".")[2].removeprefix("m")], name
        assert file.content == (ASSETS / name.removeprefix("ui/")).read_bytes()
        assert file.headers["x-content-type-options"] == "nosniff"
    for path in ("/ui/index.html", "/ui/", "/ui", "/ui/__init__.py", "/ui/../__init__.py", "/ui/vendor/README.md"):
        assert (await client.get(path)).status_code == 404, path
    assert (await client.post("/")).status_code == 405


async def test_scripts_are_told_from_text_by_a_strict_policy(client: httpx.AsyncClient) -> None:
    page = await client.get("/")
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy.pop("default-src") == "'none'"
    assert policy["script-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert not re.search(r"unsafe|\*|https?:", page.headers["content-security-policy"])
    assert "<style" not in page.text
    assert not re.search(r"<script(?! type=\"module\" src=)", page.text)
    assert not re.search(r"\s(on\w+|style)=", page.text)
    assert page.headers["referrer-policy"] == "no-referrer"
    assert page.headers["x-frame-options"] == "DENY"


@pytest.mark.parametrize("name", [name for name in SCRIPTS if not name.startswith("vendor/")])
def test_scripts_make_no_html_of_strings_and_know_no_other_host(name: str) -> None:
    source = (ASSETS / name).read_text(encoding="utf-8")
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|https?://(?!www\.w3\.org)",
        source,
    )
    for imported in re.findall(r'from "([^"]+)"', source):
        assert imported.startswith("./")
        assert (ASSETS / imported).is_file()


async def test_what_a_browser_has_is_sent_once(client: httpx.AsyncClient) -> None:
    for path in ("/", "/ui/app.js"):
        first = await client.get(path)
        assert first.headers["cache-control"] == "no-cache"
        again = await client.get(path, headers={"if-none-match": f'"other", {first.headers["etag"]}'})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == first.headers["etag"]
        changed = await client.get(path, headers={"if-none-match": '"other"'})
        assert changed.content == first.content
        head = await client.head(path)
        assert head.status_code == 200
        assert head.headers["content-length"] == str(len(first.content))


async def test_without_a_key_the_page_is_a_refusal_that_asks_for_one() -> None:
    async with client_of(api_key=("one",), admin_api_key=("boss",)) as client:
        for headers in ({}, bearer("wrong"), {"if-none-match": "*"}):
            refused = await client.get("/", headers=headers)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.headers["content-security-policy"]
            assert "<!doctype html>" in refused.text
        for key in ("one", "boss"):
            assert (await client.get("/", headers=bearer(key))).text == refused.text
        assert (await client.get("/ui/app.js")).status_code == 200
        for path in ("/v1/models", "/ui", "/uix", "/nowhere"):
            assert (await client.get(path)).status_code == 401


async def test_it_can_be_left_out() -> None:
    async with client_of(ui=False) as client:
        for path in ("/", "/ui/app.js"):
            assert (await client.get(path)).status_code == 404
    async with client_of(ui=False, api_key=("one",)) as client:
        for path in ("/", "/ui/app.js"):
            refused = await client.get(path)
            assert refused.json()["error"]["type"] == "AuthenticationError"
            assert (await client.get(path, headers=bearer("one"))).status_code == 404


async def test_a_proxy_may_show_it_under_a_path() -> None:
    async with client_of(root_path="/llm", api_key=("one",)) as client:
        assert (await client.get("/")).status_code == 401
        assert (await client.get("/ui/app.js")).status_code == 200
