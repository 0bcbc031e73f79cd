"""The choice of lengths against the slow obvious way: trying every combination."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.goodput import NEGLIGIBLE, Costs, Given, best_depths, best_lengths, rate

MOST = 3


def costs(base: float, token: float, draft: float, row: float, replicas: int = 1) -> Costs:
    return Costs(lambda tokens: base + token * tokens, lambda depth, rows: depth * (draft + row * rows), replicas)


def every_way(survival: np.ndarray, given_: Given, costs_: Costs) -> float:
    """The highest rate of all lengths that are allowed."""
    rooms = [int((row >= NEGLIGIBLE).sum()) for row in survival]
    ways = product(*(range(room + 1) for room in rooms))
    return max(rate(survival, np.array(way), given_, costs_) for way in ways)


chances = st.lists(st.floats(0, 1), min_size=MOST, max_size=MOST)


@settings(max_examples=300, deadline=None)
@given(
    rows=st.lists(chances, min_size=1, max_size=4),
    target=st.tuples(st.floats(0.01, 1), st.floats(0, 0.2)),
    draft=st.tuples(st.floats(0, 1), st.floats(0, 0.1)),
    replicas=st.integers(1, 3),
    named=st.tuples(st.integers(0, 4), st.integers(1, 3)),
)
def test_no_other_lengths_have_a_higher_rate(
    rows: list[list[float]], target: tuple, draft: tuple, replicas: int, named: tuple
) -> None:
    survival = np.cumprod(np.array(rows), axis=1)
    depth, count = named
    given_ = Given(len(rows) + depth * count, len(rows) + 0.5 * depth, depth, depth * count)
    costs_ = costs(*target, *draft, replicas)
    lengths = best_lengths(survival, given_, costs_)
    assert rate(survival, lengths, given_, costs_) == pytest.approx(every_way(survival, given_, costs_))


def test_one_row_by_hand() -> None:
    survival, alone = np.array([[0.8, 0.64, 0.512]]), Given(tokens=1, expected=1)
    assert rate(survival, np.array([2]), alone, costs(1.0, 0.0, 0.25, 0.0)) == pytest.approx(2.44 / 1.5)
    assert best_lengths(survival, alone, costs(1.0, 0.0, 0.25, 0.0)).tolist() == [3]  # 1.8/1.25, 2.44/1.5, 2.95/1.75
    assert best_lengths(survival, alone, costs(1.0, 0.0, 0.5, 0.0)).tolist() == [2]  # 1.8/1.5, 2.44/2, 2.95/2.5
    assert best_lengths(survival, alone, costs(1.0, 0.0, 0.8, 0.0)).tolist() == [0]  # 1.8/1.8 is no gain


def test_a_useless_draft_gets_nothing_and_costs_no_thought() -> None:
    survival = np.full((4, 16), 0.01)
    assert best_lengths(survival, Given(4, 4.0), costs(1.0, 0.0, 0.0, 0.0)).tolist() == [0] * 4


def test_each_row_gets_its_own_length() -> None:
    survival = np.cumprod([[0.95] * 8, [0.3] * 8], axis=1)
    sure, unsure = best_lengths(survival, Given(2, 2.0), costs(1.0, 0.05, 0.05, 0.0)).tolist()
    assert sure > unsure > 0


def test_a_draft_step_that_runs_anyway_is_joined() -> None:
    survival, dear = np.array([[0.5]]), costs(1.0, 0.0, 0.8, 0.0)
    assert best_lengths(survival, Given(2, 2.0), dear).tolist() == [0]
    assert best_lengths(survival, Given(tokens=6, expected=3.0, depth=4, drafted=4), dear).tolist() == [1]


def test_dearer_verification_shortens() -> None:
    survival = np.cumprod(np.full((8, 16), 0.8), axis=1)
    totals = [best_lengths(survival, Given(8, 8.0), costs(1.0, token, 0.05, 0.0)).sum() for token in (0, 0.01, 0.1, 1)]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > totals[-1] == 0


@settings(max_examples=300, deadline=None)
@given(
    rows=st.lists(chances, min_size=1, max_size=4),
    target=st.tuples(st.floats(0.01, 1), st.floats(0, 0.2)),
    draft=st.tuples(st.floats(0, 1), st.floats(0, 0.1)),
    replicas=st.integers(1, 3),
    named=st.tuples(st.integers(0, 4), st.integers(0, 3)),
    nodes=st.integers(1, 20),
)
def test_no_other_depth_of_trees_has_a_higher_rate(
    rows: list[list[float]], target: tuple, draft: tuple, replicas: int, named: tuple, nodes: int
) -> None:
    survival = np.cumprod(np.array(rows), axis=1)
    depth, count = named
    given_ = Given(len(rows) + nodes * count, len(rows) + 0.5 * depth, depth * (count > 0), count)
    costs_ = costs(*target, *draft, replicas)
    lengths = best_depths(survival, given_, costs_, nodes)
    rooms = (survival >= NEGLIGIBLE).sum(axis=1)
    every = [rate(survival, np.minimum(d, rooms), given_, costs_, nodes) for d in range(MOST + 1)]
    assert rate(survival, lengths, given_, costs_, nodes) == pytest.approx(max(every))


def test_a_tree_by_hand() -> None:
    survival, alone = np.array([[0.8, 0.64, 0.512]]), Given(tokens=1, expected=1)
    costs_ = costs(1.0, 0.01, 0.25, 0.0)
    assert rate(survival, np.array([2]), alone, costs_, nodes=8) == pytest.approx(2.44 / (1.09 + 0.5))
    assert best_depths(survival, alone, costs_, 8).tolist() == [3]  # 1.8/1.34, 2.44/1.59, 2.95/1.84
    assert best_depths(survival, alone, costs(1.0, 0.3, 0.25, 0.0), 8).tolist() == [0]  # 2.95/4.45 against 1/1.3
