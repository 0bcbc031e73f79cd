"""What the bodies of all generating endpoints have in common: how to sample, and how to draft."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from orchestrator.admission import MAX_ALLOWED, MAX_BIASES, MAX_STOP_TOKENS
from orchestrator.http.bodies.base import Body, ignored, refused, wrong
from orchestrator.http.bodies.forms import StructuredOutputs


def _draft_length(value: Any) -> Any:
    if value is None or value == "auto" or type(value) is int:
        return value
    raise wrong("it must be an integer or auto")


class Sampling(Body):
    """What all generating endpoints have in common."""

    model: str
    """Name of the model served; see /v1/models."""

    stream: bool | None = None
    """Sends the text as it comes, as server-sent events."""
    temperature: float | None = None
    """Where nothing is said as the model's generation config says, else 1, as with OpenAI; 0 is greedy."""
    top_p: float | None = None
    seed: int | None = None
    """Makes the text a function of seed, prompt and model alone, whatever the draft."""
    user: Any = ignored("nothing is kept per user")

    top_k: int | None = None
    """Keeps the k likeliest tokens; 0 and, as with vLLM, -1 keep all."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    """End tokens are banned before so many tokens."""
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_STOP_TOKENS)
    banned_token_ids: list[int] | None = Field(None, max_length=MAX_BIASES)
    """Tokens that never come; as a logit_bias of -100."""
    allowed_token_ids: list[int] | None = Field(None, max_length=MAX_ALLOWED)
    """Only these tokens come."""
    structured_outputs: StructuredOutputs | None = None

    draft_length: Annotated[int | Literal["auto"] | None, BeforeValidator(_draft_length)] = None
    """Most draft tokens a round; 0 does without the draft, auto has the server choose from round to round."""
    acceptance: Literal["match", "ratio", "block"] | None = None
    """Rule by which draft tokens are kept; all are exact."""
    draft_model: str | None = None
    """Drafts only with drafters of this name, or this way of drafting, as "mtp"."""
    priority: int | None = None
    """Lower is served first."""
    timeout: float | None = None
    """Seconds until the request is given up."""

    include_stop_str_in_output: bool | None = None
    """What ends the text, a stop text or the text of a stop token, is part of it."""
    skip_special_tokens: bool | None = None
    """False writes special tokens out, end tokens that are ignored among them."""
    truncate_prompt_tokens: int | None = None
    """Keeps so many of the prompt's last tokens; -1 as many as fit before the completion."""
    spaces_between_special_tokens: Any = refused("text is what the tokenizer's decoder makes of the tokens", True)
    use_beam_search: Any = refused("text is sampled", False)
