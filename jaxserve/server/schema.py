"""Request bodies as pydantic models, and one way to read them.

Types are strict: ``"16"`` is no number. Ranges are not repeated here where ``SamplingParams`` has them.
"""

from __future__ import annotations

import reprlib
import uuid
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError

from jaxserve.errors import RequestError
from jaxserve.sampling_params import MAX_LOGPROBS, MAX_N, SamplingParams
from jaxserve.server.compatibility import CHAT_UNSUPPORTED, COMPLETION_UNSUPPORTED, ignored_header, strip
from jaxserve.server.forms import one_or_many
from jaxserve.server.messages import Message
from jaxserve.server.structure import GUIDED, ResponseFormat, Structure
from jaxserve.server.tools import Tool, ToolChoice

__all__ = [
    "MAX_PROMPTS",
    "Body",
    "ChatRequest",
    "CompletionRequest",
    "GenerationRequest",
    "Prompts",
    "Scheduled",
    "StreamOptions",
    "explain",
]

MAX_PROMPTS = 1024


Strings = Annotated[list[str], BeforeValidator(one_or_many)]


class StreamOptions(BaseModel):
    """What a stream holds besides the answer. ``include_obfuscation`` pads events and has no effect on the answer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Body(BaseModel):
    """The body of a request. None is what a client gets by leaving a parameter out.

    Attributes:
        unsupported: parameters that are refused, unless they ask for nothing: see ``compatibility``.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    _ignored: tuple[str, ...] = PrivateAttr(())

    @classmethod
    def parse(cls, body: Mapping[str, Any], *, strict: bool = False) -> Self:
        """The request in ``body``. RequestError: a parameter is unsupported or of the wrong type, or, if ``strict``,
        unknown."""
        kept, ignored = strip(body, cls.model_fields, cls.unsupported, strict=strict)
        try:
            request = cls.model_validate(kept)
        except ValidationError as error:
            raise explain(error) from None
        request._ignored = ignored
        return request

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer that tell of the request."""
        return ignored_header(self._ignored)


class Scheduled(Body):
    """What all requests to the engine share.

    ``truncate_prompt_tokens`` keeps so many of a prompt's last tokens, -1 as many as fit.
    """

    model: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = Field(None, pattern=r"^[!-~]{1,128}$")
    truncate_prompt_tokens: int | None = Field(None, ge=-1)

    def new_id(self, kind: str) -> str:
        """The answer's id: of a kind, with the request's own id if it brings one."""
        return f"{kind}-{self.request_id or uuid.uuid4().hex}"


class GenerationRequest(Scheduled):
    """What the generating endpoints of OpenAI share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include_metrics: bool | None = None

    n: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Strings | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: Strings | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    detokenize: bool | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    @classmethod
    def parse(cls, body: Mapping[str, Any], *, strict: bool = False) -> Self:
        request = super().parse(body, strict=strict)
        if request.stream_options is not None and not request.stream:
            raise RequestError("stream_options can only be given together with stream: true.", "stream_options")
        if request.stream and request.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs cannot be streamed.", "prompt_logprobs")
        return request

    def sampling(self, **settings: Any) -> SamplingParams:
        """The sampling parameters of the body, with ``settings`` instead of or beside its own."""
        given = {name: value for name in _sampling_names(type(self)) if (value := getattr(self, name)) is not None}
        return SamplingParams(**given | settings)

    def structure(self) -> Structure:
        """The form that the output must have. RequestError: it is not valid, or there are two."""
        guided = {name: value for name in GUIDED if (value := getattr(self, name)) is not None}
        return Structure(self.response_format, self.structured_outputs, guided, self.guided_whitespace_pattern)

    @property
    def num_choices(self) -> int:
        """Completions per prompt."""
        return 1 if self.n is None else self.n


@cache
def _sampling_names(kind: type[GenerationRequest]) -> tuple[str, ...]:
    return tuple(SamplingParams.names() & kind.model_fields.keys() - {"structured_outputs"})


def _prompts(value: Any) -> Any:
    """Wrap the four legal forms into one: a list of prompts, each a string or a list of token ids."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(type(item) is int for item in value)):
        return [value]
    legal = isinstance(value, list) and all(isinstance(item, str) for item in value)
    if not legal and not (isinstance(value, list) and all(_is_ids(item) for item in value)):
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")
    if not value or not all(len(item) or isinstance(item, str) for item in value):
        raise ValueError("must not be empty")
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"holds {len(value)} prompts; the limit is {MAX_PROMPTS}")
    return value


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


Prompts = Annotated[list[str | list[int]], BeforeValidator(_prompts)]


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    unsupported = COMPLETION_UNSUPPORTED

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None

    @classmethod
    def parse(cls, body: Mapping[str, Any], *, strict: bool = False) -> Self:
        request = super().parse(body, strict=strict)
        request._check_best_of()
        if request.suffix and request.echo:
            raise RequestError("echo cannot be given together with suffix.", "echo")
        return request

    def _check_best_of(self) -> None:
        if self.best_of is None:
            return
        if not self.num_choices <= self.best_of <= MAX_N:
            raise RequestError(
                f"best_of must be an integer from n ({self.num_choices}) to {MAX_N}, got {self.best_of}.", "best_of"
            )
        if self.stream and self.best_of > self.num_choices:
            raise RequestError("best_of above n cannot be streamed: the best are known at the end.", "best_of")


class ChatRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    unsupported = CHAT_UNSUPPORTED

    _prompt_ids: Sequence[int] = PrivateAttr(())

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = Field(None, min_length=1)
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = Field(None, min_length=1)
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    documents: list[dict[str, Any]] | None = None

    @classmethod
    def parse(cls, body: Mapping[str, Any], *, strict: bool = False) -> Self:
        request = super().parse(body, strict=strict)
        if request.top_logprobs is not None and not request.logprobs:
            raise RequestError("top_logprobs can only be given together with logprobs: true.", "top_logprobs")
        if request.max_completion_tokens is not None and request.max_tokens not in (
            None,
            request.max_completion_tokens,
        ):
            raise RequestError("max_tokens and max_completion_tokens differ; give one of them.", "max_tokens")
        if request.continue_final_message and request.add_generation_prompt:
            raise RequestError(
                "add_generation_prompt and continue_final_message exclude each other.", "add_generation_prompt"
            )
        _check_tools(request)
        return request

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The prompt's token ids where the body was read in another process, which keeps the messages; else empty."""
        return self._prompt_ids

    @prompt_ids.setter
    def prompt_ids(self, ids: Sequence[int]) -> None:
        self._prompt_ids = ids


def _check_tools(request: ChatRequest) -> None:
    names = [tool.function.name for tool in request.tools or ()]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"tools holds two functions of the name {twice!r}.", "tools")
    choice = request.tool_choice
    if not names and choice not in (None, "none", "auto"):
        raise RequestError("tool_choice needs tools to choose from.", "tool_choice")
    if isinstance(choice, dict) and choice["name"] not in names:
        raise RequestError(f"tool_choice names {choice['name']!r}, which is none of the tools.", "tool_choice")


def explain(error: ValidationError) -> RequestError:
    """The first thing that is wrong with a body, by its parameter."""
    first = error.errors(include_url=False)[0]
    param = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return RequestError(f"{param} is not a known parameter.", param)
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    message = message[:1].lower() + message[1:]
    if first["type"] == "missing":
        return RequestError(f"{param} is required.", param)
    if first["type"] == "value_error":
        return RequestError(f"{param} {message}.", param)
    return RequestError(f"{param} {message}, got {reprlib.repr(first['input'])}.", param)
