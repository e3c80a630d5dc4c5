#!/usr/bin/env python3
"""What HTTP costs: the server over an engine whose tokens take no time, and a client that does no more than it must.

python tools/bench_surface.py                    # all of it, in about a minute
python tools/bench_surface.py --streams 1000     # how many streams at once
python tools/bench_surface.py --json out.json

Requests are tokenised and have their grammars compiled by the real parts of the engine; only its steps are left out.
The cost of HTTP is the time that a client on the same machine sees, less that of the same calls without HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import uvloop

from jaxserve.bench.machine import CpuMeter, circumstances, foreign_text
from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.engine.adapters import NoAdapters
from jaxserve.engine.input import InputProcessor
from jaxserve.engine.tokenizers import open_tokenizer
from jaxserve.outputs import CompletionOutput, EngineStats, RequestMetrics, RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.server import run_server

__all__ = ["InstantEngine", "main"]

CONTEXT = 8192
MODEL = "smollm2-135m"


class InstantEngine:
    """See ``jaxserve.server.protocol.Engine``; a token is there at once, or every ``cache_salt`` milliseconds."""

    model_name = MODEL
    max_model_len = CONTEXT
    config = EngineConfig()
    adapters = NoAdapters()

    def __init__(self) -> None:
        self.tokenizer = open_tokenizer(MODEL)
        vocabulary: Any = SimpleNamespace(
            vocab_size=self.tokenizer.vocab_size, eos_token_ids=self.tokenizer.eos_token_ids
        )
        self._input = InputProcessor(self.tokenizer, vocabulary, CONTEXT, 0)
        self._input.grammars.prepare().result()

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        times = RequestMetrics(arrived_at=time.monotonic())
        await self._input.grammars.ready(params.structured_outputs)
        (request, *_) = await asyncio.to_thread(self._input.prepare, request_id, prompt, params)
        pace = float(options.get("cache_salt") or 0) / 1e3
        times.scheduled_at = times.first_token_at = time.monotonic()
        last = (params.max_tokens or 16) - 1
        stream = options.get("stream", True)
        for index in range(last + 1):
            await asyncio.sleep(pace)
            end = "length" if index == last else None
            if end:
                times.finished_at = time.monotonic()
            if stream or end:
                output = CompletionOutput(0, text=" word", token_ids=[index], finish_reason=end)
                yield RequestOutput(request_id, None, request.prompt, [output], end is not None, 0, times)

    def has_begun(self, request_id: str) -> bool:
        return True

    def stats(self) -> EngineStats:
        return EngineStats()

    def check_health(self) -> None:
        """It never stops."""

    async def shutdown(self, drain_seconds: float) -> None:
        """There is nothing to stop."""


# ---------------------------------------------------------------------- the server's process
class Watched(InstantEngine):
    """Measures how late the event loop is; ``POST /v1/completions`` of the text RESET or REPORT talks to it."""

    def __init__(self) -> None:
        super().__init__()
        self._worst = 0.0
        self._watch: asyncio.Task[None] | None = None

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        if prompt == "RESET":
            self._watch = self._watch or asyncio.create_task(self._measure())
            self._worst = 0.0
        if prompt not in ("RESET", "REPORT"):
            async for output in super().generate(prompt, params, request_id, **options):
                yield output
            return
        report = json.dumps({"worst": self._worst, "resident": _resident()})
        completion = CompletionOutput(0, text=report, token_ids=[0], finish_reason="stop")
        yield RequestOutput(request_id, None, [0], [completion], True)

    async def _measure(self) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            self._worst = max(self._worst, time.perf_counter() - began - 0.001)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


# ---------------------------------------------------------------------- the client's process
class Client:
    """One connection that writes requests and reads answers, and looks at them only where it must."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=2**26))

    async def ask(self, path: str, body: dict[str, Any] | bytes) -> bytes:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._writer.write(request_of(path, data))
        await self._writer.drain()
        answer = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if b"transfer-encoding: chunked" in answer:
            return await self._reader.readuntil(b"\r\n0\r\n\r\n")
        length = int(answer.partition(b"content-length: ")[2].split(b"\r\n")[0])
        return await self._reader.readexactly(length)

    async def tell(self, word: str) -> dict[str, Any]:
        answer = json.loads(await self.ask("/v1/completions", {"prompt": word}))
        report: dict[str, Any] = json.loads(answer["choices"][0]["text"])
        return report

    def close(self) -> None:
        self._writer.close()


def request_of(path: str, data: bytes) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(data)}")
    return "\r\n".join((*lines, "\r\n")).encode() + data


def ask_blocking(sock: socket.socket, path: str, body: dict[str, Any]) -> None:
    """As ``Client.ask`` for a plain answer, without the cost of an event loop on the client's side."""
    sock.sendall(request_of(path, json.dumps(body).encode()))
    got = b""
    while b"\r\n\r\n" not in got:
        got += sock.recv(2**16)
    head, _, rest = got.lower().partition(b"\r\n\r\n")
    length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(rest) < length:
        rest += sock.recv(2**16)


CHAT = {"messages": [{"role": "user", "content": "Name three rivers of France, please."}], "max_tokens": 1}
COMPLETION = {"prompt": "Name three rivers of France, please.", "max_tokens": 1}


async def time_requests(port: int, engine: InstantEngine, path: str, body: dict[str, Any], num: int) -> float:
    """Seconds that HTTP adds to a request, by the medians."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    over_http, direct = [], []
    for index in range(num):
        began = time.perf_counter()
        ask_blocking(sock, path, body)
        over_http.append(time.perf_counter() - began)
        began = time.perf_counter()
        prompt = body.get("prompt") or engine.tokenizer.apply_chat_template(body["messages"])
        async for _ in engine.generate(prompt, SamplingParams(max_tokens=1), str(index), stream=False):
            pass
        direct.append(time.perf_counter() - began)
    sock.close()
    return sorted(over_http)[num // 2] - sorted(direct)[num // 2]


async def time_chunks(client: Client, engine: InstantEngine, path: str, body: dict[str, Any], num: int) -> float:
    """Seconds that HTTP adds to a token of a stream, the least of several tries."""
    tries = []
    for index in range(5):
        began = time.perf_counter()
        await client.ask(path, {**body, "stream": True, "max_tokens": num})
        over_http = time.perf_counter() - began
        began = time.perf_counter()
        async for _ in engine.generate("x", SamplingParams(max_tokens=num), str(index)):
            pass
        tries.append((over_http - (time.perf_counter() - began)) / num)
    return min(tries)


async def time_loop(client: Client, other: Client) -> dict[str, float]:
    """Seconds for which the event loop was held at most, by what was asked meanwhile."""
    long_text = "Once upon a time there was a river. " * 900  # 8100 tokens
    messages = [{"role": "user", "content": f"message {index} of many"} for index in range(100_000)]
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": i + 1} for i in range(200)}}
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    asked: dict[str, tuple[str, Any]] = {
        "nothing": ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
        "a prompt of 8,000 tokens": ("/v1/completions", {"prompt": long_text, "max_tokens": 1}),
        "a chat of 8,000 tokens": (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": long_text}], "max_tokens": 1},
        ),
        "a chat of 300 messages": ("/v1/chat/completions", {**chat, "messages": messages[:300]}),
        "a schema of 200 properties": (
            "/v1/chat/completions",
            {**chat, "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}},
        ),
        "a chat of 100,000 messages": ("/v1/chat/completions", {**chat, "messages": messages}),
        "a prompt of 2,500,000 token ids": (
            "/v1/completions",
            {"prompt": list(range(1000, 26_000)) * 100, "max_tokens": 1},
        ),
        "16 MB of brackets": ("/v1/completions", b"[" * (16 * 2**20)),
        "messages, 100,000": ("/v1/messages", {"messages": messages, "max_tokens": 4}),
        "their count": ("/v1/messages/count_tokens", {"messages": messages}),
        "a response to 100,000 items": ("/v1/responses", {"input": messages}),
        "an embedding of 2,500,000 token ids": ("/v1/embeddings", {"input": list(range(1000, 26_000)) * 100}),
        "13 MB of texts to score": ("/v1/score", {"text_1": "x", "text_2": [long_text * 2] * 200}),
        "13 MB of documents to rank": ("/v1/rerank", {"query": "x", "documents": [long_text * 2] * 200}),
        "4 MB to tokenize": ("/tokenize", {"prompt": long_text * 125}),
        "2,500,000 ids to detokenize": ("/detokenize", {"tokens": list(range(1000, 26_000)) * 100}),
    }
    await client.ask("/v1/completions", {"prompt": [1] * 20_000})  # starts the other process
    found = {}
    for name, (path, body) in asked.items():
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        await other.tell("RESET")
        for _ in range(1 if len(data) > 2**20 else 5):
            await client.ask(path, data)
        found[name] = (await other.tell("REPORT"))["worst"]
    return found


async def run_streams(port: int, control: Client, num: int, tokens: int, pace_ms: int) -> dict[str, float]:
    """Many streams at once: memory of the server early and late, and how long each token took beyond its pace."""
    body = {"prompt": "x", "stream": True, "max_tokens": tokens, "cache_salt": str(pace_ms)}
    clients = [await Client.open(port) for _ in range(num)]
    await control.tell("RESET")
    began = time.perf_counter()
    asking = [asyncio.create_task(client.ask("/v1/completions", body)) for client in clients]
    memory = []
    while not all(task.done() for task in asking):
        await asyncio.sleep(0.5)
        memory.append((await control.tell("REPORT"))["resident"])
    took = time.perf_counter() - began
    answers = await asyncio.gather(*asking)
    for client in clients:
        client.close()
    assert all(answer.count(b"data: {") == tokens for answer in answers)
    memory = memory[: max(2, len(memory) - 1)]  # the last is after their end
    return {
        "streams": num,
        "tokens": tokens,
        "seconds": took,
        "tokens_per_second": num * tokens / took,
        "early_bytes": memory[len(memory) // 4],
        "late_bytes": memory[-1],
        "worst_block": (await control.tell("REPORT"))["worst"],
    }


async def measure(port: int, args: argparse.Namespace) -> dict[str, Any]:
    engine = InstantEngine()
    client, control = await Client.open(port), await Client.open(port)
    for _ in range(200):
        await client.ask("/v1/chat/completions", CHAT)
    found: dict[str, Any] = {
        "request_seconds": {
            "completions": await time_requests(port, engine, "/v1/completions", COMPLETION, args.requests),
            "chat": await time_requests(port, engine, "/v1/chat/completions", CHAT, args.requests),
        },
        "chunk_seconds": {
            "completions": await time_chunks(client, engine, "/v1/completions", COMPLETION, args.tokens),
            "chat": await time_chunks(client, engine, "/v1/chat/completions", CHAT, args.tokens),
        },
        "loop_seconds": await time_loop(client, control),
        "streams": await run_streams(port, control, args.streams, args.stream_tokens, args.pace),
    }
    return {**found, "circumstances": circumstances()}


def show(found: dict[str, Any]) -> None:
    for what, seconds in found["request_seconds"].items():
        print(f"HTTP adds to a request of {what}: {1e3 * seconds:.2f} ms")
    for what, seconds in found["chunk_seconds"].items():
        print(f"HTTP adds to a streamed token of {what}: {1e3 * seconds:.3f} ms")
    for what, seconds in found["loop_seconds"].items():
        print(f"longest hold of the event loop, {what}: {1e3 * seconds:.1f} ms")
    streams = found["streams"]
    mebibytes = [streams[name] / 2**20 for name in ("early_bytes", "late_bytes")]
    print(
        f"{streams['streams']} streams of {streams['tokens']} tokens: {streams['tokens_per_second']:.0f} tokens/s, "
        f"memory {mebibytes[0]:.1f} MiB early, {mebibytes[1]:.1f} MiB late"
    )
    print(found["foreign"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500, help="requests that are timed (default: 500)")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of a timed stream (default: 2000)")
    parser.add_argument("--streams", type=int, default=1000, help="streams at once (default: 1000)")
    parser.add_argument("--stream-tokens", type=int, default=40, help="tokens of each (default: 40)")
    parser.add_argument("--pace", type=int, default=500, help="milliseconds between them (default: 500)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        run_server(Watched(), ServerConfig(port=0))  # type: ignore[arg-type]
        return
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(files, min(most, 2 * args.streams + 100)), most))
    with CpuMeter() as meter:  # the server has ended by its end, so that it does not count as somebody else
        server = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().rpartition(":")[2])
            found = uvloop.run(measure(port, args))
        finally:
            server.terminate()
            server.wait()
    found["foreign"] = foreign_text(meter.foreign)
    show(found)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
