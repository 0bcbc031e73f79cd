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
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pilotfish.errors import InternalError
from pilotfish.noise import Purpose, key, race, uniform_one
from pilotfish.steps import DraftResult, Ints, Supports, TargetResult, empty_ints, require, require_range

Doubles = npt.NDArray[np.float64]

ROOT = -1
"""Index of the row's last token, from which the first draft tokens follow."""

Q_TOLERANCE = 1e-4
"""Most by which a q may miss the sum of 1; float32 rounding stays far below."""

P_TOLERANCE = 1e-3
"""Most by which p on a support and its tail mass may miss the sum of 1."""


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


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens of one row; made by ``proposals_from``, which checks them.

    Attributes:
        token_ids: i32[n], distinct among siblings.
        parents: i32[n], index of each node's parent, ROOT for the root; parent before child,
            siblings in the order in which they were drawn.
        supports: one group for the root, then one per node; all groups empty if the proposal is
            deterministic.
        support_probs: q on the supports, f64[sum of supports.counts], each group summing to 1.
    """

    token_ids: Ints = field(default_factory=empty_ints)
    parents: Ints = field(default_factory=empty_ints)
    supports: Supports = field(default_factory=lambda: Supports(counts=np.zeros(1, np.int32)))
    support_probs: Doubles = field(default_factory=lambda: np.zeros(0))

    @property
    def is_sampled(self) -> bool:
        """Whether its nodes were drawn from a q that is known."""
        return len(self.supports.token_ids) > 0

    @property
    def is_chain(self) -> bool:
        """Whether every node follows the one before it."""
        return bool((self.parents == np.arange(ROOT, len(self.parents) - 1)).all())

    @property
    def depth(self) -> int:
        """Nodes on the longest path."""
        if self.is_chain:
            return len(self.parents)
        depths: list[int] = []
        for parent in self.parents.tolist():
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return max(depths)

    def children(self) -> list[list[int]]:
        """Children of the root, then of each node, in the order drawn."""
        groups: list[list[int]] = [[] for _ in range(len(self.token_ids) + 1)]
        for node, parent in enumerate(self.parents.tolist()):
            groups[parent + 1].append(node)
        return groups


EMPTY = Proposal()
"""Nothing proposed: the target's draw at the root is the bonus token."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the target says at the root and the nodes of one proposal; made by ``outputs_from``.

    Attributes:
        token_ids: y, i32[n + 1], root first; -1 where p has no mass outside the support.
        tail_masses: p's mass outside each support, f64[n + 1].
        support_probs: p on the proposal's supports, f64[sum of counts]. Each group and its tail mass
            sum to 1.
    """

    token_ids: Ints
    tail_masses: Doubles
    support_probs: Doubles


@dataclass(frozen=True, slots=True)
class Verdict:
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


@dataclass(frozen=True, slots=True)
class NoiseChance:
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


def proposals_from(
    result: DraftResult,
    draft_lengths: Ints,
    node_limits: Ints,
    vocab_size: int,
    sampled: npt.NDArray[np.bool_],
    support_limit: int = 1024,
) -> list[Proposal]:
    """The proposals of a draft replica's answer, one per row, checked.

    Args:
        result: the answer; nothing in it is trusted.
        draft_lengths: longest path asked for, i32[rows].
        node_limits: most nodes asked for, i32[rows]; i32[0]: chains were asked for.
        vocab_size: token ids are below it.
        sampled: rows that were to be drawn from a q and to bring supports, bool[rows].
        support_limit: most ids in a support.

    Raises:
        InvalidArgumentError: naming the first field at fault, its value and its limit.
    """
    layout = _Layout(result, draft_lengths, node_limits)
    require_range(result.token_ids, "token_ids", 0, vocab_size - 1, f"must be in [0, {vocab_size})")
    layout.validate_paths()
    counts, q = result.supports.counts, np.zeros(0)
    if len(counts) or len(result.supports.token_ids):
        q = _checked_supports(result, layout, vocab_size, support_limit)
    else:
        require(not len(result.support_probs), "support_probs", "given", "must be absent without supports")
        counts = np.zeros(layout.groups, np.int32)
    layout.validate_kinds(counts, sampled)
    ends = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))[layout.group_bounds].tolist()
    nodes, groups = layout.node_bounds.tolist(), layout.group_bounds.tolist()
    ids, proposals = result.supports.token_ids, []
    for row in range(layout.rows):
        own, group, support = (slice(b[row], b[row + 1]) for b in (nodes, groups, ends))
        supports = Supports(counts[group], ids[support])
        proposals.append(Proposal(result.token_ids[own], layout.parents[own], supports, q[support]))
    return proposals


class _Layout:
    """Where nodes and support groups of an answer's rows lie. A row has one group more than nodes."""

    def __init__(self, result: DraftResult, draft_lengths: Ints, node_limits: Ints) -> None:
        counts, self.rows = result.node_counts, len(draft_lengths)
        require(len(counts) == self.rows, "length of node_counts", len(counts), f"must equal the {self.rows} rows")
        self._lengths, self._is_chain = draft_lengths, not len(node_limits)
        limits = draft_lengths if self._is_chain else node_limits
        _require_each((counts >= 0) & (counts <= limits), "node_counts", counts, limits, "must be in [0, {}]")
        self.node_bounds = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        self.group_bounds = self.node_bounds + np.arange(self.rows + 1)
        nodes, self.groups = int(self.node_bounds[-1]), int(self.group_bounds[-1])
        self._token_ids = result.token_ids
        require(len(result.token_ids) == nodes, "length of token_ids", len(result.token_ids), f"must be {nodes}")
        self.row_of_node = np.repeat(np.arange(self.rows), counts)
        self.within = np.arange(nodes) - self.node_bounds[self.row_of_node]
        self.parents = result.parents if len(result.parents) else (self.within - 1).astype(np.int32)
        length = len(self.parents)
        require(length == nodes, "length of parents", length, f"must be 0 or {nodes}")

    @property
    def parent_groups(self) -> npt.NDArray[np.int64]:
        """Support group from which each node was drawn, i64[nodes]."""
        groups: npt.NDArray[np.int64] = self.group_bounds[self.row_of_node] + self.parents + 1
        return groups

    def validate_paths(self) -> None:
        """Parents precede children, paths are short enough, siblings differ."""
        parents, within = self.parents, self.within
        _require_each((parents >= ROOT) & (parents < within), "parents", parents, within, "must be in [-1, {})")
        limits = self._lengths[self.row_of_node]
        if bool((parents == within - 1).all()):
            _require_each(within < limits, "depth of node", within + 1, limits, "at most {} were asked for")
            return
        require(not self._is_chain, "parents", "a tree", "a chain was asked for")
        _require_each(self._depths(int(limits.max())) <= limits, "parents", parents, limits, "paths hold at most {}")
        children = np.stack((self.parent_groups, self._token_ids), axis=1)
        distinct = len(np.unique(children, axis=0)) == len(children)
        require(distinct, "token_ids", "repeated", "siblings must be distinct")

    def _depths(self, limit: int) -> npt.NDArray[np.int64]:
        """Depth of each node, exact up to ``limit`` + 1."""
        above = np.where(self.parents < 0, ROOT, self.parents + self.node_bounds[self.row_of_node])
        depths, ancestors = np.ones(len(above), np.int64), above
        for _ in range(limit):
            depths += ancestors >= 0
            ancestors = np.where(ancestors >= 0, above[ancestors], ROOT)
        return depths

    def validate_kinds(self, counts: Ints, sampled: npt.NDArray[np.bool_]) -> None:
        """Sampled nodes have a q, and no other row has one."""
        bare = counts[self.parent_groups] == 0
        missing = bare & sampled[self.row_of_node]
        if missing.any():
            row = int(self.row_of_node[int(missing.argmax())])
            require(False, f"supports of row {row}", "missing", "a sampled node needs the q that it was drawn from")
        row_of_group = np.repeat(np.arange(self.rows), np.diff(self.group_bounds))
        extra = (counts > 0) & ~sampled[row_of_group]
        if extra.any():
            row = int(row_of_group[int(extra.argmax())])
            require(False, f"supports of row {row}", "given", "must be absent where no sampling was asked for")


def _checked_supports(result: DraftResult, layout: _Layout, vocab_size: int, limit: int) -> Doubles:
    """q on the supports, checked and normalised exactly."""
    counts, ids, probs = result.supports.counts, result.supports.token_ids, result.support_probs
    require(len(counts) == layout.groups, "length of supports.counts", len(counts), f"must be {layout.groups}")
    require_range(counts, "supports.counts", 0, limit, f"must be in [0, {limit}]")
    total = int(counts.sum(dtype=np.int64))
    require(len(ids) == total, "length of supports.token_ids", len(ids), f"supports.counts sum to {total}")
    require(len(probs) == total, "length of support_probs", len(probs), f"supports.counts sum to {total}")
    require_range(ids, "supports.token_ids", 0, vocab_size - 1, f"must be in [0, {vocab_size})")
    positive = "must be a positive share of q"
    require_range(probs, "support_probs", float(np.finfo(np.float32).smallest_subnormal), 1 + Q_TOLERANCE, positive)
    _require_members(counts, ids, layout.parent_groups, result.token_ids)
    q = probs.astype(np.float64)
    sums = _group_sums(q, counts)
    off = (np.abs(sums - 1) > Q_TOLERANCE) & (counts > 0)
    if off.any():
        group = int(off.argmax())
        require(False, f"sum of support_probs of group {group}", sums[group], f"must be 1 within {Q_TOLERANCE}")
    normalised: Doubles = q / np.repeat(sums, counts)
    return normalised


def _require_members(counts: Ints, ids: Ints, parent_groups: npt.NDArray[np.int64], token_ids: Ints) -> None:
    """Ids are distinct within a group, and nodes come from their parent's group."""
    width = int(counts.max(initial=0))
    table = np.tile(-1 - np.arange(width, dtype=np.int32), (len(counts), 1))  # distinct, and no token
    table[np.arange(width) < counts[:, None]] = ids
    members = (table[parent_groups] == token_ids[:, None]).any(axis=1) | (counts[parent_groups] == 0)
    if not members.all():
        node = int((~members).argmax())
        require(False, f"token_ids[{node}]", token_ids[node], "must be in the support that it was drawn from")
    table.sort(axis=1)
    distinct = bool((np.diff(table, axis=1) != 0).all())
    require(distinct, "supports.token_ids", "repeated", "ids must be distinct within a group")


def outputs_from(result: TargetResult, proposals: Sequence[Proposal], vocab_size: int) -> list[Outputs]:
    """The target's answer split by row, checked and normalised exactly.

    Args:
        result: the answer to a step whose outputs are, row by row, the root and every node of the
            row's proposal, with the proposal's supports. A row that only prefills has EMPTY.
        proposals: one per row that has outputs.
        vocab_size: token ids are below it.

    Raises:
        InvalidArgumentError: naming the first field at fault, its value and its limit.
    """
    counts = np.concatenate([proposal.supports.counts for proposal in proposals] or [empty_ints()])
    ids = np.concatenate([proposal.supports.token_ids for proposal in proposals] or [empty_ints()])
    sizes = np.array([len(proposal.supports.counts) for proposal in proposals], np.int64)
    draws, probs = result.token_ids, result.support_probs
    for name, values, length in (
        ("token_ids", draws, len(counts)),
        ("tail_masses", result.tail_masses, len(counts)),
        ("support_probs", probs, len(ids)),
    ):
        require(len(values) == length, f"length of {name}", len(values), f"must be {length}")
    lowest = np.where(counts > 0, -1, 0)
    _require_each((draws >= lowest) & (draws < vocab_size), "token_ids", draws, lowest, "must be at least {}, an id")
    require_range(result.tail_masses, "tail_masses", 0, 1 + P_TOLERANCE, "must be in [0, 1]")
    require_range(probs, "support_probs", 0, 1 + P_TOLERANCE, "must be in [0, 1]")
    inside = ids == np.repeat(draws, counts)
    require(not inside.any(), "token_ids", "inside the support", "must be outside, or -1")
    tails = np.where(draws < 0, 0.0, result.tail_masses.astype(np.float64))
    masses = _group_sums(probs.astype(np.float64), counts) + tails
    _require_each(np.abs(masses - 1) <= P_TOLERANCE, "sum of p at output", masses, np.ones(len(masses)), "must be {}")
    tails, p = tails / masses, probs / np.repeat(masses, counts)
    nodes = np.concatenate(([0], np.cumsum(sizes))).tolist()
    supports = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))[nodes].tolist()
    split = []
    for row in range(len(proposals)):
        own, support = slice(nodes[row], nodes[row + 1]), slice(supports[row], supports[row + 1])
        split.append(Outputs(draws[own], tails[own], p[support]))
    return split


def _group_sums(values: Doubles, counts: Ints) -> Doubles:
    """Sums of consecutive groups; 0 for an empty group. f64[groups]."""
    sums, filled = np.zeros(len(counts)), counts > 0
    if len(values):
        sums[filled] = np.add.reduceat(values, (np.cumsum(counts, dtype=np.int64) - counts)[filled])
    return sums


def _require_each(
    good: npt.NDArray[np.bool_], name: str, values: npt.NDArray[Any], limits: npt.NDArray[Any], limit: str
) -> None:
    """Requires every element to be good, naming the first that is not, and its own limit."""
    if not good.all():
        index = int((~good).argmax())
        require(False, f"{name}[{index}]", values[index], limit.format(limits[index]))
