"""Static trees: which ranks among the children of which nodes are proposed, fixed before anything is drawn.

A path names a node by the rank of every token on the way to it: (0, 2) is the third choice after the
likeliest first token. A shape is a list of paths, the more useful ones first, each after its parent, so
that any beginning of the list is a tree too: a smaller limit takes fewer of them.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pilotfish.errors import InvalidArgumentError, NotFoundError
from pilotfish.steps import require

Steps = tuple[int, ...]

MOST_NODES = 256
"""Most paths of a shape."""


@dataclass(frozen=True)
class Shape:
    """Paths of a static tree, checked.

    Raises:
        InvalidArgumentError: on a path that is no list of ranks, repeated, or without its parent before it.
    """

    paths: tuple[Steps, ...]

    def __post_init__(self) -> None:
        require(1 <= len(self.paths) <= MOST_NODES, "tree paths", len(self.paths), f"must be 1 to {MOST_NODES}")
        known: set[Steps] = {()}
        for index, path in enumerate(self.paths):
            name = f"tree path [{index}]"
            require(bool(path) and min(path) >= 0, name, list(path), "must be ranks of at least 0, one or more")
            require(path not in known, name, list(path), "is given twice")
            require(path[:-1] in known, name, list(path), f"its parent {list(path[:-1])} must come before it")
            known.add(path)

    @property
    def depth(self) -> int:
        """Nodes on the longest path."""
        return max(map(len, self.paths))

    @property
    def branches(self) -> int:
        """Children that a node may need to be given: the highest rank, and one."""
        return 1 + max(map(max, self.paths))

    @property
    def width(self) -> int:
        """Most nodes of a level that have children."""
        parents = {path[:-1] for path in self.paths} - {()}
        return max((sum(len(parent) == level for parent in parents) for level in range(1, self.depth)), default=1)


@lru_cache(maxsize=256)
def cut(shape: Shape, node_limit: int, depth: int, width: int) -> Shape:
    """The first paths of a shape that make a tree within the limits.

    Args:
        shape: to be cut.
        node_limit: most nodes, at least 1.
        depth: most nodes on a path, at least 1.
        width: most nodes of a level that have children, at least 1.
    """
    kept: list[Steps] = []
    known: set[Steps] = {()}
    parents: list[set[Steps]] = [set() for _ in range(depth)]
    for path in shape.paths:
        parent, level = path[:-1], len(path) - 1
        if len(kept) == node_limit or level >= depth or parent not in known:
            continue
        if parent not in parents[level] and len(parents[level]) == width:
            continue
        parents[level].add(parent)
        known.add(path)
        kept.append(path)
    return Shape(tuple(kept))


def likeliest(rank_chances: Sequence[float], count: int, depth: int, fall: float = 1.0) -> Shape:
    """The paths that are kept most often, if a token's chance depends on its rank and its depth alone.

    What Chen et al., "Sequoia" (arXiv 2402.12374), section 4.1, calls the positional acceptance assumption; under
    it the best tree of every size is made of the likeliest paths, and each is part of the next.

    Args:
        rank_chances: that the token of each rank follows its parent, falling.
        count: paths wanted.
        depth: most nodes on a path.
        fall: factor on every chance for each level further down.

    >>> likeliest([0.5, 0.2], 4, 2).paths
    ((0,), (0, 0), (1,), (0, 1))
    """
    heap: list[tuple[float, Steps, float]] = [(-rank_chances[0], (0,), 1.0)]  # chance negated, path, parent's chance
    paths: list[Steps] = []
    while heap and len(paths) < count:
        negated, path, above = heapq.heappop(heap)
        paths.append(path)
        level, rank = len(path) - 1, path[-1] + 1
        if rank < len(rank_chances):
            heapq.heappush(heap, (-above * rank_chances[rank] * fall**level, (*path[:-1], rank), above))
        if len(path) < depth:
            heapq.heappush(heap, (negated * rank_chances[0] * fall ** len(path), (*path, 0), -negated))
    return Shape(tuple(paths))


def from_child_counts(*levels: Sequence[int]) -> Shape:
    """A shape, breadth first, from how many children the root has, then the nodes of every level in order.

    >>> from_child_counts([2], [1]).paths
    ((0,), (1,), (0, 0))
    """
    paths: list[Steps] = []
    level: list[Steps] = [()]
    for counts in levels:
        level = [(*path, rank) for path, count in zip(level, counts, strict=False) for rank in range(count)]
        paths += level
    return Shape(tuple(paths))


EAGLE_1 = from_child_counts([4], [3, 2, 2, 1], [3, 2, 2, 1], [3], [2])
"""The static tree of EAGLE-1 (``mc_sim_7b_63`` in its choices.py): 25 nodes, 4, 8, 8, 3 and 2 on its levels."""

DEFAULT = likeliest((0.55, 0.13, 0.07, 0.04, 0.03, 0.02, 0.015, 0.01), 64, 8)
"""Ours for drafters that see the path: chances about those that small heads reach."""

MEDUSA = likeliest((0.5, 0.14, 0.08, 0.05, 0.04, 0.03, 0.02, 0.02, 0.015, 0.015), 64, 8, fall=0.75)
"""Ours for Medusa, whose heads know less of every place further on."""


def read_shape(path: Path) -> Shape:
    """A shape from a JSON file: a list of paths, as the choices of EAGLE and Medusa are.

    Raises:
        NotFoundError: if there is no such file.
        InvalidArgumentError: if it is not such a list.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NotFoundError(f"tree file {path} is missing") from error
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"tree file {path} cannot be read: {error}") from error
    if not isinstance(found, list) or not all(_is_path(each) for each in found):
        raise InvalidArgumentError(f"tree file {path} must hold a JSON list of lists of ranks, like [[0], [1], [0, 0]]")
    try:
        # Lists in the wild are in any order; parents first costs a usefully ordered one nothing.
        return Shape(tuple(_parents_first([tuple(each) for each in found])))
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"tree file {path}: {error}") from error


def _is_path(value: Any) -> bool:
    return isinstance(value, list) and all(type(rank) is int for rank in value)


def _parents_first(paths: list[Steps]) -> list[Steps]:
    """The same order, but a parent that comes after a child of its goes before it."""
    given, ordered, placed = set(paths), [], set()
    for path in paths:
        for length in range(1, len(path)):
            parent = path[:length]
            if parent in given and parent not in placed:
                placed.add(parent)
                ordered.append(parent)
        if path not in placed or paths.count(path) > 1:
            placed.add(path)
            ordered.append(path)
    return ordered
