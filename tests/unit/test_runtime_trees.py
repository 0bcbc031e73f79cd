"""Trees that grow level by level: what a token sees lies in slots that earlier steps wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rows import Row, ints, token_rows
from torch import Tensor

from pilotfish.runtime.batch import build_batch, build_tree_batch
from pilotfish.runtime.kv_cache import KVCache
from pilotfish.runtime.loading import load_model
from pilotfish.runtime.models.decoder import Decoder
from pilotfish.runtime.slots import TreeRows

CPU = torch.device("cpu")
PAGE_SIZE = 4


@dataclass
class Node:
    """A token of a tree: where it is written behind its row's base, and the nodes above it, topmost first."""

    token: int
    place: int
    above: list[Node] = field(default_factory=list)

    @property
    def path(self) -> list[int]:
        return [node.token for node in (*self.above, self)]


@dataclass
class Tree:
    """A row: committed tokens, the levels of its tree, and a page table for all of them."""

    prefix: list[int]
    levels: list[list[Node]]
    pages: list[int]


def level_rows(level: list[tuple[Tree, list[Node]]]) -> TreeRows:
    nodes = [node for _, own in level for node in own]
    return TreeRows(
        token_ids=ints(*(node.token for node in nodes)),
        lengths=ints(*(len(own) for _, own in level)),
        bases=ints(*(len(tree.prefix) for tree, _ in level)),
        places=ints(*(node.place for node in nodes)),
        depths=ints(*(len(node.above) for node in nodes)),
        ancestor_counts=ints(*(len(node.above) for node in nodes)),
        ancestors=ints(*(above.place for node in nodes for above in node.above)),
        page_counts=ints(*(len(tree.pages) for tree, _ in level)),
        page_ids=ints(*(page for tree, _ in level for page in tree.pages)),
    )


@st.composite
def forests(draw: st.DrawFn) -> list[Tree]:
    """Trees of up to 4 levels; a node's parent is any node of an earlier level, its place any that is free."""
    token, order = st.integers(4, 279), draw(st.randoms(use_true_random=False))
    trees = []
    for _ in range(draw(st.integers(1, 3))):
        places = order.sample(range(20), 20)
        levels: list[list[Node]] = []
        for _ in range(draw(st.integers(1, 4))):
            earlier = [node for level in levels for node in level]
            level = []
            for _ in range(draw(st.integers(1, 4))):
                parent = draw(st.sampled_from(earlier)) if earlier else None
                above = [] if parent is None else [*parent.above, parent]
                level.append(Node(draw(token), places.pop(), above))
            levels.append(level)
        trees.append(Tree(draw(st.lists(token, min_size=1, max_size=12)), levels, []))
    pages = order.sample(range(40), 40)
    for tree in trees:
        tree.pages = [pages.pop() for _ in range(-(-(len(tree.prefix) + 20) // PAGE_SIZE))]
    return trees


class Runner:
    """A decoder with its cache, run on batches of any kind."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._cache = KVCache(decoder.config, pages=40, page_size=PAGE_SIZE, dtype=decoder.dtype, device=CPU)
        self._attention = decoder.create_attention(PAGE_SIZE)

    @torch.inference_mode()
    def run(self, rows: TreeRows | Row) -> Tensor:
        """Logits of all new tokens."""
        if isinstance(rows, TreeRows):
            batch = build_tree_batch(rows, PAGE_SIZE, CPU)
        else:
            batch = build_batch(token_rows(rows), PAGE_SIZE, CPU)
        self._attention.plan(batch)
        return self._decoder.logits(self._decoder.forward(batch, self._cache, self._attention).last)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@given(trees=forests())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_node_has_the_logits_of_its_path_run_alone(
    trees: list[Tree], kernels: str, model_folder: Callable[..., Path]
) -> None:
    decoder = load_model(model_folder(), dtype="float32", device="cpu", kernels=kernels).decoder
    grown, fresh = Runner(decoder), Runner(decoder)
    for tree in trees:
        grown.run(Row(tree.prefix, 0, tree.pages))
    for depth in range(4):
        level = [(tree, tree.levels[depth]) for tree in trees if depth < len(tree.levels)]
        if not level:
            break
        logits = iter(grown.run(level_rows(level)))
        for tree, nodes in level:
            for node in nodes:
                alone = fresh.run(Row(tree.prefix + node.path, 0, range(10)))[-1]
                torch.testing.assert_close(next(logits), alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_one_node_a_level_is_a_chain_to_the_last_bit(kernels: str, model_folder: Callable[..., Path]) -> None:
    """So that drafts do not depend on whether a chain was asked for as a tree."""
    decoder = load_model(model_folder(), dtype="float32", device="cpu", kernels=kernels).decoder
    as_tree, as_chain = Runner(decoder), Runner(decoder)
    prefix, pages, above = list(range(10, 17)), [3, 0, 9], list[Node]()
    for runner in (as_tree, as_chain):
        runner.run(Row(prefix, 0, pages))
    for place, token in enumerate([50, 60, 70, 80]):
        node = Node(token, place, list(above))
        got = as_tree.run(level_rows([(Tree(prefix, [], pages), [node])]))
        assert torch.equal(got, as_chain.run(Row([token], len(prefix) + place, pages)))
        above.append(node)


@given(trees=forests())
@settings(max_examples=30, deadline=None)
def test_levels_are_laid_out_as_if_slot_by_slot(trees: list[Tree]) -> None:
    level = [(tree, tree.levels[-1]) for tree in trees]
    batch = build_tree_batch(level_rows(level), PAGE_SIZE, CPU)
    nodes = [(tree, node) for tree, own in level for node in own]
    assert batch.token_ids.tolist() == [node.token for _, node in nodes]
    assert batch.positions.tolist() == [len(tree.prefix) + len(node.above) for tree, node in nodes]
    places = [len(tree.prefix) + node.place for tree, node in nodes]
    slots = [
        tree.pages[place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE
        for (tree, _), place in zip(nodes, places, strict=True)
    ]
    assert batch.slots.slots.tolist() == slots
    assert batch.qo_indptr.tolist() == np.cumsum([0, *(len(own) for _, own in level)]).tolist()
    for row, (tree, own) in enumerate(level):
        last = max(node.place for leaf in own for node in (*leaf.above, leaf))
        sees, used = batch.trees[row], batch.kv_indices[batch.kv_indptr[row] : batch.kv_indptr[row + 1]]
        assert (len(used) - 1) * PAGE_SIZE + batch.last_page_len[row] == len(tree.prefix) + last + 1
        assert used.tolist() == tree.pages[: len(used)]
        assert sees is not None
        assert sees.shape == (len(own), last + 1)
        for line, leaf in zip(sees, own, strict=True):
            assert set(np.flatnonzero(line)) == {node.place for node in (*leaf.above, leaf)}
