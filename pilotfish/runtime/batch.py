"""From the rows of a step to what one forward needs, computed once per step from host integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pilotfish.runtime.kv_cache import KVSlots
from pilotfish.steps import Ints, TokenRows, require

Bools = npt.NDArray[np.bool_]
Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward over ragged rows.

    The arrays for attention are those of FlashInfer's plan functions and stay on the host. Row i
    has queries ``qo_indptr[i]:qo_indptr[i+1]`` and pages ``kv_indices[kv_indptr[i]:kv_indptr[i+1]]``,
    of which the last holds ``last_page_len[i]`` slots. New tokens are the last slots of their row.
    """

    token_ids: Tensor  # i64[tokens], device
    positions: Tensor  # i64[tokens], device
    slots: KVSlots  # device
    qo_indptr: Ints  # [rows + 1]
    kv_indptr: Ints  # [rows + 1]
    kv_indices: Ints  # [pages]
    last_page_len: Ints  # [rows], in [1, page_size]
    trees: tuple[Bools | None, ...]
    """Per row, who sees whom among its new tokens, bool[n, n], query by key; None for a chain."""


def build_batch(rows: TokenRows, page_size: int, device: torch.device) -> Batch:
    """Lays out validated rows.

    >>> rows = TokenRows(*(np.array(a, np.int32) for a in ([5, 6, 7, 9], [3, 1], [0, 17], [1, 2], [4, 0, 3])))
    >>> batch = build_batch(rows, 16, torch.device("cpu"))
    >>> batch.slots.slots.tolist(), batch.positions.tolist(), batch.last_page_len.tolist()
    ([64, 65, 66, 49], [0, 1, 2, 17], [3, 2])
    """
    slots = written_slots(rows, page_size)
    trees, depths = _trees(rows)
    ends = rows.starts.astype(np.int64) + rows.lengths
    used = -(-ends // page_size)  # a page table may be longer than the row
    kept = _within(rows.page_counts) < np.repeat(used, rows.page_counts)
    return Batch(
        token_ids=_to(rows.token_ids.astype(np.int64), device),
        positions=_to(np.repeat(rows.starts.astype(np.int64), rows.lengths) + depths, device),
        slots=KVSlots(_to(slots, device), page_size),
        qo_indptr=rows.row_offsets.astype(np.int32),
        kv_indptr=np.concatenate(([0], np.cumsum(used))).astype(np.int32),
        kv_indices=rows.page_ids[kept],
        last_page_len=((ends - 1) % page_size + 1).astype(np.int32),
        trees=trees,
    )


def node_positions(rows: TokenRows) -> Longs:
    """Absolute position of every token of the step: start + depth. i64[tokens]."""
    return np.repeat(rows.starts.astype(np.int64), rows.lengths) + _trees(rows)[1]


def written_slots(rows: TokenRows, page_size: int, reserved: Ints | None = None) -> Longs:
    """Slots that the step's tokens, and ``reserved`` more per row, are written to. i64[tokens + reserved]."""
    lengths = rows.lengths if reserved is None else rows.lengths + reserved
    places = np.repeat(rows.starts.astype(np.int64), lengths) + _within(lengths)
    first_pages = np.cumsum(rows.page_counts, dtype=np.int64) - rows.page_counts
    pages = rows.page_ids[np.repeat(first_pages, lengths) + places // page_size]
    slots: Longs = pages.astype(np.int64) * page_size + places % page_size
    return slots


def require_distinct_slots(rows: TokenRows, page_size: int, reserved: Ints | None = None) -> None:
    """Raises ``InvalidArgumentError`` if two tokens of a step would be written to the same slot."""
    slots, counts = np.unique(written_slots(rows, page_size, reserved), return_counts=True)
    shared = slots[counts > 1]
    if len(shared):
        place = f"slot {shared[0]} (page {shared[0] // page_size})"
        require(False, "page_ids", "inconsistent", f"{place} would be written by two tokens of this step")


def _to(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


def _within(lengths: Ints) -> Longs:
    """Index of each element within its row. i64[sum of lengths]."""
    firsts = np.cumsum(lengths, dtype=np.int64) - lengths
    return np.arange(lengths.sum(), dtype=np.int64) - np.repeat(firsts, lengths)


def _trees(rows: TokenRows) -> tuple[tuple[Bools | None, ...], Longs]:
    """Who sees whom in each row, and the depth of every token."""
    depths = _within(rows.lengths)
    if not len(rows.parents):
        return (None,) * len(rows.lengths), depths
    trees: list[Bools | None] = []
    for first, length in zip(rows.row_offsets, rows.lengths, strict=False):
        parents = rows.parents[first : first + length]
        if np.array_equal(parents, np.arange(-1, length - 1)):
            trees.append(None)
            continue
        sees = np.eye(length, dtype=np.bool_)
        for node, parent in enumerate(parents):
            if parent >= 0:
                sees[node] |= sees[parent]
        trees.append(sees)
        depths[first : first + length] = sees.sum(1) - 1
    return tuple(trees), depths
