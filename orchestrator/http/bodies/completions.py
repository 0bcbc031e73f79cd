"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from orchestrator.http.bodies.base import refused, wrong
from orchestrator.http.bodies.classic import Classic

MAX_PROMPTS = 128
"""Most prompts of one call."""


def _prompts(value: Any) -> Any:
    """Each prompt as a text or token ids."""
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    if isinstance(value, str) or kinds == {int}:
        return [value]
    if not kinds or not (kinds == {str} or (kinds == {list} and all(set(map(type, ids)) <= {int} for ids in value))):
        raise wrong("it must be a text, a list of texts, a list of token ids or a list of such lists, none empty")
    if len(value) > MAX_PROMPTS:
        raise wrong(f"it has {len(value)} prompts; at most {MAX_PROMPTS} are allowed")
    return value


class CompletionBody(Classic):
    """POST /v1/completions."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)]
    """A text, token ids, or a list of either; each gets its n choices."""
    max_tokens: int | None = None
    """16 where nothing is said, as with OpenAI. 0 beside echo or prompt_logprobs gives the prompt alone."""
    echo: bool | None = None
    """The text starts with the prompt; its tokens have logprobs, too."""
    logprobs: int | None = None
    """The likeliest alternatives of each token, so many; 0 gives the token's own logprob alone."""
    add_special_tokens: Any = refused("a text prompt gets the model's special tokens; send token ids without", True)

    best_of: Any = refused("use n, and choose", 1)
    suffix: Any = refused("the text is written after the prompt only", "")
    length_penalty: Any = refused("it is for beam search", 1.0)
