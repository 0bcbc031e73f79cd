"""How long proposals take, over their depth and over the rows of a pass, learnt from steps that were timed.

A draft step is more than its passes: two hops, and the tokens that were just accepted come first. So a deep proposal
costs less per token than a shallow one, and what one depth costs must not be reckoned from another in proportion.
The time is taken for a product of two curves, over depth and over rows, as few pairs of the two ever come.
"""

from __future__ import annotations

import numpy as np

from orchestrator.core.step_times import FIRST, Doubles, StepTimes

UNSEEN_WIDTH = 4
"""Rows of a chain's pass that a level of a tree is taken for until one was timed."""


class DraftTimes:
    """Seconds until proposals of one size are there; never falls as their depth or the rows grow.

    Args:
        chains: what was learnt of chains, for trees: they share the curve over depth, and until one was timed a
            level of a tree is a pass of chains over a few rows more.
    """

    def __init__(self, chains: DraftTimes | None = None) -> None:
        self._chains = chains
        self._over_depth: StepTimes = StepTimes() if chains is None else chains._over_depth
        self._over_rows = StepTimes()

    @property
    def is_known(self) -> bool:
        """Whether any step was timed, of chains at least."""
        return self._over_depth.is_known

    def observe(self, depth: int, rows: float, seconds: float) -> None:
        """Takes in one step.

        Each curve learns what the other does not explain, and so only once the other is to be trusted.

        Args:
            depth: of the longest proposal, at least 1.
            rows: of a pass on one replica, at least 1.
            seconds: waited for it, above 0.
        """
        if self._over_rows.count(rows) >= FIRST or self._over_depth.count(depth) < FIRST:
            self._over_depth.observe(depth, seconds / float(self._share(np.array([rows]))[0]))
        if self._over_depth.count(depth) >= FIRST:
            self._over_rows.observe(rows, seconds / float(self._over_depth.seconds(np.array([depth]))[0]))

    def seconds(self, depth: Doubles, rows: Doubles) -> Doubles:
        """Seconds of such steps, f64 of the shape that both broadcast to; ``is_known`` must hold."""
        return self._over_depth.seconds(depth) * self._share(rows)

    def _share(self, rows: Doubles) -> Doubles:
        if self._over_rows.is_known:
            return self._over_rows.seconds(rows)
        return np.ones_like(rows) if self._chains is None else self._chains._share(rows * UNSEEN_WIDTH)
