"""The law that an answer's tokens were drawn from, worked out from its log probabilities. Pure.

The deployment tells the model's own law, before temperature and all that shapes it, of the likeliest tokens.
Temperature and top-k are applied here once more, and so are penalties and bias, which are sums; the repetition penalty
is not, because it needs logits, which log probabilities do not tell.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pilotfish.noise import Purpose, uniform_one

if TYPE_CHECKING:
    from pilotfish.client.params import SamplingParams

TOP = 20
"""Most likeliest tokens that a request may ask for (generation.proto)."""

_ROUNDING = 1e-4  # of probabilities

KEPT = TOP - 1
"""A ``top_k`` by which all that can come is told, and the next token, too."""

Scores = dict[int, float]
"""Logarithms of weights by token id; what is not there weighs no more than the least of them."""


def sampled_from(top: Sequence[tuple[int, float]], temperature: float, top_k: int) -> Scores:
    """Log probabilities of the likeliest tokens after temperature and top-k; the rest of the mass is elsewhere.

    Args:
        top: token ids and log probabilities, likeliest first.
        temperature: above 0; other than 1 only with a top_k, since what is elsewhere is not known.
        top_k: at most as many as ``top`` has; 0 keeps all.
    """
    if not top_k:
        assert temperature == 1.0
        return dict(top)
    weights = [logprob / temperature for _, logprob in top[:top_k]]
    total = float(np.logaddexp.reduce(weights))
    return {token_id: weight - total for (token_id, _), weight in zip(top, weights, strict=False)}


def is_plain(top: Sequence[tuple[int, float]], top_k: int) -> bool:
    """Whether it is plain which tokens ``top_k`` keeps: those that are tied with the last of them are kept, too.

    Args:
        top: token ids and log probabilities, likeliest first.
        top_k: 0 keeps all.
    """
    return not 0 < top_k < len(top) or top[top_k - 1][1] - top[top_k][1] > _ROUNDING


def drawn_from(top: Sequence[tuple[int, float]], params: SamplingParams, history: Sequence[int]) -> Scores | None:
    """Log probabilities after everything that a request asks for, if one of the likeliest tokens comes.

    None where that cannot be told: under a repetition penalty, where rounding decides what top_k, top_p or min_p keeps,
    and where none of them may come.

    Args:
        top: token ids and log probabilities, likeliest first.
        params: of the request; temperature above 0.
        history: tokens of the completion before this one.
    """
    scores = shaped(top, params, history)
    if scores is None:
        return None
    weights = {token_id: score / params.temperature for token_id, score in scores.items() if score > -math.inf}
    ranked = sorted(weights, key=weights.__getitem__, reverse=True)
    if not ranked or not is_plain([(token_id, weights[token_id]) for token_id in ranked], params.top_k):
        return None
    ranked = ranked[: params.top_k or None]
    # Without top_k, what all tokens weigh together is only known where nothing was changed.
    is_own = weights == dict(top) and not params.top_k
    total = 0.0 if is_own else float(np.logaddexp.reduce([weights[token_id] for token_id in ranked]))
    if not is_own and not params.top_k and (params.top_p < 1 or params.min_p > 0):
        return None
    kept = _truncated([(token_id, math.exp(weights[token_id] - total)) for token_id in ranked], params)
    if kept is None:
        return None
    mass = math.log(sum(p for _, p in kept))
    return {token_id: math.log(p) - mass for token_id, p in kept}


def _truncated(ranked: list[tuple[int, float]], params: SamplingParams) -> list[tuple[int, float]] | None:
    """What top_p and then min_p keep of tokens and their probabilities; None where rounding decides."""
    before = 0.0
    for count, (_, p) in enumerate(ranked):
        if params.top_p < 1 and abs(before - params.top_p) < _ROUNDING:
            return None
        if before > params.top_p:
            ranked = ranked[:count]
            break
        before += p
    shares = [p / ranked[0][1] for _, p in ranked]
    if params.min_p > 0 and any(abs(share - params.min_p) < _ROUNDING for share in shares):
        return None
    return [each for each, share in zip(ranked, shares, strict=True) if share >= params.min_p]


def shaped(top: Sequence[tuple[int, float]], params: SamplingParams, history: Sequence[int]) -> Scores | None:
    """Scores of the likeliest tokens after all that shapes logits; None with a repetition penalty.

    Args:
        top: token ids and log probabilities, likeliest first.
        params: of the request.
        history: tokens of the completion before this one.
    """
    if params.repetition_penalty != 1.0:
        return None
    counts = Counter(history)
    return {token_id: logprob + _shift(token_id, params, counts) for token_id, logprob in top}


def highest_shift(params: SamplingParams) -> float:
    """Most by which any token's score can rise."""
    if params.frequency_penalty < 0:
        return math.inf
    return max([0.0, *params.logit_bias.values()]) + max(0.0, -params.presence_penalty)


def _shift(token_id: int, params: SamplingParams, counts: Mapping[int, int]) -> float:
    bias = params.logit_bias.get(token_id, 0.0)
    is_barred = token_id in params.banned_token_ids or bias <= -100
    if is_barred or (params.allowed_token_ids and token_id not in params.allowed_token_ids):
        return -math.inf
    if sum(counts.values()) < params.min_tokens and token_id in params.stop_token_ids:
        return -math.inf
    count = counts.get(token_id, 0)
    return bias - params.presence_penalty * (count > 0) - params.frequency_penalty * count


def lead(params: SamplingParams, scores: Scores, position: int, wanted: int, got: int) -> float | None:
    """By how much one token won over another where draws follow from the seed, in logits; None if that is not known.

    At temperature 0 the highest score wins. With a seed v wins whose -log(u_v) / p_v is the smallest, u_v the noise of
    (seed, match, position, v), the same for target and drafter (``pilotfish.noise``).

    Args:
        params: of the request.
        scores: of the likeliest tokens, after all that shapes logits.
        position: absolute, of the token.
        wanted, got: token ids.
    """
    if wanted not in scores or got not in scores:
        return None
    if params.temperature == 0:
        return scores[wanted] - scores[got]
    if params.seed is None:
        return None
    noise = _gumbel(params.seed, position, wanted) - _gumbel(params.seed, position, got)
    return scores[wanted] - scores[got] + params.temperature * noise


def _gumbel(seed: int, position: int, token_id: int) -> float:
    return -math.log(-math.log(uniform_one(seed, Purpose.MATCH, 0, position, token_id)))
