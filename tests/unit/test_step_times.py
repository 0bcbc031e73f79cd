"""Step times: what curve comes of which steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from orchestrator.core.step_times import CHANGE, FIRST, FLAT, StepTimes, _never_falling


def at(times: StepTimes, *tokens: float) -> list[float]:
    return times.seconds(np.array(tokens, np.float64)).tolist()


def observe(times: StepTimes, tokens: float, *seconds: float) -> None:
    for each in seconds:
        times.observe(tokens, each)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 10), st.integers(1, 50)), min_size=1, max_size=12))
def test_pooling_is_isotonic_regression(knots: list[tuple[float, int]]) -> None:
    values, weights = zip(*knots, strict=True)
    expected = isotonic_regression(values, weights=weights).x
    assert _never_falling(list(values), list(weights)) == pytest.approx(expected)


def test_one_size_is_flat_but_for_a_guess() -> None:
    times = StepTimes()
    assert not times.is_known
    observe(times, 8, 2.0, 2.0, 2.0)
    assert times.is_known
    assert at(times, 1, 8) == pytest.approx([2.0, 2.0])
    assert at(times, 8 + FLAT) == pytest.approx([4.0])


def test_between_sizes_in_a_straight_line_and_on_beyond() -> None:
    times = StepTimes()
    observe(times, 4, *[1.0] * 5)
    observe(times, 8, *[3.0] * 5)
    assert at(times, 2, 4, 5, 6, 8, 10) == pytest.approx([1.0, 1.0, 1.5, 2.0, 3.0, 4.0])


def test_a_size_starts_from_the_median_of_its_first_steps() -> None:
    times = StepTimes()
    observe(times, 1, 50.0, 1.0, 1.1)  # the first one came to a cold cache
    assert at(times, 1) == pytest.approx([1.1])


def test_a_size_that_is_hardly_known_does_not_count() -> None:
    times = StepTimes()
    observe(times, 1, *[1.0] * FIRST)
    observe(times, 16, *[90.0] * (FIRST - 1))
    assert at(times, 16) == pytest.approx([1.0 + 15 / FLAT])
    assert times.count(16) == FIRST - 1
    assert times.count(100) == 0


def test_noise_averages_out() -> None:
    times, noise = StepTimes(), np.random.default_rng(1)
    for size in (1, 5, 16):
        observe(times, size, *(size**0.5 * np.exp(noise.normal(0, 0.3, 200))))
    assert at(times, 1, 5, 16) == pytest.approx([1.0, 5**0.5, 4.0], rel=0.15)


def test_one_step_far_off_hardly_counts() -> None:
    times = StepTimes()
    observe(times, 1, *[1.0] * 60)
    observe(times, 1, 1000.0)
    assert at(times, 1)[0] < 1.05


def test_a_change_of_the_world_moves_every_size_at_once() -> None:
    times = StepTimes()
    for size in (1, 8):
        observe(times, size, *[float(size)] * 60)
    observe(times, 1, *[1.0 * np.exp(CHANGE + 1)] * FIRST)
    assert at(times, 1, 8) == pytest.approx([np.exp(CHANGE + 1), 8 * np.exp(CHANGE + 1)], rel=0.03)


def test_sizes_not_seen_for_long_age_with_the_others() -> None:
    times = StepTimes()
    for size in (1, 8):
        observe(times, size, *[float(size)] * 60)
    observe(times, 1, *[1.5] * 400)  # longer contexts, a busier machine
    assert at(times, 1) == pytest.approx([1.5], rel=0.02)
    assert 9.5 < at(times, 8)[0] < 12.5
