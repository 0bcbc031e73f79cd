"""From the rows of a step to what one forward needs, computed once per step from host integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pilotfish.runtime.kv_cache import KVSlots
from pilotfish.runtime.slots import Bools, trees_and_depths, within, written_slots
from pilotfish.steps import Ints, TokenRows


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
    trees, depths = trees_and_depths(rows)
    ends = rows.starts.astype(np.int64) + rows.lengths
    used = -(-ends // page_size)  # a page table may be longer than the row
    kept = within(rows.page_counts) < np.repeat(used, rows.page_counts)
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


def _to(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
