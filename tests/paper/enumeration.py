"""Every outcome of one round with its exact probability, through the code that serves.

An experiment is a function of a ``World``; whenever it needs randomness it asks the world to choose.
``law`` runs it once per outcome, so draws of the drafter, of the target and coins of the rule are
enumerated alike. Proposals and outputs go through the sparse float32 messages of the contract;
probabilities are multiples of 1/16, which float32 holds exactly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.core.acceptance import Verdict
from orchestrator.core.proposals import Outputs, Proposal, outputs_from, proposals_from
from pilotfish.steps import DraftResult, Supports, TargetResult

Law = dict[Hashable, float]
Prefix = tuple[int, ...]
Judge = Callable[[Proposal, Outputs, "EnumeratedChance"], Verdict]

PARTS = 16
CHAIN_1, CHAIN_2, CHAIN_3 = [-1], [-1, 0], [-1, 0, 1]
FORK = [-1, -1]
TRIDENT = [-1, -1, -1]
PAIRS = [-1, -1, 0, 0, 1, 1]  # two children, two grandchildren each
LOPSIDED = [-1, 0, -1, 0, 2]  # a subtree judged to its leaves before its sibling's
DEEP_FORK = [-1, 0, 1, 1, 0]


class World:
    """One run of an experiment: follows a given beginning, then takes first outcomes."""

    def __init__(self, beginning: Sequence[int]) -> None:
        self._beginning = beginning
        self.trail: list[tuple[int, list[int]]] = []  # outcome taken, outcomes possible
        self.probability = 1.0

    def choose(self, probabilities: Iterable[float]) -> int:
        """An index drawn with the given probabilities, which sum to 1."""
        weights = [float(weight) for weight in probabilities]
        assert all(weight >= 0 for weight in weights)
        assert abs(sum(weights) - 1) < 1e-12
        possible = [index for index, weight in enumerate(weights) if weight > 0]
        depth = len(self.trail)
        taken = self._beginning[depth] if depth < len(self._beginning) else possible[0]
        self.trail.append((taken, possible))
        self.probability *= weights[taken]
        return taken


def law(experiment: Callable[[World], Hashable]) -> Law:
    """Exact distribution of an experiment's result."""
    total: Law = defaultdict(float)
    beginnings: list[list[int]] = [[]]
    while beginnings:
        beginning = beginnings.pop()
        world = World(beginning)
        total[experiment(world)] += world.probability
        taken = [outcome for outcome, _ in world.trail]
        for depth in range(len(beginning), len(world.trail)):
            beginnings += [[*taken[:depth], other] for other in world.trail[depth][1][1:]]
    assert abs(sum(total.values()) - 1) < 1e-9
    return dict(total)


@dataclass
class EnumeratedChance:
    """A ``Chance`` whose outcomes the world enumerates."""

    world: World
    thrown: set[int] = field(default_factory=set)

    def happens(self, probability: float, node: int) -> bool:
        assert node not in self.thrown, "two coins would share their noise"
        self.thrown.add(node)
        return self.world.choose((probability, 1 - probability)) == 0

    def pick(self, weights: npt.NDArray[np.float64], token_ids: npt.NDArray[np.int32], node: int) -> int:
        assert len(weights) == len(token_ids)
        return self.world.choose(weights / weights.sum())


@dataclass
class Language:
    """Two random laws of the next token given those before: p of the target, q of the drafter.

    p has zeros, as after top-k; q lives on fewer tokens than there are.
    """

    vocab_size: int
    support_size: int
    seed: int
    equal: bool = False
    """q is p (which then has no zeros)."""
    disjoint: bool = False
    """p is 0 wherever q is not."""
    _tables: dict[Prefix, tuple[npt.NDArray[Any], npt.NDArray[Any]]] = field(default_factory=dict)

    def p(self, prefix: Prefix) -> npt.NDArray[np.float64]:
        return self._table(prefix)[0]

    def q(self, prefix: Prefix) -> npt.NDArray[np.float64]:
        return self._table(prefix)[1]

    def _table(self, prefix: Prefix) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        if prefix not in self._tables:
            rng = np.random.default_rng([self.seed, len(prefix), *prefix])
            support = rng.choice(self.vocab_size, self.support_size, replace=False)
            q = np.zeros(self.vocab_size)
            spare = rng.dirichlet(np.full(self.support_size, 0.7))
            q[support] = 1 + rng.multinomial(PARTS - self.support_size, spare)
            p = rng.multinomial(PARTS, rng.dirichlet(np.full(self.vocab_size, 1.5))).astype(np.float64)
            if self.disjoint:
                p[q == 0] += 1
                p = np.where(q > 0, 0.0, p)
                p[p.argmax()] += PARTS - p.sum()
            self._tables[prefix] = (q if self.equal else p) / PARTS, q / PARTS
        return self._tables[prefix]

    def sequences(self, length: int, prefix: Prefix = ()) -> Law:
        """What the target alone would write: the law of its next ``length`` tokens."""
        if not length:
            return {(): 1.0}
        found: Law = {}
        for token in np.flatnonzero(self.p(prefix)).tolist():
            for rest, probability in self.sequences(length - 1, (*prefix, token)).items():
                found[(token, *rest)] = self.p(prefix)[token] * probability  # type: ignore[misc]
        return found


@dataclass
class LazyDraws:
    """The target's tokens y, each drawn when it is first looked at; p outside the support, renormalised."""

    world: World
    laws: list[npt.NDArray[np.float64]]
    drawn: dict[int, int] = field(default_factory=dict)

    def __getitem__(self, output: int) -> int:
        if output not in self.drawn:
            mass = self.laws[output].sum()
            self.drawn[output] = self.world.choose(self.laws[output] / mass) if mass > 0 else -1
        return self.drawn[output]


def prefixes(tokens: Sequence[int], parents: Sequence[int]) -> list[Prefix]:
    """Tokens up to and with the root (none), then each node."""
    found: list[Prefix] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*found[parent + 1], token))
    return found


def draw_tree(world: World, language: Language, parents: Sequence[int]) -> list[int]:
    """Tokens of a tree of the given shape: children drawn from q without replacement."""
    tokens: list[int] = []
    for node, parent in enumerate(parents):
        before = prefixes(tokens, parents[:node])
        left = language.q(before[parent + 1]).copy()
        left[[tokens[sibling] for sibling in range(node) if parents[sibling] == parent]] = 0
        tokens.append(world.choose(left / left.sum()))
    return tokens


def proposal_of(
    language: Language, tokens: Sequence[int], parents: Sequence[int], sampled: bool, leaf_supports: bool = False
) -> Proposal:
    """The proposal as it arrives over the wire."""
    counts, ids, probs = [], [], []
    for node, prefix in enumerate(prefixes(tokens, parents), start=-1):
        support = np.flatnonzero(language.q(prefix))[::-1] if leaf_supports or node in parents else np.zeros(0, int)
        counts.append(len(support))
        ids.append(support)
        probs.append(language.q(prefix)[support])
    lengths = np.array([len(tokens)], np.int32)
    result = DraftResult(
        step_id=1,
        node_counts=lengths,
        token_ids=np.array(tokens, np.int32),
        compute_us=1,
        parents=np.array(parents, np.int32),
        supports=Supports(np.array(counts, np.int32), np.concatenate(ids).astype(np.int32)) if sampled else Supports(),
        support_probs=np.concatenate(probs).astype(np.float32) if sampled else np.zeros(0, np.float32),
    )
    return proposals_from(result, lengths, lengths, language.vocab_size, np.array([sampled]))[0]


def outputs_of(world: World, language: Language, proposal: Proposal) -> Outputs:
    """What the target answers, through the wire; its draws are made when looked at."""
    draws, tails, probs, laws = [], [], [], []
    bounds = np.concatenate(([0], np.cumsum(proposal.supports.counts)))
    for output, prefix in enumerate(prefixes(proposal.token_ids.tolist(), proposal.parents.tolist())):
        support = proposal.supports.token_ids[bounds[output] : bounds[output + 1]]
        outside = language.p(prefix).copy()
        outside[support] = 0
        laws.append(outside)
        draws.append(int(outside.argmax()) if outside.any() else -1)
        tails.append(outside.sum())
        probs.append(language.p(prefix)[support])
    result = TargetResult(
        step_id=1,
        token_ids=np.array(draws, np.int32),
        tail_masses=np.array(tails, np.float32),
        support_probs=np.concatenate(probs).astype(np.float32),
        compute_us=1,
    )
    outputs = outputs_from(result, [proposal], language.vocab_size)[0]
    return outputs._replace(token_ids=LazyDraws(world, laws))  # type: ignore[arg-type]


def emitted(proposal: Proposal, verdict: Verdict) -> Prefix:
    """The tokens that a verdict adds to the text."""
    return (*proposal.token_ids[list(verdict.path)].tolist(), verdict.token)


def completed(language: Language, runs: Law, length: int) -> Law:
    """The law of the first ``length`` tokens when runs of emitted tokens are continued by the target alone."""
    total: Law = defaultdict(float)
    for run, probability in runs.items():
        assert isinstance(run, tuple)
        for rest, chance in language.sequences(max(0, length - len(run)), run).items():
            total[(*run, *rest)[:length]] += probability * chance  # type: ignore[misc]
    return dict(total)


def difference(left: Law, right: Law) -> float:
    """Largest difference of any one probability."""
    return max(abs(left.get(key, 0.0) - right.get(key, 0.0)) for key in left.keys() | right.keys())


def error_of(judge: Judge, language: Language, parents: Sequence[int], leaf_supports: bool = False) -> float:
    """How far the text written with a sampled proposal is from what the target alone would write."""

    def experiment(world: World) -> Prefix:
        proposal = proposal_of(language, draw_tree(world, language, parents), parents, True, leaf_supports)
        verdict = judge(proposal, outputs_of(world, language, proposal), EnumeratedChance(world))
        return emitted(proposal, verdict)

    length = 1 + max(len(prefix) for prefix in prefixes([0] * len(parents), parents))
    return difference(completed(language, law(experiment), length), language.sequences(length))


def rounds_of(judge: Judge, language: Language, length: int) -> Law:
    """The joint law of (draft tokens, accepted, next token) of a sampled chain."""
    chain = list(range(-1, length - 1))

    def experiment(world: World) -> Hashable:
        tokens = draw_tree(world, language, chain)
        proposal = proposal_of(language, tokens, chain, True)
        verdict = judge(proposal, outputs_of(world, language, proposal), EnumeratedChance(world))
        return tuple(tokens), len(verdict.path), verdict.token

    return law(experiment)


def mean_accepted(rounds: Law) -> float:
    """Expected number of accepted draft tokens."""
    return sum(probability * outcome[1] for outcome, probability in rounds.items())  # type: ignore[index]
