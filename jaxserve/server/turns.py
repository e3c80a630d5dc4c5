"""How a chat request is put to this model, and how its answers are read: tools, reasoning, and the output's form.

``auto`` is the only choice that rests on the model: it writes calls in its own format, or does not. A call that must be
made is made certain by a grammar, in one format for all models.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.config import ServerConfig
from jaxserve.errors import RequestError
from jaxserve.sampling_params import StructuredOutputsParams
from jaxserve.server.parsers import END, REASONING_PARSERS, START, TOOL_PARSERS, OutputParser, ToolParser, detect
from jaxserve.server.parsers.calls import arguments_of
from jaxserve.server.protocol import Tokenizer
from jaxserve.server.schema import ChatRequest
from jaxserve.server.structure import renamed
from jaxserve.server.tools import Tool, with_tools
from jaxserve.structured import calls_structure

__all__ = ["Reading", "Turn", "Turns"]

_PROMPT_END = 16  # tokens, in which a mark of reasoning at the end of a prompt must lie


@dataclass(frozen=True)
class Turn:
    """One request.

    Attributes:
        tools: those that may be called.
        told: whether the messages must tell of them, as the chat template does not.
        parser: finds calls in the answer, None if there can be none.
        structure, structure_field: the form of the output, and the field that asks for it.
        max_calls: most calls of an answer.
        shows_reasoning: whether thoughts are sent, where they are looked for.
    """

    tools: Sequence[Tool] = ()
    told: bool = False
    parser: ToolParser | None = None
    structure: StructuredOutputsParams | None = None
    structure_field: str = "structured_outputs"
    max_calls: int | None = None
    shows_reasoning: bool = True

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The schema of each tool's parameters."""
        return {tool.function.name: tool.function.schema_of_arguments for tool in self.tools}

    def put(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Messages and options for the chat template."""
        if not self.tools:
            return messages, {}
        if self.told:
            return with_tools(messages, self.tools), {}
        return messages, {"tools": [tool.rendered() for tool in self.tools]}


@dataclass(frozen=True)
class Reading:
    """How answers to one prompt are read.

    Attributes:
        turn: what was asked.
        inside: whether they begin inside a thought; None if reasoning is not looked for.
        reasoning: the parser's name.
        keep_special: whether marks are special tokens, which are to stay in the text until they are found.
    """

    turn: Turn
    inside: bool | None = None
    reasoning: str = ""
    keep_special: bool = False

    @property
    def structure(self) -> StructuredOutputsParams | None:
        """The form of the output, where thoughts may come first."""
        wanted = self.turn.structure
        if wanted is None or self.inside is None:
            return wanted
        closed = not self.inside and REASONING_PARSERS[self.reasoning].implied
        return wanted if closed else replace(wanted, reasoning=("" if self.inside else START, END))

    @property
    def shows_reasoning(self) -> bool:
        """Whether answers hold what was thought."""
        return self.inside is not None and self.turn.shows_reasoning

    def new_id(self) -> str:
        """An id for a call, in a form that the model's template takes."""
        length = self.turn.parser.id_length if self.turn.parser else None
        return f"call_{uuid.uuid4().hex[:24]}" if length is None else uuid.uuid4().hex[:length]

    def output_parser(self) -> OutputParser:
        """What takes one answer apart."""
        parser = self.turn.parser
        return OutputParser(
            None if self.inside is None else REASONING_PARSERS[self.reasoning].parse(self.inside),
            None if parser is None else parser.parse,
            self.turn.schemas,
            self.turn.max_calls,
        )


class Turns:
    """What the server makes of chat requests to its model."""

    def __init__(self, tokenizer: Tokenizer, config: ServerConfig) -> None:
        template = tokenizer.chat_template or ""
        self._tokenizer = tokenizer
        self._trusts_templates = config.trust_request_chat_template
        self._knows_tools = "tools" in template
        name: str | None = config.tool_call_parser
        if name == "auto":
            # The format in which calls are described to templates that know none.
            name = detect(template) if self._knows_tools else "hermes"
        self._parser = TOOL_PARSERS.get(name or "none")
        self._auto = config.enable_auto_tool_choice
        self._reasoning = config.reasoning_parser if config.reasoning_parser in REASONING_PARSERS else ""
        special = {tokenizer.token_bytes(token) for token in tokenizer.special_ids}
        self._special = frozenset(piece.decode("utf-8", "replace") for piece in special)

    @property
    def reasons(self) -> bool:
        """Whether thoughts are told from answers."""
        return bool(self._reasoning)

    def plan(self, body: ChatRequest) -> Turn:
        """What ``body`` asks for. RequestError: it cannot be served."""
        if body.chat_template is not None and not self._trusts_templates:
            raise RequestError("chat_template needs a server with --trust-request-chat-template.", "chat_template")
        structure = body.structure()
        turn = Turn(
            structure=structure.params,
            structure_field=structure.field,
            shows_reasoning=body.include_reasoning is not False,
        )
        choice = body.tool_choice or "auto"
        if not body.tools or choice == "none":
            return turn
        knows_tools = self._knows_tools if body.chat_template is None else "tools" in body.chat_template
        turn = replace(turn, tools=body.tools, told=not knows_tools)
        if body.parallel_tool_calls is False:
            turn = replace(turn, max_calls=1)
        if structure.params is not None:
            raise RequestError(
                f"{structure.field} cannot be given together with tools that may be called.", structure.field
            )
        if choice == "auto":
            if not self._auto or self._parser is None:
                raise RequestError(
                    'tool_choice "auto" needs a server with --enable-auto-tool-choice, and with --tool-call-parser '
                    "where the chat template does not tell the format.",
                    "tool_choice",
                )
            return _strict(replace(turn, parser=self._parser))
        return self._forced(turn, choice)

    def read(self, turn: Turn, prompt: Sequence[int]) -> Reading:
        """How the answers to a prompt are to be read."""
        inside = None
        if self._reasoning:
            end = self._tokenizer.decode(prompt[-_PROMPT_END:], skip_special_tokens=False)
            inside = REASONING_PARSERS[self._reasoning].begins_inside(end)
        marks = (*(turn.parser.marks if turn.parser else ()), *((START, END) if self._reasoning else ()))
        return Reading(turn, inside, self._reasoning, not self._special.isdisjoint(marks))

    def _forced(self, turn: Turn, choice: Any) -> Turn:
        id_length = self._parser.id_length if self._parser else None
        try:
            if choice == "required":
                structure = calls_structure(turn.schemas, most=turn.max_calls)
                parser = replace(TOOL_PARSERS["json"], id_length=id_length)
            else:
                structure = StructuredOutputsParams(json=turn.schemas[choice["name"]])
                parser = ToolParser(arguments_of(choice["name"]), id_length=id_length)
        except RequestError as error:
            raise renamed(error, "tools") from None
        return replace(turn, structure=structure, structure_field="tools", parser=parser)


def _strict(turn: Turn) -> Turn:
    """Where a tool is strict, and the model's format can be held to schemas: calls of its own accord are."""
    if turn.parser is None or turn.parser.strict is None or not any(tool.function.strict for tool in turn.tools):
        return turn
    structures = []
    for tool in turn.tools:
        begin, end = turn.parser.tag(tool.function.name)
        schema = tool.function.schema_of_arguments if tool.function.strict else {"type": "object"}
        structures.append({"begin": begin, "schema": schema, "end": end})
    wanted = {"structures": structures, "triggers": [turn.parser.marks[0]]}
    return replace(turn, structure=StructuredOutputsParams(structural_tag=wanted), structure_field="tools")
