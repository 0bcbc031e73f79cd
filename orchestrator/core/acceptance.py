"""Which draft tokens stay: the three exact acceptance rules, on sparse messages.

Words: a *proposal* is a tree (usually a chain) of draft tokens below the row's last token, its root.
The *support* of a node is where the q is non-zero from which the node's children were drawn. Of the
target's law p at a node we know p on the support, the *tail mass* T outside, and one token y drawn
from p outside the support; with an empty support y is an ordinary draw. A token of the outcome is
*accepted* (a draft token kept), *recovered* (the target's token where the draft failed) or *bonus*
(the target's token after a path that ended in a node without children).

Whatever the proposal, each rule emits tokens whose law is exactly the target's:

``match``   the target's own draw decides. For deterministic proposals and for shared noise.
``ratio``   Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2022),
            Algorithm 1; Chen et al., "Accelerating Large Language Model Decoding with Speculative
            Sampling" (2023), Algorithm 2. Trees: multi-round sampling without replacement as in
            Miao et al., "SpecInfer" (2023), section 4.3, with q renormalised after each sibling.
``block``   Sun et al., "Block Verification Accelerates Speculative Decoding" (2024), Algorithm 2.
            Trees: Weng et al., "Traversal Verification for Speculative Tree Decoding" (2025).

The sparse form follows from q being 0 outside S: there (P - Q)+ is P itself, so the residual outside
S keeps the shape of p, and y is a draw of that shape, whatever mass is left to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np

from orchestrator.core.proposals import ROOT, Doubles, Outputs, Proposal
from pilotfish.errors import InternalError
from pilotfish.noise import Purpose, key, race, uniform_one
from pilotfish.steps import Ints


class Rule(IntEnum):
    """Acceptance rule (AcceptanceRule in generation.proto)."""

    MATCH = 1
    RATIO = 2
    BLOCK = 3


class TokenKind(IntEnum):
    """How a token came about (generation.proto)."""

    ACCEPTED = 1
    RECOVERED = 2
    BONUS = 3


class Verdict(NamedTuple):
    """Outcome of one proposal.

    Attributes:
        path: accepted nodes from the root down.
        token: the token after them.
        kind: BONUS exactly when the path ends in a node without children, else RECOVERED.
    """

    path: tuple[int, ...]
    token: int
    kind: TokenKind


class Chance(Protocol):
    """Where a rule gets its randomness from, so that tests can enumerate every outcome."""

    def happens(self, probability: float, node: int) -> bool:
        """A coin for one node, thrown at most once per node and round."""

    def pick(self, weights: Doubles, token_ids: Ints, node: int) -> int:
        """An index drawn in proportion to weights, f64[n], non-negative with a positive sum."""


class NoiseChance(NamedTuple):
    """Chance from counter noise: fresh in every round, the same when a round is run again."""

    seed: int
    round_index: int

    def happens(self, probability: float, node: int) -> bool:
        # Strictly below, so that nothing of probability 0 ever happens.
        return uniform_one(self.seed, Purpose.COIN, self.round_index, node) < probability

    def pick(self, weights: Doubles, token_ids: Ints, node: int) -> int:
        positive = weights.nonzero()[0]
        # Nodes count from ROOT = -1, positions from 0.
        keys = np.array([key(self.seed, Purpose.RESIDUAL, self.round_index, node + 1)])
        with np.errstate(over="ignore"):  # a weight near 0 never wins
            return int(positive[race(keys, token_ids[positive].astype(np.int64), weights[positive])])


def accept(rule: Rule, proposal: Proposal, outputs: Outputs, chance: Chance) -> Verdict:
    """Judges a proposal.

    Args:
        rule: MATCH judges deterministic proposals, RATIO and BLOCK sampled ones; all judge EMPTY.
        proposal: of the drafter.
        outputs: of the target, drawn for this rule (DrawRule in target.proto).
        chance: for RATIO and BLOCK.

    Raises:
        InternalError: if the rule does not suit the proposal; the outcome would not be exact.
    """
    if len(proposal.token_ids) and proposal.is_sampled != (rule is not Rule.MATCH):
        kind = "sampled" if proposal.is_sampled else "deterministic"
        raise InternalError(f"rule is {rule.name}; it does not judge {kind} proposals")
    if rule is Rule.MATCH:
        return match(proposal, outputs)
    return (ratio if rule is Rule.RATIO else block)(proposal, outputs, chance)


def match(proposal: Proposal, outputs: Outputs) -> Verdict:
    """Descends while a child is the token that the target drew itself, and ends with that draw.

    Exact because every token emitted is the target's own draw at its place.
    """
    children, token_ids, draws = proposal.children(), proposal.token_ids, outputs.token_ids
    path: list[int] = []
    while True:
        at = path[-1] + 1 if path else 0
        token = int(draws[at])
        child = next((node for node in children[at] if token_ids[node] == token), None)
        if child is None:
            return Verdict(tuple(path), token, TokenKind.RECOVERED if children[at] else TokenKind.BONUS)
        path.append(child)


def ratio(proposal: Proposal, outputs: Outputs, chance: Chance) -> Verdict:
    """Accepts a child x with probability min(1, P(x) / Q(x)) and descends; else tries its next sibling."""
    row = _Row(proposal, outputs)
    path = [_Node(row, ROOT, 1.0)]
    while (child := path[-1].next_child()) is not None:
        if chance.happens(path[-1].rate(child), child):
            path.append(_Node(row, child, 1.0))
        else:
            path[-1].reject(child)
    return _verdict(path, chance)


def block(proposal: Proposal, outputs: Outputs, chance: Chance) -> Verdict:
    """Judges from the leaves up: a node is tried once every path below it has failed.

    With probability ``weight`` a node stays, and with it its ancestors. The root always stays. Whether
    a subtree fails depends on its tokens, so those of its siblings' subtrees must have been drawn
    independently of them: not with noise that is keyed by position alone.
    """
    row = _Row(proposal, outputs)
    path = [_Node(row, ROOT, 1.0)]
    while True:
        node = path[-1]
        if (child := node.next_child()) is not None:
            path.append(_Node(row, child, node.rate(child)))
        elif node.index == ROOT or chance.happens(node.weight, node.index):
            return _verdict(path, chance)
        else:
            path.pop()
            path[-1].reject(node.index)


class _Row:
    """A proposal beside what the target says about it."""

    def __init__(self, proposal: Proposal, outputs: Outputs) -> None:
        self.proposal, self.outputs = proposal, outputs
        self.children = proposal.children()
        self.bounds = [0, *np.cumsum(proposal.supports.counts).tolist()]


class _Node:
    """One node of the walk, as its children are tried and rejected.

    Attributes:
        p, tail: what is left of the target's law, on the support and outside; they sum to 1.
        q: what is left of the draft's law on the support; sums to 1.
        weight: the share of p that this node answers for: 1 in ``ratio``; in ``block`` the p_i of
            Algorithm 2, after rejections its h_i.
    """

    __slots__ = ("_children", "_row", "ids", "index", "is_leaf", "p", "q", "tail", "weight")

    def __init__(self, row: _Row, index: int, weight: float) -> None:
        support = slice(row.bounds[index + 1], row.bounds[index + 2])
        self._row = row
        self._children = iter(row.children[index + 1])
        self.is_leaf = not row.children[index + 1]
        self.index = index
        self.ids = row.proposal.supports.token_ids[support]
        self.q = row.proposal.support_probs[support]
        self.p = row.outputs.support_probs[support]
        self.tail = float(row.outputs.tail_masses[index + 1])
        self.weight = weight

    def next_child(self) -> int | None:
        return next(self._children, None)

    def rate(self, child: int) -> float:
        """min(1, weight * P(x) / Q(x)) of a child that has not been rejected."""
        at = self._place(child)
        return min(1.0, self.weight * float(self.p[at]) / float(self.q[at]))

    def reject(self, child: int) -> None:
        """Goes on with norm((weight * P - Q)+) and with Q without the child.

        By rounding alone can nothing be left to a node of weight 1: P equals Q, and a rejection had
        no probability. P then stays as it is. A node of less weight is lost.
        """
        rest, tail = np.maximum(self.weight * self.p - self.q, 0.0), self.weight * self.tail
        mass = float(rest.sum()) + tail
        if mass > 0.0:
            self.p, self.tail = rest / mass, tail / mass
            self.weight = mass / (mass + (1.0 - self.weight))  # exactly 1 stays exactly 1
        elif self.weight < 1.0:
            self.weight = 0.0
        self.q = self.q.copy()
        self.q[self._place(child)] = 0.0
        if (left := float(self.q.sum())) > 0.0:  # else the support is used up and no sibling follows
            self.q /= left

    def draw(self, chance: Chance) -> int:
        """A token from what is left of the target's law."""
        outside = int(self._row.outputs.token_ids[self.index + 1])
        if not len(self.ids):
            return outside
        ids = np.append(self.ids, np.int32(outside))
        return int(ids[chance.pick(np.append(self.p, self.tail), ids, self.index)])

    def _place(self, child: int) -> int:
        """Where a child's token stands in the support."""
        return int((self.ids == self._row.proposal.token_ids[child]).argmax())


def _verdict(path: Sequence[_Node], chance: Chance) -> Verdict:
    last = path[-1]
    kind = TokenKind.BONUS if last.is_leaf else TokenKind.RECOVERED
    return Verdict(tuple(node.index for node in path[1:]), last.draw(chance), kind)
