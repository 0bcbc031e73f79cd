"""From a body's fields to what the rest of Pilotfish calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from orchestrator.admission import Asked, truncate
from orchestrator.core.acceptance import Rule
from orchestrator.generation import Ask, Generation
from orchestrator.http.bodies.classic import Classic
from orchestrator.http.bodies.sampling import Sampling
from orchestrator.http.forms import Form
from pilotfish.errors import refusal

DEFAULT_TEMPERATURE = 1.0
"""OpenAI's; over gRPC nothing said is greedy."""

Body = TypeVar("Body", bound=Sampling)


def fill(generation: Generation, body: Body) -> Body:
    """The body, with what the model's generation config or else OpenAI says where it says nothing.

    How many tokens come is another matter; see ``fit``.
    """
    unsaid = {"temperature": DEFAULT_TEMPERATURE, **generation.sampling_defaults}
    return body.model_copy(
        update={
            name: value
            for name, value in unsaid.items()
            if name in Sampling.model_fields and getattr(body, name) is None
        }
    )


def asked(body: Sampling, max_tokens: int, form: Form | None, **others: Any) -> Asked:
    """How to sample, as the body says, once ``fill`` has filled it in."""
    return Asked(
        max_tokens=max_tokens,
        temperature=body.temperature,
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
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
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


def ask(body: Sampling, prompt: Sequence[int], how: Asked, *, is_text: bool = False, shown: Sequence[int] = ()) -> Ask:
    """One prompt's request; ``shown`` are special tokens that have a text nevertheless."""
    limits: dict[str, Any] = {"priority": body.priority or 0, "timeout_s": body.timeout}
    return Ask(prompt, how, is_text, body.model, **limits, shown_token_ids=shown)


def fit(generation: Generation, body: Sampling, prompt: Sequence[int], limit: int | None) -> tuple[Sequence[int], int]:
    """The tokens of a prompt that are kept, and how many may follow.

    If no limit is said, as many may as there is room for, or as the model's generation config says.

    Raises:
        InvalidArgumentError: there is no room, or see ``truncate``.
    """
    max_len = generation.info().max_len
    kept = truncate(prompt, body.truncate_prompt_tokens, 1 if limit is None else limit, max_len)
    if limit is not None:
        return kept, limit
    if len(kept) >= max_len > 0:
        raise refusal("prompt", f"{len(kept)} tokens", f"at most {max_len - 1} fit this model")
    left = max(1, max_len - len(kept))
    return kept, min(left, int(generation.sampling_defaults.get("max_tokens", left)))
