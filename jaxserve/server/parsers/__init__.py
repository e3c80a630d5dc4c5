"""What models write, taken apart: reasoning, calls of tools, and the answer itself."""

from __future__ import annotations

from jaxserve.server.parsers.output import Call, OutputParser, Piece
from jaxserve.server.parsers.reasoning import END, REASONING_PARSERS, START, ReasoningParser
from jaxserve.server.parsers.registry import TOOL_PARSERS, ToolParser, detect
from jaxserve.server.parsers.source import Event, ParseCalls, Tools

__all__ = [
    "END",
    "REASONING_PARSERS",
    "START",
    "TOOL_PARSERS",
    "Call",
    "Event",
    "OutputParser",
    "ParseCalls",
    "Piece",
    "ReasoningParser",
    "ToolParser",
    "Tools",
    "detect",
]
