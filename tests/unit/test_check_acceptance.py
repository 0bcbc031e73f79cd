"""What ``pilotfish check`` says of verdicts on draft tokens, beside a simulation of the rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from check_answers import answer

from pilotfish import Completion, SamplingParams
from pilotfish.check import acceptance
from pilotfish.check.acceptance import Law, Verdict, verdicts_of
from pilotfish.client.results import Proposal, TokenLogprobs

PARAMS = SamplingParams(temperature=1.0, top_k=3, logprobs=4)
P: Law = {1: 0.5, 2: 0.3, 3: 0.2}
Q: Law = {1: 0.2, 2: 0.4, 4: 0.4}


def verdict(drafted: int, came: int, is_kept: bool) -> Verdict:
    return Verdict(drafted, came, is_kept, P, Q)


def test_chance_and_what_follows_a_rejection() -> None:
    assert [verdict(token_id, 1, True).chance for token_id in Q] == pytest.approx([1.0, 0.75, 0.0])
    assert verdict(2, 1, False).residual == pytest.approx({1: 0.6, 3: 0.4})
    assert verdict(2, 2, True).fault == ""
    assert verdict(2, 3, False).fault == ""


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (verdict(2, 3, True), "token 2 was kept, and 3 came"),
        (verdict(4, 4, True), "token 4 was kept, which the target never writes there"),
        (verdict(1, 3, False), "token 1 was rejected, though p 0.5000 is above its q"),
        (verdict(4, 2, False), "token 2 came after a rejection, though its p is below its q"),
    ],
)
def test_what_can_never_be(wrong: Verdict, fault: str) -> None:
    assert wrong.fault == fault


def told(law: Law, token_id: int) -> TokenLogprobs:
    top = tuple((each, math.log(p)) for each, p in sorted(law.items(), key=lambda pair: -pair[1]))
    return TokenLogprobs(math.log(law[token_id]), top)


def completion(parents: tuple[int, ...] = (-1, 0, 1)) -> Completion:
    """Of three draft tokens one was kept, and the next was replaced."""
    [piece] = answer([(1, "a", "a"), (3, "b", "r")], drafted=3).pieces
    tokens = tuple(replace(token, logprobs=told(P, token.id)) for token in piece.tokens)
    drafted = (1, 2, 4)
    proposal = Proposal(drafted, parents, (0,), tuple(told(Q, each) for each in drafted))
    return replace(answer([]), pieces=(replace(piece, tokens=tokens, proposal=proposal),))


def test_verdicts_end_with_the_first_rejection() -> None:
    first, second = verdicts_of(completion(), PARAMS)
    assert (first.drafted, first.came, first.is_kept) == (1, 1, True)
    assert (second.drafted, second.came, second.is_kept) == (2, 3, False)
    assert first.p == pytest.approx(P)
    assert first.q == pytest.approx(Q)


def test_trees_and_unknown_laws_tell_nothing() -> None:
    assert list(verdicts_of(completion((-1, -1, 0)), PARAMS)) == []
    bare = completion()
    [piece] = bare.pieces
    assert piece.proposal is not None
    bare = replace(bare, pieces=(replace(piece, proposal=replace(piece.proposal, logprobs=())),))
    assert list(verdicts_of(bare, PARAMS)) == []


def test_what_is_tied_with_the_last_that_top_k_keeps_tells_nothing() -> None:
    """It is kept, too, and what else may be is not told."""
    tied = {1: 0.5, 2: 0.3, 3: 0.1, 4: 0.1}
    whole = completion()
    [piece] = whole.pieces
    tokens = (piece.tokens[0], replace(piece.tokens[1], logprobs=told(tied, 3)))
    whole = replace(whole, pieces=(replace(piece, tokens=tokens),))
    assert [verdict.drafted for verdict in verdicts_of(whole, PARAMS)] == [1]


Coin = Callable[[np.random.Generator, float, float], bool]


def judged(rng: np.random.Generator, coin: Coin, count: int = 300) -> list[list[Verdict]]:
    """Answers of ten verdicts each on laws of eight tokens, by the rule itself but for its coin."""
    answers = []
    for _ in range(count):
        luck, verdicts = rng.random(), []
        for _ in range(10):
            p, q = rng.dirichlet(np.ones(8)), rng.dirichlet(np.ones(8))
            drafted = int(rng.choice(8, p=q))
            rest = np.maximum(p - q, 0)
            is_kept = coin(rng, min(1.0, p[drafted] / q[drafted]), luck)
            came = drafted if is_kept else int(rng.choice(8, p=rest / rest.sum()))
            verdicts.append(Verdict(drafted, came, is_kept, dict(enumerate(p)), dict(enumerate(q))))
        answers.append(verdicts)
    return answers


def test_p_values_of_the_rule_are_even() -> None:
    rng = np.random.default_rng(5)
    found: dict[str, list[float]] = {}
    for _ in range(25):
        answers = judged(rng, lambda rng, chance, luck: rng.random() < chance, count=100)
        for name, test in acceptance.tests(answers).items():
            found.setdefault(name, []).append(test.p_value)
    for name, p_values in found.items():
        assert min(p_values) > 1e-4, name
        assert 0.25 < np.mean(p_values) < 0.75, name


@pytest.mark.parametrize(
    ("coin", "name"),
    [
        (lambda rng, chance, luck: rng.random() < 1.15 * chance, "kept"),
        (lambda rng, chance, luck: rng.random() < chance**1.5, "kept by chance"),
        (lambda rng, chance, luck: luck < chance, "luck carried on"),
    ],
)
def test_other_coins_are_found(coin: Coin, name: str) -> None:
    assert acceptance.tests(judged(np.random.default_rng(6), coin))[name].p_value < 1e-6
