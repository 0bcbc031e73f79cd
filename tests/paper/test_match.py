"""The match rule: exact for any deterministic proposal, and the text for a seed depends on p alone."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.acceptance import TokenKind, match
from orchestrator.core.chains import match_chains
from orchestrator.core.proposals import Outputs, Proposal
from pilotfish.noise import Purpose, key, uniform
from tests.paper.enumeration import (
    CHAIN_2,
    CHAIN_3,
    DEEP_FORK,
    FORK,
    LOPSIDED,
    PAIRS,
    PARTS,
    TRIDENT,
    Language,
    Prefix,
    World,
    completed,
    difference,
    emitted,
    law,
    outputs_of,
    prefixes,
    proposal_of,
)

EXACT = 1e-9
TREES = [[], CHAIN_2, CHAIN_3, FORK, TRIDENT, LOPSIDED, DEEP_FORK, PAIRS]


def likeliest_tree(language: Language, parents: list[int]) -> list[int]:
    """Children are the likeliest tokens of q, in order: a function of the past alone."""
    tokens: list[int] = []
    for node, parent in enumerate(parents):
        scores = language.q(prefixes(tokens, parents[:node])[parent + 1])
        rank = sum(parents[sibling] == parent for sibling in range(node))
        tokens.append(int(np.argsort(-scores, kind="stable")[rank]))
    return tokens


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tree", TREES)
def test_deterministic_proposals_leave_the_law_of_the_text_as_it_is(tree: list[int], seed: int) -> None:
    """A point mass as q turns min(1, p/q) and the residual into: draw from p, keep the child that it hits."""
    language = Language(4, 3, seed)
    proposal = proposal_of(language, likeliest_tree(language, tree), tree, sampled=False)

    def experiment(world: World) -> Prefix:
        return emitted(proposal, match(proposal, outputs_of(world, language, proposal)))

    length = 1 + max(len(prefix) for prefix in prefixes([0] * len(tree), tree))
    assert difference(completed(language, law(experiment), length), language.sequences(length)) < EXACT


def test_the_checker_catches_a_match_that_drops_the_targets_draw() -> None:
    language, tree = Language(4, 3, 0), FORK
    proposal = proposal_of(language, likeliest_tree(language, tree), tree, sampled=False)

    def experiment(world: World) -> Prefix:
        outputs = outputs_of(world, language, proposal)
        verdict = match(proposal, outputs)
        if not verdict.path:  # draws again where the draft failed
            verdict = verdict._replace(token=outputs_of(world, language, proposal).token_ids[0])
        return emitted(proposal, verdict)

    assert difference(completed(language, law(experiment), 2), language.sequences(2)) > 1e-3


def draw_by(noise: int, probabilities: np.ndarray) -> int:
    """Inverse distribution function at one of PARTS equally likely levels."""
    return int(np.searchsorted(np.cumsum(probabilities * PARTS), noise, side="right"))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("length", [1, 2])
def test_a_drafter_that_shares_the_noise_changes_no_text_for_any_noise(length: int, seed: int) -> None:
    """Stronger than the law: each outcome of the noise gives the text that the target alone gives."""
    language, chain = Language(3, 2, seed), list(range(-1, length - 1))
    accepted = 0
    for noise in product(range(PARTS), repeat=length + 1):
        alone: list[int] = []
        tokens: list[int] = []
        for level in noise:
            alone.append(draw_by(level, language.p(tuple(alone))))
        for level in noise[:length]:
            tokens.append(draw_by(level, language.q(tuple(tokens))))
        proposal = proposal_of(language, tokens, chain, sampled=False)
        draws = [draw_by(noise[len(before)], language.p(before)) for before in prefixes(tokens, chain)]
        outputs = Outputs(np.array(draws, np.int32), np.ones(length + 1), np.zeros(0))
        verdict = match(proposal, outputs)
        run = emitted(proposal, verdict)
        assert list(run) == alone[: len(run)]
        accepted += len(verdict.path)
    overlap = np.minimum(language.p(()), language.q(())).sum()
    assert overlap == 0 or accepted > 0


@given(st.data())
def test_many_chains_at_once_are_judged_like_each_alone(data: st.DataObject) -> None:
    chains = data.draw(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=6))
    proposals = [Proposal(np.array(c, np.int32), np.arange(-1, len(c) - 1, dtype=np.int32)) for c in chains]
    draws = [data.draw(st.lists(st.integers(0, 2), min_size=len(c) + 1, max_size=len(c) + 1)) for c in chains]
    each = [
        match(proposal, Outputs(np.array(drawn, np.int32), np.ones(len(drawn)), np.zeros(0)))
        for proposal, drawn in zip(proposals, draws, strict=True)
    ]
    assert match_chains(proposals, np.concatenate([[], *draws]).astype(np.int32)) == each


def text_for(seed: int, language: Language, parents: list[int], length: int) -> tuple[list[int], int]:
    """Text of a seed by rounds of drafting and matching with the real noise, and the rounds it took."""
    text: list[int] = []
    rounds = 0
    while len(text) < length:
        tokens: list[int] = []
        for node, parent in enumerate(parents):
            before = prefixes(tokens, parents[:node])[parent + 1]
            scores = race_scores(seed, len(text) + len(before), language.q((*text, *before)))
            rank = sum(parents[sibling] == parent for sibling in range(node))
            tokens.append(int(np.argsort(scores, kind="stable")[rank]))
        proposal = Proposal(np.array(tokens, np.int32), np.array(parents, np.int32))
        draws = [
            int(race_scores(seed, len(text) + len(before), language.p((*text, *before))).argmin())
            for before in prefixes(tokens, parents)
        ]
        verdict = match(proposal, Outputs(np.array(draws, np.int32), np.ones(len(draws)), np.zeros(0)))
        text += emitted(proposal, verdict)
        rounds += 1
    return text[:length], rounds


def race_scores(seed: int, position: int, probabilities: np.ndarray) -> np.ndarray:
    """Smallest for a token drawn with its probability; the noise that target and drafter share."""
    ids = np.arange(len(probabilities))
    noise = -np.log(uniform(np.array([key(seed, Purpose.MATCH, 0, position)]), ids))
    return np.divide(noise, probabilities, out=np.full(len(ids), np.inf), where=probabilities > 0)


@pytest.mark.parametrize("seed", range(8))
def test_text_for_a_seed_depends_on_no_drafter_and_no_tree(seed: int) -> None:
    language = Language(4, 3, 1)
    alone, rounds_alone = text_for(seed, language, [], 12)
    assert rounds_alone == 12
    for tree in TREES[1:]:
        text, rounds = text_for(seed, language, tree, 12)
        assert text == alone
        assert rounds <= rounds_alone
    other = Language(4, 3, 99)
    assert alone == text_for(seed, WithDrafter(language, other), CHAIN_3, 12)[0]


class WithDrafter(Language):
    """p of one language, q of another."""

    def __init__(self, target: Language, drafter: Language) -> None:
        super().__init__(target.vocab_size, target.support_size, target.seed)
        self._target, self._drafter = target, drafter

    def p(self, prefix: Prefix) -> np.ndarray:
        return self._target.p(prefix)

    def q(self, prefix: Prefix) -> np.ndarray:
        return self._drafter.q(prefix)


def test_shared_noise_accepts_more_than_chance() -> None:
    language = Language(4, 3, 1)
    rounds = [text_for(seed, language, CHAIN_3, 12)[1] for seed in range(20)]
    assert np.mean(rounds) < 9


def test_kinds_and_paths() -> None:
    proposal = Proposal(np.array([5, 6, 7], np.int32), np.array([-1, -1, 1], np.int32))

    def judge(*draws: int) -> tuple[tuple[int, ...], int, TokenKind]:
        verdict = match(proposal, Outputs(np.array(draws, np.int32), np.ones(4), np.zeros(0)))
        return verdict.path, verdict.token, verdict.kind

    assert judge(6, 0, 7, 3) == ((1, 2), 3, TokenKind.BONUS)
    assert judge(6, 0, 9, 3) == ((1,), 9, TokenKind.RECOVERED)
    assert judge(5, 8, 7, 3) == ((0,), 8, TokenKind.BONUS)
    assert judge(7, 8, 7, 3) == ((), 7, TokenKind.RECOVERED)
