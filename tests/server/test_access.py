"""Keys of clients and operators, and browsers of other origins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.server import create_app
from tests.server.fake import FakeEngine
from tests.server.test_errors import error_of

pytestmark = pytest.mark.anyio

CONTROL = ("/reset_prefix_cache", "/abort", "/pause", "/resume", "/v1/load_lora_adapter", "/start_profile")


@asynccontextmanager
async def client_of(engine: FakeEngine | None = None, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine or FakeEngine(), ServerConfig(**settings))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + key.encode()}


async def test_a_key_is_needed_for_all_but_health() -> None:
    async with client_of(api_key=("one", "zwei ü")) as client:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Bearer one two"},
            {"authorization": "Bearer "},
            {"authorization": "one"},
            {"authorization": "Basic one"},
            {"x-api-key": "wrong"},
        ):
            for path in ("/v1/models", "/metrics", "/version", "/nowhere", "/health/", "http://test//health", *CONTROL):
                response = await client.get(path, headers=headers)
                assert error_of(response, 401)["type"] == "AuthenticationError"
                assert response.headers["www-authenticate"] == "Bearer"
                assert response.headers["x-request-id"]
        for path in ("/health", "/ping"):
            assert (await client.get(path)).status_code == 200
        assert (await client.post("/ping")).status_code == 200
        for key in ("one", "zwei ü"):
            assert (await client.get("/v1/models", headers=bearer(key))).status_code == 200
        assert (await client.get("/v1/models", headers={"x-api-key": "one"})).status_code == 200


async def test_keys_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# team a\nkey-a  \n\n  key-b\n", encoding="utf-8")
    async with client_of(api_key=("c",), api_key_file=str(file)) as client:
        for key, status in (("key-a", 200), ("key-b", 200), ("c", 200), ("# team a", 401), ("", 401)):
            assert (await client.get("/v1/models", headers=bearer(key))).status_code == status
    file.write_text("# nothing\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no key"):
        ServerConfig(api_key_file=str(file)).client_keys()
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        create_app(FakeEngine(), ServerConfig(api_key_file=str(tmp_path / "none")))


async def test_operators_alone_control_the_server() -> None:
    async with client_of(api_key=("user",), admin_api_key=("root",)) as client:
        for path in CONTROL:
            assert error_of(await client.post(path), 401)
            assert error_of(await client.post(path, headers=bearer("user")), 403)["type"] == "PermissionDeniedError"
            assert error_of(await client.post(path + "/", headers=bearer("user")), 403)
            assert error_of(await client.post(path + "%0A"), 401)
            assert error_of(await client.post(path + "%0A", headers=bearer("user")), 403)
            assert (await client.post(path, headers=bearer("root"))).status_code not in (401, 403)
        assert (await client.get("/v1/models", headers=bearer("root"))).status_code == 200
    async with client_of(admin_api_key=("root",)) as client:
        assert (await client.get("/v1/models")).status_code == 200
        assert error_of(await client.post("/pause"), 401)


async def test_what_one_key_may_have_under_way() -> None:
    engine = FakeEngine(seconds_per_token=0.01)
    keys = {"api_key": ("a", "b"), "admin_api_key": ("root",)}
    async with client_of(engine, max_concurrency_per_key=2, **keys) as client:
        body = {"prompt": "x", "max_tokens": 20}

        async def ask(key: str) -> httpx.Response:
            return await client.post("/v1/completions", json=body, headers=bearer(key))

        answers = await asyncio.gather(*(ask("a") for _ in range(5)), ask("b"), *(ask("root") for _ in range(3)))
        refused = [answer for answer in answers[:5] if answer.status_code == 429]
        assert len(refused) == 3
        assert error_of(refused[0], 429)["message"].startswith("this key has 2 requests under way; the limit is 2")
        assert refused[0].headers["retry-after"] == "1"
        assert all(answer.status_code == 200 for answer in answers[5:])
        assert (await ask("a")).status_code == 200


async def test_work_in_the_background_is_under_way_until_it_ends() -> None:
    engine = FakeEngine(seconds_per_token=0.01)
    async with client_of(engine, max_concurrency_per_key=1, api_key=("a", "b")) as client:

        async def ask(key: str = "a", **more: Any) -> httpx.Response:
            return await client.post("/v1/responses", json={"input": "x", **more}, headers=bearer(key))

        first = (await ask(background=True)).json()
        for more in ({}, {"background": True}):
            assert "1 requests under way" in error_of(await ask("a", **more), 429)["message"]
        assert (await ask("b", max_output_tokens=1)).status_code == 200
        # It can be watched and ended all the same.
        path = f"/v1/responses/{first['id']}"
        assert (await client.get(path, headers=bearer("a"))).json()["status"] in ("queued", "in_progress")
        assert (await client.post(f"{path}/cancel", headers=bearer("a"))).json()["status"] == "cancelled"
        for _ in range(2):  # nothing is left of it, nor of one that ends by itself
            assert (await ask(background=True, stream=True, max_output_tokens=2)).status_code == 200
        assert (await ask(max_output_tokens=1)).status_code == 200


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"api_key": ("",)}, "api_key must not hold an empty string"),
        ({"max_concurrency_per_key": 1}, "max_concurrency_per_key has no effect without keys"),
        ({"max_request_body": 0}, "max_request_body must be an integer of at least 1"),
        ({"request_timeout": 0.0}, "request_timeout must be a number of seconds above 0"),
        ({"ttft_timeout": float("nan")}, "ttft_timeout must be a number of seconds above 0"),
        ({"sse_keep_alive_interval": -1.0}, "sse_keep_alive_interval must be a number of seconds from 0"),
        ({"root_path": "v1/"}, "root_path must begin with / and not end with it"),
        ({"ssl_keyfile": "key.pem"}, "ssl_keyfile has no effect without a certificate"),
        ({"enable_ssl_refresh": True}, "enable_ssl_refresh has no effect without a certificate"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 2}, "ssl_cert_reqs needs the authorities of clients"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 3}, "ssl_cert_reqs must be one of 0, 1, 2"),
        ({"allowed_origins": ('["a"',)}, "allowed_origins must hold plain values, or one JSON list"),
    ],
)
async def test_settings_that_cannot_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**settings)


async def test_other_origins_are_let_in_by_name() -> None:
    page = {"origin": "https://a.example"}
    ask = {**page, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with client_of() as client:
        assert "access-control-allow-origin" not in (await client.get("/health", headers=page)).headers
        assert (await client.options("/v1/completions", headers=ask)).status_code == 405
    async with client_of(api_key=("k",), allowed_origins=('["https://a.example", "https://b.example"]',)) as client:
        # Before it sends the key, the browser asks whether it may; and it must be able to read a refusal.
        assert (await client.options("/v1/completions", headers=ask)).headers["access-control-allow-origin"] == page[
            "origin"
        ]
        refused = await client.get("/v1/models", headers=page)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, page["origin"])
        other = await client.get("/health", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


def test_under_the_path_of_a_proxy(serve: Callable[..., str]) -> None:
    url = serve(FakeEngine(), root_path="/llm/v1", api_key=("k",))
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/version").status_code == 401
    assert httpx.get(f"{url}/version", headers={"x-api-key": "k"}).status_code == 200
