"""The usual case, many rows at once: verdicts on chains, in a fraction of the time of one after the other.

Each function here has its twin in ``acceptance``, which says why it is exact and does the same for one
row of any shape; tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from orchestrator.core.acceptance import TokenKind, Verdict
from orchestrator.core.proposals import Doubles, Outputs, Proposal
from pilotfish.noise import Purpose, keys, uniform
from pilotfish.steps import Ints

Longs = npt.NDArray[np.int64]


@cache
def _path(length: int) -> tuple[int, ...]:
    """The first nodes of a chain."""
    return tuple(range(length))


def match_chains(proposals: Sequence[Proposal], draws: Ints) -> list[Verdict]:
    """``acceptance.match`` of each.

    Args:
        proposals: chains, or empty.
        draws: of the target, at the root and the nodes of one proposal after the other.
    """
    verdicts, drawn, begin = [], draws.tolist(), 0
    for proposal in proposals:
        token_ids, kept = proposal.token_ids.tolist(), 0
        end = begin + len(token_ids)
        while begin < end and token_ids[kept] == drawn[begin]:
            kept, begin = kept + 1, begin + 1
        kind = TokenKind.BONUS if begin == end else TokenKind.RECOVERED
        verdicts.append(Verdict(_path(kept), drawn[begin], kind))
        begin = end + 1
    return verdicts


def ratio_chains(
    proposals: Sequence[Proposal], outputs: Sequence[Outputs], seeds: Sequence[int], rounds: Sequence[int]
) -> list[Verdict]:
    """``acceptance.ratio`` of each, with the noise of ``acceptance.NoiseChance``.

    Args:
        proposals: chains drawn from a q, or empty.
        outputs: of the target, one per proposal.
        seeds, rounds: of each row.
    """
    if not proposals:
        return []
    batch = _Batch(proposals, outputs, np.array(seeds, np.uint64), np.array(rounds, np.int64))
    kept = batch.kept()
    tokens = batch.tokens_after(kept)
    return [
        Verdict(_path(count), token, TokenKind.BONUS if count == length else TokenKind.RECOVERED)
        for count, token, length in zip(kept.tolist(), tokens.tolist(), batch.lengths.tolist(), strict=True)
    ]


class _Batch:
    """Rows concatenated. A row has an output at its root and at each of its nodes, and each output a support."""

    def __init__(
        self, proposals: Sequence[Proposal], outputs: Sequence[Outputs], seeds: npt.NDArray[np.uint64], rounds: Longs
    ) -> None:
        self._seeds, self._rounds = seeds, rounds
        self.lengths = np.array([len(proposal.token_ids) for proposal in proposals])
        self._nodes = np.concatenate([proposal.token_ids for proposal in proposals])
        self._counts = np.concatenate([proposal.supports.counts for proposal in proposals])
        self._ids = np.concatenate([proposal.supports.token_ids for proposal in proposals])
        self._q = np.concatenate([proposal.support_probs for proposal in proposals])
        self._p = np.concatenate([output.support_probs for output in outputs])
        self._tails = np.concatenate([output.tail_masses for output in outputs])
        self._outside = np.concatenate([output.token_ids for output in outputs])
        self._roots = np.concatenate(([0], np.cumsum(self.lengths + 1)[:-1]))  # output of each row's root

    def kept(self) -> Longs:
        """Draft tokens accepted in each row: coins are thrown for all, and the first that fails ends the path."""
        rows = np.repeat(np.arange(len(self.lengths)), self.lengths)
        depths = np.arange(len(rows)) - (np.cumsum(self.lengths) - self.lengths)[rows]
        child = np.full(len(self._counts), -1)
        child[self._roots[rows] + depths] = self._nodes
        drawn = self._ids == np.repeat(child, self._counts)  # one of each support that a node was drawn from
        rates = np.minimum(1.0, self._p[drawn] / self._q[drawn])
        coins = uniform(keys(self._seeds[rows], Purpose.COIN, self._rounds[rows], depths), np.int64(0))
        failed = np.where(coins < rates, np.iinfo(np.int64).max, depths)
        kept = self.lengths.copy()
        np.minimum.at(kept, rows, failed)
        return kept

    def tokens_after(self, kept: Longs) -> Longs:
        """The target's token after each accepted path, from what the rejection leaves of p."""
        at = self._roots + kept
        weights, ids = self._residuals(at, rejected=kept < self.lengths)
        noise = uniform(keys(self._seeds, Purpose.RESIDUAL, self._rounds, kept)[:, None], ids)
        with np.errstate(divide="ignore", over="ignore"):
            places = (-np.log(noise) / weights).argmin(axis=1)
        tokens: Longs = np.take_along_axis(ids, places[:, None], axis=1)[:, 0]
        return tokens

    def _residuals(self, at: Longs, rejected: npt.NDArray[np.bool_]) -> tuple[Doubles, Longs]:
        """What is left at one output of each row, by token: its support, and last the draw from outside."""
        counts = self._counts[at]
        width = int(counts.max(initial=0))
        filled = np.arange(width) < counts[:, None]
        places = ((np.cumsum(self._counts) - self._counts)[at][:, None] + np.arange(width))[filled]
        p, q, ids = np.zeros(filled.shape), np.zeros(filled.shape), np.zeros((len(at), width + 1), np.int64)
        p[filled], q[filled], ids[:, :-1][filled] = self._p[places], self._q[places], self._ids[places]
        tails, ids[:, -1] = self._tails[at], self._outside[at]
        rest = np.where(rejected[:, None], np.maximum(p - q, 0.0), p)
        # By rounding alone can nothing be left: then p stays as it is.
        rest = np.where((rest.sum(axis=1) + tails > 0)[:, None], rest, p)
        return np.column_stack((rest, tails)), ids
