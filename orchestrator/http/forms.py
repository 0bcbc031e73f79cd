"""What form a text must have: OpenAI's and vLLM's ways to say so, as the grammars of ``Asked``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.http.bodies.forms import ResponseFormat, StructuredOutputs, TextFormat
from orchestrator.http.errors import invalid
from orchestrator.json_schema import check_schema, relaxed
from pilotfish.errors import InvalidArgumentError
from pilotfish.steps import MAX_GRAMMAR_BYTES, require

_JSON = {"type": "json_schema", "max_whitespace_cnt": 40}  # as of a schema by itself; see pilotfish/runtime/grammar.py
_ANY = _JSON | {"json_schema": {"type": "object"}}


@dataclass(frozen=True)
class Form:
    """A form.

    Attributes:
        asked: the one field of ``Asked`` that holds the grammar.
        field: of the body that asks for it, for errors.
        part: the same as a format of xgrammar's structural tags, to be combined with others.
    """

    asked: Mapping[str, Any]
    field: str
    part: Mapping[str, Any]

    @property
    def names(self) -> dict[str, str]:
        """What the body calls the field of ``Asked``."""
        return dict.fromkeys(self.asked, self.field)


def form_of(format: ResponseFormat | TextFormat | None, outputs: StructuredOutputs | None, field: str) -> Form | None:
    """The form that a body asks for; None for free text. Both are not given at once.

    Args:
        format: OpenAI's, of the endpoint's shape.
        outputs: vLLM's.
        field: name of the former.
    """
    if outputs is not None:
        return _structured(outputs)
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return Form({"json_object": True}, field, _ANY)
    if isinstance(format, TextFormat):
        return _schema(format.schema_ or {}, f"{field}.schema", format.strict)
    assert format.json_schema is not None
    return _schema(format.json_schema.schema_, f"{field}.json_schema.schema", format.json_schema.strict)


def tag(part: Mapping[str, Any], field: str) -> Form:
    """A format of xgrammar's structural tags as a form of its own."""
    return Form({"structural_tag": json.dumps({"type": "structural_tag", "format": part})}, field, part)


def _structured(outputs: StructuredOutputs) -> Form:
    field = "structured_outputs"
    if outputs.json_ is not None:
        return _schema(outputs.json_, f"{field}.json")
    if outputs.regex is not None:
        return Form({"regex": outputs.regex}, f"{field}.regex", {"type": "regex", "pattern": outputs.regex})
    if outputs.grammar is not None:
        return Form({"ebnf": outputs.grammar}, f"{field}.grammar", {"type": "grammar", "grammar": outputs.grammar})
    if outputs.choice is not None:
        choices = [{"type": "const_string", "value": choice} for choice in outputs.choice]
        return tag({"type": "or", "elements": choices}, f"{field}.choice")
    if outputs.structural_tag is not None:
        return Form({"structural_tag": outputs.structural_tag}, f"{field}.structural_tag", {})
    return Form({"json_object": True}, f"{field}.json_object", _ANY)


def _schema(schema: Mapping[str, Any], field: str, strict: bool | None = None) -> Form:
    schema = kept_schema(schema, field, strict)
    # In ASCII: what a client writes may be no text in Unicode.
    return Form({"json_schema": json.dumps(schema)}, field, _JSON | {"json_schema": schema})


def kept_schema(schema: Mapping[str, Any], field: str, strict: bool | None, within: str = "") -> Mapping[str, Any]:
    """A schema that a grammar keeps to: the one given or, where ``strict`` is false, what a grammar can keep of it.

    Args:
        schema: as JSON has it.
        field: of the body, for errors.
        strict: OpenAI's.
        within: where in the field it is.

    Raises:
        ApiError: a grammar does not keep to it, naming keyword and path.
    """
    try:
        size = _size(schema)
        require(size <= MAX_GRAMMAR_BYTES, field, f"of {size} bytes", f"at most {MAX_GRAMMAR_BYTES} are allowed")
        if strict is False:
            found: Mapping[str, Any] = relaxed(schema, field)
            return found
        check_schema(schema, field, within)
    except InvalidArgumentError as error:
        raise invalid(field, str(error)) from error
    return schema


def _size(schema: Mapping[str, Any]) -> int:
    try:
        return len(json.dumps(schema))
    except RecursionError:
        return 0  # it is refused for its depth
