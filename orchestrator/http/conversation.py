"""A conversation with tools: what the model is told, what it must write, and how calls are told apart from text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.generation import Generation
from orchestrator.http.bodies.chat import ChatMessage
from orchestrator.http.bodies.tools import FunctionDefinition, NamedTool, Tool, ToolChoice
from orchestrator.http.errors import invalid
from orchestrator.http.forms import Form, kept_schema, tag
from orchestrator.http.tool_reading import ForcedCalls, Reader, Text
from orchestrator.http.tool_writing import Function, Writing, writing_of


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
    """

    tools: Sequence[Tool]
    form: Form | None
    writing: Writing
    must_call: bool = False
    several: bool = True
    stops: Sequence[str] = ()

    def reader(self) -> Reader:
        """Tells calls from text."""
        if self.must_call:
            return ForcedCalls()
        names = {tool.function.name for tool in self.tools}
        return self.writing.reader(names, self.several) if names else Text()

    async def prompt(
        self, generation: Generation, messages: Sequence[ChatMessage], variables: Mapping[str, Any] | None
    ) -> list[int]:
        """Token ids of the conversation, by the model's chat template.

        Raises:
            PilotfishError: see ``Tokenizer.encode_chat``.
        """
        tools = [template_tool(tool) for tool in self.tools]
        return await generation.encode_chat(template_messages(messages), tools=tools, variables=variables)


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


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as Hugging Face's chat templates expect them."""
    return [_template_message(message, index) for index, message in enumerate(messages)]


def template_tool(tool: Tool) -> dict[str, Any]:
    """A tool as Hugging Face's chat templates expect it."""
    function = tool.function
    parameters = function.parameters or {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {"name": function.name, "description": function.description or "", "parameters": parameters},
    }


def _template_message(message: ChatMessage, index: int) -> dict[str, Any]:
    # Templates know no developer; some of them add texts to the content, so that it may not be None.
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role, "content": message.content or ""}
    found |= {name: value for name in ("name", "tool_call_id") if (value := getattr(message, name)) is not None}
    if message.thought:
        found["reasoning_content"] = message.thought
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, f"messages[{index}].tool_calls[{number}]"),
                },
            }
            for number, call in enumerate(message.tool_calls)
        ]
    return found


def _arguments(text: str, place: str) -> dict[str, Any]:
    """As an object: templates write it as JSON themselves."""
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise invalid(f"{place}.function.arguments", f"{place}.function.arguments is not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise invalid(f"{place}.function.arguments", f"{place}.function.arguments is no JSON object")
    return arguments
