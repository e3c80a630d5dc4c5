"""What a request says of its output's form, in OpenAI's field, vLLM's, and vLLM's older ones: brought to one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from jaxserve.errors import RequestError, nearest
from jaxserve.sampling_params import StructuredOutputsParams

__all__ = ["GUIDED", "ResponseFormat", "Structure", "renamed"]

GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_NAMES = frozenset(f.name for f in fields(StructuredOutputsParams)) - {"reasoning"}


class _JsonSchema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's ``response_format``. A schema holds, whether it is called strict or not."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: _JsonSchema | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class Structure:
    """The form that a request asks for.

    Attributes:
        field: the field that says so, for messages.
        params: the form, None for any.
    """

    def __init__(
        self,
        response_format: ResponseFormat | None,
        structured_outputs: Mapping[str, Any] | None,
        guided: Mapping[str, Any],
        whitespace: str | None,
    ) -> None:
        """``guided`` holds the older fields that were given. RequestError: a form is not valid, or there are two."""
        given: dict[str, dict[str, Any]] = {}
        if response_format is not None and response_format.type != "structural_tag":
            for name in ("structures", "triggers"):
                if getattr(response_format, name) is not None:
                    raise RequestError(f"response_format.{name} needs the type structural_tag.", "response_format")
        if response_format is not None and response_format.type != "text":
            given["response_format"] = _of_format(response_format)
        elif response_format is not None and response_format.json_schema is not None:
            raise RequestError("response_format.json_schema needs the type json_schema.", "response_format")
        if structured_outputs is not None:
            given["structured_outputs"] = _known(structured_outputs)
        given |= {name: {name.removeprefix("guided_"): value} for name, value in guided.items()}
        if len(given) > 1:
            first, second, *_ = given
            raise RequestError(f"{second} cannot be given together with {first}.", second)
        if whitespace is not None and not given:
            raise RequestError("guided_whitespace_pattern needs a form with whitespace.", "guided_whitespace_pattern")
        self.field = next(iter(given), "structured_outputs")
        self.params: StructuredOutputsParams | None = None
        for settings in given.values():
            spaces = {} if whitespace is None else {"whitespace_pattern": whitespace}
            try:
                self.params = StructuredOutputsParams(**{**settings, **spaces})
            except RequestError as error:
                raise renamed(error, self.field) from None


def renamed(error: RequestError, field: str) -> RequestError:
    """An error about ``structured_outputs``, as one about the field that the client knows."""
    if error.param != "structured_outputs" or field == "structured_outputs":
        return error
    return RequestError(re.sub(r"structured_outputs(\.\w+)?", lambda _: field, str(error), count=1), field)


def _of_format(response_format: ResponseFormat) -> dict[str, Any]:
    if response_format.type == "structural_tag":
        return {"structural_tag": response_format.model_dump(include={"structures", "triggers"})}
    if response_format.type == "json_object":
        if response_format.json_schema is not None:
            raise RequestError("response_format.json_schema needs the type json_schema.", "response_format")
        return {"json_object": True}
    if response_format.json_schema is None:
        raise RequestError("response_format.json_schema is required for the type json_schema.", "response_format")
    return {"json": response_format.json_schema.schema_}


def _known(wanted: Mapping[str, Any]) -> dict[str, Any]:
    for name in wanted:
        if name not in _NAMES:
            hint = nearest(name[:64], _NAMES)
            raise RequestError(f"structured_outputs.{name[:64]} is not supported.{hint}", "structured_outputs")
    return {name: value for name, value in wanted.items() if value is not None}
