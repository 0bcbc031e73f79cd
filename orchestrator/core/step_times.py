"""How long a worker's step takes as a function of its tokens, learnt from steps that were timed.

A curve through a few knots, two per doubling of the tokens. Each knot is a running mean of logarithms,
so that a step twice too slow and one twice too quick cancel, and no single step moves it far. What
changes the steps of every size alike (longer contexts, a busy neighbour) is told apart as a drift, so
that sizes which were not seen for a while age with the others.

Left out on purpose: the lengths of the contexts, and which rows the tokens belong to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]

FIRST = 3
"""Steps before a knot counts; it then starts from their median, whatever a cold cache did to one of them."""

MEMORY = 50
"""Steps that a knot remembers: the weight of a new one is at least one in so many."""

SURPRISE = 0.5
"""Most by which one step's logarithm counts as off its knot."""

CHANGE = 1.0
"""``FIRST`` steps of one size in a row that are further off, to the same side, are no noise: every knot moves."""

DRIFT = 0.02
"""Share of every step's surprise that moves all knots."""

FLAT = 64
"""Before two sizes are known, a step is taken to cost twice as much with so many times the tokens."""


@dataclass(slots=True)
class _Knot:
    tokens: float
    first: list[float] = field(default_factory=list)
    count: int = 0
    level: float = 0.0  # logarithm of the seconds, less the drift
    far_off: list[float] = field(default_factory=list)  # surprises in a row beyond CHANGE


class _Curve(NamedTuple):
    """Through (sizes, times), and on from the last one with the slope."""

    sizes: Doubles
    times: Doubles
    slope: float


class StepTimes:
    """Seconds per step over tokens per step; never falls as the tokens grow."""

    def __init__(self) -> None:
        self._knots: dict[int, _Knot] = {}
        self._drift = 0.0
        self._curve: _Curve | None = None  # until the next step is observed

    @property
    def is_known(self) -> bool:
        """Whether any step was observed."""
        return bool(self._knots)

    def count(self, tokens: float) -> int:
        """Steps of about so many tokens that were observed."""
        knot = self._knots.get(_size(tokens))
        return knot.count if knot is not None else 0

    def observe(self, tokens: float, seconds: float) -> None:
        """Takes in one step.

        Args:
            tokens: of the step, at least 1.
            seconds: that it took, above 0.
        """
        self._curve = None
        knot = self._knots.setdefault(_size(tokens), _Knot(tokens))
        knot.count += 1
        knot.tokens += (tokens - knot.tokens) / min(knot.count, MEMORY)
        level = math.log(seconds) - self._drift
        if knot.count <= FIRST:
            knot.first.append(level)
            knot.level = sorted(knot.first)[(knot.count - 1) // 2]
            return
        surprise = level - knot.level
        if self._is_change(knot, surprise):
            self._drift += sorted(knot.far_off)[FIRST // 2]
            knot.far_off.clear()
            return
        surprise = min(max(surprise, -SURPRISE), SURPRISE)
        knot.level += surprise / min(knot.count, MEMORY)
        if knot.count >= MEMORY:
            self._drift += DRIFT * surprise

    def seconds(self, tokens: Doubles) -> Doubles:
        """Seconds of steps with so many tokens, f64 of the same shape; ``is_known`` must hold.

        Between knots in a straight line; beyond the last one on with the slope of the whole curve.
        """
        curve = self._curve = self._curve or self._draw_curve()
        beyond = curve.slope * np.maximum(tokens - curve.sizes[-1], 0.0)
        seconds: Doubles = np.interp(tokens, curve.sizes, curve.times) + beyond
        return seconds

    def _draw_curve(self) -> _Curve:
        knots = [knot for knot in self._knots.values() if knot.count >= FIRST] or list(self._knots.values())
        knots.sort(key=lambda knot: knot.tokens)
        sizes = np.array([knot.tokens for knot in knots])
        times = _never_falling([math.exp(k.level + self._drift) for k in knots], [min(k.count, MEMORY) for k in knots])
        slope = (times[-1] - times[0]) / (sizes[-1] - sizes[0]) if len(knots) > 1 else times[0] / FLAT
        return _Curve(sizes, times, float(slope))

    def _is_change(self, knot: _Knot, surprise: float) -> bool:
        """Whether the last steps were all far off to the same side."""
        if abs(surprise) <= CHANGE or (knot.far_off and knot.far_off[0] * surprise < 0):
            knot.far_off.clear()
        if abs(surprise) > CHANGE:
            knot.far_off.append(surprise)
        return len(knot.far_off) == FIRST


def _size(tokens: float) -> int:
    return round(2 * math.log2(tokens))


def _never_falling(values: list[float], weights: list[int]) -> Doubles:
    """The never-falling sequence nearest to the values in weighted squares: neighbours that fall are pooled."""
    pools: list[tuple[float, int, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (left, a, m), (right, b, n) = pools.pop(-2), pools.pop()
            pools.append(((left * a + right * b) / (a + b), a + b, m + n))
    return np.repeat([mean for mean, _, _ in pools], [length for _, _, length in pools])
