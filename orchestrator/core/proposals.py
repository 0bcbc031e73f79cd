"""Proposals and what the target says about them, as the acceptance rules see them.

Both come off the wire as the arrays of a whole batch, are checked there, and are cut up by row:
nothing that a worker answers is trusted. The usual case, deterministic chains, takes a short way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pilotfish.steps import DraftResult, Ints, Supports, TargetResult, empty_ints, require, require_range

Doubles = npt.NDArray[np.float64]

ROOT = -1
"""Index of the row's last token, from which the first draft tokens follow."""

Q_TOLERANCE = 1e-4
"""Most by which a q may miss the sum of 1; float32 rounding stays far below."""

NOTHING_FOLLOWS = -1
"""In the place of the target's token where what a row asks of its logits leaves none: it has all of p's mass."""

P_TOLERANCE = 1e-3
"""Most by which p on a support and its tail mass may miss the sum of 1."""


NO_INTS, NO_DOUBLES = empty_ints(), np.zeros(0)
NO_SUPPORT = Supports(counts=np.zeros(1, np.int32))


class Proposal:
    """Draft tokens of one row; made by ``proposals_from``, which checks them.

    Attributes:
        token_ids: i32[n], distinct among siblings.
        parents: i32[n], index of each node's parent, ROOT for the root; parent before child,
            siblings in the order in which they were drawn.
        supports: one group for the root, then one per node; all groups empty if the proposal is
            deterministic.
        support_probs: q on the supports, f64[sum of supports.counts], each group summing to 1.
        is_chain: whether every node follows the one before it; found out if not given.
    """

    __slots__ = ("is_chain", "parents", "support_probs", "supports", "token_ids")

    def __init__(
        self,
        token_ids: Ints = NO_INTS,
        parents: Ints = NO_INTS,
        supports: Supports = NO_SUPPORT,
        support_probs: Doubles = NO_DOUBLES,
        is_chain: bool | None = None,
    ) -> None:
        self.token_ids, self.parents = token_ids, parents
        self.supports, self.support_probs = supports, support_probs
        follows = parents == np.arange(ROOT, len(parents) - 1) if is_chain is None else None
        self.is_chain = bool(is_chain) if follows is None else bool(follows.all())

    @property
    def is_sampled(self) -> bool:
        """Whether its nodes were drawn from a q that is known."""
        return len(self.supports.token_ids) > 0

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


class Outputs(NamedTuple):
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
    require_range(result.token_ids, "token_ids", 0, vocab_size - 1, f"must be in [0, {vocab_size})")
    if not sampled.any() and not len(result.parents) and _is_bare(result):
        return _plain_chains(result, draft_lengths)
    layout = _Layout(result, draft_lengths, node_limits)
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
    ids, is_chains, proposals = result.supports.token_ids, layout.is_chains, []
    for row in range(layout.rows):
        own, group, support = (slice(b[row], b[row + 1]) for b in (nodes, groups, ends))
        supports = Supports(counts[group], ids[support])
        proposals.append(Proposal(result.token_ids[own], layout.parents[own], supports, q[support], is_chains))
    return proposals


def _is_bare(result: DraftResult) -> bool:
    """Whether nothing is said of any q."""
    supports = result.supports
    return not (len(supports.counts) or len(supports.token_ids) or len(result.support_probs))


def _plain_chains(result: DraftResult, draft_lengths: Ints) -> list[Proposal]:
    """Deterministic chains: the general way's outcome, in a fifth of the steps."""
    counts, rows = result.node_counts, len(draft_lengths)
    require(len(counts) == rows, "length of node_counts", len(counts), f"must equal the {rows} rows")
    _require_each((counts >= 0) & (counts <= draft_lengths), "node_counts", counts, draft_lengths, "must be in [0, {}]")
    lengths = counts.tolist()
    require(len(result.token_ids) == sum(lengths), "length of token_ids", len(result.token_ids), f"not {sum(lengths)}")
    longest = max(lengths, default=0)
    parents = np.arange(ROOT, longest - 1, dtype=np.int32)
    supports = [Supports(np.zeros(length + 1, np.int32)) for length in range(longest + 1)]
    proposals, begin = [], 0
    for length in lengths:
        tokens = result.token_ids[begin : begin + length]
        proposals.append(Proposal(tokens, parents[:length], supports[length], NO_DOUBLES, is_chain=True))
        begin += length
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
    def is_chains(self) -> bool | None:
        """True if every row is a chain; None if that is for each to find out."""
        return bool((self.parents == self.within - 1).all()) or None

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
        if self.is_chains:
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


def outputs_from(
    result: TargetResult, proposals: Sequence[Proposal], vocab_size: int, *, shaped: bool = False
) -> list[Outputs]:
    """The target's answer split by row, checked and normalised exactly.

    Args:
        result: the answer to a step whose outputs are, row by row, the root and every node of the
            row's proposal, with the proposal's supports. A row that only prefills has EMPTY.
        proposals: one per row that has outputs.
        vocab_size: token ids are below it.
        shaped: a row of the step has something done to its logits, so that an output may have ``NOTHING_FOLLOWS``.

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
    ends = (draws == NOTHING_FOLLOWS) & (result.tail_masses == 1) & shaped
    lowest = np.where((counts > 0) | ends, -1, 0)
    _require_each((draws >= lowest) & (draws < vocab_size), "token_ids", draws, lowest, "must be at least {}, an id")
    require_range(result.tail_masses, "tail_masses", 0, 1 + P_TOLERANCE, "must be in [0, 1]")
    require_range(probs, "support_probs", 0, 1 + P_TOLERANCE, "must be in [0, 1]")
    inside = ids == np.repeat(draws, counts)
    require(not inside.any(), "token_ids", "inside the support", "must be outside, or -1")
    tails = np.where((draws < 0) & ~ends, 0.0, result.tail_masses.astype(np.float64))
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


def plain_draws(result: TargetResult, proposals: Sequence[Proposal], vocab_size: int, *, shaped: bool = False) -> Ints:
    """The draws of an answer to proposals without supports, checked: every draw is an ordinary one.

    Args, raises: as in ``outputs_from``.
    """
    draws, total = result.token_ids, sum([len(proposal.token_ids) for proposal in proposals]) + len(proposals)
    for name, values, length in (
        ("token_ids", draws, total),
        ("tail_masses", result.tail_masses, total),
        ("support_probs", result.support_probs, 0),
    ):
        require(len(values) == length, f"length of {name}", len(values), f"must be {length}")
    lowest = NOTHING_FOLLOWS if shaped else 0
    require_range(draws, "token_ids", lowest, vocab_size - 1, f"must be in [{lowest}, {vocab_size})")
    require_range(result.tail_masses, "tail_masses", 1 - P_TOLERANCE, 1 + P_TOLERANCE, "must be 1 without a support")
    return draws


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
