"""The items of a response's input as the messages of a chat, which is what templates know."""

from __future__ import annotations

from typing import Any

from orchestrator.http.bodies.chat import ChatMessage
from orchestrator.http.bodies.responses import ResponseBody, ResponseItem
from orchestrator.http.bodies.tools import FunctionCall, ToolCall


def messages_of(body: ResponseBody) -> list[ChatMessage]:
    """The conversation as a chat: what one answer thought, said and called, item after item, is one message."""
    messages = [] if body.instructions is None else [ChatMessage(role="system", content=body.instructions)]
    answer: dict[str, Any] = {}  # the fields of a message of the assistant that later items may belong to
    for item in body.input:
        if answer and not _goes_on(answer, item):
            messages.append(_answer(answer))
            answer = {}
        match item.type:
            case "reasoning":
                answer["reasoning_content"] = item.content or ""
            case "function_call":
                answer.setdefault("tool_calls", []).append(_call(item))
            case "function_call_output":
                messages.append(ChatMessage(role="tool", content=item.output, tool_call_id=item.call_id))
            case "message" if item.role == "assistant":
                answer["content"] = item.content
            case "message":
                assert item.role is not None
                messages.append(ChatMessage(role=item.role, content=item.content))
    return [*messages, _answer(answer)] if answer else messages


def _answer(fields: dict[str, Any]) -> ChatMessage:
    return ChatMessage(role="assistant", **({"content": ""} | fields))


def _goes_on(answer: dict[str, Any], item: ResponseItem) -> bool:
    """Whether an item belongs to the answer begun before it: reasoning, text and calls come in this order."""
    if item.type == "function_call":
        return True
    return item.role == "assistant" and answer.keys() == {"reasoning_content"}


def _call(item: ResponseItem) -> ToolCall:
    assert item.call_id is not None
    assert item.name is not None
    assert item.arguments is not None
    return ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))
