"""How often draft tokens are kept, by row and position, learnt from every round.

These are the estimates of Kaplan and Meier: a round counts for the positions that it judged, and a
proposal that was short, or was cut short by the end of the text, says nothing of the positions behind.
A row's own counts are shrunk towards those of all rows, and a position's towards the one before it.

Trees keep more than chains, and bigger ones more, so that each size has counts of its own, shared by all rows.
Before they say anything, what is known of chains says what to hope for.

Left out on purpose: how a row samples, and how likely the drafter found its own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from orchestrator.core.requests import MAX_ADAPTIVE_LENGTH, Request

Doubles = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]

PRIOR, PRIOR_COUNT = 0.7, 2.0
"""Chance that a first draft token is kept before any was judged, and the judgements that a prior is worth."""

SHARED_COUNT = 8.0
"""Judgements of its own that outweigh, for a row, what all rows have shown."""

SHARED_DECAY, ROW_DECAY = 0.99, 0.97
"""What a round leaves of the counts: half is forgotten after 69 rounds, and 23."""

DOUBT, DOUBTED = 0.25, 24.0
"""What a probe leaves of the shared counts, which are of long ago. Of the first position at least so many are left,
so that probe after probe does not bring the prior back."""


HOPE = 8
"""A tree of n nodes is hoped to miss HOPE / (HOPE + n) as often as a chain: less than it will, so that it is tried, and
soon known. What its first positions show goes for the later ones, which few rounds reach."""


class Survival:
    """Chances of draft tokens in proposals of one size.

    Args:
        chains: what is known of chains, for trees.
        nodes: of a tree.
    """

    def __init__(self, chains: Survival | None = None, nodes: int = 0) -> None:
        self._chains, self._nodes = chains, nodes
        self._shared = np.zeros((2, MAX_ADAPTIVE_LENGTH))  # kept, judged

    def observe(self, rows: Sequence[Request], kept: Longs, judged: Longs) -> None:
        """Takes in one round.

        Args:
            rows: whose proposals were judged.
            kept: draft tokens kept, i64[rows].
            judged: draft tokens that the target spoke on, kept or recovered from, i64[rows].
        """
        positions = np.arange(MAX_ADAPTIVE_LENGTH)
        counts = np.stack((positions < kept[:, None], positions < judged[:, None]), axis=1).astype(np.float64)
        self._shared = SHARED_DECAY * self._shared + counts.sum(axis=0)
        if self._chains is not None:
            return
        for request, new in zip(rows, ROW_DECAY * _own_counts(rows) + counts, strict=True):
            request.judged = new

    def doubt(self) -> None:
        """Trusts less in what all rows have shown."""
        first = min(max(DOUBT, DOUBTED / max(float(self._shared[1, 0]), DOUBTED)), 1.0)
        self._shared[:, 0] *= first
        self._shared[:, 1:] *= DOUBT

    def chances(self, rows: Sequence[Request]) -> Doubles:
        """Chance that a row's first k draft tokens are all kept, f64[rows, MAX_ADAPTIVE_LENGTH], k from 1."""
        shared = np.array(self._if_reached())
        if self._chains is not None:
            return np.tile(shared.cumprod(), (len(rows), 1))
        own = _own_counts(rows)
        kept_if_reached: Doubles = (own[:, 0] + SHARED_COUNT * shared) / (own[:, 1] + SHARED_COUNT)
        return kept_if_reached.cumprod(axis=1)

    def _if_reached(self) -> list[float]:
        """Chance that a draft token is kept if all before it are, by position, as all rows have shown it."""
        if self._chains is not None:
            return self._if_reached_in_trees(self._chains._if_reached())
        found, prior = [], PRIOR
        for kept, judged in self._shared.T.tolist():
            prior = (kept + PRIOR_COUNT * prior) / (judged + PRIOR_COUNT)
            found.append(prior)
        return found

    def _if_reached_in_trees(self, chains: list[float]) -> list[float]:
        """As hoped at the first position; at each other one missed as often, beside a chain, as at the one before."""
        found, missed = [], HOPE / (HOPE + self._nodes)
        for chain, (kept, judged) in zip(chains, self._shared.T.tolist(), strict=True):
            prior = 1 - missed * (1 - chain)
            found.append((kept + PRIOR_COUNT * prior) / (judged + PRIOR_COUNT))
            missed = min((1 - found[-1]) / (1 - chain), 1.0) if chain < 1 else missed
        return found


def _own_counts(rows: Sequence[Request]) -> Doubles:
    """f64[rows, 2, MAX_ADAPTIVE_LENGTH]."""
    return np.array([request.judged for request in rows])
