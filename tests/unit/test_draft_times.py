"""How long proposals take, learnt from few depths and rows."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.core.draft_times import UNSEEN_WIDTH, DraftTimes
from orchestrator.core.step_times import FIRST


def step(depth: float, rows: float, overhead: float = 0.003, draft_pass: float = 0.001) -> float:
    return (overhead + depth * draft_pass) * (1 + 0.1 * rows)


def learnt(*pairs: tuple[int, float], noise: float = 0.0, **costs: float) -> DraftTimes:
    times, draws = DraftTimes(), np.random.default_rng(2)
    for depth, rows in pairs:
        times.observe(depth, rows, step(depth, rows, **costs) * float(np.exp(draws.normal(0, noise))))
    return times


def seconds(times: DraftTimes, depth: float, rows: float) -> float:
    return float(times.seconds(np.array([depth]), np.array([rows]))[0])


@pytest.mark.parametrize("overhead", [0.0, 0.003, 0.02])
def test_what_a_step_takes_beside_its_passes_is_not_in_proportion_to_depth(overhead: float) -> None:
    """As after calibration, and then long at one depth: the others are still known."""
    times = learnt(*[(4, 1), (2, 1), (1, 1)] * FIRST, *[(1, 1)] * 300, overhead=overhead)
    for depth in (1, 2, 3, 4, 8):
        assert seconds(times, depth, 1) == pytest.approx(step(depth, 1, overhead))


def test_pairs_that_never_came_are_known_from_both_curves() -> None:
    times = learnt(*[(4, 1), (2, 1), (1, 1)] * FIRST, *[(2, 16)] * 10, *[(2, 1)] * 10)
    assert seconds(times, 4, 16) == pytest.approx(step(4, 16), rel=0.02)
    assert seconds(times, 1, 16) == pytest.approx(step(1, 16), rel=0.02)
    assert seconds(times, 2, 1) == pytest.approx(step(2, 1), rel=0.02)


def test_noise_averages_out() -> None:
    pairs = [(depth, rows) for depth in (1, 2, 4) for rows in (1, 8)] * 60
    times = learnt(*pairs, noise=0.3)
    for depth, rows in ((1, 1), (4, 1), (2, 8)):
        assert seconds(times, depth, rows) == pytest.approx(step(depth, rows), rel=0.15)


def test_it_never_falls_and_takes_arrays() -> None:
    times = learnt(*[(d, r) for d in (1, 2, 4) for r in (1, 3, 9)] * 9, noise=0.5)
    grid = times.seconds(np.arange(1.0, 9.0)[:, None], np.arange(1.0, 12.0))
    assert grid.shape == (8, 11)
    assert (np.diff(grid, axis=0) >= 0).all()
    assert (np.diff(grid, axis=1) >= 0).all()


def test_a_machine_that_gets_slower_is_followed() -> None:
    times = learnt(*[(4, 1), (2, 1), (1, 1)] * FIRST, *[(2, 1)] * 100)
    for _ in range(400):
        times.observe(2, 1, 1.5 * step(2, 1))
    assert seconds(times, 2, 1) == pytest.approx(1.5 * step(2, 1), rel=0.05)
    assert seconds(times, 4, 1) == pytest.approx(1.5 * step(4, 1), rel=0.2)


def test_a_level_of_a_tree_is_a_wider_pass_until_one_was_timed() -> None:
    chains = learnt(*[(depth, rows) for depth in (1, 2, 4) for rows in (1, 8)] * 40)
    trees = DraftTimes(chains)
    assert trees.is_known
    assert seconds(trees, 3, 2) == pytest.approx(seconds(chains, 3, 2 * UNSEEN_WIDTH))
    for _ in range(FIRST):
        trees.observe(4, 2, 3 * step(4, 2))
    assert seconds(trees, 4, 2) == pytest.approx(3 * step(4, 2), rel=0.05)
    assert seconds(trees, 2, 2) == pytest.approx(3 * step(2, 2), rel=0.1)  # the curve over depth is the chains'


def test_nothing_is_known_at_first() -> None:
    assert not DraftTimes().is_known
    assert not DraftTimes(DraftTimes()).is_known
