"""A message in the making: what the model writes becomes parts of its content, and the events that tell of them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from jaxserve.outputs import CompletionOutput
from jaxserve.request import FinishReason
from jaxserve.server.parsers import Event

__all__ = ["Writer"]

Told = dict[str, Any]

_DELTAS = {"text": "text_delta", "thinking": "thinking_delta"}


class Writer:
    """Writes one message.

    Attributes:
        message: the object as it is now; ``content`` is complete at the end.
    """

    def __init__(self, message_id: str, model: str) -> None:
        self.message: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": None,
        }
        self._is_open = False
        self._arguments = ""

    def begin(self, usage: dict[str, Any]) -> Iterator[Told]:
        """The first token is there."""
        self.message["usage"] = usage
        yield {"type": "message_start", "message": {**self.message, "content": []}}

    def write(self, events: Iterable[Event]) -> Iterator[Told]:
        """Something was written."""
        for event in events:
            if event.kind == "name":
                call_id = f"toolu_{uuid.uuid4().hex[:24]}"
                yield from self._open({"type": "tool_use", "id": call_id, "name": event.text, "input": {}})
            elif event.kind == "arguments":
                self._arguments += event.text
                yield self._delta({"type": "input_json_delta", "partial_json": event.text})
            else:
                yield from self._add_text(event)

    def end(self, output: CompletionOutput, usage: dict[str, Any]) -> Iterator[Told]:
        """The model has written all."""
        yield from self._close()
        self.message |= {"stop_reason": self._stop_reason(output), "usage": usage}
        if self.message["stop_reason"] == "stop_sequence":
            self.message["stop_sequence"] = output.stop_reason
        delta = {key: self.message[key] for key in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": delta, "usage": usage}
        yield {"type": "message_stop"}

    def _stop_reason(self, output: CompletionOutput) -> str:
        if output.finish_reason == FinishReason.LENGTH:
            return "max_tokens"
        if isinstance(output.stop_reason, str):
            return "stop_sequence"
        return "tool_use" if any(part["type"] == "tool_use" for part in self.message["content"]) else "end_turn"

    def _add_text(self, event: Event) -> Iterator[Told]:
        kind = "text" if event.kind == "content" else "thinking"
        if not self._is_open or self.message["content"][-1]["type"] != kind:
            yield from self._open({"type": kind, kind: ""} | ({} if kind == "text" else {"signature": ""}))
        self.message["content"][-1][kind] += event.text
        yield self._delta({"type": _DELTAS[kind], kind: event.text})

    def _open(self, part: dict[str, Any]) -> Iterator[Told]:
        yield from self._close()
        self.message["content"].append(part)
        self._is_open, self._arguments = True, ""
        yield {"type": "content_block_start", "index": self._index, "content_block": dict(part)}

    def _close(self) -> Iterator[Told]:
        if not self._is_open:
            return
        part = self.message["content"][-1]
        if part["type"] == "tool_use":
            part["input"] = json.loads(self._arguments or "{}")
        self._is_open = False
        yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: dict[str, Any]) -> Told:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    @property
    def _index(self) -> int:
        return len(self.message["content"]) - 1
