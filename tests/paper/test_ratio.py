"""Claims of Leviathan et al. (2022), Chen et al. (2023) and SpecInfer (2023) about the ratio rule."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from orchestrator.core import acceptance
from orchestrator.core.acceptance import NoiseChance, ratio
from orchestrator.core.chains import ratio_chains
from orchestrator.core.proposals import Outputs, Proposal
from pilotfish.steps import Supports
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
def test_tokens_from_speculative_sampling_are_distributed_as_from_p_alone(chain: list[int], seed: int) -> None:
    """Leviathan et al., appendix A.1; Chen et al., theorem 1."""
    assert error_of(ratio, Language(4, 3, seed), chain) < EXACT


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("tree", [FORK, TRIDENT, LOPSIDED, DEEP_FORK, PAIRS])
def test_multi_round_sampling_without_replacement_is_exact_on_trees(tree: list[int], seed: int) -> None:
    """SpecInfer, theorem 4.2, with q renormalised after each sibling."""
    assert error_of(ratio, Language(4, 3, seed), tree) < EXACT


@pytest.mark.parametrize(
    ("tree", "support_size"), [(CHAIN_2, 1), (CHAIN_2, 2), (FORK, 2), (DEEP_FORK, 2), (TRIDENT, 3)]
)
def test_exact_with_supports_far_smaller_than_the_vocabulary(tree: list[int], support_size: int) -> None:
    assert error_of(ratio, Language(5, support_size, 5), tree) < EXACT


@pytest.mark.parametrize("tree", [CHAIN_2, FORK, LOPSIDED])
def test_exact_when_leaves_bring_a_support_too(tree: list[int]) -> None:
    assert error_of(ratio, Language(4, 3, 6), tree, leaf_supports=True) < EXACT


@pytest.mark.parametrize("tree", [CHAIN_2, FORK, LOPSIDED])
def test_exact_when_the_support_is_the_whole_vocabulary(tree: list[int]) -> None:
    assert error_of(ratio, Language(3, 3, 7), tree) < EXACT


@pytest.mark.parametrize("tree", [CHAIN_2, FORK])
def test_exact_and_nothing_accepted_when_p_and_q_are_disjoint(tree: list[int]) -> None:
    language = Language(5, 2, 8, disjoint=True)
    assert error_of(ratio, language, tree) < EXACT
    assert mean_accepted(rounds_of(ratio, language, 2)) == 0


def test_everything_is_accepted_when_p_equals_q() -> None:
    language = Language(3, 3, 9, equal=True)
    assert error_of(ratio, language, CHAIN_3) < EXACT
    assert mean_accepted(rounds_of(ratio, language, 3)) == pytest.approx(3, abs=EXACT)


@pytest.mark.parametrize("seed", SEEDS)
def test_acceptance_rate_is_the_sum_of_the_minimum_of_p_and_q(seed: int) -> None:
    """Leviathan et al., theorem 3.5: beta = sum_x min(p(x), q(x))."""
    language = Language(4, 3, seed)
    beta = np.minimum(language.p(()), language.q(())).sum()
    assert mean_accepted(rounds_of(ratio, language, 1)) == pytest.approx(beta, abs=EXACT)


@pytest.mark.parametrize("seed", SEEDS)
def test_sparse_messages_give_the_same_rounds_as_dense_distributions(seed: int) -> None:
    language = Language(4, 3, seed)
    assert difference(rounds_of(ratio, language, 2), dense_rounds(language, 2)) < EXACT


def dense_rounds(language: Language, length: int) -> Law:
    """Leviathan et al., Algorithm 1, written down on whole distributions."""
    total: Law = {}

    def go(tokens: tuple[int, ...], reach: float, accepted: int, stopped: int | None) -> None:
        if len(tokens) == length:
            if stopped is None:
                last = language.p(tokens)
                for token in last.nonzero()[0].tolist():
                    total[(tokens, length, token)] = total.get((tokens, length, token), 0.0) + reach * last[token]
            else:
                key = (tokens, accepted, stopped)
                total[key] = total.get(key, 0.0) + reach
            return
        p, q = language.p(tokens), language.q(tokens)
        for x in q.nonzero()[0].tolist():
            if stopped is not None:
                go((*tokens, x), reach * q[x], accepted, stopped)
                continue
            keep = min(1.0, p[x] / q[x])
            go((*tokens, x), reach * q[x] * keep, accepted + 1, None)
            if keep < 1:
                rest = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
                for token in rest.nonzero()[0].tolist():
                    go((*tokens, x), reach * q[x] * (1 - keep) * rest[token], accepted, token)

    go((), 1.0, 0, None)
    return {key: value for key, value in total.items() if value > 0}


Node = acceptance._Node
_reject, _rate, _draw = Node.reject, Node.rate, Node.draw


def _drop(node: Node, child: int) -> None:
    node.q = node.q.copy()
    node.q[node._place(child)] = 0
    node.q /= max(node.q.sum(), 1e-300)


def _forget_the_residual(node: Node, child: int) -> None:
    _drop(node, child)


def _keep_the_rejected_sibling_in_q(node: Node, child: int) -> None:
    q = node.q
    _reject(node, child)
    node.q = q


def _do_not_renormalise_q(node: Node, child: int) -> None:
    q = node.q.copy()
    q[node._place(child)] = 0
    _reject(node, child)
    node.q = q


def _forget_the_tail(node: Node, child: int) -> None:
    _reject(node, child)
    if node.p.sum() > 0:
        node.p, node.tail = node.p / node.p.sum(), 0.0


def _zero_p_of_the_rejected_child_only(node: Node, child: int) -> None:
    node.p = node.p.copy()
    node.p[node._place(child)] = 0
    mass = node.p.sum() + node.tail
    node.p, node.tail = node.p / mass, node.tail / mass
    _drop(node, child)


@pytest.mark.parametrize(
    ("mutant", "tree"),
    [
        (_forget_the_residual, CHAIN_1),
        (_forget_the_residual, CHAIN_2),
        (_forget_the_residual, FORK),
        (_zero_p_of_the_rejected_child_only, CHAIN_1),
        (_keep_the_rejected_sibling_in_q, FORK),
        (_keep_the_rejected_sibling_in_q, LOPSIDED),
        (_do_not_renormalise_q, FORK),
        (_forget_the_tail, CHAIN_1),
    ],
)
def test_the_checker_catches_wrong_rules(
    monkeypatch: pytest.MonkeyPatch, mutant: Callable[[Node, int], None], tree: list[int]
) -> None:
    languages = [Language(5, 3, seed) for seed in range(4)]
    assert max(error_of(ratio, language, tree) for language in languages) < EXACT
    monkeypatch.setattr(Node, "reject", mutant)
    assert max(error_of(ratio, language, tree) for language in languages) > WRONG


def test_the_checker_catches_a_deterministic_proposal_judged_as_if_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The likeliest token of q, sent with q: no coin can make that exact."""
    from tests.paper import enumeration

    def likeliest(world: enumeration.World, language: Language, parents: list[int]) -> list[int]:
        return [int(language.q(()).argmax())]

    monkeypatch.setattr(enumeration, "draw_tree", likeliest)
    assert max(error_of(ratio, Language(4, 3, seed), CHAIN_1) for seed in range(4)) > WRONG


def random_row(rng: np.random.Generator) -> tuple[Proposal, Outputs]:
    """A sampled chain of up to 4 tokens out of 12, and what the target says: like q, unlike it, or nothing outside."""
    length, leaf = int(rng.integers(0, 5)), int(rng.integers(0, 3))
    groups = [rng.choice(12, rng.integers(1, 6), replace=False) for _ in range(length)] + [np.arange(leaf)]
    q = [rng.dirichlet(np.ones(len(group))) for group in groups[:-1]] + [np.full(leaf, 1 / max(leaf, 1))]
    nodes = np.array([rng.choice(group) for group in groups[:-1]], np.int32)
    p, tails, outside = [], [], []
    for group, drawn_from in zip(groups, q, strict=True):
        tail = 1.0 if not len(group) else float(rng.choice([0.0, 0.4, rng.random()]))
        law = drawn_from if rng.random() < 0.3 else rng.dirichlet(np.ones(len(group))) if len(group) else drawn_from
        p.append((1 - tail) * law)
        tails.append(tail)
        outside.append(int(rng.choice(np.setdiff1d(np.arange(12), group))) if tail else -1)
    supports = Supports(np.array([len(group) for group in groups], np.int32), np.concatenate(groups).astype(np.int32))
    proposal = Proposal(nodes, np.arange(-1, length - 1, dtype=np.int32), supports, np.concatenate(q))
    return proposal, Outputs(np.array(outside, np.int32), np.array(tails), np.concatenate(p))


def test_many_chains_at_once_are_judged_like_each_alone() -> None:
    rng = np.random.default_rng(4)
    for _ in range(300):
        rows = [random_row(rng) for _ in range(rng.integers(1, 9))]
        seeds, rounds = rng.integers(0, 2**63, len(rows)).tolist(), rng.integers(0, 99, len(rows)).tolist()
        each = [ratio(*row, NoiseChance(*key)) for row, key in zip(rows, zip(seeds, rounds, strict=True), strict=True)]
        assert ratio_chains([row[0] for row in rows], [row[1] for row in rows], seeds, rounds) == each
    assert ratio_chains([], [], [], []) == []
