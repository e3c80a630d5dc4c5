"""A response in the making: what the model writes becomes items, and the events that tell of them.

The plain answer is what the stream's events add up to: both are made here, and without streaming nobody listens.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxserve.outputs import CompletionOutput
from jaxserve.request import FinishReason
from jaxserve.server.errors import ErrorAnswer
from jaxserve.server.parsers import Event
from jaxserve.server.responses.schema import ResponsesRequest

__all__ = ["Writer"]

Told = dict[str, Any]

_PARTS = {"content": "output_text", "reasoning": "reasoning_text"}


class Writer:
    """Writes one response.

    Attributes:
        response: the object as it is now.
    """

    def __init__(self, body: ResponsesRequest, response_id: str, model: str) -> None:
        self.response = _opened(body, response_id, model)
        self._numbers = itertools.count()
        self._is_created = False
        self._item: dict[str, Any] | None = None
        self._call = -1
        self._logprobs: list[dict[str, Any]] = []

    # ------------------------------------------------------------------ the response
    def queue(self) -> Iterator[Told]:
        """It waits."""
        yield from self._create("queued")
        yield self._told("response.queued", response=self._now("queued"))

    def begin(self) -> Iterator[Told]:
        """It is being worked on."""
        yield from self._create("in_progress")
        yield self._told("response.in_progress", response=self._now("in_progress"))

    def end(self, output: CompletionOutput, usage: dict[str, Any]) -> Iterator[Told]:
        """The model has written all."""
        whole = output.finish_reason != FinishReason.LENGTH
        status = "completed" if whole else "incomplete"
        yield from self._close(status)
        if not whole:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.response["usage"] = usage
        self.response["completed_at"] = int(time.time()) if whole else None
        yield self._told(f"response.{status}", response=self._now(status))

    def fail(self, error: ErrorAnswer) -> Iterator[Told]:
        """It could not be finished."""
        yield from self._close("incomplete")
        code = "invalid_prompt" if error.status < 500 else "server_error"
        self.response["error"] = {"code": code, "message": error.message}
        yield self._told("response.failed", response=self._now("failed"))

    def cancel(self) -> None:
        """Nobody wants the rest; nothing is told of it."""
        list(self._close("incomplete"))
        self._now("cancelled")

    def _create(self, status: str) -> Iterator[Told]:
        """Clients want this event first, and once."""
        if not self._is_created:
            self._is_created = True
            yield self._told("response.created", response=self._now(status))

    # ------------------------------------------------------------------ items
    def write(self, events: Iterable[Event], logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Told]:
        """Something was written; ``logprobs`` are those of its tokens, as chats have them."""
        self._logprobs += logprobs
        for event in events:
            if event.kind == "name":
                yield from self._begin_call(event)
            elif event.kind == "arguments":
                yield from self._add_arguments(event.text)
            else:
                yield from self._add_text(event)

    def _begin_call(self, event: Event) -> Iterator[Told]:
        call_id = f"call_{uuid.uuid4().hex[:24]}"
        item = {"id": _new_id("fc"), "type": "function_call", "call_id": call_id, "name": event.text, "arguments": ""}
        yield from self._open(item)

    def _add_arguments(self, text: str) -> Iterator[Told]:
        assert self._item is not None
        self._item["arguments"] += text
        yield self._of_item("response.function_call_arguments.delta", delta=text)

    def _add_text(self, event: Event) -> Iterator[Told]:
        kind = "message" if event.kind == "content" else "reasoning"
        if self._item is None or self._item["type"] != kind:
            pending = _last(self._logprobs, event.text)  # what came before the text are marks, which are no part of it
            yield from self._open(_message() if kind == "message" else _reasoning())
            self._logprobs = pending
            yield from self._open_part(_PARTS[event.kind])
        assert self._item is not None
        part = self._item["content"][0]
        part["text"] += event.text
        if kind == "reasoning":
            self._logprobs = []  # the answer's text alone has them
            yield self._of_part("response.reasoning_text.delta", delta=event.text)
            return
        new, self._logprobs = self._logprobs, []
        part["logprobs"] += new
        yield self._of_part("response.output_text.delta", delta=event.text, logprobs=_brief(new))

    def _open(self, item: dict[str, Any]) -> Iterator[Told]:
        yield from self._close("completed")
        self._item = {**item, "status": "in_progress"}
        self.response["output"].append(self._item)
        yield self._told("response.output_item.added", output_index=self._index, item=_copy(self._item))

    def _open_part(self, kind: str) -> Iterator[Told]:
        assert self._item is not None
        part: dict[str, Any] = {"type": kind, "text": ""}
        if kind == "output_text":
            part |= {"annotations": [], "logprobs": []}
        self._item["content"].append(part)
        # Of its own lists: an event that is kept must not grow with the part.
        yield self._of_part("response.content_part.added", part={k: [] if v == [] else v for k, v in part.items()})

    def _close(self, status: str) -> Iterator[Told]:
        item = self._item
        if item is None:
            return
        item["status"] = status
        if item["type"] == "function_call":
            self._logprobs = []
            yield self._of_item("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            part = item["content"][0]
            if item["type"] == "message":
                part["logprobs"] += self._logprobs
                logprobs = {"logprobs": _brief(part["logprobs"])}
            self._logprobs = []
            done, more = ("output_text", logprobs) if item["type"] == "message" else ("reasoning_text", {})
            yield self._of_part(f"response.{done}.done", text=part["text"], **more)
            yield self._of_part("response.content_part.done", part=dict(part))
        yield self._told("response.output_item.done", output_index=self._index, item=_copy(item))
        self._item = None

    # ------------------------------------------------------------------ telling
    @property
    def _index(self) -> int:
        return len(self.response["output"]) - 1

    def _of_part(self, kind: str, **more: Any) -> Told:
        return self._of_item(kind, content_index=0, **more)

    def _of_item(self, kind: str, **more: Any) -> Told:
        assert self._item is not None
        return self._told(kind, item_id=self._item["id"], output_index=self._index, **more)

    def _told(self, kind: str, **more: Any) -> Told:
        return {"type": kind, "sequence_number": next(self._numbers), **more}

    def _now(self, status: str) -> dict[str, Any]:
        self.response["status"] = status
        return {**self.response, "output": [_copy(item) for item in self.response["output"]]}


def _opened(body: ResponsesRequest, response_id: str, model: str) -> dict[str, Any]:
    """The object of a response that was not begun yet."""
    text_format = body.text.format if body.text is not None else None
    shown_format = {"type": "text"} if text_format is None else text_format.model_dump(exclude_none=True, by_alias=True)
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": bool(body.store),
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": shown_format},
        "tool_choice": body.tool_choice or "auto",
        "tools": [_shown_tool(tool.model_dump()) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "strict": bool(tool["strict"])}


def _message() -> dict[str, Any]:
    return {"id": _new_id("msg"), "type": "message", "role": "assistant", "content": []}


def _reasoning() -> dict[str, Any]:
    return {"id": _new_id("rs"), "type": "reasoning", "summary": [], "content": []}


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """An item as it is now: parts are the only thing in it that changes."""
    return {**item, "content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)


def _last(logprobs: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Those of the last tokens that hold a text."""
    num_bytes, first = len(text.encode("utf-8", "replace")), len(logprobs)
    while first and num_bytes > 0:
        first -= 1
        num_bytes -= len(logprobs[first]["bytes"])
    return logprobs[first:]


def _brief(logprobs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """As events have them: without the bytes."""
    return [
        {
            "token": entry["token"],
            "logprob": entry["logprob"],
            "top_logprobs": [{"token": top["token"], "logprob": top["logprob"]} for top in entry["top_logprobs"]],
        }
        for entry in logprobs
    ]
