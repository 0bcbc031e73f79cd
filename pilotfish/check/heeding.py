"""Whether an answer heeds what was asked of its law, token by token, from the log probabilities it brings. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pilotfish.check.own_law import highest_shift, shaped

if TYPE_CHECKING:
    from pilotfish.client.params import SamplingParams
    from pilotfish.client.results import Completion, TokenLogprobs

_ROUNDING = 1e-3  # relative, of probabilities


def breaches(answer: Completion, params: SamplingParams, near_tie: float) -> list[str]:
    """What an answer does that its parameters forbid; nothing where that cannot be told.

    Greedy tokens are the likeliest after penalties and bias; at temperature 1 tokens lie in what top_k, top_p and min_p
    keep.

    Args:
        answer: with the likeliest tokens' log probabilities.
        params: of the request.
        near_tie: by so much, in logits, another token may be likelier.
    """
    tokens = [token for piece in answer.pieces for token in piece.tokens]
    faults = []
    for index, token in enumerate(tokens):
        assert token.logprobs is not None
        if params.temperature == 0:
            fault = _not_likeliest(token.id, token.logprobs, params, answer.token_ids[:index], near_tie)
        else:
            fault = _left_out(token.id, token.logprobs, params)
        if fault is not None:
            faults.append(f"token {index + 1} ({token.kind}) is {token.id}, {fault}")
    return faults


def _not_likeliest(
    token_id: int, logprobs: TokenLogprobs, params: SamplingParams, history: tuple[int, ...], near_tie: float
) -> str | None:
    scores = shaped(logprobs.top, params, history)
    if scores is None:
        return None
    best = max(scores, key=scores.__getitem__)
    # Tokens that are not among the likeliest can at most have risen to this.
    own = scores.get(token_id, logprobs.top[-1][1] + highest_shift(params))
    if own >= scores[best] - near_tie:
        return None
    return f"though {best} is likelier by {scores[best] - own:.3g} after penalties and bias"


def _left_out(token_id: int, logprobs: TokenLogprobs, params: SamplingParams) -> str | None:
    if params.temperature != 1 or _is_shaped(params):
        return None
    before, likeliest = [each for each in logprobs.top if each[1] > logprobs.logprob], logprobs.top[0][1]
    if params.top_k and len(before) >= params.top_k:
        return f"of rank {len(before) + 1}, beyond top_k {params.top_k}"
    if (mass := sum(math.exp(logprob) for _, logprob in before)) > params.top_p * (1 + _ROUNDING):
        return f"behind {mass:.3f} of likelier tokens, beyond top_p {params.top_p}"
    if (share := math.exp(logprobs.logprob - likeliest)) < params.min_p * (1 - _ROUNDING):
        return f"{share:.3g} times as likely as the likeliest, below min_p {params.min_p}"
    return None


def _is_shaped(params: SamplingParams) -> bool:
    penalties = (params.repetition_penalty - 1, params.presence_penalty, params.frequency_penalty)
    lists = (params.logit_bias, params.banned_token_ids, params.allowed_token_ids)
    return any(penalties) or any(map(len, lists)) or params.min_tokens > 0
