"""A conversation with tools: what the model must write, and how calls are told apart from text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.generation import Generation
from orchestrator.http.bodies.tools import FunctionDefinition, NamedTool, Tool, ToolChoice
from orchestrator.http.errors import invalid
from orchestrator.http.forms import Form, kept_schema, tag
from orchestrator.http.tool_reading import CLOSE, OPEN, ForcedCalls, Reader, Text
from orchestrator.http.tool_writing import Function, Writing, writing_of
from orchestrator.tokenizer import Tokenizer


@dataclass(frozen=True)
class Plan:
    """What tools and a form mean for a conversation.

    Attributes:
        tools: that the model is told of.
        form: of the answer as it is written, calls included; None is free text.
        writing: how the model writes calls.
        must_call: the answer is calls and nothing else.
        several: more than one call counts.
        stops: texts that end the answer.
        marks: texts that the reader must see, even if they are special tokens.
        wrap: a reader around that of calls and text.
    """

    tools: Sequence[Tool]
    form: Form | None
    writing: Writing
    must_call: bool = False
    several: bool = True
    stops: Sequence[str] = ()
    marks: Sequence[str] = ()
    wrap: Callable[[Reader], Reader] = lambda reader: reader

    def reader(self) -> Reader:
        """Tells calls from text."""
        return self.wrap(self._reader())

    def shown_token_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Tokens that the reader must see, special or not: with some models tags and marks are."""
        tags = (OPEN, CLOSE) if self.tools and self.writing.has_tags else ()
        return [found for mark in (*tags, *self.marks) if (found := tokenizer.token_id(mark)) is not None]

    def _reader(self) -> Reader:
        if self.must_call:
            return ForcedCalls()
        names = {tool.function.name for tool in self.tools}
        return self.writing.reader(names, self.several) if names else Text()


def plan(
    generation: Generation, tools: Sequence[Tool], choice: ToolChoice | None, parallel: bool | None, form: Form | None
) -> Plan:
    """What a body asks for.

    Args:
        generation: has the model's chat template.
        tools: that may be called.
        choice: whether and which.
        parallel: whether several may be called.
        form: of an answer that calls nothing.
    """
    tools = () if choice == "none" else tools
    writing, several = writing_of(generation.tokenizer.template_source(bool(tools))), parallel is not False
    functions = _functions(tools)
    if isinstance(choice, NamedTool):
        named = [function for function in functions if function.name == choice.function.name]
        return Plan(tools, tag(writing.only_calls(named, False), "tools"), writing, must_call=True)
    if choice == "required":
        return Plan(tools, tag(writing.only_calls(functions, several), "tools"), writing, must_call=True)
    if not tools or form is not None:
        either = form if form is None or not tools else _or_calls(form, writing.only_calls(functions, several))
        return Plan(tools, either, writing, several=several)
    if any(tool.function.strict for tool in tools):
        return Plan(tools, tag(writing.calls_in_text(functions, several), "tools"), writing, several=several)
    # No JSON string has such an end of a call in it: ends of lines are escaped there.
    stops = [] if several or not writing.has_tags else [writing.closing]
    return Plan(tools, None, writing, several=several, stops=stops)


def _functions(tools: Sequence[Tool]) -> list[Function]:
    return [Function(tool.function.name, _parameters(tool.function)) for tool in tools]


def _parameters(function: FunctionDefinition) -> Mapping[str, Any]:
    within = f"the parameters of {function.name}, "
    return kept_schema(function.parameters or {"type": "object"}, "tools", function.strict, within)


def _or_calls(form: Form, calls: Mapping[str, Any]) -> Form:
    if not form.part:
        raise invalid(form.field, f"{form.field} does not go with tools", "unsupported_parameter")
    return tag({"type": "or", "elements": [form.part, calls]}, form.field)
