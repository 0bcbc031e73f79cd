"""How often draft tokens are kept: estimates from rounds."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.core.requests import MAX_ADAPTIVE_LENGTH, Params, Request
from orchestrator.core.survival import PRIOR, Survival


def request(name: str = "r") -> Request:
    return Request(name, np.array([1], np.int32), Params(max_tokens=1000, draft_length=None))


def observe(survival: Survival, row: Request, kept: int, judged: int, times: int = 1) -> None:
    for _ in range(times):
        survival.observe([row], np.array([kept]), np.array([judged]))


def play(survival: Survival, rows: list[Request], chances: list[float], rounds: int, length: int, seed: int) -> None:
    """Rounds of proposals whose every token is kept with the row's own chance."""
    draws = np.random.default_rng(seed)
    for _ in range(rounds):
        kept = np.array([_run(draws, chance, length) for chance in chances])
        survival.observe(rows, kept, np.minimum(kept + 1, length))


def _run(draws: np.random.Generator, chance: float, length: int) -> int:
    misses = np.flatnonzero(draws.random(length) >= chance)
    return int(misses[0]) if len(misses) else length


def test_nothing_known_is_the_prior() -> None:
    chances = Survival().chances([request()])
    assert chances.shape == (1, MAX_ADAPTIVE_LENGTH)
    assert chances[0] == pytest.approx(PRIOR ** np.arange(1, MAX_ADAPTIVE_LENGTH + 1))


def test_rows_tend_to_their_own_rates() -> None:
    survival, rows = Survival(), [request("good"), request("bad")]
    play(survival, rows, [0.9, 0.3], rounds=300, length=4, seed=1)
    good, bad = survival.chances(rows)
    assert good[:4] == pytest.approx(0.9 ** np.arange(1, 5), abs=0.2)
    assert bad[:4] == pytest.approx(0.3 ** np.arange(1, 5), abs=0.2)


def test_a_new_row_starts_from_what_all_rows_showed() -> None:
    survival = Survival()
    play(survival, [request()], [0.4], rounds=300, length=3, seed=2)
    assert survival.chances([request("new")])[0, 0] == pytest.approx(0.4, abs=0.1)


def test_positions_that_were_not_judged_say_nothing() -> None:
    """Short proposals that are always kept are no evidence against longer ones."""
    survival, row = Survival(), request()
    observe(survival, row, kept=2, judged=2, times=200)
    chances = survival.chances([row])[0]
    assert chances[1] > 0.95
    assert chances[2] / chances[1] > 0.95  # the third is judged by the second


def test_each_position_has_a_rate_of_its_own() -> None:
    survival, row = Survival(), request()
    observe(survival, row, kept=2, judged=3, times=200)  # the third is always wrong
    chances = survival.chances([row])[0]
    assert chances[1] > 0.9
    assert chances[2] < 0.1


def test_a_collapse_is_seen_within_some_rounds_and_so_is_its_end() -> None:
    survival, row = Survival(), request()
    observe(survival, row, kept=4, judged=4, times=500)
    observe(survival, row, kept=0, judged=1, times=60)
    assert survival.chances([row])[0, 0] < 0.35
    observe(survival, row, kept=4, judged=4, times=60)
    assert survival.chances([row])[0, 0] > 0.65


def test_after_a_doubt_a_little_evidence_weighs_more() -> None:
    sure, unsure = Survival(), Survival()
    for survival in (sure, unsure):
        observe(survival, request(), kept=0, judged=1, times=300)
    unsure.doubt()
    for survival in (sure, unsure):
        observe(survival, request(), kept=2, judged=2, times=8)
    assert unsure.chances([request()])[0, 0] > 2 * sure.chances([request()])[0, 0]


def test_doubts_in_a_row_do_not_bring_the_prior_back() -> None:
    survival = Survival()
    observe(survival, request(), kept=0, judged=1, times=300)
    for _ in range(9):
        survival.doubt()
    assert survival.chances([request()])[0, 0] < 0.2


def test_what_the_first_positions_of_trees_show_goes_for_later_ones() -> None:
    """Trees that miss as often as chains are soon expected to miss as often at depths that none has reached."""
    chains, row = Survival(), request()
    play(chains, [row], [0.5], rounds=400, length=6, seed=3)
    fresh, hopeful, sobered = (Survival(chains, 16) for _ in range(3))
    observe(hopeful, row, kept=1, judged=1, times=40)
    for kept in (0, 1, 0, 1) * 10:
        observe(sobered, row, kept=kept, judged=1)
    at_once, good, bad = (np.diff(np.log(each.chances([row])[0, :8])) for each in (fresh, hopeful, sobered))
    assert np.exp(bad[1:]) == pytest.approx(np.full(6, 0.5), abs=0.12)
    assert (good > at_once).all()
    assert (at_once > bad).all()
