"""What form a text must have, as bodies say it."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from orchestrator.http.bodies.base import Body, ignored, wrong, wrong_field

MAX_SCHEMA_KEYWORDS = 1024
"""Most keywords of a schema, on its first level."""


class JsonSchema(Body):
    """A schema with its name."""

    name: str = "schema"
    description: Any = ignored("the model does not see it")
    schema_: dict[str, Any] = Field(alias="schema", max_length=MAX_SCHEMA_KEYWORDS)
    """JSON Schema; the text always follows it."""
    strict: bool | None = None
    """False: keywords that a grammar does not keep to are left out, rather than refused."""


class ResponseFormat(Body):
    """What form a text has."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") is not (self.json_schema is not None):
            raise wrong_field("json_schema", "goes with type json_schema, and only with it")
        return self


class TextFormat(Body):
    """What form a response has; OpenAI nests it less deeply than that of a chat."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", max_length=MAX_SCHEMA_KEYWORDS)
    description: Any = ignored("the model does not see it")
    strict: bool | None = None
    """As in a chat's."""

    @model_validator(mode="after")
    def _has_its_schema(self) -> TextFormat:
        if (self.type == "json_schema") is not (self.schema_ is not None):
            raise wrong_field("schema", "goes with type json_schema, and only with it")
        return self


def _schema(value: Any) -> Any:
    """A JSON Schema, maybe as text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise wrong(f"it is not JSON: {error}") from error


MAX_CHOICES = 4096
"""Most texts of a choice."""


class StructuredOutputs(Body):
    """vLLM's way to name a form; exactly one."""

    json_: Annotated[dict[str, Any] | None, BeforeValidator(_schema)] = Field(
        None, alias="json", max_length=MAX_SCHEMA_KEYWORDS
    )
    """JSON Schema, as an object or as text."""
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    """The text is one of these."""
    grammar: str | None = None
    """EBNF."""
    json_object: bool | None = None
    """Any JSON object."""
    structural_tag: str | None = None
    """xgrammar's, as JSON."""

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        given = [name for name in type(self).model_fields if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise wrong("it must have exactly one of json, regex, choice, grammar, json_object and structural_tag")
        return self


def check_form(format: ResponseFormat | TextFormat | None, outputs: StructuredOutputs | None) -> None:
    """Returns unless both ask for a form; raises for validators."""
    if format is not None and format.type != "text" and outputs is not None:
        raise wrong_field("structured_outputs", "goes with no other form of the text")
