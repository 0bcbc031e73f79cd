"""POST /v1/completions: plain prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from orchestrator.generation import Generation
from orchestrator.http.bodies import CompletionBody
from orchestrator.http.calls import respond
from orchestrator.http.classic import ClassicWriter
from orchestrator.http.sampling import ask, classic_asked
from orchestrator.outputs import Piece, Prompt

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


async def complete(generation: Generation, body: CompletionBody, request: Request) -> Response:
    """Completes each prompt n times."""
    generation.require_model(body.model)
    prompts = [await generation.encode(each) if isinstance(each, str) else each for each in body.prompt]
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    how = classic_asked(body, limit, body.stop, echo=bool(body.echo))
    asks = [ask(body, prompt, how) for prompt in prompts]
    return await respond(generation, asks, _Writer(body, [len(prompt) for prompt in prompts]), request)


class _Writer(ClassicWriter):
    def __init__(self, body: CompletionBody, prompts: Sequence[int]) -> None:
        super().__init__(body, prompts, "cmpl", "text_completion", "text_completion")

    def echo(self, choice: int, prompt: Prompt) -> Iterator[dict[str, Any]]:
        yield self.nothing(choice) | {"text": "".join(prompt.token_texts)}

    def piece(self, choice: int, piece: Piece) -> Iterator[dict[str, Any]]:
        text = "".join(piece.token_texts)
        if text:
            yield self.nothing(choice) | {"text": text}

    def finish(self, choice: int, reason: str) -> Iterator[dict[str, Any]]:
        yield self.nothing(choice) | {"finish_reason": reason}

    def nothing(self, choice: int) -> dict[str, Any]:
        return {"index": choice, "text": "", "logprobs": None, "finish_reason": None}

    def fold(self, choices: dict[int, dict[str, Any]], delta: dict[str, Any]) -> None:
        choice = choices.setdefault(delta["index"], self.nothing(delta["index"]))
        choice["text"] += delta["text"]
        choice["finish_reason"] = delta["finish_reason"]
