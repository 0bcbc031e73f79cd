"""Trees as they grow, against EAGLE-2 written down plainly, against all paths there are, and against a fixed list."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_svc.drafters.tree_shapes import Shape, likeliest
from draft_svc.drafters.trees import NO_SUPPORT, ROOT, DynamicTree, Nodes, StaticTree, Support, Tree

VOCAB = 5
Path = tuple[int, ...]


class Model:
    """Chances of the next token after a path, random; few distinct ones, so that totals tie often.

    Attributes:
        runs: paths that were run, level by level.
    """

    def __init__(self, seed: int, parts: int = 4) -> None:
        self._seed, self._parts = seed, parts
        self.runs: list[list[Path]] = []

    def scores(self, path: Path) -> np.ndarray:
        rng = np.random.default_rng([self._seed, *path])
        parts = rng.multinomial(self._parts, rng.dirichlet(np.full(VOCAB, 0.5)))
        with np.errstate(divide="ignore"):
            return np.log(parts / self._parts)

    def children(self, path: Path, count: int) -> tuple[list[int], list[float]]:
        """The best, of equals the lowest id."""
        scores = self.scores(path)
        order = np.argsort(-scores, kind="stable")[:count]
        return order.tolist(), scores[order].tolist()

    def grow(self, tree: Tree, sampled: bool = False) -> Nodes:
        """Runs a tree to its end as a drafter would, and checks each frontier."""
        run: list[Path] = [()]
        slots: dict[int, Path] = {}
        while True:
            found = [self.children(path, tree.branches) for path in run]
            supports = [self.support(path) for path in run] if sampled else []
            tree.grow(np.array([ids for ids, _ in found]), np.array([scores for _, scores in found]), supports)
            frontier = tree.frontier
            if not len(frontier.token_ids):
                return tree.finish()
            assert frontier.level == len(self.runs)
            run = [(*run[parent], int(t)) for parent, t in zip(frontier.parents, frontier.token_ids, strict=True)]
            self.runs.append(run)
            for path, slot, ancestors in zip(run, frontier.slots.tolist(), frontier.ancestors.tolist(), strict=True):
                assert slot not in slots, "two nodes in one slot"
                assert [slots[a] for a in ancestors] == [path[:n] for n in range(1, len(path))]
                slots[slot] = path

    def support(self, path: Path) -> Support:
        ids = np.flatnonzero(self.scores(path) > -np.inf).astype(np.int32)
        return Support(ids, np.exp(self.scores(path)[ids]).astype(np.float32))


def paths_of(nodes: Nodes) -> list[Path]:
    """The path to each node; checks that parents come first and siblings differ."""
    paths: list[Path] = []
    for index, (token, parent) in enumerate(zip(nodes.token_ids.tolist(), nodes.parents.tolist(), strict=True)):
        assert ROOT <= parent < index
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)
    return paths


def eagle_2(model: Model, node_limit: int, depth: int, width: int) -> list[Path]:
    """Section 4 of the paper as it stands: expand ``width`` nodes to ``width`` children each, then rerank them all."""
    pool: list[tuple[float, Path]] = []
    level: list[tuple[float, Path]] = [(0.0, ())]
    for _ in range(depth):
        found = [
            (total + score, (*path, token))
            for total, path in level
            for token, score in zip(*model.children(path, width), strict=True)
            if score > -math.inf
        ]
        pool += found
        level = sorted(found, key=lambda node: -node[0])[:width]  # sorted is stable: of equals the first
    best = sorted(range(len(pool)), key=lambda index: -pool[index][0])[:node_limit]
    return [pool[index][1] for index in sorted(best)]


limits = st.tuples(st.integers(1, 20), st.integers(1, 5), st.integers(1, 4))


@given(st.integers(0, 10_000), limits)
def test_a_dynamic_tree_is_that_of_eagle_2(seed: int, limit: tuple[int, int, int]) -> None:
    node_limit, depth, width = limit
    nodes = Model(seed).grow(DynamicTree(node_limit, depth, width))
    assert paths_of(nodes) == eagle_2(Model(seed), node_limit, depth, width)
    assert nodes.supports == (NO_SUPPORT,) * (len(nodes.token_ids) + 1)


@given(st.integers(0, 10_000), st.integers(1, 12))
def test_with_room_for_every_path_it_holds_the_likeliest_of_all(seed: int, node_limit: int) -> None:
    depth, model = 3, Model(seed, parts=1000)
    totals = {
        path: sum(model.scores(path[:n])[path[n]] for n in range(len(path)))
        for length in range(1, depth + 1)
        for path in product(range(VOCAB), repeat=length)
    }
    found = paths_of(model.grow(DynamicTree(node_limit, depth, VOCAB**depth)))
    possible = sorted((total for total in totals.values() if total > -math.inf), reverse=True)
    assert sorted((totals[path] for path in found), reverse=True) == pytest.approx(possible[:node_limit])


@given(st.integers(0, 10_000), limits)
def test_nothing_is_run_that_could_not_stay(seed: int, limit: tuple[int, int, int]) -> None:
    """Every node that is run is among the best of the levels seen so far, and no level is wider than said."""
    node_limit, depth, width = limit
    model = Model(seed)
    model.grow(DynamicTree(node_limit, depth, width))
    assert len(model.runs) < depth
    for level, run in enumerate(model.runs, start=1):
        assert len(run) <= width
        assert set(run) <= set(eagle_2(Model(seed), node_limit, level, width))


def test_a_tree_whose_best_nodes_are_complete_stops_before_its_depth() -> None:
    class Flat(Model):
        def scores(self, path: Path) -> np.ndarray:
            return np.log(np.full(VOCAB, 1 / VOCAB))

    flat = Flat(0)
    assert len(paths_of(flat.grow(DynamicTree(4, 8, 5)))) == 4
    assert len(flat.runs) == 1, "a second token is never likelier than another first one"


def test_width_one_is_a_chain() -> None:
    model = Model(3, parts=100)
    nodes = model.grow(DynamicTree(6, 6, 1))
    assert nodes.parents.tolist() == [-1, 0, 1, 2, 3, 4]
    path: Path = ()
    for token in nodes.token_ids.tolist():
        assert token == model.children(path, 1)[0][0]
        path = (*path, token)


def test_scores_that_round_to_above_zero_do_not_lift_a_child_over_its_parent() -> None:
    tree = DynamicTree(1, 2, 1)
    tree.grow(np.array([[4]]), np.array([[0.0]]))
    tree.grow(np.array([[2]]), np.array([[1e-7]]))
    assert paths_of(tree.finish()) == [(4,)]


def test_dynamic_trees_refuse_tokens_that_were_drawn() -> None:
    with pytest.raises(AssertionError, match="must not be dropped"):
        DynamicTree(4, 2, 2).grow(np.array([[4]]), np.array([[0.0]]), [NO_SUPPORT])


# Static trees


@st.composite
def shapes(draw: Callable[..., int]) -> Shape:
    paths: list[Path] = []
    for _ in range(draw(st.integers(1, 20))):
        parent = ([(), *paths])[draw(st.integers(0, len(paths)))]
        child = (*parent, draw(st.integers(0, VOCAB - 1)))
        if child not in paths:
            paths.append(child)
    return Shape(tuple(paths))


@given(shapes(), st.integers(0, 10_000), limits)
def test_a_static_tree_holds_the_ranks_of_its_list(shape: Shape, seed: int, limit: tuple[int, int, int]) -> None:
    """Against looking every path of the list up by itself."""
    node_limit, depth, width = limit
    model, wanted = Model(seed), []
    tree = StaticTree(shape, node_limit, depth, width)
    for ranks in cut_twin(shape, node_limit, depth, width):
        path: Path = ()
        for rank in ranks:
            ids, scores = model.children(path, VOCAB)
            if scores[rank] == -math.inf:
                break
            path = (*path, ids[rank])
        else:
            wanted.append(path)
    assert sorted(paths_of(model.grow(tree))) == sorted(wanted)
    assert all(len(run) <= width for run in model.runs)


@given(shapes(), st.integers(0, 10_000), limits)
def test_of_drawn_children_only_the_number_counts(shape: Shape, seed: int, limit: tuple[int, int, int]) -> None:
    model = Model(seed)
    nodes = model.grow(StaticTree(shape, *limit), sampled=True)
    children: dict[Path, list[int]] = {}
    paths = [(), *paths_of(nodes)]
    for path in paths[1:]:
        children.setdefault(path[:-1], []).append(path[-1])
    for path, support in zip(paths, nodes.supports, strict=True):
        if path in children:
            assert children[path] == model.children(path, len(children[path]))[0], "the first ones drawn"
            assert support.token_ids.tolist() == model.support(path).token_ids.tolist()
        else:
            assert support is NO_SUPPORT


def cut_twin(shape: Shape, node_limit: int, depth: int, width: int) -> list[Path]:
    kept: list[Path] = []
    for path in shape.paths:
        parents = {other[:-1] for other in [*kept, path] if len(other) == len(path)}
        is_tree = path[:-1] in [(), *kept]
        if is_tree and len(path) <= depth and len(parents) <= width and len(kept) < node_limit:
            kept.append(path)
    return kept


def test_siblings_and_levels_come_in_order() -> None:
    tree = StaticTree(Shape(((1,), (0,), (1, 0), (0, 1), (0, 0))), 5, 2, 2)
    nodes = Model(0, parts=1000).grow(tree)
    assert nodes.parents.tolist() == [-1, -1, 0, 0, 1]


def test_a_chain_of_drawn_tokens_is_a_static_tree() -> None:
    nodes = Model(1, parts=1000).grow(StaticTree(likeliest([1.0], 4, 4), 4, 3, 1), sampled=True)
    assert nodes.parents.tolist() == [-1, 0, 1]
    assert [len(support.token_ids) > 0 for support in nodes.supports] == [True, True, True, False]
