"""A conversation as the prompt that a model's chat template makes of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from orchestrator.generation import Generation
from orchestrator.http.bodies.chat import ChatMessage
from orchestrator.http.bodies.tools import Tool
from orchestrator.http.errors import invalid
from orchestrator.http.lenient import pass_over
from orchestrator.http.tool_reading import ObjectEnd
from pilotfish.steps import require


async def encode(
    generation: Generation,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool],
    variables: Mapping[str, Any] | None,
    effort: str | None = None,
    *,
    adds_prompt: bool = True,
    continues: bool = False,
    is_cut: bool = False,
) -> list[int]:
    """Token ids of a conversation, by the model's chat template.

    Args:
        generation: has the template.
        messages: of the conversation.
        tools: that the model is told of.
        variables: ``chat_template_kwargs``.
        effort: ``reasoning_effort``.
        adds_prompt: ends with the beginning of the assistant's answer.
        continues: ends with the content of the last message.
        is_cut: its beginning may be left out, so that it may have any length.

    Raises:
        PilotfishError: the template has no such variable, or see ``Tokenizer.encode_chat``.
    """
    told = [template_tool(tool) for tool in tools]
    known = generation.tokenizer.template_variables(told)
    given = {name: value for name, value in (variables or {}).items() if _is_known(name, known)}
    if effort is not None:
        require("reasoning_effort" in known, "reasoning_effort", effort, "this model's chat template does not read it")
        agrees = given.get("reasoning_effort", effort) == effort
        require(agrees, "reasoning_effort", effort, "chat_template_kwargs say otherwise")
        given["reasoning_effort"] = effort
    return await generation.encode_chat(template_messages(messages), adds_prompt, told, given, continues, is_cut=is_cut)


def _is_known(name: str, known: Collection[str]) -> bool:
    """Whether the template reads a variable; where it does not, the request is refused, or the variable passed over."""
    field = f"chat_template_kwargs.{name}"
    if name not in known and not pass_over(field):
        has = f"it reads {', '.join(sorted(known))}" if known else "it reads none"
        raise invalid("chat_template_kwargs", f"{field} is no variable of this model's chat template; {has}")
    return name in known


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


def _arguments(text: str, place: str) -> dict[str, Any] | str:
    """As an object: templates write it as JSON themselves. Those of a call that was cut off are text as they are."""
    try:
        arguments = from_json(text) if text.strip() else {}
    except ValueError as error:
        if _is_cut(text):
            return text
        raise invalid(f"{place}.function.arguments", f"{place}.function.arguments is not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise invalid(f"{place}.function.arguments", f"{place}.function.arguments is no JSON object")
    return arguments


def _is_cut(text: str) -> bool:
    """Whether a text is the beginning of a JSON object, and no more."""
    end = ObjectEnd()
    end.take(text.lstrip())
    try:
        return not end.is_over and isinstance(from_json(text, allow_partial="trailing-strings"), dict)
    except ValueError:
        return False
