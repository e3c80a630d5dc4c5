"""What a model must write that is to call tools: a JSON list of calls, each of which fits its tool's parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.sampling_params import StructuredOutputsParams
from jaxserve.structured.sources import literal, settled

__all__ = ["calls_structure"]


def calls_structure(tools: Mapping[str, Mapping[str, Any]], *, most: int | None = None) -> StructuredOutputsParams:
    """One call or more (``most`` at most) of tools, given by name with the JSON schema of their parameters.

    Each schema stays a document of its own, so that its references hold. Raises RequestError for a schema that cannot
    be used.
    """
    rules, names = [], []
    for number, (name, schema) in enumerate(tools.items()):
        opening = f'{{"name": {json.dumps(name)}, "parameters": '
        names.append(f"call{number}")
        rules.append(f"call{number}: {literal(opening)} arguments{number} {literal('}')}")
        rules.append(f"arguments{number}: %json {_document(name, schema)}")
    more = f'(", " call){{0,{most - 1}}}' if most is not None else '(", " call)*'
    start = 'start: "[" call "]"' if most == 1 else f'start: "[" call {more} "]"'
    return StructuredOutputsParams(grammar="\n".join([start, f"call: {' | '.join(names)}", *rules, ""]))


def _document(name: str, schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(settled(schema, StructuredOutputsParams(json=dict(schema))))
    except (RecursionError, TypeError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(
            f"structured_outputs: the parameters of {name!r} cannot be used: {error}.", "structured_outputs"
        ) from None
