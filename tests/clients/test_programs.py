"""Clients that are programs of their own: the ``llm`` command, and OpenAI's package for Node."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.conftest import KEY

pytestmark = pytest.mark.clients

NODE_MODULES = Path(sys.prefix) / "node_modules"
"""Where ``make test-clients`` puts them."""

SCRIPT = """
import OpenAI, { toFile } from "openai";
const client = new OpenAI({ baseURL: process.argv[2], apiKey: process.argv[3], maxRetries: 0 });
const messages = [{ role: "user", content: "hello" }];
const models = await client.models.list();
const model = models.data[0].id;
const whole = await client.chat.completions.create({ model, messages, max_tokens: 5 });
const stream = await client.chat.completions.create({ model, messages, stream: true });
let text = "";
for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
const runner = client.chat.completions.stream({ model, messages });
const final = await runner.finalContent();
let refused = null;
try { await client.chat.completions.create({ model, messages, temperature: -1 }); }
catch (error) { refused = [error.status, error.param]; }
console.log(JSON.stringify([whole.choices[0].message.content, text, final, refused]));
"""


def test_llm_command(serve: Callable[..., str], tmp_path: Path) -> None:
    pytest.importorskip("llm")
    folder = Path(os.environ["LLM_USER_PATH"])
    folder.mkdir()
    (folder / "extra-openai-models.yaml").write_text(
        f"- model_id: ours\n  model_name: fake-model\n  api_base: {serve('Hello there')}\n  api_key_name: ours\n"
    )
    (folder / "keys.json").write_text(f'{{"ours": "{KEY}"}}')
    for options in ([], ["--no-stream"], ["--system", "be brief"]):
        done = subprocess.run(
            [sys.executable, "-m", "llm", "prompt", "-m", "ours", "hi", *options],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stdout) == (0, "Hello there\n"), done.stderr


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
@pytest.mark.skipif(not (NODE_MODULES / "openai").is_dir(), reason="npm's openai is not installed")
def test_openai_for_node(serve: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    script = tmp_path / "talk.mjs"
    script.write_text(SCRIPT)
    done = subprocess.run(
        ["node", str(script), serve("Hello there"), KEY], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.stderr == ""
    assert done.stdout == '["Hello","Hello there","Hello there",[400,"temperature"]]\n'
