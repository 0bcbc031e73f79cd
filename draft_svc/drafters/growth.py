"""Drafts trees, level by level, with whatever gives logits, beside chains; how trees grow, ``trees`` says.

Proposals that are a function of the past grow as in EAGLE-2, whatever draws the children: the likeliest
tokens, or those ahead in the race of the target's own draws. Sampled ones have a fixed shape, and so have all
if one is given, as in EAGLE-1 and Medusa.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch

from draft_svc.drafters import Proposals
from draft_svc.drafters.chains import Run, draft_chains
from draft_svc.drafters.children import Children, drawn_children, likeliest_children, matched_children
from draft_svc.drafters.nodes import collect
from draft_svc.drafters.tree_shapes import DEFAULT, Shape
from draft_svc.drafters.trees import DynamicTree, Nodes, StaticTree, Tree
from pilotfish.runtime import sampling
from pilotfish.runtime.shaping import Shaper
from pilotfish.runtime.slots import Bools, Longs, TreeRows
from pilotfish.steps import DraftStep, ProposalKind, TokenRows


class TreeRun(Run, Protocol):
    """A run that trees can grow from."""

    def advance_trees(self, rows: TreeRows, parents: Longs) -> TreeRun:
        """Runs the nodes of a level of trees behind tokens of this run, i64[nodes]."""

    def distinct(self, tokens: Longs) -> tuple[Longs, Longs]:
        """Which of some tokens of this run have logits of their own, and which of those each token shares.

        Args:
            tokens: i64[n].

        Returns:
            indices into ``tokens``, i64[m], and indices into these, i64[n]. Only tokens of one row share logits.
        """


def draft(
    step: DraftStep,
    run: TreeRun,
    *,
    width: int,
    shape: Shape | None = None,
    drawn: Shape = DEFAULT,
    shaper: Shaper | None = None,
) -> Proposals:
    """Trees for the rows of a step that ask for one, chains for the others.

    Args:
        step: says how much each row may draft, and how its tokens are chosen.
        run: of the step's tokens.
        width: most nodes run per level of a tree; 0: chains only.
        shape: of all trees; None: they grow to the likeliest nodes.
        drawn: of trees whose tokens are sampled, which cannot grow so.
        shaper: of the step.
    """
    is_tree = _wants_tree(step, width)
    nodes = draft_chains(step, np.flatnonzero((step.draft_lengths > 0) & ~is_tree), run, shaper)
    rows = np.flatnonzero(is_tree).tolist()
    nodes |= _draft_trees(step, {row: _plant(step, row, width, shape, drawn) for row in rows}, run, shaper)
    return collect(step, nodes)


def _wants_tree(step: DraftStep, width: int) -> Bools:
    """Which rows are to be answered with trees, bool[rows]."""
    if not (width and len(step.node_limits)):
        return np.zeros(len(step.draft_lengths), np.bool_)
    return (step.node_limits > step.draft_lengths) & (step.draft_lengths > 0)


def _draft_trees(step: DraftStep, trees: Mapping[int, Tree], run: TreeRun, shaper: Shaper | None) -> dict[int, Nodes]:
    """Lets the trees of these rows grow; by row."""
    growing, ends = dict(trees), step.rows.row_offsets.tolist()
    firsts = {row: ends[row + 1] - 1 for row in growing}
    while growing:  # firsts: where each tree's part of the run begins; at first that is the root alone
        _give_children(step, growing, firsts, run, shaper)
        growing = {row: tree for row, tree in growing.items() if len(tree.frontier.token_ids)}
        if growing:
            parents = np.concatenate([firsts[row] + tree.frontier.parents for row, tree in growing.items()])
            level = _level(step.rows, growing)
            run = run.advance_trees(level, parents)
            firsts = dict(zip(growing, np.cumsum(level.lengths) - level.lengths, strict=True))
    return {row: tree.finish() for row, tree in trees.items()}


def _plant(step: DraftStep, row: int, width: int, shape: Shape | None, drawn: Shape) -> Tree:
    limit, depth = int(step.node_limits[row]), int(step.draft_lengths[row])
    if shape is None and step.proposal_kinds[row] == ProposalKind.SAMPLED:
        shape = drawn
    return DynamicTree(limit, depth, width) if shape is None else StaticTree(shape, limit, depth, width)


def _give_children(
    step: DraftStep, trees: dict[int, Tree], firsts: dict[int, int], run: TreeRun, shaper: Shaper | None
) -> None:
    """Lets all trees grow by the logits of the nodes that were just run."""
    for kind in ProposalKind:
        chosen = {row: tree for row, tree in trees.items() if _kind(step, row) is kind}
        if not chosen:
            continue
        counts = [max(len(tree.frontier.token_ids), 1) for tree in chosen.values()]
        tokens = np.concatenate([firsts[row] + np.arange(n) for row, n in zip(chosen, counts, strict=True)])
        children = _children(step, kind, chosen, counts, tokens, run, shaper)
        first = 0
        for tree, count in zip(chosen.values(), counts, strict=True):
            own, columns = slice(first, first + count), slice(tree.branches)
            tree.grow(children.token_ids[own, columns], children.scores[own, columns], children.supports[own])
            first += count


def _kind(step: DraftStep, row: int) -> ProposalKind:
    """How a row's children are chosen: at temperature 0 the target's race has one runner, and no second child."""
    kind = ProposalKind(int(step.proposal_kinds[row]))
    is_cold = kind is ProposalKind.MATCHED and step.sampling.temperatures[row] == 0
    return ProposalKind.GREEDY if is_cold else kind


def _children(
    step: DraftStep,
    kind: ProposalKind,
    trees: dict[int, Tree],
    counts: list[int],
    tokens: Longs,
    run: TreeRun,
    shaper: Shaper | None,
) -> Children:
    """Of all nodes just run, which are those tokens of the run, so many of each tree."""
    firsts, shared = run.distinct(tokens)
    logits = run.logits(tokens[firsts])
    sampling.require_finite(logits, "the draft model")
    most, rows = max(tree.branches for tree in trees.values()), np.repeat(np.array(list(trees)), counts)
    if shaper is not None and shaper.shapes(rows):
        logits = logits[torch.from_numpy(shared).to(logits.device)]  # each node by its own path
        firsts = shared = np.arange(len(tokens))
        shaper(logits, rows, _paths(trees).__getitem__)
    of_rows = sampling.take_rows(step.sampling, rows[firsts])
    after = (step.rows.starts + step.rows.lengths)[rows].astype(np.int64) + run.ahead
    if kind is ProposalKind.SAMPLED:
        # Nodes of one level draw tokens of one position, and still need noise of their own: so their places key it.
        fronts = [tree.frontier.slots for tree in trees.values()]
        places = np.concatenate([1 + slots if len(slots) else np.zeros(1, np.int64) for slots in fronts])
        return drawn_children(logits, of_rows, after + places, most, step.support_limit, run.token_ids, shared)
    if kind is ProposalKind.GREEDY:
        ranked = likeliest_children(logits, most, run.token_ids)
    else:
        levels = np.repeat([tree.frontier.level + 1 for tree in trees.values()], counts)
        ranked = matched_children(logits, of_rows, (after + levels)[firsts], most, run.token_ids)
    return Children(ranked.token_ids[shared], ranked.scores[shared])


def _paths(trees: dict[int, Tree]) -> list[list[int]]:
    """Tokens that lead from each row's committed ones to its nodes just run; none to the root, which is committed."""
    frontiers = [tree.frontier for tree in trees.values()]
    return [path for frontier in frontiers for path in (frontier.paths.tolist() or [[]])]


def _level(rows: TokenRows, trees: dict[int, Tree]) -> TreeRows:
    """The frontiers of all trees as one batch."""
    chosen, frontiers = np.array(list(trees)), [tree.frontier for tree in trees.values()]
    firsts = np.cumsum(rows.page_counts) - rows.page_counts
    counts = np.array([len(frontier.token_ids) for frontier in frontiers], np.int32)
    levels = np.repeat([frontier.level for frontier in frontiers], counts)
    return TreeRows(
        token_ids=np.concatenate([frontier.token_ids for frontier in frontiers]),
        lengths=counts,
        bases=(rows.starts + rows.lengths)[chosen],
        places=np.concatenate([frontier.slots for frontier in frontiers]),
        depths=levels,
        ancestor_counts=levels,
        ancestors=np.concatenate([frontier.ancestors.ravel() for frontier in frontiers]),
        page_counts=rows.page_counts[chosen],
        page_ids=np.concatenate([rows.page_ids[firsts[row] : firsts[row] + rows.page_counts[row]] for row in chosen]),
    )
