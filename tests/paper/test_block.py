"""Claims of Sun et al., "Block Verification Accelerates Speculative Decoding" (2024), and its form on trees."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from orchestrator.core import acceptance
from orchestrator.core.acceptance import block, ratio
from tests.paper.enumeration import (
    CHAIN_1,
    CHAIN_2,
    CHAIN_3,
    DEEP_FORK,
    FORK,
    LOPSIDED,
    PAIRS,
    TRIDENT,
    Language,
    Law,
    difference,
    error_of,
    mean_accepted,
    rounds_of,
)

EXACT = 1e-9
WRONG = 1e-3
SEEDS = range(3)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("chain", [CHAIN_1, CHAIN_2, CHAIN_3])
def test_block_verification_preserves_the_distribution(chain: list[int], seed: int) -> None:
    """Theorem 1."""
    assert error_of(block, Language(4, 3, seed), chain) < EXACT


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("tree", [FORK, TRIDENT, LOPSIDED, DEEP_FORK, PAIRS])
def test_judging_a_tree_from_its_leaves_preserves_the_distribution(tree: list[int], seed: int) -> None:
    """Weng et al., "Traversal Verification for Speculative Tree Decoding" (2025), losslessness."""
    assert error_of(block, Language(4, 3, seed), tree) < EXACT


@pytest.mark.parametrize("tree", [CHAIN_2, CHAIN_3, FORK, LOPSIDED])
def test_exact_when_leaves_bring_a_support_too(tree: list[int]) -> None:
    assert error_of(block, Language(4, 3, 6), tree, leaf_supports=True) < EXACT


@pytest.mark.parametrize("tree", [CHAIN_3, FORK, LOPSIDED])
def test_exact_when_the_support_is_the_whole_vocabulary(tree: list[int]) -> None:
    assert error_of(block, Language(3, 3, 7), tree) < EXACT


@pytest.mark.parametrize("tree", [CHAIN_2, FORK, LOPSIDED])
def test_exact_and_nothing_accepted_when_p_and_q_are_disjoint(tree: list[int]) -> None:
    language = Language(5, 2, 8, disjoint=True)
    assert error_of(block, language, tree) < EXACT
    assert mean_accepted(rounds_of(block, language, 2)) == 0


def test_everything_is_accepted_when_p_equals_q() -> None:
    language = Language(3, 3, 9, equal=True)
    assert error_of(block, language, CHAIN_3) < EXACT
    assert mean_accepted(rounds_of(block, language, 3)) == pytest.approx(3, abs=EXACT)


@pytest.mark.parametrize("seed", range(6))
def test_rounds_are_those_of_algorithm_2_on_dense_distributions(seed: int) -> None:
    """Not only the text: draft tokens, accepted length and next token have the same joint law."""
    language = Language(4, 3, seed)
    assert difference(rounds_of(block, language, 3), dense_rounds(language, 3)) < EXACT


def dense_rounds(language: Language, length: int) -> Law:
    """Algorithm 2, written down on whole distributions."""
    total: Law = {}
    for tokens, drafted in drafts(language, length).items():
        stay = [1.0]  # p_i
        for i in range(1, length + 1):
            before, x = tokens[: i - 1], tokens[i - 1]
            stay.append(min(1.0, stay[-1] * language.p(before)[x] / language.q(before)[x]))
        failed_below = 1.0
        for i in range(length, -1, -1):
            p = language.p(tokens[:i])
            if i == length:
                law, h = p, stay[i]
            else:
                rest = np.maximum(stay[i] * p - language.q(tokens[:i]), 0)
                left = rest.sum()
                h = 1.0 if i == 0 else left / (left + 1 - stay[i]) if left else 0.0
                law = rest / left if left else rest
            for token in law.nonzero()[0].tolist():
                total[(tokens, i, token)] = drafted * failed_below * h * law[token]
            failed_below *= 1 - h
    return {key: value for key, value in total.items() if value > 0}


def drafts(language: Language, length: int, prefix: tuple[int, ...] = ()) -> dict[tuple[int, ...], float]:
    if len(prefix) == length:
        return {prefix: 1.0}
    q = language.q(prefix)
    return {
        tokens: q[x] * probability
        for x in q.nonzero()[0].tolist()
        for tokens, probability in drafts(language, length, (*prefix, x)).items()
    }


def test_block_accepts_at_least_as_much_as_ratio_and_sometimes_more() -> None:
    """Theorem 2."""
    gains = []
    for seed in range(12):
        language = Language(4, 3, seed)
        gains.append(mean_accepted(rounds_of(block, language, 3)) - mean_accepted(rounds_of(ratio, language, 3)))
    assert min(gains) > -EXACT
    assert max(gains) > 0.02


def test_block_and_ratio_are_the_same_for_one_draft_token() -> None:
    language = Language(4, 3, 2)
    assert difference(rounds_of(block, language, 1), rounds_of(ratio, language, 1)) < EXACT


def test_the_example_of_the_paper() -> None:
    """Section 2: p = (1/3, 2/3), q = (2/3, 1/3) at every place, two draft tokens: 10/9 accepted become 11/9."""
    example = PaperExample()
    assert mean_accepted(rounds_of(ratio, example, 2)) == pytest.approx(10 / 9, abs=1e-6)
    assert mean_accepted(rounds_of(block, example, 2)) == pytest.approx(11 / 9, abs=1e-6)


class PaperExample(Language):
    """Two tokens, whatever came before. Thirds are not exact in float32, hence the wider tolerance."""

    def __init__(self) -> None:
        super().__init__(vocab_size=2, support_size=2, seed=0)

    def _table(self, prefix: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        return np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])


Node = acceptance._Node
_reject = Node.reject


def _judge_by_ratio_residual(node: Node, child: int) -> None:
    weight, node.weight = node.weight, 1.0
    _reject(node, child)
    node.weight = weight


def _keep_the_rejected_sibling_in_q(node: Node, child: int) -> None:
    q = node.q
    _reject(node, child)
    node.q = q


def _forget_the_update_of_the_weight(node: Node, child: int) -> None:
    weight = node.weight
    _reject(node, child)
    node.weight = weight


@pytest.mark.parametrize(
    ("mutant", "tree"),
    [
        (_judge_by_ratio_residual, CHAIN_2),
        (_forget_the_update_of_the_weight, CHAIN_2),
        (_keep_the_rejected_sibling_in_q, FORK),
        (_keep_the_rejected_sibling_in_q, LOPSIDED),
    ],
)
def test_the_checker_catches_wrong_rules(
    monkeypatch: pytest.MonkeyPatch, mutant: Callable[[Node, int], None], tree: list[int]
) -> None:
    languages = [Language(5, 3, seed) for seed in range(4)]
    assert max(error_of(block, language, tree) for language in languages) < EXACT
    monkeypatch.setattr(Node, "reject", mutant)
    assert max(error_of(block, language, tree) for language in languages) > WRONG
