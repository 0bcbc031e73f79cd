"""The draft lengths that give the most expected tokens per second.

The aim is the goodput of Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models
Using Goodput" (arXiv 2406.14066), here with a length of its own for every row:

    rate(K) = Σ_i (1 + s_i1 + … + s_iK_i) / (target(tokens + Σ K_i) + draft(max K, Σ K_i / max K))

s_ik is the chance that row i's first k draft tokens are all kept. A draft step is max K passes over the
draft model, so that one long row makes everybody wait, and what it drafts alone is dear.

The maximum is exact, not greedy, unless more passes over fewer rows cost less: for a depth d and a
number M of draft tokens the costs are fixed, and as s_ik falls with k, the M best of all (i, k ≤ d) are
a prefix of every row. So it is enough to sort all s_ik once and to try every d and M.

A round may also grow a tree of so many nodes for every row that drafts, whatever its depth. Then s_ik is
the chance that k tokens of row i's tree are kept, and what remains to be chosen is how deep trees grow:

    rate(d) = Σ_i (1 + s_i1 + … + s_id) / (target(tokens + rows · nodes) + draft(d, rows))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]

NEGLIGIBLE = 0.05
"""A draft token that is kept less often is not worth asking for, nor the time to think about it."""

TRIED = 256
"""Numbers of draft tokens that are tried for a depth: all, or evenly spaced ones where more are possible."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a round costs.

    Attributes:
        target: seconds of target steps over their tokens; elementwise, never falling.
        draft: seconds of a draft step over its depth and the rows of a pass; elementwise, never falling. For trees a
            pass is a level, and a row counts once, however many nodes of it are run.
        replicas: draft replicas that share the rows evenly.
    """

    target: Callable[[Doubles], Doubles]
    draft: Callable[[Doubles, Doubles], Doubles]
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class Given:
    """What the round holds whatever is chosen.

    Attributes:
        tokens: of the target's step, without the draft tokens to be chosen.
        expected: tokens that it yields without them.
        depth: longest proposal among rows whose length is not ours to choose.
        drafted: their draft tokens; counted in ``tokens`` too. Where trees are grown, the number of these rows.
    """

    tokens: int
    expected: float
    depth: int = 0
    drafted: int = 0


def rate(survival: Doubles, lengths: Longs, given: Given, costs: Costs, nodes: int = 0) -> float:
    """Expected tokens per second with these lengths.

    Args:
        survival: s_ik, f64[rows, most].
        lengths: K, i64[rows], each at most ``most``.
        nodes: of every row's tree; 0: chains.
    """
    within = np.arange(survival.shape[1]) < lengths[:, None]
    depth, chosen = max(given.depth, int(lengths.max(initial=0))), int(lengths.sum())
    rows = int(np.count_nonzero(lengths))
    tokens = given.tokens + (rows * nodes if nodes else chosen)
    seconds = float(costs.target(np.array([tokens], np.float64))[0])
    if depth:
        width = (given.drafted + rows if nodes else (given.drafted + chosen) / depth) / costs.replicas
        seconds += float(costs.draft(np.array([depth]), np.array([width]))[0])
    return (given.expected + float(survival[within].sum())) / seconds


def best_depths(survival: Doubles, given: Given, costs: Costs, nodes: int) -> Longs:
    """The depths of trees with the highest ``rate``, i64[rows]: the same for all rows that may grow so deep.

    Args:
        survival: as in ``best_lengths``.
        nodes: of every row's tree.
    """
    rooms = (survival >= NEGLIGIBLE).sum(axis=1)
    nothing, rows = np.zeros(len(rooms), np.int64), int(np.count_nonzero(rooms))
    if not rows:
        return nothing
    depths = np.arange(1, int(rooms.max()) + 1)
    counted = np.where(np.arange(survival.shape[1]) < rooms[:, None], survival, 0.0)
    expected = given.expected + counted.sum(axis=0).cumsum()[: len(depths)]
    target = costs.target(np.array([given.tokens + rows * nodes], np.float64))
    draft = costs.draft(np.maximum(depths, given.depth), np.array([(given.drafted + rows) / costs.replicas]))
    best = int((expected / (target + draft)).argmax()) + 1
    lengths = np.minimum(best, rooms)
    pays = rate(survival, lengths, given, costs, nodes) > rate(survival, nothing, given, costs, nodes)
    return lengths if pays else nothing


def best_lengths(survival: Doubles, given: Given, costs: Costs) -> Longs:
    """The lengths with the highest ``rate``, i64[rows].

    Args:
        survival: s_ik, f64[rows, most], falling along each row; 0 where a length is not allowed.
    """
    rows, most = survival.shape
    flat = survival.ravel()
    order = np.argsort(-flat, kind="stable")  # of equals the shallower first, so that rows keep their prefixes
    order = order[: np.count_nonzero(flat >= NEGLIGIBLE)]
    if not len(order):
        return np.zeros(rows, np.int64)
    depth_of, gain = order % most + 1, flat[order]
    depths = np.arange(1, int(depth_of.max()) + 1)
    allowed = depth_of <= depths[:, None]  # [depths, candidates]
    stride = -(-len(order) // TRIED)
    tried = slice((len(order) - 1) % stride, None, stride)
    counts = np.cumsum(allowed, axis=1)[:, tried]
    expected = given.expected + np.cumsum(np.where(allowed, gain, 0.0), axis=1)[:, tried]
    reached = np.maximum(depths, given.depth)[:, None]
    is_reached = np.logical_or.accumulate(depth_of == depths[:, None], axis=1)[:, tried] | (reached == given.depth)
    draft = costs.draft(reached, (given.drafted + counts) / (reached * costs.replicas))
    target = costs.target(np.arange(given.tokens, given.tokens + len(order) + 1, dtype=np.float64))
    rates = np.where(is_reached, expected / (target[counts] + draft), 0.0)
    depth, column = np.unravel_index(int(rates.argmax()), rates.shape)
    if rates[depth, column] <= rate(survival, np.zeros(rows, np.int64), given, costs):
        return np.zeros(rows, np.int64)
    end = (len(order) - 1) % stride + column * stride + 1
    chosen = order[:end][allowed[depth, :end]]
    return np.bincount(chosen // most, minlength=rows)
