"""POST /v1/chat/completions: conversations, by the model's chat template, with tools."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.responses import Response

from orchestrator.generation import Generation
from orchestrator.http.bodies import ChatBody, ChatMessage, NamedTool, Tool
from orchestrator.http.calls import respond
from orchestrator.http.classic import ClassicWriter
from orchestrator.http.errors import api_error, invalid
from orchestrator.http.sampling import ask, classic_asked, room
from orchestrator.http.tools import Arguments, CallBegins, ForcedCall, Part, Reader, Text, Words, Writing, writing_of
from orchestrator.outputs import Piece
from pilotfish.errors import PilotfishError

NAMES = ClassicWriter.names | {"prompt": "messages", "prompt token_ids": "messages"}


async def chat(generation: Generation, body: ChatBody, request: Request) -> Response:
    """Answers the conversation n times."""
    generation.require_model(body.model)
    how = plan(body, generation)
    try:
        prompt = await generation.encode_chat(
            template_messages(body.messages),
            tools=[template_tool(tool) for tool in how.tools],
            variables=body.chat_template_kwargs,
            beginning=how.beginning,
        )
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        limit = room(prompt, generation.info().max_len) if limit is None else limit
    except PilotfishError as error:
        raise api_error(error, NAMES) from error
    asked = classic_asked(body, limit, how.stops)
    return await respond(generation, [ask(body, prompt, asked)], _Writer(body, how, len(prompt)), request)


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

    @property
    def beginning(self) -> str:
        return self.writing.beginning if self.forced else ""

    def reader(self) -> Reader:
        """Tells calls from text."""
        if self.forced:
            return ForcedCall()
        return self.writing.reader({tool.function.name for tool in self.tools}) if self.tools else Text()


def plan(body: ChatBody, generation: Generation) -> Plan:
    """What the body's tools ask for."""
    tools = [] if body.tool_choice == "none" else body.tools or []
    forced: Sequence[Tool] = tools if body.tool_choice == "required" else ()
    if isinstance(body.tool_choice, NamedTool):
        forced = [tool for tool in tools if tool.function.name == body.tool_choice.function.name]
    if forced:
        raise invalid("tool_choice", "tool_choice is not supported yet but for none and auto", "unsupported_parameter")
    writing = writing_of(generation.tokenizer.template_source(bool(tools)))
    ends_with_call = tools and not forced and body.parallel_tool_calls is False and writing.closing
    return Plan(tools, forced, writing, [*body.stop, *([writing.closing] if ends_with_call else [])])


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


class _Writer(ClassicWriter):
    names = NAMES

    def __init__(self, body: ChatBody, how: Plan, prompt: int) -> None:
        super().__init__(body, [prompt], "chatcmpl", "chat.completion", "chat.completion.chunk")
        if body.max_completion_tokens is not None:
            self.names = self.names | {"max_tokens": "max_completion_tokens"}
        self._readers = [how.reader() for _ in range(self.choice_count)]
        self._calls = [-1] * self.choice_count  # index of each choice's last call

    def openings(self) -> Iterator[dict[str, Any]]:
        for choice in range(self.choice_count):
            yield _delta(choice, {"role": "assistant", "content": "", "refusal": None})

    def piece(self, choice: int, piece: Piece) -> Iterator[dict[str, Any]]:
        return self._parts(choice, self._readers[choice].push("".join(piece.token_texts)))

    def finish(self, choice: int, reason: str) -> Iterator[dict[str, Any]]:
        yield from self._parts(choice, self._readers[choice].finish())
        has_called = self._calls[choice] >= 0
        yield _delta(choice, {}, "tool_calls" if has_called and reason == "stop" else reason)

    def nothing(self, choice: int) -> dict[str, Any]:
        return _delta(choice, {})

    def fold(self, choices: dict[int, dict[str, Any]], delta: dict[str, Any]) -> None:
        choice = choices.setdefault(
            delta["index"],
            {
                "index": delta["index"],
                "message": {"role": "assistant", "content": None, "refusal": None, "annotations": []},
                "logprobs": None,
                "finish_reason": None,
            },
        )
        message, change = choice["message"], delta["delta"]
        if "content" in change:
            message["content"] = (message["content"] or "") + change["content"]
        for call in change.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                calls.append({name: call[name] for name in ("id", "type", "function")})
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        choice["finish_reason"] = delta["finish_reason"]
        if delta["finish_reason"] is not None and "tool_calls" not in message:
            message["content"] = message["content"] or ""

    def _parts(self, choice: int, parts: Iterator[Part]) -> Iterator[dict[str, Any]]:
        for part in parts:
            match part:
                case Words(text):
                    yield _delta(choice, {"content": text})
                case CallBegins(call_id, name):
                    self._calls[choice] += 1
                    begun = {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
                    yield _delta(choice, {"tool_calls": [{"index": self._calls[choice], **begun}]})
                case Arguments(text):
                    more = {"index": self._calls[choice], "function": {"arguments": text}}
                    yield _delta(choice, {"tool_calls": [more]})


def _delta(choice: int, change: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": choice, "delta": change, "logprobs": None, "finish_reason": reason}
