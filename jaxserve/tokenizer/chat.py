"""Chats to prompts: what OpenAI clients send, made into what chat templates expect.

Templates are written for messages with a string as content and tool calls with an object as arguments; clients send
null, nothing, or lists of parts, and arguments as a JSON string. The rendering itself is transformers'.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import RequestError

__all__ = ["render"]


def render(
    hf: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    chat_template: str | None,
    options: dict[str, Any],
) -> str:
    """Render with a transformers tokenizer's template, or ``chat_template``; a failure raises RequestError."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError("messages must be a non-empty list.", "messages")
    if not all(isinstance(tool, Mapping) for tool in tools or ()):
        raise RequestError("tools must be a list of objects.", "tools")
    schemas = [dict(tool) for tool in tools] if tools else None
    try:
        template = hf.get_chat_template(chat_template, schemas)
    except ValueError as error:
        raise RequestError(f"This model has no chat template to use: {error}", "messages") from error
    knows_tool_calls = "tool_calls" in template
    plain = [_plain(message, i, knows_tool_calls) for i, message in enumerate(messages)]
    try:
        text = hf.apply_chat_template(plain, tools=schemas, chat_template=template, tokenize=False, **options)
    except Exception as error:  # a template is a program: it may raise anything, and only its input can be at fault
        raise RequestError(f"The chat template cannot render these messages: {error}", "messages") from error
    return str(text)


def _plain(message: Mapping[str, Any], index: int, knows_tool_calls: bool) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object, got {type(message).__name__}.", "messages")
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{where}.role must be a string.", "messages")
    plain = {**message, "content": _text(message.get("content"), where)}
    calls = message.get("tool_calls")
    if not calls:
        plain.pop("tool_calls", None)
        return plain
    if not isinstance(calls, list):
        raise _malformed_calls(where)
    plain["tool_calls"] = [_tool_call(call, where) for call in calls]
    if not knows_tool_calls:
        # The template would drop the calls without a word, and the model would not know what the results answer.
        plain["content"] = "\n".join(filter(None, (plain["content"], *map(_call_text, plain["tool_calls"]))))
    return plain


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a string, null or a list of parts.", "messages")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise RequestError(f"{where}.content[{i}]: only parts of type text are served, got {kind!r}.", "messages")
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}.content[{i}].text must be a string.", "messages")
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _malformed_calls(where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments else {}
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"{where}.tool_calls: arguments of {function['name']!r} are no JSON.", "messages"
            ) from error
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _malformed_calls(where: str) -> RequestError:
    return RequestError(f"{where}.tool_calls must be a list of objects with a function and its name.", "messages")


def _call_text(call: Mapping[str, Any]) -> str:
    function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
    try:
        text = json.dumps(function, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        message = f"tool_calls: arguments of {function['name']!r} cannot be written as JSON: {error}"
        raise RequestError(message, "messages") from error
    return f"<tool_call>\n{text}\n</tool_call>"
