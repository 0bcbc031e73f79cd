"""POST /v1/completions: plain prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from orchestrator.generation import Generation
from orchestrator.http.bodies.completions import CompletionBody
from orchestrator.http.calls import respond
from orchestrator.http.classic import ClassicWriter
from orchestrator.http.forms import Form, form_of
from orchestrator.http.logprobs import CompletionLogprobs, prompt_logprobs
from orchestrator.http.sampling import ask, classic_asked, fill, fit
from orchestrator.outputs import Piece, Prompt
from orchestrator.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


async def complete(generation: Generation, body: CompletionBody, request: Request) -> Response:
    """Completes each prompt n times."""
    generation.require_model(body.model)
    body, is_cut = fill(generation, body), body.truncate_prompt_tokens is not None
    prompts = [await generation.encode(each, is_cut=is_cut) if isinstance(each, str) else each for each in body.prompt]
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    counts = [len(fit(generation, body, prompt, limit)[0]) for prompt in prompts]
    form = form_of(body.response_format, body.structured_outputs, "response_format")
    scored = body.logprobs if body.echo and body.logprobs is not None else None
    how = classic_asked(
        body,
        limit,
        body.stop,
        form,
        echo=bool(body.echo),
        logprobs=body.logprobs,
        prompt_logprobs=max((count for count in (scored, body.prompt_logprobs) if count is not None), default=None),
    )
    writer = _Writer(body, generation.tokenizer, counts, form)
    asks = [
        ask(body, prompt, how, is_text=isinstance(given, str))
        for given, prompt in zip(body.prompt, prompts, strict=True)
    ]
    return await respond(generation, asks, writer, request)


class _Writer(ClassicWriter):
    def __init__(self, body: CompletionBody, tokenizer: Tokenizer, prompts: Sequence[int], form: Form | None) -> None:
        super().__init__(body, tokenizer, prompts, "cmpl", "text_completion", "text_completion")
        if form is not None:
            self.names = self.names | form.names
        self._body = body
        # Of each choice that has begun: how many there are has yet to be judged.
        self._logprobs = defaultdict[int, CompletionLogprobs](lambda: CompletionLogprobs(tokenizer))

    def echo(self, choice: int, prompt: Prompt) -> Iterator[dict[str, Any]]:
        body, delta = self._body, self.nothing(choice)
        if body.echo:
            delta["text"] = "".join(prompt.token_texts)
            if body.logprobs is not None:
                found = [each._replace(top=each.top[: body.logprobs]) for each in prompt.logprobs]
                delta["logprobs"] = self._logprobs[choice].of(prompt.token_ids, prompt.token_texts, [None, *found])
        if body.prompt_logprobs is not None:
            found = [each._replace(top=each.top[: body.prompt_logprobs]) for each in prompt.logprobs]
            delta["prompt_logprobs"] = prompt_logprobs(self.tokenizer, prompt.token_ids, found)
        yield delta

    def piece(self, choice: int, piece: Piece) -> Iterator[dict[str, Any]]:
        text = "".join(piece.token_texts)
        if text:
            yield self.nothing(choice) | {"text": text}

    def logprobs(self, choice: int, piece: Piece) -> dict[str, Any]:
        return self._logprobs[choice].of(piece.token_ids, piece.token_texts, piece.logprobs)

    def finish(self, choice: int, reason: str) -> Iterator[dict[str, Any]]:
        yield self.nothing(choice) | {"finish_reason": reason}

    def nothing(self, choice: int) -> dict[str, Any]:
        return {"index": choice, "text": "", "logprobs": None, "finish_reason": None}

    def fold(self, choices: dict[int, dict[str, Any]], delta: dict[str, Any]) -> None:
        choice = choices.setdefault(delta["index"], self.nothing(delta["index"]))
        choice["text"] += delta["text"]
        choice["finish_reason"] = delta["finish_reason"]
        self.extend(choice, delta["logprobs"])
        if "prompt_logprobs" in delta:
            choice["prompt_logprobs"] = delta["prompt_logprobs"]
