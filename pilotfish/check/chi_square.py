"""Pearson's chi-square, of two samples or of one sample against the laws it was drawn from. Pure.

Outcomes that are expected fewer than so many times are taken together, so that the chi-square distribution describes
the statistic well, far into its tail too: a run with many tests reads p-values near 1e-5. Simulated, 3 million times
each with as many outcomes as can be at that limit: of one sample at most 3.1 times as many p-values as there should be
lie below 1e-5 (2.1 times below 1e-4), of two samples 0.3 times as many; with a limit of 10 for both, 7.6 times and 0.3.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pilotfish.check.results import Counts, Result

Doubles = npt.NDArray[np.float64]

LEAST = 20
"""Fewest expected draws of an outcome that counts by itself, of one sample."""
LEAST_OF_TWO = 10
"""The same of two samples, in each."""
REST = "others"

_SINGULAR = 1e-9
"""Share of the largest eigenvalue of a covariance below which one is 0 but for rounding."""


NO_COUNTS = Counts((), (), ())


@dataclass(frozen=True)
class Test:
    """A statistic and what it says."""

    statistic: float
    freedom: int
    """Degrees of freedom; 0 if there were too few draws, or too few outcomes, to compare anything."""
    counts: Counts
    draws: float = 0.0
    """That it rests on; of two samples as many of one that would tell as much."""

    @property
    def p_value(self) -> float:
        return survival(self.statistic, self.freedom) if self.freedom else 1.0

    def result(self, name: str, answers: int) -> Result:
        """As a result that rests on so many answers; whether it failed is for ``significance.decide`` to say."""
        numbers = {"answers": float(answers), "draws": self.draws, "statistic": self.statistic}
        numbers["freedom"] = float(self.freedom)
        return Result(name, "passed", numbers=numbers, p_value=self.p_value, counts=self.counts)


def survival(statistic: float, freedom: int) -> float:
    """P(X >= statistic) of the chi-square distribution.

    Q(a + 1, x) = Q(a, x) + x^a e^-x / Gamma(a + 1) (Abramowitz and Stegun 6.5.21), from Q(1/2, x) = erfc(sqrt x) or
    Q(1, x) = e^-x up to a = freedom / 2, x = statistic / 2.

    Args:
        statistic: at least 0.
        freedom: degrees of freedom, at least 1.

    >>> round(survival(3.841, 1), 4)
    0.05
    """
    x = statistic / 2
    if x <= 0:
        return 1.0
    a = 0.5 if freedom % 2 else 1.0
    total = math.erfc(math.sqrt(x)) if freedom % 2 else math.exp(-x)
    while a < freedom / 2:
        total += math.exp(a * math.log(x) - x - math.lgamma(a + 1))
        a += 1
    return min(total, 1.0)


def of_two_samples(one: Counter[Hashable], other: Counter[Hashable]) -> Test:
    """Whether two samples come from one law.

    The observed counts are those of ``one``; the expected ones follow from both together.
    """
    outcomes = sorted(one.keys() | other.keys(), key=lambda outcome: -(one[outcome] + other[outcome]))
    table = np.array([[sample[outcome] for outcome in outcomes] for sample in (one, other)], float)
    sizes = table.sum(1)
    if not sizes.all():
        return Test(0.0, 0, NO_COUNTS)
    table, labels = _pooled(table, np.outer(sizes, table.sum(0)) / sizes.sum(), [str(each) for each in outcomes])
    expected = np.outer(sizes, table.sum(0)) / sizes.sum()
    statistic = float(((table - expected) ** 2 / expected).sum())
    counts = Counts(tuple(labels), tuple(table[0]), tuple(expected[0]))
    return Test(statistic, len(labels) - 1, counts, draws=float(sizes.prod() / sizes.sum()))


def of_laws(laws: Doubles, drawn: npt.NDArray[np.intp], labels: Sequence[str]) -> Test:
    """Whether draws follow the laws that each was made from, which may all differ.

    With d = observed - expected, summed over the draws, the statistic is d V^-1 d, V the sum of the covariances
    diag(p) - p p^T; of equal laws that is Pearson's. It stays a chi-square where a law depends on the draws
    before it, as of the tokens of one text: d is then a martingale with these increments of its variance.

    Args:
        laws: probabilities, f64[draws, outcomes]; rows sum to 1.
        drawn: outcome of each draw, int[draws].
        labels: of the outcomes.
    """
    if not len(drawn):
        return Test(0.0, 0, NO_COUNTS)
    observed = np.bincount(drawn, minlength=len(labels)).astype(float)
    groups = _groups(laws.sum(0)[None], LEAST)
    merge = np.zeros((len(labels), len(groups)))
    for column, group in enumerate(groups):
        merge[group, column] = 1.0
    laws, observed = laws @ merge, observed @ merge
    expected = laws.sum(0)
    # One outcome follows from the others; without it V has an inverse.
    difference = (observed - expected)[:-1]
    covariance = (np.diag(expected) - laws.T @ laws)[:-1, :-1]
    # Where a draw can come to some outcomes only, as those of its own kind, more than one follows from the others.
    freedom = int(np.linalg.matrix_rank(covariance, rtol=_SINGULAR)) if len(groups) > 1 else 0
    inverse = np.linalg.pinv(covariance, rcond=_SINGULAR, hermitian=True)
    statistic = float(difference @ inverse @ difference) if freedom else 0.0
    names = tuple(_name(group, labels) for group in groups)
    return Test(statistic, freedom, Counts(names, tuple(observed), tuple(expected)), draws=float(len(drawn)))


def _pooled(table: Doubles, expected: Doubles, labels: Sequence[str]) -> tuple[Doubles, list[str]]:
    """Columns of both, the small ones added up."""
    groups = _groups(expected, LEAST_OF_TWO)
    return np.stack([table[:, group].sum(1) for group in groups], axis=1), [_name(group, labels) for group in groups]


def _groups(expected: Doubles, limit: int) -> list[list[int]]:
    """Outcomes as they are counted: each by itself, or the small ones together.

    Args:
        expected: f64[samples, outcomes].
        limit: fewest expected draws of a group in each sample.
    """
    least = expected.min(0)
    order = np.argsort(-least, kind="stable")
    groups = [[int(index)] for index in order if least[index] >= limit]
    rest = [int(index) for index in order if least[index] < limit]
    if rest and groups and expected[:, rest].sum(1).min() < limit:
        rest = groups.pop() + rest
    return [*groups, rest] if rest else groups


def _name(group: Sequence[int], labels: Sequence[str]) -> str:
    return labels[group[0]] if len(group) == 1 else REST
