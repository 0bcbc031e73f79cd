"""POST /v1/chat/completions: conversations, by the model's chat template, with tools."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from fastapi import Request
from starlette.responses import Response

from orchestrator.generation import Generation
from orchestrator.http.bodies.chat import ChatBody
from orchestrator.http.calls import respond
from orchestrator.http.classic import ClassicWriter
from orchestrator.http.conversation import Plan, plan
from orchestrator.http.errors import api_error
from orchestrator.http.forms import form_of
from orchestrator.http.logprobs import ChatLogprobs, prompt_logprobs
from orchestrator.http.prompts import encode
from orchestrator.http.reasoning import Marks, reasoning_of
from orchestrator.http.sampling import ask, classic_asked, fill, fit
from orchestrator.http.tool_reading import Arguments, CallBegins, Part, Reader, Thought, Words
from orchestrator.outputs import Piece, Prompt
from orchestrator.tokenizer import Tokenizer
from pilotfish.errors import PilotfishError

NAMES = ClassicWriter.names | {"prompt": "messages", "prompt token_ids": "messages"}


async def chat(generation: Generation, body: ChatBody, request: Request, marks: Marks | None) -> Response:
    """Answers the conversation n times; ``marks`` are those of the model's reasoning, if that is to be told apart."""
    generation.require_model(body.model)
    body = fill(generation, body)
    form = form_of(body.response_format, body.structured_outputs, "response_format")
    how = plan(generation, body.tools or [], body.tool_choice, body.parallel_tool_calls, form)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    try:
        tokens = await encode(
            generation,
            body.messages,
            how.tools,
            body.chat_template_kwargs,
            body.reasoning_effort,
            adds_prompt=body.add_generation_prompt is not False,
            continues=bool(body.continue_final_message),
            is_cut=body.truncate_prompt_tokens is not None,
        )
        prompt, limit = fit(generation, body, tokens, limit)
    except PilotfishError as error:
        raise api_error(error, NAMES) from error
    if marks is not None:
        continued = body.messages[-1].content if body.continue_final_message else None
        how = reasoning_of(marks, generation.tokenizer, prompt, continued).plan(how, generation.tokenizer)
    asked = classic_asked(
        body,
        limit,
        [*body.stop, *how.stops],
        how.form,
        logprobs=body.top_logprobs or 0 if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    writer = _Writer(body, generation.tokenizer, how, len(prompt), thinks=marks is not None)
    shown = how.shown_token_ids(generation.tokenizer)
    return await respond(generation, [ask(body, prompt, asked, shown=shown)], writer, request)


class _Writer(ClassicWriter):
    names = NAMES

    def __init__(self, body: ChatBody, tokenizer: Tokenizer, how: Plan, prompt: int, *, thinks: bool) -> None:
        super().__init__(body, tokenizer, [prompt], "chatcmpl", "chat.completion", "chat.completion.chunk")
        if body.max_completion_tokens is not None:
            self.names = self.names | {"max_tokens": "max_completion_tokens"}
        if how.form is not None:
            self.names = self.names | how.form.names
        # Of each choice that has begun: how many there are has yet to be judged.
        self._readers: defaultdict[int, Reader] = defaultdict(how.reader)
        self._calls: defaultdict[int, int] = defaultdict(lambda: -1)  # index of the last call
        self._shows_reasoning = body.include_reasoning is not False
        self._message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None, "annotations": []}
        self._message |= {"reasoning_content": None} if thinks else {}
        self._logprobs = ChatLogprobs(tokenizer, body, how.shown_token_ids(tokenizer))
        self._prompt_logprobs: dict[str, Any] = {}

    def whole(self) -> dict[str, Any]:
        """All choices, the usage, and as with vLLM the prompt's log probabilities beside them."""
        return super().whole() | self._prompt_logprobs

    def echo(self, choice: int, prompt: Prompt) -> Iterator[dict[str, Any]]:
        found = prompt_logprobs(self.tokenizer, prompt.token_ids, prompt.logprobs)
        self._prompt_logprobs = {"prompt_logprobs": found}
        return iter(())

    def logprobs(self, choice: int, piece: Piece) -> dict[str, Any]:
        return self._logprobs.of(piece.token_ids, piece.logprobs)

    def openings(self) -> Iterator[dict[str, Any]]:
        for choice in range(self.choice_count):
            yield _delta(choice, {"role": "assistant", "content": "", "refusal": None})

    def piece(self, choice: int, piece: Piece) -> Iterator[dict[str, Any]]:
        return self._parts(choice, self._readers[choice].read(piece.token_texts))

    def finish(self, choice: int, reason: str) -> Iterator[dict[str, Any]]:
        yield from self._parts(choice, self._readers[choice].finish())
        self.usage.reasoning_tokens += self._readers[choice].reasoning_tokens
        has_called = self._calls[choice] >= 0
        yield _delta(choice, {}, "tool_calls" if has_called and reason == "stop" else reason)

    def nothing(self, choice: int) -> dict[str, Any]:
        return _delta(choice, {})

    def fold(self, choices: dict[int, dict[str, Any]], delta: dict[str, Any]) -> None:
        choice = choices.setdefault(
            delta["index"],
            {
                "index": delta["index"],
                "message": dict(self._message, annotations=[]),
                "logprobs": None,
                "finish_reason": None,
            },
        )
        message, change = choice["message"], delta["delta"]
        for name in ("content", "reasoning_content"):
            if name in change:
                message[name] = (message[name] or "") + change[name]
        for call in change.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                calls.append({name: call[name] for name in ("id", "type", "function")})
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        self.extend(choice, delta["logprobs"])
        choice["finish_reason"] = delta["finish_reason"]
        if delta["finish_reason"] is not None and "tool_calls" not in message:
            message["content"] = message["content"] or ""

    def _parts(self, choice: int, parts: Iterator[Part]) -> Iterator[dict[str, Any]]:
        for part in parts:
            match part:
                case Words(text):
                    yield _delta(choice, {"content": text})
                case Thought(text):
                    if self._shows_reasoning:
                        yield _delta(choice, {"reasoning_content": text})
                case CallBegins(call_id, name):
                    self._calls[choice] += 1
                    begun = {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
                    yield _delta(choice, {"tool_calls": [{"index": self._calls[choice], **begun}]})
                case Arguments(text):
                    more = {"index": self._calls[choice], "function": {"arguments": text}}
                    yield _delta(choice, {"tool_calls": [more]})


def _delta(choice: int, change: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": choice, "delta": change, "logprobs": None, "finish_reason": reason}
