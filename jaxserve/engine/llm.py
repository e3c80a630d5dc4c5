"""The offline API: prompts in, finished outputs out, on the calling thread."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any, Self

from tqdm.auto import tqdm

from jaxserve.config import EngineConfig
from jaxserve.engine.adapters import EngineAdapters
from jaxserve.engine.engine import StepClock
from jaxserve.engine.lora_request import LoRARequest
from jaxserve.engine.output import OutputProcessor
from jaxserve.engine.reading import EMBEDDING, POOLINGS, SCORING, check_dimensions, joined, mean_logprob, pairs, shaped
from jaxserve.engine.startup import start
from jaxserve.errors import EngineDeadError, LoadError, RequestError
from jaxserve.outputs import EmbeddingOutput, EngineStats, RequestOutput, ScoringOutput
from jaxserve.request import FinishReason
from jaxserve.sampling_params import SamplingParams

__all__ = ["LLM"]

Adapters = LoRARequest | Sequence[LoRARequest | None] | None
Prompt = str | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model for offline generation, with vLLM's names.

    Args:
        model: Hugging Face folder, GGUF file, hub id, or the alias ``smollm2-135m``.
        **settings: any setting of ``EngineConfig``, flat (``max_model_len=2048``, ``block_size=32``).

    Raises:
        LoadError, ConfigError: see ``engine.startup.start``.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        config = EngineConfig.from_flat(
            {"model": os.fspath(model) if isinstance(model, os.PathLike) else model, **settings}
        )
        started = start(config)
        self._by_priority = config.scheduler.scheduling_policy == "priority"
        self.engine = started.engine
        self.tokenizer = started.tokenizer
        self.model_config = started.model_config
        self.max_model_len = started.max_model_len
        self.startup_phases = started.phases
        self.adapters = started.adapters
        self._input = started.input_processor()
        self._count = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (text or token ids), in one batch.

        Args:
            prompts: one prompt or several.
            sampling_params: for all prompts, or one each.
            use_tqdm: show a progress bar.
            lora_request: an adapter for all prompts, or one each, None being the base model (with ``enable_lora``).
            priority: one number per prompt, lower is served first (with ``scheduling_policy="priority"``).

        Returns:
            One output per prompt, in their order.

        Raises:
            RequestError: a prompt or parameter that cannot be served; then nothing was generated.
        """
        many = _as_list(prompts)
        params = _per_prompt(sampling_params, len(many))
        ranks = list(priority) if priority is not None else [0] * len(many)
        if any(ranks) and not self._by_priority:
            raise RequestError('priority needs scheduling_policy="priority"; this is "fcfs".', "priority")
        if len(ranks) != len(many):
            raise RequestError(f"{len(ranks)} priorities for {len(many)} prompts.", "priority")
        return self._serve(list(zip(many, params, ranks, strict=True)), lora_request, use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = "last",
        dimensions: int | None = None,
        normalize: bool = True,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
    ) -> list[EmbeddingOutput]:
        """What the model makes of prompts (text or token ids), as vectors.

        Args:
            prompts: one prompt or several.
            pooling: "last" takes the hidden state of a prompt's last token, "mean" the mean over all.
            dimensions: keep the first numbers only, which suits models that were trained for it.
            normalize: bring vectors to the length 1.
            use_tqdm: show a progress bar.
            lora_request: the adapter of all, or one (or None) per prompt.

        Returns:
            One output per prompt, in their order. Raises RequestError as ``generate`` does.
        """
        if pooling not in POOLINGS:
            raise RequestError(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}.", "pooling")
        check_dimensions(dimensions, self.model_config.hidden_size)
        asked = [(prompt, EMBEDDING, 0) for prompt in _as_list(prompts)]
        outputs = self._serve(asked, lora_request, pooling=pooling, use_tqdm=use_tqdm)
        return [
            EmbeddingOutput(out.request_id, out.prompt_token_ids, shaped(out, dimensions, normalize=normalize))
            for out in outputs
        ]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
    ) -> list[ScoringOutput]:
        """How likely each text of ``text_2`` is after one ``text_1``, or after the one of the same place.

        Returns:
            One output per pair: the mean log probability of the second text's tokens. Raises RequestError.
        """
        ids = [joined(self.tokenizer, pair, self.max_model_len) for pair in pairs(text_1, text_2)]
        outputs = self._serve([(prompt, SCORING, 0) for prompt, _ in ids], lora_request, use_tqdm=use_tqdm)
        return [
            ScoringOutput(out.request_id, out.prompt_token_ids, mean_logprob(out, num_first))
            for out, (_, num_first) in zip(outputs, ids, strict=True)
        ]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several (a list of such lists), in one batch.

        ``tools`` are described to the model by its chat template, in OpenAI's form; calls are left in the text as the
        model writes them. Raises RequestError if the template knows no tools.
        """
        if tools and "tools" not in (self.tokenizer.chat_template or ""):
            raise RequestError("tools: this model's chat template knows none.", "tools")
        conversations: Any = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts = [
            self.tokenizer.apply_chat_template(
                list(conversation),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools or None,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def stats(self) -> EngineStats:
        """Counts of the engine."""
        return replace(self.engine.stats(), adapters=self.adapters.stats())

    def step_stats(self) -> dict[str, float]:
        """Where time and KV memory went since ``reset_step_stats``: all of a ``StepClock``, and ``host_seconds``."""
        clock = self.engine.clock
        return {**asdict(clock), "host_seconds": clock.host_seconds}

    def reset_step_stats(self) -> None:
        """Start ``step_stats`` anew."""
        self.engine.clock = StepClock()

    def shutdown(self) -> None:
        """Release device memory. The object is of no use afterwards; calling it twice is harmless."""
        if (engine := self.__dict__.pop("engine", None)) is not None:
            self.adapters.close()
            engine.runner.close()

    def __getattr__(self, name: str) -> Any:
        # Python asks here only for what is not there.
        if name == "engine":
            raise EngineDeadError("this LLM was shut down.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def _serve(
        self,
        asked: Sequence[tuple[Prompt, SamplingParams, int]],
        lora_request: Adapters,
        *,
        use_tqdm: bool,
        pooling: str = "",
    ) -> list[RequestOutput]:
        """Finished outputs of prompts with their parameters and priorities, in their order."""
        output = OutputProcessor(self.tokenizer)
        batch, order = [], []
        with ExitStack() as leases:
            keys = _lease(self.adapters, lora_request, len(asked), leases)
            for (prompt, wanted, rank), key in zip(asked, keys, strict=True):
                request_id = f"llm-{self._count}"
                self._count += 1
                requests = self._input.prepare(request_id, prompt, wanted, priority=rank, adapter=key, pooling=pooling)
                text = prompt if isinstance(prompt, str) else None
                output.add(request_id, text, requests, stream=False)
                batch += requests
                order.append(request_id)
            self.engine.add(batch)
            finished = self._run(output, order, use_tqdm)
        return [finished[request_id] for request_id in order]

    def _run(self, output: OutputProcessor, order: list[str], use_tqdm: bool) -> dict[str, RequestOutput]:
        """Step until the batch is done; if interrupted, leave the engine empty."""
        finished: dict[str, RequestOutput] = {}
        try:
            with tqdm(total=len(order), desc="generating", unit="prompt", disable=None if use_tqdm else True) as bar:
                while len(finished) < len(order):
                    outputs, ended = output.process(self.engine.step())
                    for request_id in ended:
                        self.engine.finish(request_id, FinishReason.STOP)
                    finished.update((out.request_id, out) for out in outputs)
                    bar.update(len(outputs))
            # Requests that a stop string ended may still have a step in flight.
            while self.engine.has_work:
                self.engine.step()
        except BaseException:
            self.engine.abandon()
            raise
        return finished


def _lease(adapters: EngineAdapters, asked: Adapters, count: int, leases: ExitStack) -> list[bytes | None]:
    """Keys of the adapters of ``count`` prompts, kept until ``leases`` ends; those that are not loaded are loaded."""
    many = [asked] * count if asked is None or isinstance(asked, LoRARequest) else list(asked)
    if len(many) != count or not all(each is None or isinstance(each, LoRARequest) for each in many):
        raise RequestError(f"lora_request must be a LoRARequest, or a list of {count}, one per prompt.", "lora_request")
    try:
        for request in dict.fromkeys(each for each in many if each is not None):
            _load(adapters, request)
    except LoadError as error:
        raise RequestError(str(error), "lora_request") from error
    return [None if each is None else leases.enter_context(adapters.lease(each.lora_name)) for each in many]


def _load(adapters: EngineAdapters, request: LoRARequest) -> None:
    name, path = request.lora_name, request.lora_path
    loaded = {info.name: info.path for info in adapters.infos()}
    if request.load_inplace or (path and path != loaded.get(name)):
        adapters.load(name, path, base_model=request.base_model_name, replace=request.load_inplace)
    else:
        adapters.prepare(name)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}.", "prompt")
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _per_prompt(params: Params, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(item, SamplingParams) for item in params):
        raise RequestError("sampling_params must be SamplingParams, or a list of them.", "sampling_params")
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling_params for {count} prompts.", "sampling_params")
    return list(params)
