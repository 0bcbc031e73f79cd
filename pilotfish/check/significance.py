"""Which of many p-values are too small: one false alarm rate for the whole run, and what a run can find. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import NormalDist

from pilotfish.check.chi_square import survival
from pilotfish.check.results import Result


def holm(p_values: Sequence[float], rate: float) -> list[bool]:
    """Which hypotheses fall, so that with probability at most ``rate`` a true one does, however they depend.

    Holm, "A Simple Sequentially Rejective Multiple Test Procedure" (1979): the k-th smallest of m falls if it and
    all smaller ones are at most rate / (m - k + 1).

    >>> holm([0.2, 0.0001, 0.009], 0.02)
    [False, True, True]
    """
    falls = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > rate / (len(p_values) - rank):
            break
        falls[index] = True
    return falls


SAFETY = 3.0
"""By so much, at most, are the p-values too small on which a run is decided (``chi_square``)."""


def decide(results: Sequence[Result], rate: float) -> list[Result]:
    """The results, those failed whose p-values are too small beside all of them.

    Args:
        results: of a run.
        rate: probability that a sound deployment fails any.
    """
    p_values = [result.p_value for result in results if result.p_value is not None]
    falls = iter(holm(p_values, rate / SAFETY))
    return [_failed(result) if result.p_value is not None and next(falls) else result for result in results]


POWER = 0.9
"""Probability with which a run finds what it is said to find."""

_AN_OUTCOME = 0.1  # probability of the outcomes between which draws move


@lru_cache(maxsize=512)
def detectable(draws: int, freedom: int, rate: float, tests: int) -> float:
    """Smallest share of all draws that, moved from one outcome of probability 1/10 to another, a test finds.

    Args:
        draws: that the test rests on, at least 1.
        freedom: degrees of freedom of its chi-square, at least 1.
        rate: probability that a sound deployment fails any test of the run.
        tests: of the run, at least 1.
    """
    level = rate / SAFETY / tests
    limit = _solve(lambda x: survival(x, freedom) <= level)
    shift = _solve(lambda x: _noncentral_survival(limit, freedom, x) >= POWER)
    return min(math.sqrt(shift / draws * _AN_OUTCOME / 2), 1.0)


def _noncentral_survival(x: float, freedom: int, shift: float) -> float:
    """P(X > x) of the noncentral chi-square distribution, by Sankaran's approximation (Biometrika, 1959)."""
    mean, double = freedom + shift, freedom + 2 * shift
    h = 1 - 2 * mean * (freedom + 3 * shift) / (3 * double**2)
    p, m = double / mean**2, (h - 1) * (1 - 3 * h)
    centre = 1 + h * p * (h - 1 - (2 - h) * m * p / 2)
    return 1 - NormalDist().cdf(((x / mean) ** h - centre) / (h * (2 * p) ** 0.5 * (1 + m * p / 2)))


def _solve(holds: Callable[[float], bool]) -> float:
    """The smallest number above 0 for which it holds; it holds for all above."""
    low, high = 0.0, 1.0
    while not holds(high):
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _failed(result: Result) -> Result:
    odds = f"by chance a sound deployment looks so wrong with probability {result.p_value:.1g}"
    return replace(result, status="failed", why=f"{result.why}; {odds}" if result.why else odds)
