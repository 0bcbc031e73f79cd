"""POST /v1/responses: OpenAI's newer form of a chat. Nothing is stored, so a conversation is sent whole."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any

from fastapi import Request
from starlette.responses import Response

from orchestrator.core.finish import FinishReason
from orchestrator.generation import Generation
from orchestrator.http.bodies.responses import ResponseBody
from orchestrator.http.bodies.tools import NamedTool
from orchestrator.http.calls import NAMES, Writer, respond
from orchestrator.http.conversation import Plan, plan
from orchestrator.http.errors import ApiError, api_error
from orchestrator.http.forms import form_of
from orchestrator.http.items import messages_of
from orchestrator.http.logprobs import ChatLogprobs
from orchestrator.http.prompts import encode
from orchestrator.http.reasoning import Marks, reasoning_of
from orchestrator.http.sampling import ask, asked, fill, fit
from orchestrator.http.sse import event
from orchestrator.http.tool_reading import Arguments, CallBegins, Part, Thought, Words
from orchestrator.http.usage import UsageCount
from orchestrator.outputs import Event, Finished, Piece
from orchestrator.tokenizer import Tokenizer
from pilotfish.errors import PilotfishError

_NAMES = NAMES | {
    "prompt": "input",
    "prompt token_ids": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}


async def create(generation: Generation, body: ResponseBody, request: Request, marks: Marks | None) -> Response:
    """Answers the conversation; ``marks`` are those of the model's reasoning, if that is to be told apart."""
    generation.require_model(body.model)
    body = fill(generation, body)
    form = form_of(body.text.format if body.text is not None else None, body.structured_outputs, "text.format")
    tools = [function.tool for function in body.tools or ()]
    how = plan(generation, tools, body.tool_choice, body.parallel_tool_calls, form)
    limit = body.max_output_tokens
    try:
        effort = body.reasoning.effort if body.reasoning is not None else None
        is_cut = body.truncate_prompt_tokens is not None
        variables = body.chat_template_kwargs
        tokens = await encode(generation, messages_of(body), how.tools, variables, effort, is_cut=is_cut)
        prompt, limit = fit(generation, body, tokens, limit)
    except PilotfishError as error:
        raise api_error(error, _NAMES) from error
    if marks is not None:
        how = reasoning_of(marks, generation.tokenizer, prompt).plan(how, generation.tokenizer)
    logprobs = body.top_logprobs or 0 if body.has_logprobs else None
    sampling = asked(body, limit, how.form, stop=how.stops, logprobs=logprobs)
    writer = _Writer(body, generation.tokenizer, how, len(prompt))
    shown = how.shown_token_ids(generation.tokenizer)
    return await respond(generation, [ask(body, prompt, sampling, shown=shown)], writer, request)


class _Writer(Writer):
    """Events of a response, and the response that they add up to."""

    names = _NAMES

    def __init__(self, body: ResponseBody, tokenizer: Tokenizer, how: Plan, prompt: int) -> None:
        self.id = f"resp_{secrets.token_hex(24)}"
        self.streams = bool(body.stream)
        self._body = body
        self._created_at = int(time.time())
        self._reader = how.reader()
        self._logprobs = ChatLogprobs(tokenizer, body, how.shown_token_ids(tokenizer))
        self._held: list[dict[str, Any]] = []  # log probabilities of tokens whose text has not left
        if how.form is not None:
            self.names = self.names | how.form.names
        self._usage = UsageCount([prompt])
        self._output: list[dict[str, Any]] = []
        self._is_open = False  # whether the last item may grow
        self._reason: FinishReason | None = None  # None before the end
        self._number = -1

    def begin(self) -> Iterator[bytes]:
        """Tells of the response, empty yet."""
        yield self._event("response.created", response=self.whole())
        yield self._event("response.in_progress", response=self.whole())

    def push(self, prompt: int, found: Event) -> Iterator[bytes]:
        """What the event adds to the output."""
        if isinstance(found, Piece):
            yield from self._piece(found)
        elif isinstance(found, Finished):
            self._usage.add(prompt, found.usage)
            yield from self._parts(self._reader.finish())
            self._usage.reasoning_tokens += self._reader.reasoning_tokens
            if not self._output:
                yield from self._open_message()
            self._reason = found.reason
            yield from self._close()

    def end(self) -> Iterator[bytes]:
        """The whole response."""
        yield self._event(f"response.{self._status}", response=self.whole())

    def failure(self, error: ApiError) -> bytes:
        """An error on the way."""
        found = error.body["error"]
        return self._event("error", code=found["code"], message=found["message"], param=found["param"])

    def add(self, prompt: int, found: Event) -> None:
        """Adds to the output."""
        for _ in self.push(prompt, found):
            pass

    def whole(self) -> dict[str, Any]:
        """The response as it is now."""
        body, is_over = self._body, self._reason is not None
        is_cut = self._reason is FinishReason.LENGTH
        choice: Any = body.tool_choice or "auto"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": int(time.time()) if is_over and not is_cut else None,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": self._output if is_over else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": _format(body)},
            "tool_choice": _choice(choice) if isinstance(choice, NamedTool) else choice,
            "tools": [function.model_dump() for function in body.tools or ()],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": self._usage.response() if is_over else None,
        }

    @property
    def _status(self) -> str:
        if self._reason is None:
            return "in_progress"
        return "incomplete" if self._reason is FinishReason.LENGTH else "completed"

    def _piece(self, piece: Piece) -> Iterator[bytes]:
        if not piece.logprobs:
            yield from self._parts(self._reader.read(piece.token_texts))
            return
        logprobs = self._logprobs.of(piece.token_ids, piece.logprobs)["content"]
        for text, logprob in zip(piece.token_texts, logprobs, strict=True):
            self._held.append(logprob)
            yield from self._parts(self._reader.read((text,)))
            if self._reader.is_thinking:
                self._held = []  # reasoning has no place for them

    def _parts(self, parts: Iterator[Part]) -> Iterator[bytes]:
        for part in parts:
            match part:
                case Thought(text):
                    if not self._is_open:
                        yield from self._open_reasoning()
                    self._item["content"][0]["text"] += text
                    yield self._item_event("response.reasoning_text.delta", content_index=0, delta=text)
                case Words(text):
                    if not self._is_open or self._item["type"] != "message":
                        yield from self._close()
                        yield from self._open_message()
                    self._item["content"][0]["text"] += text
                    more = {"delta": text, "logprobs": self._take_logprobs()}
                    yield self._item_event("response.output_text.delta", content_index=0, **more)
                case CallBegins(call_id, name):
                    self._held = []  # the call's, which has no place for them
                    yield from self._close()
                    yield from self._open_call(call_id, name)
                case Arguments(text):
                    self._item["arguments"] += text
                    yield self._item_event("response.function_call_arguments.delta", delta=text)

    def _open_message(self) -> Iterator[bytes]:
        item: dict[str, Any] = {"type": "message", "role": "assistant", "content": []}
        yield self._open(item, f"msg_{secrets.token_hex(24)}")
        yield self._open_part({"type": "output_text", "text": "", "annotations": [], "logprobs": []})

    def _open_reasoning(self) -> Iterator[bytes]:
        item: dict[str, Any] = {"type": "reasoning", "summary": [], "content": [], "encrypted_content": None}
        yield self._open(item, f"rs_{secrets.token_hex(24)}")
        yield self._open_part({"type": "reasoning_text", "text": ""})

    def _open_part(self, part: dict[str, Any]) -> bytes:
        self._item["content"].append(part)
        return self._item_event("response.content_part.added", content_index=0, part=part)

    def _open_call(self, call_id: str, name: str) -> Iterator[bytes]:
        item = {"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}
        yield self._open(item, f"fc_{secrets.token_hex(24)}")

    def _open(self, item: dict[str, Any], item_id: str) -> bytes:
        self._output.append(item)
        item |= {"id": item_id, "status": "in_progress"}
        self._is_open = True
        return self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)

    def _close(self) -> Iterator[bytes]:
        """Nothing is added to the last item any more."""
        if not self._is_open:
            return
        self._is_open, item = False, self._item
        item["status"] = "incomplete" if self._reason is FinishReason.LENGTH else "completed"
        if item["type"] == "reasoning":
            part = item["content"][0]
            yield self._item_event("response.reasoning_text.done", content_index=0, text=part["text"])
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        elif item["type"] == "message":
            self._take_logprobs()
            part = item["content"][0]
            whole = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._item_event("response.output_text.done", content_index=0, **whole)
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        else:
            named = {"name": item["name"], "arguments": item["arguments"]}
            yield self._item_event("response.function_call_arguments.done", **named)
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _take_logprobs(self) -> list[dict[str, Any]]:
        """Those that have not left, now part of the message."""
        taken, self._held = self._held, []
        self._item["content"][0]["logprobs"] += taken
        return taken

    @property
    def _item(self) -> dict[str, Any]:
        return self._output[-1]

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item["id"], output_index=len(self._output) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields}, kind)


def _format(body: ResponseBody) -> dict[str, Any]:
    if body.text is None or body.text.format is None:
        return {"type": "text"}
    given: dict[str, Any] = body.text.format.model_dump(by_alias=True, exclude_none=True)
    return given


def _choice(choice: NamedTool) -> dict[str, Any]:
    return {"type": "function", "name": choice.function.name}
