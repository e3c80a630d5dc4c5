"""What a request asks for, in the form that llguidance compiles."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import llguidance

from jaxserve.errors import RequestError
from jaxserve.sampling_params import StructuredOutputsParams
from jaxserve.structured.checks import check_regex, closed, patterns
from jaxserve.structured.tags import tags_grammar
from jaxserve.structured.vocabulary import Vocabulary

__all__ = ["literal", "refusal", "settled", "source_of"]

_WHITESPACE = r"[ \n\t\r]{0,20}"


def _body(wanted: StructuredOutputsParams, vocabulary: Vocabulary) -> Mapping[str, Any]:
    """The grammar as llguidance's object, without what comes before."""
    match wanted.kind:
        case "json" | "json_object":
            schema = wanted.json if wanted.json is not None else {"type": "object"}
            return {"json_schema": settled(schema, wanted)}
        case "choice":
            return {"lark_grammar": f"start: {' | '.join(map(literal, wanted.choice or ()))}"}
        case "structural_tag":
            tags = tags_grammar(wanted.structural_tag, vocabulary, literal, partial(settled, wanted=wanted))
            return {"lark_grammar": tags}
        case "regex":
            check_regex(wanted.text, "regex")
            made = json.loads(llguidance.LLMatcher.grammar_from_regex(wanted.text))
            return dict(made["grammars"][0])
    if wanted.text.lstrip().startswith("start:"):
        return {"lark_grammar": wanted.text}
    try:
        lark = llguidance.grammar_from("grammar", wanted.text)
    except (ValueError, RecursionError) as error:
        raise refusal("grammar", str(error)) from None
    return {"lark_grammar": lark}


def settled(schema: Any, wanted: StructuredOutputsParams) -> Any:
    """The schema with what the request says of whitespace and further properties."""
    try:
        for pattern in patterns(schema):
            check_regex(pattern, "json")
        schema = closed(schema) if wanted.disable_additional_properties else schema
    except RecursionError:
        raise refusal("json", "it nests too deeply") from None
    if not isinstance(schema, dict):
        return schema
    if wanted.whitespace_pattern is not None:
        check_regex(wanted.whitespace_pattern, "whitespace_pattern")
    if wanted.disable_any_whitespace:
        return {**schema, "x-guidance": {"whitespace_flexible": False}}
    own = {"whitespace_pattern": _WHITESPACE, **schema.get("x-guidance", {})}
    asked = {} if wanted.whitespace_pattern is None else {"whitespace_pattern": wanted.whitespace_pattern}
    return {**schema, "x-guidance": {**own, **asked}}


def source_of(wanted: StructuredOutputsParams, vocabulary: Vocabulary) -> str:
    """The grammar of a request. RequestError: it cannot be one."""
    body = _body(wanted, vocabulary)
    if wanted.reasoning is None:
        return json.dumps({"grammars": [body]})
    before = _free_text(*wanted.reasoning, vocabulary)
    return json.dumps({"grammars": [{"lark_grammar": before}, {**body, "name": "body"}]})


def _free_text(start: str, end: str, vocabulary: Vocabulary) -> str:
    """A grammar for free text before ``@body``; its marks may be tokens that are no text."""
    special = {vocabulary.tokens[token]: token for token in vocabulary.special_ids}
    opening, closing = special.get(start.encode()), special.get(end.encode())
    first = "" if not start else literal(start) if opening is None else f"<[{opening}]>"
    text = f"{first} TEXT <[{closing}]>" if closing is not None else f"{first} text"
    optional = f"({text} SPACE)?" if start else f"{text} SPACE"
    rule = "TEXT: /(.|\\n)*/" if closing is not None else f"text[suffix={literal(end)}]: /(.|\\n)*/"
    return f"start: {optional} @body\nSPACE: /[ \\n\\t\\r]*/\n{rule}\n"


def literal(text: str) -> str:
    """A text as Lark writes it."""
    # JSON's strings are Lark's, but for DEL, which JSON leaves as it is.
    return json.dumps(text).replace("\x7f", "\\u007f")


def refusal(kind: str, why: str) -> RequestError:
    """Why a grammar of a kind cannot be used."""
    return RequestError(f"structured_outputs.{kind} cannot be used: {why.rstrip('.')}.", "structured_outputs")
