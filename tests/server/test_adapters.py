"""Adapters over HTTP: a model's name picks one; they come and go while the server runs."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import httpx
import pytest

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.outputs import AdapterInfo
from jaxserve.server import create_app
from tests.server.fake import FakeEngine

pytestmark = pytest.mark.anyio


async def post(client: httpx.AsyncClient, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def load(client: httpx.AsyncClient, name: str, path: str, **more: Any) -> dict[str, Any]:
    """Load an adapter, and return how it is listed."""
    answer = await client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})
    assert (answer.status_code, answer.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")
    listed = (await client.get("/v1/lora_adapters")).json()["data"]
    found: dict[str, Any] = next(adapter for adapter in listed if adapter["lora_name"] == name)
    return found


async def test_a_model_s_name_picks_the_adapter(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    shown = await load(client, "sql-expert", "org/sql")
    assert (shown["lora_name"], shown["rank"], shown["bytes"], shown["slot"]) == ("sql-expert", 8, 512, 1)
    messages = [{"role": "user", "content": "x"}]
    answer = await post(client, "/v1/chat/completions", model="sql-expert", messages=messages)
    assert answer["model"] == "sql-expert"
    assert (await post(client, "/v1/completions", model="sql-expert", prompt="x"))["model"] == "sql-expert"
    assert (await post(client, "/v1/completions", prompt="x"))["model"] == "fake-model"
    assert engine.adapters.used == ["sql-expert", "sql-expert", None]


async def test_slow_loads_take_no_threads_of_others(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, load_now = threading.Event(), engine.adapters.load

    def load_late(name: str, path: str, **more: Any) -> AdapterInfo:
        assert arrived.wait(20)
        return load_now(name, path, **more)

    monkeypatch.setattr(engine.adapters, "load", load_late)
    async with anyio.create_task_group() as tasks:
        for i in range(60):
            tasks.start_soon(load, client, f"far{i}", "x")
        await anyio.wait_all_tasks_blocked()
        try:
            with anyio.fail_after(10):
                await post(client, "/v1/completions", prompt="x")
        finally:
            arrived.set()
    assert len(engine.adapters.known) == 60


async def test_models_list_adapters_with_their_parent(client: httpx.AsyncClient) -> None:
    await load(client, "a/b", "org/x", base_model_name="base")
    base, adapter = (await client.get("/v1/models")).json()["data"]
    assert (base["id"], base["parent"], base["root"]) == ("fake-model", None, "fake-model")
    assert (adapter["id"], adapter["parent"], adapter["root"]) == ("a/b", "fake-model", "org/x")
    assert (await client.get("/v1/models/a/b")).json() == adapter
    listed = (await client.get("/v1/lora_adapters")).json()
    assert (listed["slots"], listed["slots_bytes"]) == (2, 4096)
    assert [(a["lora_name"], a["base_model_name"], a["targets"]) for a in listed["data"]] == [
        ("a/b", "base", ["q", "v"])
    ]


async def test_an_unknown_name_is_told_the_nearest(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await load(client, "sql-expert", "org/sql")
    error = (await post(client, "/v1/completions", 404, model="sql-exprt", prompt="x"))["error"]
    assert error["message"].endswith("served are: 'fake-model', 'sql-expert'. Did you mean 'sql-expert'?")
    engine.adapters.lazy = frozenset({"lazy"})
    assert (await post(client, "/v1/completions", model="lazy", prompt="x"))["model"] == "lazy"
    assert (await client.get("/v1/models/lazy")).json()["parent"] == "fake-model"


async def test_what_cannot_be_loaded_says_why(client: httpx.AsyncClient) -> None:
    error = (await post(client, "/v1/load_lora_adapter", 400, lora_name="a", lora_path="bad/x"))["error"]
    assert (error["param"], error["type"]) == ("lora_path", "BadRequestError")
    assert "DoRA" in error["message"]
    error = (await post(client, "/v1/load_lora_adapter", 404, lora_name="a", lora_path="gone/x"))["error"]
    assert (error["param"], error["type"]) == ("lora_path", "NotFoundError")
    assert (await client.get("/v1/lora_adapters")).json()["data"] == []
    error = (await post(client, "/v1/load_lora_adapter", 400, lora_name="fake-model", lora_path="x"))["error"]
    assert error["message"] == "lora_name 'fake-model' is a name of the base model."
    await load(client, "a", "x")
    error = (await post(client, "/v1/load_lora_adapter", 400, lora_name="a", lora_path="y"))["error"]
    assert "loaded already" in error["message"]
    again = await load(client, "a", "y", load_inplace=True)
    assert again["lora_path"] == "y"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("load", {"lora_path": "x"}, "lora_name is required."),
        ("load", {"lora_name": "a"}, "lora_path is required."),
        ("load", {"lora_name": "a", "lora_path": 3}, "lora_path should be a valid string, got 3."),
        (
            "load",
            {"lora_name": "a", "lora_path": "x", "inplace": True},
            "unknown parameter 'inplace'. Did you mean 'load_inplace'?",
        ),
        ("unload", {"lora_name": "a", "timeout": -1}, "timeout should be greater than or equal to 0, got -1."),
        ("unload", {"lora_name": "a", "wait": "yes"}, "wait should be a valid boolean, got 'yes'."),
    ],
)
async def test_bodies_are_checked(client: httpx.AsyncClient, path: str, body: dict[str, Any], message: str) -> None:
    error = (await post(client, f"/v1/{path}_lora_adapter", 400, **body))["error"]
    assert error["message"] == message


async def test_unloading_refuses_or_waits(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for body, waited in (({}, None), ({"wait": True}, 60.0), ({"wait": True, "timeout": 2.5}, 2.5)):
        await load(client, "a", "x")
        answer = await client.post("/v1/unload_lora_adapter", json={"lora_name": "a", **body})
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'a' removed successfully.")
        assert engine.adapters.waits[-1] == waited
    assert (await post(client, "/v1/unload_lora_adapter", 404, lora_name="a"))["error"]["param"] == "lora_name"


async def test_an_adapter_cannot_have_a_name_of_the_model() -> None:
    engine = FakeEngine()
    engine.adapters.load("b", "x")
    with pytest.raises(ConfigError, match="'b' is a name of the base model"):
        create_app(engine, ServerConfig(served_model_name=("a", "b")))
