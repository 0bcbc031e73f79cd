"""From the rows of a step to what one forward needs, computed once per step from host integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pilotfish.runtime.kv_cache import KVSlots
from pilotfish.runtime.slots import (
    Bools,
    Longs,
    TreeRows,
    seen_of_trees,
    slots_at,
    trees_and_depths,
    within,
    written_slots,
)
from pilotfish.steps import Ints, TokenRows


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward over ragged rows.

    The arrays for attention are those of FlashInfer's plan functions and stay on the host. Row i
    has queries ``qo_indptr[i]:qo_indptr[i+1]`` and pages ``kv_indices[kv_indptr[i]:kv_indptr[i+1]]``,
    of which the last holds ``last_page_len[i]`` slots. New tokens of a chain are the last slots of their row.
    """

    token_ids: Tensor  # i64[tokens], device
    positions: Tensor  # i64[tokens], device
    slots: KVSlots  # device
    qo_indptr: Ints  # [rows + 1]
    kv_indptr: Ints  # [rows + 1]
    kv_indices: Ints  # [pages]
    last_page_len: Ints  # [rows], in [1, page_size]
    trees: tuple[Bools | None, ...]
    """Per row, what each of its new tokens sees of the last slots, bool[n, slots]; it sees all slots before those.
    None for a chain: its new tokens are the last slots, and see themselves and all before them."""


def build_batch(rows: TokenRows, page_size: int, device: torch.device) -> Batch:
    """Lays out validated rows.

    >>> rows = TokenRows(*(np.array(a, np.int32) for a in ([5, 6, 7, 9], [3, 1], [0, 17], [1, 2], [4, 0, 3])))
    >>> batch = build_batch(rows, 16, torch.device("cpu"))
    >>> batch.slots.slots.tolist(), batch.positions.tolist(), batch.last_page_len.tolist()
    ([64, 65, 66, 49], [0, 1, 2, 17], [3, 2])
    """
    trees, depths = trees_and_depths(rows)
    starts = rows.starts.astype(np.int64)
    slots = written_slots(rows, page_size)
    positions = starts.repeat(rows.lengths) + depths
    return _lay_out(rows, slots, positions, starts + rows.lengths, trees, page_size, device)


def build_tree_batch(rows: TreeRows, page_size: int, device: torch.device) -> Batch:
    """Lays out a level of trees. Page tables reach up to the last slot that a token of their row writes or sees.

    A tree behind 20 slots: the second level has two children of the node whose slot is 21.

    >>> level = ([5, 6], [2], [20], [2, 3], [1, 1], [1, 1], [1, 1], [2], [4, 0])
    >>> batch = build_tree_batch(TreeRows(*(np.array(a, np.int32) for a in level)), 16, torch.device("cpu"))
    >>> batch.slots.slots.tolist(), batch.positions.tolist(), batch.last_page_len.tolist()
    ([6, 7], [21, 21], [8])
    >>> batch.trees[0].astype(int).tolist()
    [[0, 1, 1, 0], [0, 1, 0, 1]]
    """
    of_rows = np.arange(len(rows.lengths)).repeat(rows.lengths)
    bases = rows.bases.astype(np.int64)
    slots = slots_at(rows, of_rows, bases[of_rows] + rows.places, page_size)
    trees = seen_of_trees(rows)
    ends = bases + [tree.shape[1] for tree in trees]
    return _lay_out(rows, slots, bases[of_rows] + rows.depths, ends, trees, page_size, device)


def _lay_out(
    rows: TokenRows | TreeRows,
    slots: Longs,
    positions: Longs,
    ends: Longs,
    trees: tuple[Bools | None, ...],
    page_size: int,
    device: torch.device,
) -> Batch:
    """``ends`` i64[rows]: slots of each row, with those of its new tokens."""
    used = -(-ends // page_size)  # a page table may be longer than the row
    kept = within(rows.page_counts) < used.repeat(rows.page_counts)
    return Batch(
        token_ids=_to(rows.token_ids.astype(np.int64), device),
        positions=_to(positions, device),
        slots=KVSlots(_to(slots, device), page_size),
        qo_indptr=_bounds(rows.lengths),
        kv_indptr=_bounds(used),
        kv_indices=rows.page_ids[kept],
        last_page_len=((ends - 1) % page_size + 1).astype(np.int32),
        trees=trees,
    )


def _bounds(lengths: Ints | Longs) -> Ints:
    """Where pieces of these lengths begin, and where the last ends, i32[n + 1]."""
    bounds = np.zeros(len(lengths) + 1, np.int32)
    lengths.cumsum(out=bounds[1:])
    return bounds


def _to(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
