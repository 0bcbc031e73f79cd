"""A conversation with tools as a prompt: what the model is told, and how its calls are told apart from text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.generation import Generation
from orchestrator.http.bodies import ChatMessage, NamedTool, Tool, ToolChoice
from orchestrator.http.errors import invalid
from orchestrator.http.tools import ForcedCall, Reader, Text, Writing, writing_of


@dataclass(frozen=True)
class Plan:
    """What tools mean for a conversation.

    Attributes:
        tools: that the model is told of.
        forced: the one call that must come is of one of these; empty if none must.
        writing: how the model writes calls.
        stops: texts that end the answer.
    """

    tools: Sequence[Tool]
    forced: Sequence[Tool]
    writing: Writing
    stops: Sequence[str]

    def reader(self) -> Reader:
        """Tells calls from text."""
        if self.forced:
            return ForcedCall()
        return self.writing.reader({tool.function.name for tool in self.tools}) if self.tools else Text()

    async def prompt(
        self, generation: Generation, messages: Sequence[ChatMessage], variables: Mapping[str, Any] | None
    ) -> list[int]:
        """Token ids of the conversation, by the model's chat template.

        Raises:
            PilotfishError: see ``Tokenizer.encode_chat``.
        """
        return await generation.encode_chat(
            template_messages(messages),
            tools=[template_tool(tool) for tool in self.tools],
            variables=variables,
            beginning=self.writing.beginning if self.forced else "",
        )


def plan(generation: Generation, tools: Sequence[Tool], choice: ToolChoice | None, parallel: bool | None) -> Plan:
    """What a body's tools ask for.

    Args:
        generation: has the model's chat template.
        tools: that may be called.
        choice: whether and which.
        parallel: whether several may be called.
    """
    tools = () if choice == "none" else tools
    forced = tools if choice == "required" else ()
    if isinstance(choice, NamedTool):
        forced = [tool for tool in tools if tool.function.name == choice.function.name]
    if forced:
        raise invalid("tool_choice", "tool_choice is not supported yet but for none and auto", "unsupported_parameter")
    writing = writing_of(generation.tokenizer.template_source(bool(tools)))
    ends_with_call = tools and not forced and parallel is False and writing.closing
    return Plan(tools, forced, writing, [writing.closing] if ends_with_call else [])


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
