"""Children of tree nodes: ranks against plain sorting, and draws against the law they should have."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from rows import sampling_rows
from scipy.stats import chisquare

from draft_svc.drafters.children import drawn_children, likeliest_children, matched_children
from pilotfish.noise import Purpose, key, uniform_one
from pilotfish.runtime import sampling

LOGITS = torch.tensor([[1.0, 3.0, 0.0, 2.5, -1.0], [0.0, 0.5, 4.0, -3.0, 1.0]])
IDS = torch.tensor([40, 7, 90, 12, 61])  # of a reduced vocabulary
LIMIT = 1e-4  # of p-values; the noise is fixed


def test_the_likeliest_come_first_with_their_logarithms() -> None:
    found = likeliest_children(LOGITS, 3)
    assert found.token_ids.tolist() == [[1, 3, 0], [2, 4, 1]]
    wanted = LOGITS.double().log_softmax(-1).gather(1, torch.from_numpy(found.token_ids))
    np.testing.assert_allclose(found.scores, wanted.numpy(), atol=1e-6)
    assert not found.supports


@pytest.mark.parametrize("top_k", [0, 3])
def test_matched_children_are_those_that_win_the_targets_race_after_the_winners(top_k: int) -> None:
    rows, positions = sampling_rows(2, temperature=0.8, top_k=top_k, seed=5), np.array([11, 30])
    found = matched_children(LOGITS, rows, positions, 5, IDS)
    p = sampling.probabilities(LOGITS, rows).double().numpy()
    for row in range(2):
        speeds = [
            p[row, v] / -np.log(uniform_one(5 + row, Purpose.MATCH, 0, int(positions[row]), int(IDS[v])))
            for v in range(5)
        ]
        order = np.argsort(-np.array(speeds), kind="stable")
        kept = int(np.count_nonzero(speeds))
        assert kept == (top_k or 5)
        assert found.token_ids[row, :kept].tolist() == IDS[order[:kept]].tolist()
        np.testing.assert_allclose(np.exp(found.scores[row]), np.array(speeds)[order] / sum(speeds), rtol=1e-6)


def test_the_first_matched_child_is_the_draw_that_a_target_like_the_draft_makes() -> None:
    rows, positions = sampling_rows(2, seed=9), np.array([3, 4])
    keys = sampling.draw_keys(rows.seeds, Purpose.MATCH, np.zeros_like(rows.rounds), positions)
    drawn = sampling.draw_plain(LOGITS, rows, keys).token_ids
    assert matched_children(LOGITS, rows, positions, 2).token_ids[:, 0].tolist() == drawn.tolist()


def test_drawn_children_are_drawn_without_replacement() -> None:
    """The law of the first two, in order, over many rounds: q(a) q(b) / (1 - q(a))."""
    count = 20_000
    rows = sampling_rows(count, seed=1, top_k=4)
    found = drawn_children(LOGITS[:1].expand(count, -1), rows, np.full(count, 17), 2, 3)
    ids, q = found.supports[0]
    assert ids.tolist() == [1, 3, 0], "three of the four that top-k leaves"
    assert q.sum() == pytest.approx(1)
    chance = dict(zip(ids.tolist(), (q / q.sum()).tolist(), strict=True))
    pairs = list(permutations(chance, 2))
    counts = Counter(map(tuple, found.token_ids.tolist()))
    expected = [count * chance[a] * chance[b] / (1 - chance[a]) for a, b in pairs]
    assert chisquare([counts[pair] for pair in pairs], np.array(expected) * count / sum(expected)).pvalue > LIMIT


def test_the_first_drawn_child_is_that_of_a_chain() -> None:
    """The same key, and the same race."""
    rows, positions = sampling_rows(2, seed=4, round_index=6), np.array([3, 8])
    found = drawn_children(LOGITS, rows, positions, 1, 5)
    ids, q = sampling.truncate(sampling.probabilities(LOGITS, rows), 5)
    keys = np.array([key(4 + row, Purpose.DRAFT, 6, int(positions[row])) for row in range(2)])
    winners = sampling.race(q, keys, ids)
    assert found.token_ids[:, 0].tolist() == ids.gather(1, winners[:, None])[:, 0].tolist()


def test_nodes_that_share_their_logits_draw_by_themselves() -> None:
    positions, shared = np.array([3, 8, 4]), np.array([1, 0, 1])
    found = drawn_children(LOGITS, sampling_rows(2, seed=4), positions, 2, 4, IDS, shared)
    seeds = np.array([5, 4, 5], np.uint64)
    alone = drawn_children(LOGITS[shared], replace(sampling_rows(3), seeds=seeds), positions, 2, 4, IDS)
    assert found.token_ids.tolist() == alone.token_ids.tolist()
    for mine, wanted in zip(found.supports, alone.supports, strict=True):
        assert mine.token_ids.tolist() == wanted.token_ids.tolist()
        assert mine.probs.tolist() == wanted.probs.tolist()


def test_tokens_of_no_chance_are_no_children() -> None:
    rows = sampling_rows(2, top_k=2)
    positions = np.array([1, 2])
    assert (drawn_children(LOGITS, rows, positions, 4, 5).scores > -np.inf).tolist() == [[True, True, False, False]] * 2
    assert (matched_children(LOGITS, rows, positions, 4).scores > -np.inf).tolist() == [[True, True, False, False]] * 2
    assert likeliest_children(LOGITS, 9).token_ids.shape == (2, 5)


def test_ids_of_a_reduced_vocabulary_are_the_targets_own_in_supports_and_draws() -> None:
    rows, positions = sampling_rows(2, seed=2), np.array([5, 6])
    found = drawn_children(LOGITS, rows, positions, 3, 4, IDS)
    assert found.supports[0].token_ids.tolist() == [7, 12, 40, 90]
    assert set(found.token_ids[0].tolist()) <= {7, 12, 40, 90}
