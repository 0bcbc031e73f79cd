"""How the tree of one row grows, level by level, on what a drafter finds likely; pure.

    tree = DynamicTree(...)                      or StaticTree(...)
    tree.grow(...)                               children of the row's last token
    while len(tree.frontier.token_ids):
        ... the drafter runs the frontier ...
        tree.grow(...)                           children of the frontier's nodes
    nodes = tree.finish()

Each level is one pass of the drafter over the frontier: the nodes that get children. They need not end
up in the proposal, so they are cached in scratch slots of their own: frontier node j of level l in slot
l * width + j after the row's committed ones, at position l after them.

``DynamicTree`` is that of Li et al., "EAGLE-2" (arXiv 2406.16858), section 4. Which nodes it keeps
depends on how likely they are, which is exact for proposals that are a function of the past: whatever
deterministic tree is proposed, every token emitted is the target's own draw (``acceptance.match``). It
would not be exact for tokens drawn from q: to drop one for being unlikely changes the law that it was
drawn from. Those grow in a ``StaticTree``, whose shape is fixed before anything is drawn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from draft_svc.drafters.tree_shapes import Shape, cut
from pilotfish.steps import Floats, Ints

Longs = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]

ROOT = -1
"""The row's last token, as a parent."""


class Support(NamedTuple):
    """The q that children were drawn from: tokens i32[n], and q f32[n], positive."""

    token_ids: Ints
    probs: Floats


NO_SUPPORT = Support(np.zeros(0, np.int32), np.zeros(0, np.float32))


@dataclass(frozen=True, slots=True)
class Frontier:
    """The nodes of a level that are run next, m of them, all at depth ``level`` below the first draft tokens.

    Attributes:
        level: 0 for children of the row's last token.
        token_ids: i32[m].
        parents: of each, its place in the frontier before, whose hidden state it continues; 0 at level 0. i64[m].
        slots: where each is cached, counted from the row's first slot that is not committed. i64[m].
        ancestors: slots, counted alike, of the nodes above each, the topmost first. i64[m, level].
        paths: tokens of the nodes above each, and its own. i32[m, level + 1].
    """

    level: int
    token_ids: Ints
    parents: Longs
    slots: Longs
    ancestors: Longs
    paths: Ints


class Nodes(NamedTuple):
    """A tree that has grown.

    Attributes:
        token_ids: i32[n].
        parents: index of each node's parent, ROOT for the row's last token; parent before child, siblings in
            order. i32[n].
        supports: of the root, then of every node; empty where there are no children or nothing was drawn.
    """

    token_ids: Ints
    parents: Ints
    supports: tuple[Support, ...]


class Tree(ABC):
    """One row's tree while it grows.

    Attributes:
        branches: children that ``grow`` wants to choose from, of each node of the frontier.
        frontier: nodes to run next; none when the tree is complete. At first none too, since the root was run.
    """

    branches: int
    frontier: Frontier

    @abstractmethod
    def grow(self, token_ids: Longs, scores: Doubles, supports: Sequence[Support] = ()) -> None:
        """Gives children to the nodes just run: to the root first, then to those of the frontier.

        Args:
            token_ids: distinct in a row, the best or first drawn first, i64[m, at most branches].
            scores: how likely each is after its parent, logarithms of at most 0, falling; -inf: there is no such
                child. f64[m, as many].
            supports: m, of children that were drawn; none for those that were chosen.
        """

    @abstractmethod
    def finish(self) -> Nodes:
        """The proposal; the tree is complete, or left as it is."""


_NOT_BEGUN = Frontier(
    level=-1,
    token_ids=np.zeros(0, np.int32),
    parents=np.zeros(0, np.int64),
    slots=np.zeros(0, np.int64),
    ancestors=np.zeros((0, 0), np.int64),
    paths=np.zeros((0, 0), np.int32),
)


def _next_frontier(before: Frontier, parents: Longs, tokens: Longs, width: int) -> Frontier:
    """The frontier of the level below, by the places of its nodes' parents in the one before."""
    level, token_ids = before.level + 1, tokens.astype(np.int32)
    ancestors, paths = np.zeros((len(parents), 0), np.int64), token_ids[:, None]
    if level:
        ancestors = np.column_stack((before.ancestors[parents], before.slots[parents]))
        paths = np.column_stack((before.paths[parents], paths))
    return Frontier(level, token_ids, parents, level * width + np.arange(len(parents)), ancestors, paths)


class DynamicTree(Tree):
    """Keeps the nodes that are likeliest to be reached: a node's total is the sum of the scores on its path.

    Every level runs the ``width`` best nodes of the one before, and takes ``width`` children of each. In the end
    the best ``node_limit`` of all nodes seen stay. They are a tree, because no child's total is above its
    parent's, and of equals the one seen first goes before. For the same reason a node that is not among the best
    so far can never be, nor can its children: it is not run, and a tree whose best nodes are all complete stops
    growing before its depth is reached.

    Args:
        node_limit: most nodes, at least 1.
        depth: most nodes on a path, at least 1.
        width: nodes run per level, and children of each that are looked at.
    """

    def __init__(self, node_limit: int, depth: int, width: int) -> None:
        self.branches = width
        self.frontier = _NOT_BEGUN
        self._node_limit, self._depth, self._width = node_limit, depth, width
        self._tokens, self._parents, self._totals = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
        self._run = np.array([ROOT])  # what ``grow`` gives children to, as indices of all nodes seen
        self._run_totals = np.zeros(1)

    def grow(self, token_ids: Longs, scores: Doubles, supports: Sequence[Support] = ()) -> None:
        assert not supports, "a drawn token must not be dropped for its q"
        # A logarithm may round to above 0.
        totals = (self._run_totals[:, None] + np.minimum(scores, 0.0)).ravel()
        possible = np.flatnonzero(totals > -np.inf)
        places, first = possible // scores.shape[1], len(self._tokens)
        tokens, totals = token_ids.ravel()[possible], totals[possible]
        self._tokens = np.concatenate((self._tokens, tokens))
        self._parents = np.concatenate((self._parents, self._run[places]))
        self._totals = np.concatenate((self._totals, totals))
        chosen = np.zeros(0, np.int64)
        if self.frontier.level + 2 < self._depth:
            best = self._best()
            chosen = best[best >= first][: self._width] - first
        self._run, self._run_totals = chosen + first, totals[chosen]
        self.frontier = _next_frontier(self.frontier, places[chosen], tokens[chosen], self._width)

    def finish(self) -> Nodes:
        kept = np.sort(self._best())
        place_of = np.full(len(self._tokens) + 1, ROOT)  # the last element answers for ROOT
        place_of[kept] = np.arange(len(kept))
        parents = place_of[self._parents[kept]]
        return Nodes(self._tokens[kept].astype(np.int32), parents.astype(np.int32), (NO_SUPPORT,) * (len(kept) + 1))

    def _best(self) -> Longs:
        """The nodes that would stay if it ended here, from the best down; of equals the one seen first."""
        best: Longs = np.argsort(-self._totals, kind="stable")[: self._node_limit]
        return best


class StaticTree(Tree):
    """Proposes the children of given ranks, however likely they are.

    Of children that were drawn only their number counts, so that the first ones drawn stay: to take the second
    without the first would again change the law. A node with fewer children than wanted has those.

    Args:
        shape: what is wanted.
        node_limit: most nodes, at least 1.
        depth: most nodes on a path, at least 1.
        width: most nodes run per level.
    """

    def __init__(self, shape: Shape, node_limit: int, depth: int, width: int) -> None:
        layout = cut(shape, node_limit, depth, width)
        self.branches = layout.branches
        self.frontier = _NOT_BEGUN
        self._width = width
        self._ranks: dict[tuple[int, ...], list[int]] = {}  # of the children of each node that has any
        for *parent, rank in sorted(layout.paths):
            self._ranks.setdefault(tuple(parent), []).append(rank)
        self._run: list[tuple[tuple[int, ...], int]] = [((), ROOT)]  # path and index of what gets children
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._supports = [NO_SUPPORT]

    def grow(self, token_ids: Longs, scores: Doubles, supports: Sequence[Support] = ()) -> None:
        following, places = [], []
        for place, (path, node) in enumerate(self._run):
            wanted = self._ranks[path]
            if supports:
                self._supports[node + 1] = supports[place]
            for order, rank in enumerate(wanted):
                column = order if supports else rank
                if column >= scores.shape[1] or scores[place, column] == -np.inf:
                    break
                if (*path, rank) in self._ranks:
                    following.append(((*path, rank), len(self._tokens)))
                    places.append(place)
                self._tokens.append(int(token_ids[place, column]))
                self._parents.append(node)
                self._supports.append(NO_SUPPORT)
        self._run = following
        tokens = np.array([self._tokens[node] for _, node in following], np.int64)
        self.frontier = _next_frontier(self.frontier, np.array(places, np.int64), tokens, self._width)

    def finish(self) -> Nodes:
        return Nodes(np.array(self._tokens, np.int32), np.array(self._parents, np.int32), tuple(self._supports))
