"""Sampled trees as they are drawn in service, noise and all, leave the target's law as it is.

The rules are proven exact by enumeration for children that are drawn independently (``test_ratio``,
``test_block``). Here the children come from counter noise, whose keys must make them so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from rows import sampling_rows
from scipy.stats import chi2

from draft_svc.drafters.children import drawn_children
from draft_svc.drafters.tree_shapes import Shape, from_child_counts
from draft_svc.drafters.trees import Nodes, StaticTree
from orchestrator.core.acceptance import NoiseChance, Rule, accept
from orchestrator.core.proposals import Proposal, proposals_from
from pilotfish.runtime.sampling import take_rows
from pilotfish.steps import DraftResult, Supports
from tests.paper.enumeration import Language, Prefix, World, emitted, outputs_of

ROUNDS = 4000
SEED = 3
END = 10  # position of the first draft token
LENGTH = 3
TWINS = from_child_counts([2], [1, 1])


class Alike(Language):
    """q depends on how many tokens came before, not on which: shared noise would draw siblings the same children."""

    def q(self, prefix: Prefix) -> npt.NDArray[np.float64]:
        return super().q((0,) * len(prefix))


class RandomWorld(World):
    """Draws instead of enumerating."""

    def __init__(self, seed: int) -> None:
        super().__init__([])
        self._draws = np.random.default_rng(seed)

    def choose(self, probabilities: Iterable[float]) -> int:
        sums = np.cumsum(list(probabilities))
        return int(np.searchsorted(sums, self._draws.random() * sums[-1], side="right"))


def draw_trees(language: Language, shape: Shape, rounds: int, by_depth: bool = False) -> list[Nodes]:
    """One tree for every round of one row, all grown side by side.

    Args:
        by_depth: wrong on purpose: noise is keyed by how deep a token is, and siblings' children share it.
    """
    trees = [StaticTree(shape, 99, 99, 8) for _ in range(rounds)]
    run: list[tuple[int, Prefix, int]] = [(index, (), 0) for index in range(rounds)]
    while run:
        rounds_run = np.array([index for index, _, _ in run])
        sampling = take_rows(sampling_rows(1, seed=SEED), np.zeros(len(run), np.int64))
        rows = replace(sampling, rounds=rounds_run)
        with np.errstate(divide="ignore"):
            logits = torch.from_numpy(np.log([language.q(prefix) for _, prefix, _ in run])).float()
        positions = np.array([END + (len(prefix) if by_depth else key) for _, prefix, key in run])
        found = drawn_children(logits, rows, positions, shape.branches, 8)
        following, begin = [], 0
        while begin < len(run):
            index, end = run[begin][0], begin
            while end < len(run) and run[end][0] == index:
                end += 1
            own = slice(begin, end)
            trees[index].grow(found.token_ids[own], found.scores[own], found.supports[own])
            frontier = trees[index].frontier
            nodes = zip(frontier.parents.tolist(), frontier.token_ids.tolist(), frontier.slots.tolist(), strict=True)
            following += [(index, (*run[begin + parent][1], token), slot + 1) for parent, token, slot in nodes]
            begin = end
        run = following
    return [tree.finish() for tree in trees]


def proposal_of(nodes: Nodes, vocab_size: int) -> Proposal:
    """Over the wire."""
    limit = np.array([len(nodes.token_ids)], np.int32)
    result = DraftResult(
        step_id=1,
        node_counts=limit,
        token_ids=nodes.token_ids,
        compute_us=1,
        parents=nodes.parents,
        supports=Supports(
            np.array([len(support.token_ids) for support in nodes.supports], np.int32),
            np.concatenate([support.token_ids for support in nodes.supports]),
        ),
        support_probs=np.concatenate([support.probs for support in nodes.supports]),
    )
    return proposals_from(result, limit, limit, vocab_size, np.array([True]))[0]


def p_value(language: Language, rule: Rule, shape: Shape, by_depth: bool = False) -> float:
    """Chi-square of the first tokens of many rounds against what the target alone would write."""
    world, counts = RandomWorld(7), Counter[Prefix]()
    for index, nodes in enumerate(draw_trees(language, shape, ROUNDS, by_depth)):
        proposal = proposal_of(nodes, language.vocab_size)
        verdict = accept(rule, proposal, outputs_of(world, language, proposal), NoiseChance(SEED, index))
        text = emitted(proposal, verdict)
        while len(text) < LENGTH:
            text = (*text, world.choose(language.p(text)))
        counts[text[:LENGTH]] += 1
    law = language.sequences(LENGTH)
    assert set(counts) <= set(law), "a token of no probability"
    expected = np.array([*law.values()]) * ROUNDS
    observed = np.array([counts[text] for text in law], float)
    small = expected < 5
    expected = np.append(expected[~small], max(expected[small].sum(), 1e-9))
    observed = np.append(observed[~small], observed[small].sum())
    return float(chi2.sf((((observed - expected) ** 2) / expected).sum(), len(expected) - 1))


@pytest.mark.parametrize("rule", [Rule.RATIO, Rule.BLOCK])
@pytest.mark.parametrize("shape", [TWINS, Shape(((0,), (1,), (1, 0), (1, 1), (1, 0, 0)))], ids=["twins", "lean"])
def test_trees_of_drawn_tokens_are_exact(rule: Rule, shape: Shape) -> None:
    assert p_value(Alike(3, 2, 37), rule, shape) > 1e-4


def test_block_would_not_be_exact_if_siblings_drew_with_the_same_noise() -> None:
    assert p_value(Alike(3, 2, 37), Rule.BLOCK, TWINS, by_depth=True) < 1e-4
