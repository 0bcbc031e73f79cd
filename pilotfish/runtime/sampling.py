"""From logits to p, to draws, and to the sparse distributions that travel, for both workers.

A draw is an exponential race over counter-based noise: the token v with the smallest -log(u_v) / w_v
wins with probability proportional to w_v, whatever else is in the batch. Rounding happens in one
place: p is float32 as computed; sums and races over it are float64; what goes on the wire is
float32 again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pilotfish import noise
from pilotfish.errors import InternalError
from pilotfish.noise import Purpose
from pilotfish.steps import Floats, Ints, SamplingRows, Supports

Longs = npt.NDArray[np.int64]


def take_rows(sampling: SamplingRows, rows: npt.NDArray[Any]) -> SamplingRows:
    """The sampling of the given rows, repeated and in their order."""
    return SamplingRows(
        temperatures=sampling.temperatures[rows],
        top_ks=sampling.top_ks[rows],
        top_ps=sampling.top_ps[rows],
        min_ps=sampling.min_ps[rows],
        seeds=sampling.seeds[rows],
        rounds=sampling.rounds[rows],
    )


def require_finite(logits: Tensor, whose: str) -> None:
    """Raises ``InternalError`` if a model answered NaN or infinity: every draw from it would be arbitrary."""
    sums = logits.numpy().sum() if logits.device.type == "cpu" else logits.sum().item()  # numpy wakes no threads
    if not math.isfinite(sums):
        raise InternalError(
            f"{whose} answered logits that are not finite; is its checkpoint damaged, or dtype too small?"
        )


def likeliest(scores: Tensor) -> Tensor:
    """Index of the largest score of each row, the lowest among equals. i64[n].

    Args:
        scores: [n, vocab], finite.
    """
    if scores.device.type == "cpu":  # numpy takes a tenth of torch's time
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.argmax(-1)


def probabilities(logits: Tensor, sampling: SamplingRows) -> Tensor:
    """The law of the next token: temperature, then top-k, top-p and min-p as Hugging Face applies them.

    Tokens tied with the k-th likeliest are kept. Temperature 0 is all mass on the likeliest token,
    the lowest id among equals.

    Args:
        logits: f32[n, vocab].
        sampling: n rows.

    Returns:
        f32[n, vocab], rows summing to 1.
    """
    temperatures = _column(sampling.temperatures, logits)
    greedy = temperatures == 0
    # The maximum goes first, so that no temperature, however small, makes inf - inf.
    scores = (logits - logits.amax(-1, keepdim=True)) / torch.where(greedy, 1.0, temperatures)
    scores = _keep_top_k(scores, sampling.top_ks)
    scores = _keep_top_p(scores, sampling.top_ps)
    scores = _keep_min_p(scores, sampling.min_ps)
    p = scores.softmax(-1)
    if bool(greedy.any()):
        one_hot = torch.zeros_like(p).scatter_(-1, likeliest(logits).unsqueeze(-1), 1.0)
        p = torch.where(greedy, one_hot, p)
    return p


def draw_keys(seeds: npt.NDArray[np.uint64], purpose: Purpose, rounds: Longs, positions: Longs) -> Longs:
    """Noise keys of one draw per element, i64[n]; positions are those of the tokens drawn."""
    return noise.keys(seeds, purpose, rounds, positions)


def race(weights: Tensor, keys: Longs, token_ids: Tensor | None = None) -> Tensor:
    """Index of one token per row, drawn in proportion to ``weights``. i64[n].

    Args:
        weights: [n, m], non-negative; a row without a positive one gives 0.
        keys: i64[n].
        token_ids: i64[n, m]; None where column v is token v.
    """
    return race_times(weights, keys, token_ids).argmin(-1)


def race_times(weights: Tensor, keys: Longs, token_ids: Tensor | None = None) -> Tensor:
    """When each token of a ``race`` comes in: -log(u_v) / w_v, infinite where w is 0. f64[n, m]."""
    if token_ids is None:
        token_ids = torch.arange(weights.shape[-1], device=weights.device)
    u = noise.uniform(torch.from_numpy(keys).to(weights.device).unsqueeze(-1), token_ids)
    return -torch.log(u) / weights.double()


@dataclass(frozen=True, slots=True)
class OutsideDraws:
    """What the target answers for a batch of outputs; fields as in ``TargetResult``."""

    token_ids: Ints
    tail_masses: Floats
    support_probs: Floats


def draw_greedy(logits: Tensor) -> OutsideDraws:
    """``draw_plain`` of greedy rows, which need neither p nor noise."""
    return OutsideDraws(to_ints(likeliest(logits)), np.ones(len(logits), np.float32), np.zeros(0, np.float32))


def draw_plain(logits: Tensor, sampling: SamplingRows, keys: Longs) -> OutsideDraws:
    """One token per row from all of p: ``draw_outside`` with empty supports; greedy rows are spared the work."""
    tokens = likeliest(logits)
    warm = np.flatnonzero(sampling.temperatures > 0)
    if len(warm):
        index = torch.from_numpy(warm).to(logits.device)
        p = probabilities(logits.index_select(0, index), take_rows(sampling, warm))
        tokens = tokens.index_copy(0, index, race(p, keys[warm]))
    return OutsideDraws(to_ints(tokens), np.ones(len(keys), np.float32), np.zeros(0, np.float32))


def draw_outside(p: Tensor, keys: Longs, supports: Supports) -> OutsideDraws:
    """p on each support, its mass outside, and one token drawn from outside.

    p is rounded, so its sum misses 1 by a little. All three answers are those of p divided by its
    sum, in float64, so that supports and tail together are 1.

    Args:
        p: f32[n, vocab].
        keys: i64[n].
        supports: n groups of distinct ids, or none at all.
    """
    counts = supports.counts if len(supports.counts) else np.zeros(len(p), np.int32)
    rows = torch.from_numpy(np.repeat(np.arange(len(p)), counts)).to(p.device)
    ids = torch.from_numpy(supports.token_ids.astype(np.int64)).to(p.device)
    inside = p[rows, ids].double()
    rest = p.index_put((rows, ids), torch.zeros((), dtype=p.dtype, device=p.device))
    tails = rest.sum(-1, dtype=torch.float64)
    totals = tails.index_add(0, rows, inside)
    tokens = torch.where(tails > 0, race(rest, keys), -1)
    return OutsideDraws(to_ints(tokens), to_floats(tails / totals), to_floats(inside / totals[rows]))


def nothing_follows(draws: OutsideDraws, supports: Supports, outputs: Longs) -> OutsideDraws:
    """The draws, but for outputs i64[m] that nothing may follow: all their mass is on token -1, outside the support."""
    if not len(outputs):
        return draws
    tokens, tails, probs = draws.token_ids.copy(), draws.tail_masses.copy(), draws.support_probs.copy()
    tokens[outputs], tails[outputs] = -1, 1.0
    if len(supports.counts):
        probs[np.isin(np.repeat(np.arange(len(tokens)), supports.counts), outputs)] = 0.0
    return OutsideDraws(tokens, tails, probs)


def truncate(p: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """The sparse q of a drafter: its likeliest tokens, renormalised.

    Args:
        p: f32[n, vocab].
        limit: most tokens kept, at least 1.

    Returns:
        token ids i64[n, m] from likely to unlikely, and q f32[n, m], 0 where a row has fewer than
        m possible tokens. These very numbers are drawn from and sent.
    """
    top = p.topk(min(limit, p.shape[-1]), dim=-1)
    wide = top.values.double()
    return top.indices, (wide / wide.sum(-1, keepdim=True)).float()


def to_ints(values: Tensor) -> Ints:
    return values.to("cpu", torch.int32).numpy()


def to_floats(values: Tensor) -> Floats:
    return values.to("cpu", torch.float32).numpy()


def _column(values: Sequence[float] | npt.NDArray[Any], like: Tensor) -> Tensor:
    """One value per row, f32[n, 1]."""
    return torch.tensor(np.asarray(values, np.float32), device=like.device).unsqueeze(-1)


def _keep_top_k(scores: Tensor, top_ks: Ints) -> Tensor:
    ks = np.minimum(top_ks, scores.shape[-1])
    if not ks.any():
        return scores
    largest = scores.topk(int(ks.max()), dim=-1).values
    index = torch.from_numpy(np.maximum(ks, 1).astype(np.int64) - 1).to(scores.device).unsqueeze(-1)
    threshold = largest.gather(-1, index).masked_fill(_column(ks, scores) == 0, float("-inf"))
    return scores.masked_fill(scores < threshold, float("-inf"))


def _keep_top_p(scores: Tensor, top_ps: Floats) -> Tensor:
    cut = np.flatnonzero(top_ps < 1)
    if not len(cut):
        return scores
    index = torch.from_numpy(cut).to(scores.device)
    ascending, order = scores.index_select(0, index).sort(dim=-1, stable=True)
    # Removing from the unlikely end keeps the token that crosses the mass asked for.
    removed = ascending.softmax(-1).cumsum(-1) <= 1 - _column(top_ps[cut], scores)
    removed[:, -1] = False
    kept = ascending.masked_fill(removed, float("-inf"))
    return scores.index_copy(0, index, torch.empty_like(kept).scatter_(-1, order, kept))


def _keep_min_p(scores: Tensor, min_ps: Floats) -> Tensor:
    if not min_ps.any():
        return scores
    p = scores.softmax(-1)
    removed = p < _column(min_ps, scores) * p.amax(-1, keepdim=True)
    return scores.masked_fill(removed, float("-inf"))
