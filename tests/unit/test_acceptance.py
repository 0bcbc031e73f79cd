"""Acceptance: what proposals and answers are refused, edges of rounding, and the noise of the coins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from orchestrator.core.acceptance import NoiseChance, Rule, TokenKind, Verdict, accept, block, ratio
from orchestrator.core.proposals import (
    EMPTY,
    NOTHING_FOLLOWS,
    Outputs,
    Proposal,
    outputs_from,
    plain_draws,
    proposals_from,
)
from pilotfish import noise
from pilotfish.errors import InternalError, InvalidArgumentError
from pilotfish.noise import Purpose, key, uniform_one
from pilotfish.steps import DraftResult, Supports, TargetResult

VOCAB = 10


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


# Three rows: a sampled chain of two, a sampled row without nodes, a greedy chain of one.
SAMPLED = np.array([True, True, False])
LENGTHS = ints(2, 2, 1)
GOOD = DraftResult(
    step_id=1,
    node_counts=ints(2, 0, 1),
    token_ids=ints(3, 4, 5),
    compute_us=10,
    supports=Supports(ints(2, 3, 0, 0, 0, 0), ints(3, 7, 9, 4, 1)),
    support_probs=floats(0.25, 0.75, 0.5, 0.25, 0.25),
)
# One sampled row: two siblings below the root, one node below the second.
TREE = DraftResult(
    step_id=1,
    node_counts=ints(3),
    token_ids=ints(3, 7, 3),
    compute_us=10,
    parents=ints(-1, -1, 1),
    supports=Supports(ints(2, 0, 2, 0), ints(3, 7, 3, 4)),
    support_probs=floats(0.25, 0.75, 0.5, 0.5),
)


def parse(result: DraftResult, **changes: Any) -> list[Proposal]:
    return proposals_from(replace(result, **changes), LENGTHS, LENGTHS, VOCAB, SAMPLED)


def parse_tree(lengths: int = 2, limits: int = 4, **changes: Any) -> Proposal:
    result = replace(TREE, **changes)
    return proposals_from(result, ints(lengths), ints(limits), VOCAB, np.array([True]))[0]


def test_rows_get_their_own_nodes_and_supports() -> None:
    first, second, third = parse(GOOD)
    assert first.token_ids.tolist() == [3, 4]
    assert first.parents.tolist() == [-1, 0]
    assert first.supports.counts.tolist() == [2, 3, 0]
    assert first.supports.token_ids.tolist() == [3, 7, 9, 4, 1]
    assert first.support_probs.tolist() == [0.25, 0.75, 0.5, 0.25, 0.25]
    assert first.is_sampled
    assert second.token_ids.tolist() == []
    assert second.supports.counts.tolist() == [0]
    assert third.token_ids.tolist() == [5]
    assert not third.is_sampled


def test_trees_keep_parents_and_order_of_siblings() -> None:
    proposal = parse_tree()
    assert proposal.children() == [[0, 1], [], [2], []]
    assert proposal.supports.counts.tolist() == [2, 0, 2, 0]


def test_q_is_normalised_exactly() -> None:
    proposal = parse(GOOD, support_probs=floats(0.25001, 0.75, 0.5, 0.25, 0.25))[0]
    assert proposal.support_probs[:2].sum() == pytest.approx(1, abs=1e-15)


def test_a_deterministic_answer_needs_no_supports() -> None:
    result = DraftResult(1, ints(2, 0), ints(3, 4), 10)
    chain, empty = proposals_from(result, ints(2, 2), ints(), VOCAB, np.array([False, True]))
    assert chain.supports.counts.tolist() == [0, 0, 0]
    assert empty.supports.counts.tolist() == [0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"node_counts": ints(2, 0)}, "length of node_counts is 2; must equal the 3 rows"),
        ({"node_counts": ints(2, -1, 1)}, r"node_counts\[1\] is -1; must be in \[0, 2\]"),
        ({"node_counts": ints(3, 0, 0)}, r"node_counts\[0\] is 3; must be in \[0, 2\]"),
        ({"token_ids": ints(3, 4)}, "length of token_ids is 2; must be 3"),
        ({"token_ids": ints(3, VOCAB, 5)}, r"token_ids\[1\] is 10; must be in \[0, 10\)"),
        ({"token_ids": ints(3, 4, -1)}, r"token_ids\[2\] is -1"),
        ({"token_ids": ints(3, 5, 5)}, r"token_ids\[1\] is 5; must be in the support"),
        ({"parents": ints(-1, 0)}, "length of parents is 2; must be 0 or 3"),
        ({"parents": ints(-1, 1, -1)}, r"parents\[1\] is 1; must be in \[-1, 1\)"),
        ({"parents": ints(-2, 0, -1)}, r"parents\[0\] is -2"),
        ({"supports": Supports(), "support_probs": floats()}, "supports of row 0 is missing"),
        ({"supports": Supports()}, "support_probs is given"),
        ({"supports": Supports(ints(2, 3, 0, 0, 0), GOOD.supports.token_ids)}, "length of supports.counts is 5"),
        ({"supports": Supports(ints(2, 2, 0, 0, 0, 0), GOOD.supports.token_ids)}, "token_ids is 5; .* sum to 4"),
        ({"supports": Supports(ints(2, -3, 3, 3, 0, 0), GOOD.supports.token_ids)}, r"supports.counts\[1\] is -3"),
        ({"supports": Supports(ints(5, 0, 0, 0, 0, 0), GOOD.supports.token_ids)}, "sum of support_probs of group 0"),
        ({"supports": Supports(ints(2, 0, 3, 0, 0, 0), GOOD.supports.token_ids)}, "supports of row 0 is missing"),
        ({"supports": Supports(ints(2, 0, 0, 0, 3, 0), ints(3, 7, 5, 4, 1))}, "supports of row 0 is missing"),
        ({"supports": Supports(GOOD.supports.counts, ints(3, 7, 4, 4, 1))}, "supports.token_ids is repeated"),
        ({"supports": Supports(GOOD.supports.counts, ints(3, -7, 9, 4, 1))}, r"supports.token_ids\[1\] is -7"),
        ({"supports": Supports(GOOD.supports.counts, ints(3, 7, 10, 4, 1))}, r"supports.token_ids\[2\] is 10"),
        (
            {"supports": Supports(GOOD.supports.counts, ints(6, 7, 9, 4, 1))},
            r"token_ids\[0\] is 3; must be in the supp",
        ),
        ({"support_probs": floats(0.25, 0.75, 0.5, 0.25)}, "length of support_probs is 4"),
        ({"support_probs": floats(0.25, 0.75, 0.5, 0.5, 0)}, r"support_probs\[4\] is 0"),
        ({"support_probs": floats(1.25, -0.25, 0.5, 0.25, 0.25)}, r"support_probs\[0\] is 1.25"),
        ({"support_probs": floats(0.25, np.nan, 0.5, 0.25, 0.25)}, r"support_probs\[1\] is nan"),
        ({"support_probs": floats(0.25, np.inf, 0.5, 0.25, 0.25)}, r"support_probs\[1\] is inf"),
        ({"support_probs": floats(0.25, 0.74, 0.5, 0.25, 0.25)}, "sum of support_probs of group 0 is 0.99"),
    ],
)
def test_garbage_from_a_drafter_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        parse(GOOD, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": ints(3, 3, 3)}, "token_ids is repeated; siblings must be distinct"),
        ({"parents": ints(-1, -1, 2)}, r"parents\[2\] is 2; must be in \[-1, 2\)"),
        ({"lengths": 1}, r"parents\[2\] is 1; paths hold at most 1"),
        ({"limits": 2}, r"node_counts\[0\] is 3; must be in \[0, 2\]"),
        ({"parents": ints(-1, -1, 0)}, "supports of row 0 is missing"),
    ],
)
def test_garbage_trees_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        parse_tree(**changes)


def test_paths_of_deep_trees_are_measured() -> None:
    tree = DraftResult(1, ints(1, 6), ints(9, 1, 2, 3, 4, 5, 6), 10, parents=ints(-1, -1, -1, 0, 2, 3, 4))
    greedy = np.array([False, False])
    assert len(proposals_from(tree, ints(4, 5), ints(9, 9), VOCAB, greedy)) == 2
    with pytest.raises(InvalidArgumentError, match=r"parents\[6\] is 4; paths hold at most 4"):
        proposals_from(tree, ints(4, 4), ints(9, 9), VOCAB, greedy)


def test_a_chain_longer_than_asked_for_is_refused() -> None:
    chain = DraftResult(1, ints(3), ints(1, 2, 3), 10)
    with pytest.raises(InvalidArgumentError, match=r"node_counts\[0\] is 3; must be in \[0, 2\]"):
        proposals_from(chain, ints(2), ints(3), VOCAB, np.array([False]))


def test_a_tree_where_chains_were_asked_for_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="parents is a tree; a chain was asked for"):
        proposals_from(TREE, ints(3), ints(), VOCAB, np.array([True]))


def test_supports_where_no_sampling_was_asked_for_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="supports of row 0 is given; must be absent"):
        proposals_from(TREE, ints(2), ints(4), VOCAB, np.array([False]))


def test_supports_larger_than_asked_for_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"supports.counts\[0\] is 2; must be in \[0, 1\]"):
        proposals_from(TREE, ints(2), ints(4), VOCAB, np.array([True]), support_limit=1)


# The answer to GOOD's three rows with a row between them that only prefills.
PROPOSALS = [*parse(GOOD)[:1], EMPTY, *parse(GOOD)[2:]]
ANSWER = TargetResult(
    step_id=1,
    token_ids=ints(5, -1, 6, 2, 8, 8),
    tail_masses=floats(0.5, 0.0, 1, 1, 1, 1),
    support_probs=floats(0.125, 0.375, 0.5, 0.5, 0.0),
    compute_us=10,
)


def test_answers_are_split_by_row() -> None:
    chain, prefill, greedy = outputs_from(ANSWER, PROPOSALS, VOCAB)
    assert chain.token_ids.tolist() == [5, -1, 6]
    assert chain.tail_masses.tolist() == [0.5, 0.0, 1.0]
    assert chain.support_probs.tolist() == [0.125, 0.375, 0.5, 0.5, 0.0]
    assert prefill.token_ids.tolist() == [2]
    assert greedy.token_ids.tolist() == [8, 8]
    assert greedy.support_probs.tolist() == []


def test_p_is_normalised_exactly_and_nothing_is_left_outside_where_y_is_absent() -> None:
    answer = replace(ANSWER, tail_masses=floats(0.5003, 1e-8, 1, 1, 1, 1))
    chain = outputs_from(answer, PROPOSALS, VOCAB)[0]
    assert chain.tail_masses[0] + chain.support_probs[:2].sum() == pytest.approx(1, abs=1e-15)
    assert chain.tail_masses[1] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": ints(5, -1, 6, 2, 8)}, "length of token_ids is 5; must be 6"),
        ({"tail_masses": floats(0.5, 0, 1)}, "length of tail_masses is 3; must be 6"),
        ({"support_probs": floats(0.125, 0.375)}, "length of support_probs is 2; must be 5"),
        ({"token_ids": ints(5, -1, 6, 2, 8, VOCAB)}, r"token_ids\[5\] is 10"),
        ({"token_ids": ints(5, -2, 6, 2, 8, 8)}, r"token_ids\[1\] is -2; must be at least -1"),
        ({"token_ids": ints(5, -1, -1, 2, 8, 8)}, r"token_ids\[2\] is -1; must be at least 0"),
        ({"token_ids": ints(7, -1, 6, 2, 8, 8)}, "token_ids is inside the support"),
        ({"tail_masses": floats(0.5, 0, 1, np.nan, 1, 1)}, r"tail_masses\[3\] is nan"),
        ({"tail_masses": floats(0.5, 0, 1, 0, 1, 1)}, r"sum of p at output\[3\] is 0.0"),
        ({"support_probs": floats(0.125, 0.375, 0.5, 0.5, -0.1)}, r"support_probs\[4\] is -0.1"),
        ({"support_probs": floats(0.125, 0.375, 0, 0, 0)}, r"sum of p at output\[1\] is 0.0"),
        ({"support_probs": floats(0.125, 0.3, 0.5, 0.5, 0)}, r"sum of p at output\[0\] is 0.92"),
    ],
)
def test_garbage_from_the_target_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        outputs_from(replace(ANSWER, **changes), PROPOSALS, VOCAB)


def test_no_rows_are_no_outputs() -> None:
    assert outputs_from(TargetResult(1, ints(), floats(), floats(), 1), [], VOCAB) == []


class Scripted:
    """A chance that says what it is told and remembers what it was asked."""

    def __init__(self, *coins: bool) -> None:
        self.coins = list(coins)
        self.asked: list[tuple[str, int]] = []

    def happens(self, probability: float, node: int) -> bool:
        self.asked.append(("coin", node))
        return probability > 0 and self.coins.pop(0)

    def pick(self, weights: np.ndarray, token_ids: np.ndarray, node: int) -> int:
        self.asked.append(("pick", node))
        assert np.isfinite(weights).all()
        assert weights.sum() == pytest.approx(1)
        return int(weights.argmax())


def outputs(proposal: Proposal, draws: list[int], tails: list[float], probs: list[float]) -> Outputs:
    assert len(draws) == len(tails) == len(proposal.supports.counts)
    return Outputs(ints(*draws), np.array(tails), np.array(probs))


@pytest.mark.parametrize("rule", list(Rule))
def test_an_empty_proposal_is_a_bonus_token(rule: Rule) -> None:
    chance = Scripted()
    assert accept(rule, EMPTY, outputs(EMPTY, [4], [1], []), chance) == Verdict((), 4, TokenKind.BONUS)
    assert chance.asked == []


def test_a_rule_refuses_proposals_that_it_would_judge_wrongly() -> None:
    sampled, _, greedy = parse(GOOD)
    with pytest.raises(InternalError, match="rule is MATCH; it does not judge sampled proposals"):
        accept(Rule.MATCH, sampled, outputs(sampled, [5, 2, 6], [1, 1, 1], [0] * 5), Scripted())
    for rule in (Rule.RATIO, Rule.BLOCK):
        with pytest.raises(InternalError, match="does not judge deterministic proposals"):
            accept(rule, greedy, outputs(greedy, [8, 8], [1, 1], []), Scripted())


def test_only_a_step_with_shaped_rows_has_outputs_that_nothing_follows() -> None:
    answer = replace(ANSWER, token_ids=ints(5, -1, -1, 2, 8, -1))
    chain, _, greedy = outputs_from(answer, PROPOSALS, VOCAB, shaped=True)
    assert chain.tail_masses.tolist() == [0.5, 0.0, 1.0]
    assert greedy.token_ids.tolist() == [8, NOTHING_FOLLOWS]
    with pytest.raises(InvalidArgumentError, match=r"token_ids\[2\] is -1; must be at least 0"):
        outputs_from(answer, PROPOSALS, VOCAB)
    with pytest.raises(InvalidArgumentError, match=r"token_ids\[2\] is -1; must be at least 0"):
        outputs_from(replace(answer, tail_masses=floats(0.5, 0, 0.99, 1, 1, 1)), PROPOSALS, VOCAB, shaped=True)
    plain = TargetResult(1, ints(8, -1), floats(1, 1), floats(), 1)
    assert plain_draws(plain, PROPOSALS[2:], VOCAB, shaped=True).tolist() == [8, -1]
    with pytest.raises(InvalidArgumentError, match=r"token_ids\[1\] is -1"):
        plain_draws(plain, PROPOSALS[2:], VOCAB)


@pytest.mark.parametrize("rule", [ratio, block])
def test_what_cannot_follow_a_node_leaves_the_node_its_own_chance(rule: Any) -> None:
    """After the first token nothing may follow, as behind the end of a grammar: the second is never accepted, and the
    first as often as p / q says, here always and a quarter of the time."""
    proposal = parse(GOOD)[0]
    for p, often in ((0.25, 1.0), (0.0625, 0.25)):
        said = outputs(proposal, [5, -1, 6], [0.75 - p, 1, 1], [p, 0.25, 0, 0, 0])
        paths = [rule(proposal, said, NoiseChance(seed, 0)).path for seed in range(4000)]
        assert set(paths) <= {(), (0,)}
        assert paths.count((0,)) / len(paths) == pytest.approx(often, abs=0.03)
        verdicts = [rule(proposal, said, NoiseChance(seed, 0)) for seed in range(50)]
        assert all((verdict.token == NOTHING_FOLLOWS) == (verdict.path == (0,)) for verdict in verdicts)


def test_kinds_of_ratio_and_block() -> None:
    proposal = parse(GOOD)[0]
    said = outputs(proposal, [5, 2, 6], [0.5, 0.5, 1], [0.25, 0.25, 0.125, 0.25, 0.125])
    assert ratio(proposal, said, Scripted(True, True)) == Verdict((0, 1), 6, TokenKind.BONUS)
    assert ratio(proposal, said, Scripted(True, False)) == Verdict((0,), 2, TokenKind.RECOVERED)
    assert ratio(proposal, said, Scripted(False)) == Verdict((), 5, TokenKind.RECOVERED)
    assert block(proposal, said, Scripted(True)) == Verdict((0, 1), 6, TokenKind.BONUS)
    assert block(proposal, said, Scripted(False, True)) == Verdict((0,), 2, TokenKind.RECOVERED)
    assert block(proposal, said, Scripted(False, False)) == Verdict((), 5, TokenKind.RECOVERED)


def test_coins_belong_to_the_node_judged() -> None:
    proposal = parse_tree()
    said = outputs(proposal, [5, 2, 6, 6], [0.0625, 1, 0.5, 1], [0.125, 0.8125, 0.25, 0.25])
    for_ratio, for_block = Scripted(False, True, False), Scripted(False, False, False)
    ratio(proposal, said, for_ratio)
    assert for_ratio.asked == [("coin", 0), ("coin", 1), ("coin", 2), ("pick", 1)]
    block(proposal, said, for_block)
    assert for_block.asked == [("coin", 0), ("coin", 2), ("coin", 1), ("pick", -1)]


@pytest.mark.parametrize("rule", [ratio, block])
def test_a_rejection_without_probability_leaves_the_targets_law(rule: Any) -> None:
    """p = q, and rounding alone makes the coin fail: nothing is left of (p - q)+, p stays."""
    proposal = parse_tree()
    said = outputs(proposal, [-1, 6, -1, 6], [0, 1, 0, 1], [0.25, 0.75, 0.5, 0.5])
    verdict = rule(proposal, said, Scripted(False, False, False))
    assert verdict.path == ()
    assert verdict.token in (3, 7)


def test_tokens_without_probability_are_never_emitted() -> None:
    """p lives on one token of the support and y is absent; whatever the noise, that token comes."""
    proposal = parse_tree()
    said = outputs(proposal, [-1, 6, -1, 6], [0, 1, 0, 1], [0, 1, 0, 1])
    for rule in (ratio, block):
        for seed in range(200):
            verdict = rule(proposal, said, NoiseChance(seed, 0))
            run = [*proposal.token_ids[list(verdict.path)].tolist(), verdict.token]
            assert run[0] == 7
            assert run[1:2] in ([], [4])


@pytest.mark.parametrize("rule", [ratio, block])
def test_long_chains_need_no_recursion(rule: Any) -> None:
    length = 3000
    result = DraftResult(
        1,
        ints(length),
        np.zeros(length, np.int32),
        1,
        supports=Supports(np.append(np.ones(length, np.int32), np.int32(0)), np.zeros(length, np.int32)),
        support_probs=np.ones(length, np.float32),
    )
    proposal = proposals_from(result, ints(length), ints(length), VOCAB, np.array([True]))[0]
    said = outputs(proposal, [1] * (length + 1), [0.5] * length + [1], [0.5] * length)
    verdict = rule(proposal, said, NoiseChance(1, 0))
    assert len(verdict.path) < 100


@pytest.mark.parametrize("rule", [ratio, block])
def test_extreme_probabilities_give_no_nan(rule: Any) -> None:
    tiny = float(np.finfo(np.float32).smallest_subnormal)
    proposal = parse_tree(support_probs=floats(tiny, 1, 1, tiny))
    for probs in ([tiny, 1, tiny, 1], [1, tiny, 1, tiny], [0, 1, 1, 0], [1e-300, 1, 1e-300, 1]):
        said = outputs(proposal, [-1, 6, -1, 6], [0, 1, 0, 1], probs)
        for seed in range(50):
            assert rule(proposal, said, NoiseChance(seed, 3)).token in (3, 4, 6, 7)


# The noise of coins and picks.


def test_coins_happen_with_their_probability() -> None:
    for probability in (0.0, 0.1, 0.5, 0.99, 1.0):
        heads = sum(NoiseChance(11, i).happens(probability, i % 5) for i in range(4000))
        if probability in (0, 1):
            assert heads == 4000 * probability
        else:
            assert chisquare([heads, 4000 - heads], [4000 * probability, 4000 * (1 - probability)]).pvalue > 1e-3


def test_picks_follow_their_weights() -> None:
    weights, ids = np.array([0.5, 0.0, 0.3, 0.2]), ints(7, 3, 900, 2)
    counts = np.bincount([NoiseChance(5, i).pick(weights, ids, i % 7 - 1) for i in range(4000)], minlength=4)
    assert counts[1] == 0
    assert chisquare(counts[[0, 2, 3]], 4000 * weights[[0, 2, 3]]).pvalue > 1e-3


def test_a_weight_of_zero_loses_even_to_the_worst_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "uniform", lambda keys, ids: np.ones(len(ids)))
    assert NoiseChance(1, 1).pick(np.array([0.0, 1.0]), ints(1, 2), 0) == 1


def test_draws_do_not_share_noise() -> None:
    """Same chance again: same draw. Another node, round, seed or purpose: another."""
    assert NoiseChance(1, 2).happens(uniform_one(1, Purpose.COIN, 2, 3) + 1e-12, 3)
    assert not NoiseChance(1, 2).happens(uniform_one(1, Purpose.COIN, 2, 3), 3)
    keys = {
        key(seed, purpose, round_index, position)
        for seed in (1, 2)
        for purpose in Purpose
        for round_index in range(4)
        for position in range(8)
    }
    assert len(keys) == 2 * 5 * 4 * 8


@pytest.mark.parametrize("rule", [Rule.RATIO, Rule.BLOCK])
def test_tokens_are_drawn_from_p_with_the_real_noise(rule: Rule) -> None:
    """Drafts by the same kind of noise as a drafter uses; chi-square of the first token."""
    p, q = np.array([0.4, 0.1, 0.2, 0.3]), np.array([0.25, 0.75])
    counts = np.zeros(4)
    for seed in range(4000):
        x = int(uniform_one(seed, Purpose.DRAFT, 0, 0) >= q[0])
        y = 2 + int(uniform_one(seed, Purpose.OUTSIDE, 0, 0) >= 0.4)
        proposal = Proposal(ints(x), ints(-1), Supports(ints(2, 0), ints(0, 1)), q)
        said = outputs(proposal, [y, 0], [0.5, 1], [0.4, 0.1])
        verdict = accept(rule, proposal, said, NoiseChance(seed, 0))
        counts[x if verdict.path else verdict.token] += 1
    assert chisquare(counts, 4000 * p).pvalue > 1e-3
