"""Which of many p-values are too small: one false alarm rate for the whole run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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


def _failed(result: Result) -> Result:
    odds = f"by chance a sound deployment looks so wrong with probability {result.p_value:.1g}"
    return replace(result, status="failed", why=f"{result.why}; {odds}" if result.why else odds)
