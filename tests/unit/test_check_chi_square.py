"""The statistics of ``pilotfish check`` beside scipy's, beside simulation, and their false alarms."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from scipy import stats

from pilotfish.check.chi_square import LEAST_OF_TWO, REST, of_laws, of_two_samples, survival
from pilotfish.check.results import Result, passed
from pilotfish.check.significance import SAFETY, decide, holm


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 20, 101])
@pytest.mark.parametrize("statistic", [1e-6, 0.5, 3.0, 20.0, 150.0, 1200.0])
def test_survival_is_scipys(freedom: int, statistic: float) -> None:
    assert survival(statistic, freedom) == pytest.approx(stats.chi2.sf(statistic, freedom), rel=1e-9, abs=1e-300)


def test_survival_of_nothing_is_certain() -> None:
    assert survival(0.0, 3) == 1.0


def test_two_samples_are_compared_as_scipy_does() -> None:
    one, other = Counter({"a": 30, "b": 50, "c": 20}), Counter({"a": 50, "b": 40, "c": 30})
    test = of_two_samples(one, other)
    wanted = stats.chi2_contingency([[30, 50, 20], [50, 40, 30]], correction=False)
    assert (test.statistic, test.freedom) == pytest.approx((wanted.statistic, wanted.dof))
    assert test.p_value == pytest.approx(wanted.pvalue)
    assert test.counts.labels == ("b", "a", "c")


def test_rare_outcomes_are_counted_together() -> None:
    one, other = Counter({1: 100, 2: 4, 3: 6, 4: 5}), Counter({1: 90, 2: 6, 3: 8, 5: 7})
    test = of_two_samples(one, other)
    assert test.counts.labels == ("1", REST)
    assert test.counts.observed == (100, 15)
    assert min(test.counts.expected) >= LEAST_OF_TWO
    # What is too rare even together goes to the rarest of the others.
    assert of_two_samples(Counter({1: 60, 2: 40, 3: 1}), Counter({1: 60, 2: 40})).counts.labels == ("1", REST)


@pytest.mark.parametrize("one", [Counter(), Counter({1: 500}), Counter({1: 3, 2: 2})])
def test_where_there_is_nothing_to_compare_no_sample_is_odd(one: Counter[int]) -> None:
    assert of_two_samples(one, one).p_value == 1.0


def test_of_equal_laws_it_is_pearsons() -> None:
    law = np.array([0.5, 0.3, 0.2])
    drawn = np.repeat(np.arange(3), [110, 40, 50])
    test = of_laws(np.tile(law, (200, 1)), drawn, ["a", "b", "c"])
    wanted = stats.chisquare([110, 40, 50], law * 200)
    assert (test.statistic, test.freedom) == pytest.approx((wanted.statistic, 2))
    assert test.p_value == pytest.approx(wanted.pvalue)
    assert test.counts.expected == pytest.approx((100, 60, 40))


def test_of_different_laws_it_has_the_covariance_of_the_sum() -> None:
    """Against the slow way: the covariance summed draw by draw, and inverted."""
    rng = np.random.default_rng(1)
    laws = rng.dirichlet(np.ones(4), 300)
    drawn = np.array([rng.choice(4, p=law) for law in laws])
    difference, covariance = np.zeros(4), np.zeros((4, 4))
    for law, outcome in zip(laws, drawn, strict=True):
        difference += np.eye(4)[outcome] - law
        covariance += np.diag(law) - np.outer(law, law)
    wanted = difference[:3] @ np.linalg.inv(covariance[:3, :3]) @ difference[:3]
    test = of_laws(laws, drawn, list("abcd"))
    assert (test.statistic, test.freedom) == (pytest.approx(wanted), 3)


def test_outcomes_that_are_certain_count_for_nothing() -> None:
    laws = np.tile([1.0, 0.0], (50, 1))
    assert of_laws(laws, np.zeros(50, int), ["a", "b"]).p_value == 1.0


@pytest.mark.parametrize("kind", ["two samples", "laws"])
def test_p_values_of_sound_samples_are_even(kind: str) -> None:
    """Also where a law follows from the draw before, as along a text."""
    rng = np.random.default_rng(3)
    chain = rng.dirichlet(np.full(8, 0.7), 8)
    p_values = []
    for _ in range(1500):
        if kind == "two samples":
            one, other = (Counter(rng.choice(8, size=200, p=chain[0]).tolist()) for _ in range(2))
            p_values.append(of_two_samples(one, other).p_value)
            continue
        state = np.zeros(60, int)
        laws, drawn = [], []
        for _ in range(4):
            law = chain[state]
            state = (law.cumsum(1) < rng.random((60, 1))).sum(1).clip(max=7)
            laws.append(law)
            drawn.append(state)
        p_values.append(of_laws(np.concatenate(laws), np.concatenate(drawn), list("abcdefgh")).p_value)
    for level in (0.5, 0.1, 0.02):
        share = np.mean(np.array(p_values) <= level)
        assert share == pytest.approx(level, abs=4 * (level * (1 - level) / 1500) ** 0.5 + 0.1 * level)


def test_holm_goes_by_rank() -> None:
    assert holm([], 0.01) == []
    assert holm([0.5, 0.001, 0.004], 0.01) == [False, True, True]  # 0.001 <= 0.01 / 3, 0.004 <= 0.01 / 2
    assert holm([0.5, 0.001, 0.006], 0.01) == [False, True, False]
    assert holm([0.004, 0.004, 0.004], 0.01) == [False] * 3  # the first is above 0.01 / 3


def test_results_fail_by_all_p_values_of_the_run() -> None:
    results = [passed("exact"), *(Result(f"test {p}", "passed", p_value=p) for p in (0.0004, 0.3, 0.02, 0.9))]
    decided = decide(results, 0.01 * SAFETY)
    assert [result.status for result in decided] == ["passed", "failed", "passed", "passed", "passed"]
    assert decided[1].why == "by chance a sound deployment looks so wrong with probability 0.0004"
