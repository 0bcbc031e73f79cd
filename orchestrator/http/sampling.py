"""From a body's fields to what the rest of Pilotfish calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.admission import Asked
from orchestrator.core.acceptance import Rule
from orchestrator.generation import Ask
from orchestrator.http.bodies.classic import Classic
from orchestrator.http.bodies.sampling import Sampling
from orchestrator.http.forms import Form
from pilotfish.errors import refusal

DEFAULT_TEMPERATURE = 1.0
"""OpenAI's; over gRPC nothing said is greedy."""


def asked(body: Sampling, max_tokens: int, form: Form | None, **others: Any) -> Asked:
    """How to sample, as the body says."""
    return Asked(
        max_tokens=max_tokens,
        temperature=DEFAULT_TEMPERATURE if body.temperature is None else body.temperature,
        seed=body.seed,
        top_k=0 if body.top_k == -1 else body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        min_tokens=body.min_tokens,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=body.stop_token_ids or (),
        banned_token_ids=body.banned_token_ids or (),
        allowed_token_ids=body.allowed_token_ids or (),
        acceptance=None if body.acceptance is None else Rule[body.acceptance.upper()],
        draft_length=None if body.draft_length == "auto" else body.draft_length,
        adaptive_draft_length=body.draft_length == "auto",
        draft_model=body.draft_model or "",
        **(form.asked if form is not None else {}),
        **others,
    )


def classic_asked(body: Classic, max_tokens: int, stops: Sequence[str], form: Form | None, **others: Any) -> Asked:
    """``asked`` with what responses do not have."""
    return asked(
        body,
        max_tokens,
        form,
        n=body.n,
        show_proposals=bool(body.show_tokens),
        stop=stops,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias,
        **others,
    )


def ask(body: Sampling, prompt: Sequence[int], how: Asked, *, is_text: bool = False) -> Ask:
    """One prompt's request."""
    return Ask(prompt, how, is_text, body.model, priority=body.priority or 0, timeout_s=body.timeout)


def room(prompt: Sequence[int], max_len: int) -> int:
    """Tokens that fit behind a prompt.

    Raises:
        InvalidArgumentError: none does.
    """
    if len(prompt) >= max_len > 0:
        raise refusal("prompt", f"{len(prompt)} tokens", f"at most {max_len - 1} fit this model")
    return max(1, max_len - len(prompt))
