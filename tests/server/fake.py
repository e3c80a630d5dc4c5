"""An engine without a model: same interface, same promises, tokens over time. A token is a byte of UTF-8."""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.errors import (
    EngineDeadError,
    MissingFileError,
    ModelNotFoundError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    UnsupportedModelError,
)
from jaxserve.outputs import (
    AdapterInfo,
    AdapterStats,
    CompletionOutput,
    EngineStats,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SpeculationStats,
)
from jaxserve.request import FinishReason
from jaxserve.sampling_params import SamplingParams
from jaxserve.timings import ADAPTER_EDGES, STEP_EDGES, Timings
from tests.server.fake_live import FakeLive

EOS = 256
SCRIPT = "Hello wörld 🦙 日本, once upon a time there was "


class FakeTokenizer:
    """One token per byte, and EOS. The chat template knows tools, and hermes' format of calls."""

    chat_template = "tools <tool_call>"
    special_ids = frozenset({EOS})
    longest_token = 5
    vocab_size = 257

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def encode_prompt(self, text: str, max_model_len: int, /) -> list[int]:
        ids = self.encode(text)
        if len(ids) >= max_model_len:
            raise PromptTooLongError.of_tokens(max_model_len, len(ids))
        return ids

    def decode(self, ids: Sequence[int], /, skip_special_tokens: bool = True) -> str:
        special = b"" if skip_special_tokens else b"<eos>"
        return b"".join(special if id == EOS else bytes([id]) for id in ids).decode("utf-8", "replace")

    def token_text(self, id: int) -> str:
        return self.token_bytes(id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int, /) -> bytes:
        return b"<eos>" if token_id == EOS else bytes([token_id])

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Any = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> list[int]:
        if kwargs.get("refuse"):
            raise RequestError("the chat template refuses: no.", "messages")
        text = "".join(f"<{m['role']}>{m['content']}{m.get('tool_calls', '')}</>" for m in messages)
        text = text.removesuffix("</>") if continue_final_message else text
        text = f"{tools or ''}{chat_template or ''}{text}"
        return self.encode(
            text + "".join(f"[{k}={v}]" for k, v in kwargs.items()) + "<assistant>" * add_generation_prompt
        )


@dataclass
class FakeAdapters:
    """See ``jaxserve.server.protocol.Adapters``: a path is served unless it begins with ``bad`` or ``gone``."""

    num_slots: int = 2
    num_bytes: int = 4096
    known: dict[str, AdapterInfo] = field(default_factory=dict)
    lazy: frozenset[str] = frozenset()
    waits: list[float | None] = field(default_factory=list)
    used: list[str | None] = field(default_factory=list)

    def stats(self) -> AdapterStats:
        loads = Timings(ADAPTER_EDGES)
        loads.add(0.02)
        return AdapterStats(self.num_slots, ("sql", "pirate"), ("notes",), 7, loads)

    def has(self, name: str) -> bool:
        return name in self.known or name in self.lazy

    def infos(self) -> list[AdapterInfo]:
        return list(self.known.values())

    def load(self, name: str, path: str, *, base_model: str | None = None, replace: bool = False) -> AdapterInfo:
        if name in self.known and not replace:
            raise RequestError(f"lora_name {name!r} is loaded already.", "lora_name")
        if path.startswith("gone"):
            raise MissingFileError(f"There is no adapter {path!r}.")
        if path.startswith("bad"):
            raise UnsupportedModelError(f"{path}: the adapter is a DoRA adapter (use_dora).")
        self.known[name] = AdapterInfo(name, path, base_model, path.encode().hex(), 8, ("q", "v"), 512, True, 0, 1)
        return self.known[name]

    def unload(self, name: str, *, wait: float | None = None) -> None:
        if name not in self.known:
            raise ModelNotFoundError(f"there is no adapter {name!r}.", "lora_name")
        self.waits.append(wait)
        del self.known[name]


@dataclass
class FakeEngine:
    """See ``jaxserve.server.protocol.Engine``.

    Attributes:
        says: the whole of every answer; by default a script without an end.
        seconds_per_token: how long a token takes.
        max_running: further requests wait until one ends.
        max_queued: as ``max_num_queued_reqs``.
        dies_at, fails_at: number of tokens after which the engine stops, or the request ends in an error.
    """

    says: str | None = None
    seconds_per_token: float = 0.0
    max_running: int = 64
    max_queued: int = 0
    dies_at: int | None = None
    fails_at: int | None = None
    max_model_len: int = 512
    hidden_size: int = 4
    model_name: str = "fake-model"
    config: EngineConfig = field(default_factory=EngineConfig)
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    adapters: FakeAdapters = field(default_factory=FakeAdapters)
    dead: str | None = None
    running: set[str] = field(default_factory=set)
    waiting: set[str] = field(default_factory=set)
    told_to_end: set[str] = field(default_factory=set)
    is_paused: bool = False
    begun: set[str] = field(default_factory=set)
    step_seconds: Timings = field(default_factory=lambda: Timings(STEP_EDGES))
    aborted: int = 0
    finished: int = 0
    submitted: list[dict[str, Any]] = field(default_factory=list)
    shutdowns: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.live = FakeLive(self.stats, self.check_health)
        for seconds in (0.015, 0.5):
            self.step_seconds.add(seconds)

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        stream: bool = True,
        pooling: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        self.check_health()
        if self.max_queued and len(self.waiting) >= self.max_queued:
            raise QueueFullError(f"{len(self.waiting)} requests are waiting; the limit is {self.max_queued}.")
        ids = self._check(prompt, params)
        assert request_id not in self.running | self.waiting
        self.submitted.append({"ids": ids, "params": params, "priority": priority, "cache_salt": cache_salt})
        self.adapters.used.append(adapter)
        if pooling or params.max_tokens == 0:
            yield self._read(request_id, ids, params, pooling)
            return
        of_prompt = None if params.prompt_logprobs is None else _prompt_logprobs(ids, params.prompt_logprobs)
        times = RequestMetrics(arrived_at=time.monotonic())
        text = prompt if isinstance(prompt, str) else None
        self.waiting.add(request_id)
        completions = [_Completion(i, params, self.max_model_len - len(ids), self.says) for i in range(params.n)]
        entry = self.live.journal.open(request_id, adapter)
        requests = self.live.make(request_id, ids, params)
        entry.queue(requests)
        ended = False
        try:
            while len(self.running) >= self.max_running:
                await asyncio.sleep(0.005)
            self.waiting.remove(request_id)
            self.running.add(request_id)
            times.scheduled_at = time.monotonic()
            for request in requests:
                self.live.begin(request)
            while not ended:
                await asyncio.sleep(self.seconds_per_token)
                self.check_health()
                if request_id in self.told_to_end:
                    ends = [CompletionOutput(c.whole.index, finish_reason="abort") for c in completions]
                    yield RequestOutput(request_id, text, ids, ends, True)
                    return
                times.speculation.note(num_drafts=2, num_accepted=1)
                outputs = [output for c in completions if (output := self._advance(c)) is not None]
                for output in outputs:
                    for token in output.token_ids:
                        self.live.say(requests[output.index], token)
                entry.note(RequestOutput(request_id, text, ids, outputs, False))
                times.first_token_at = times.first_token_at or time.monotonic()
                self.begun.add(request_id)
                ended = all(c.finish_reason for c in completions)
                times.finished_at = time.monotonic() if ended else 0.0
                if ended:
                    self.finished += 1
                    self.running.discard(request_id)
                if stream:
                    out = RequestOutput(request_id, text, ids, outputs, ended, 16 if len(ids) > 16 else 0, times)
                    out.prompt_logprobs, of_prompt = of_prompt, None
                    yield out
            if not stream:
                whole = [c.whole for c in completions]
                yield RequestOutput(request_id, text, ids, whole, True, 16 if len(ids) > 16 else 0, times, of_prompt)
        finally:
            for request in requests:
                self.live.end(request)
            self.live.journal.close(entry, FinishReason.ABORT)
            self.aborted += not ended
            self.running.discard(request_id)
            self.waiting.discard(request_id)
            self.begun.discard(request_id)

    def has_begun(self, request_id: str) -> bool:
        return request_id in self.begun

    async def abort(self, request_id: str) -> None:
        self.told_to_end.add(request_id)

    def open_requests(self) -> list[str]:
        return sorted(self.running | self.waiting)

    async def pause(self, how: str) -> None:
        if how not in ("abort", "wait", "keep"):
            raise RequestError("mode must be one of abort, wait, keep.", "mode")
        self.is_paused = True

    async def resume(self) -> None:
        self.is_paused = False

    async def reset_prefix_cache(self) -> bool:
        return not self.running

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_blocks=100,
            num_free_blocks=100 - len(self.running),
            num_cached_blocks=9,
            num_preparing=2,
            prefix_misses={"cold": 7},
            recomputed_tokens_total=11,
            last_step_age=0.5,
            step_seconds={"decode": self.step_seconds},
            prompt_tokens_total=sum(len(s["ids"]) for s in self.submitted),
            preemptions_total=3,
            last_step_tokens=6,
            last_step_padded=8,
            last_step_kv_tokens=24,
            last_step_kv_slots=48,
            last_step_drafts=1.5,
            step_sizes={1: 4, 6: 2, 20000: 1},
            speculation=SpeculationStats(3, 12, 5, [3, 2], {"no gain": 2}),
            adapters=self.adapters.stats(),
        )

    def check_health(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(self.dead)

    async def shutdown(self, drain_seconds: float) -> None:
        self.shutdowns.append(drain_seconds)
        deadline = time.monotonic() + drain_seconds
        while (self.running or self.waiting) and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        self.dead = "the engine was shut down"

    def _read(self, request_id: str, ids: list[int], params: SamplingParams, pooling: str) -> RequestOutput:
        """Embeddings tell of the prompt's sum and last token, and of the pooling."""
        numbers = [0.0, sum(ids), ids[-1], float(pooling == "mean")]
        nothing = [
            CompletionOutput(i, logprobs=None if params.logprobs is None else [], finish_reason="length")
            for i in range(params.n)
        ]
        return RequestOutput(
            request_id,
            None,
            ids,
            nothing,
            True,
            prompt_logprobs=None if params.prompt_logprobs is None else _prompt_logprobs(ids, params.prompt_logprobs),
            embedding=np.array(numbers, np.float32) if pooling else None,
        )

    def _check(self, prompt: str | Sequence[int], params: SamplingParams) -> list[int]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise RequestError("prompt must not be empty: it holds no token.", "prompt")
        if len(ids) >= self.max_model_len:
            raise PromptTooLongError.of_tokens(self.max_model_len, len(ids))
        structure = params.structured_outputs
        if structure is not None and structure.regex == "[a-":
            raise RequestError("structured_outputs.regex cannot be used: it has no end.", "structured_outputs")
        for name, tokens in (("prompt", ids), ("logit_bias", params.logit_bias)):
            for token in tokens:
                if not 0 <= token <= EOS:
                    raise RequestError(f"{name}: token id {token} is outside the vocabulary (0 to {EOS}).", name)
        return ids

    def _advance(self, completion: _Completion) -> CompletionOutput | None:
        if completion.finish_reason:
            return None
        if self.dies_at is not None and len(completion.whole.token_ids) >= self.dies_at:
            self.dead = "the engine has stopped: RuntimeError: test"
            self.check_health()
        return completion.next(failing=len(completion.whole.token_ids) == self.fails_at)


class _Completion:
    """Says the script, from another place for each index; keeps back what may begin a stop string."""

    def __init__(self, index: int, params: SamplingParams, room: int, says: str | None) -> None:
        self.whole = CompletionOutput(index, logprobs=None if params.logprobs is None else [])
        self._params = params
        self._limit = min(room, params.max_tokens or room)
        start = 6 * index
        self._script = (SCRIPT[start:] + SCRIPT * 100 if says is None else says).encode()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""

    @property
    def finish_reason(self) -> str | None:
        return self.whole.finish_reason

    def next(self, failing: bool) -> CompletionOutput:
        whole, params = self.whole, self._params
        if failing:
            whole.finish_reason, whole.error = "error", "the fake fails."
            return CompletionOutput(whole.index, finish_reason="error", error=whole.error)
        token = self._script[len(whole.token_ids)]
        whole.token_ids.append(token)
        delta = CompletionOutput(whole.index, token_ids=[token])
        if whole.logprobs is not None:
            delta.logprobs = [_logprobs(token, params.logprobs or 0)]
            whole.logprobs += delta.logprobs
            # The later, the likelier: so the best are not the first.
            whole.cumulative_logprob = (whole.cumulative_logprob or 0.0) - 1 / (1 + whole.index)
        self._text += self._decoder.decode(bytes([token]))
        cuts = [(self._text.find(stop), stop) for stop in params.stop if stop in self._text]
        shown = len(self._text)
        if cuts:
            shown, whole.stop_reason = min(cuts)
            whole.finish_reason = "stop"
        elif len(whole.token_ids) >= self._limit:
            whole.finish_reason = "length"
        elif len(whole.token_ids) == len(self._script):
            whole.finish_reason = "stop"
        else:
            shown -= max((n for s in params.stop for n in range(len(s)) if self._text.endswith(s[:n])), default=0)
        delta.text, whole.text = self._text[len(whole.text) : shown], self._text[:shown]
        delta.finish_reason, delta.stop_reason = whole.finish_reason, whole.stop_reason
        return delta


def _prompt_logprobs(ids: list[int], num_top: int) -> list[dict[int, Logprob] | None]:
    """The larger a byte, the less likely it is."""
    shown: list[dict[int, Logprob] | None] = [None]
    for token in ids[1:]:
        entries = {token: Logprob(-token / 100, 9, FakeTokenizer().token_text(token))}
        for rank in range(1, num_top + 1):
            entries.setdefault(rank, Logprob(-rank / 100, rank, FakeTokenizer().token_text(rank)))
        shown.append(entries)
    return shown


def _logprobs(token: int, num_top: int) -> dict[int, Logprob]:
    """The sampled token is the second likeliest; the likeliest one is EOS."""
    likely = [EOS, token, 1, 2, 3, 4][: max(num_top, 0)]
    entries = {token: Logprob(-1.0, 2, FakeTokenizer().token_text(token))}
    for rank, id in enumerate(likely, 1):
        value = float("-inf") if rank == 5 else -rank / 2
        entries.setdefault(id, Logprob(value, rank, FakeTokenizer().token_text(id)))
    return entries
