"""How ``pilotfish check`` shares out its time, and what it says of what it can find."""

from __future__ import annotations

import pytest
from scipy import stats

from pilotfish.check.pace import Forecast, Schedule, Speed
from pilotfish.check.significance import POWER, SAFETY, detectable

CHECKS = {"a": (Forecast(10, 10.0), Forecast(100, 110.0)), "b": (Forecast(5, 20.0), Forecast(50, 120.0))}


def test_without_a_budget_everything_is_asked_in_full() -> None:
    schedule = Schedule(CHECKS, None)
    assert schedule.begin(1000.0) == 1.0
    assert schedule.left(0.0) == Forecast(150, 230.0)


def test_what_a_budget_leaves_beyond_the_least_is_shared_out_alike() -> None:
    schedule = Schedule(CHECKS, 80.0)
    assert schedule.begin(0.0) == pytest.approx(0.25)  # 50 s beyond the least, of 200 s
    assert schedule.left(0.0).seconds == pytest.approx(80.0)
    assert Schedule(CHECKS, 430.0).begin(0.0) == pytest.approx(2.0)
    assert Schedule(CHECKS, 20.0).begin(0.0) == 0.0
    assert Schedule(CHECKS, 20.0).left(0.0).seconds == pytest.approx(30.0)


def test_a_server_that_turns_out_slower_is_asked_less() -> None:
    schedule = Schedule(CHECKS, 80.0)
    schedule.end("a", forecast_s=10.0, taken_s=20.0)
    assert schedule.begin(20.0) == pytest.approx((60.0 / 2 - 20.0) / 100)
    assert schedule.left(20.0).seconds == pytest.approx(60.0)
    assert schedule.probable(Forecast(3, 4.0)) == Forecast(3, 8.0)


def test_completions_take_passes_and_tokens() -> None:
    speed = Speed(pass_s=1.0, token_s=0.1)
    assert speed.seconds([], 8) == 0.0
    assert speed.seconds([10], 8) == pytest.approx(10 * 1.0 + 10 * 0.1)
    assert speed.seconds([10, 10], 1) == pytest.approx(20 * 1.0 + 20 * 0.1)
    assert speed.seconds([1, 10], 8) == pytest.approx(10 * 1.0 + 11 * 0.1)  # the longest decides
    assert Speed.measured(alone_s=1.0, together_s=0.5, rows=4) == Speed(1.0, 0.0)  # noise


@pytest.mark.parametrize(
    ("draws", "freedom", "tests"), [(320, 10, 160), (4000, 10, 160), (500, 1, 1), (20_000, 60, 400)]
)
def test_what_is_detectable_is_detected_so_often(draws: int, freedom: int, tests: int) -> None:
    """By scipy's noncentral chi-square."""
    share = detectable(draws, freedom, 0.001, tests)
    shift = draws * 2 * share**2 / 0.1
    limit = stats.chi2.isf(0.001 / SAFETY / tests, freedom)
    assert stats.ncx2.sf(limit, freedom, shift) == pytest.approx(POWER, abs=0.005)


def test_no_more_than_all_draws_can_be_misplaced() -> None:
    assert detectable(1, 10, 0.001, 100) == 1.0
