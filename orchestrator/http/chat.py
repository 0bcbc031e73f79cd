"""POST /v1/chat/completions: conversations, by the model's chat template, with tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import Request
from starlette.responses import Response

from orchestrator.generation import Generation
from orchestrator.http.bodies import ChatBody
from orchestrator.http.calls import respond
from orchestrator.http.classic import ClassicWriter
from orchestrator.http.conversation import Plan, plan
from orchestrator.http.errors import api_error
from orchestrator.http.sampling import ask, classic_asked, room
from orchestrator.http.tools import Arguments, CallBegins, Part, Words
from orchestrator.outputs import Piece
from pilotfish.errors import PilotfishError

NAMES = ClassicWriter.names | {"prompt": "messages", "prompt token_ids": "messages"}


async def chat(generation: Generation, body: ChatBody, request: Request) -> Response:
    """Answers the conversation n times."""
    generation.require_model(body.model)
    how = plan(generation, body.tools or [], body.tool_choice, body.parallel_tool_calls)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    try:
        prompt = await how.prompt(generation, body.messages, body.chat_template_kwargs)
        limit = room(prompt, generation.info().max_len) if limit is None else limit
    except PilotfishError as error:
        raise api_error(error, NAMES) from error
    asked = classic_asked(body, limit, [*body.stop, *how.stops])
    return await respond(generation, [ask(body, prompt, asked)], _Writer(body, how, len(prompt)), request)


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
