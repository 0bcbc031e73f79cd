"""Attention on a CPU, straight from the pages: nothing is gathered, nothing padded."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pilotfish.runtime import cores
from pilotfish.runtime.attention import Attention, AttentionShape
from pilotfish.runtime.batch import Batch
from pilotfish.runtime.native.library import FLOAT_KINDS, Shape, Step, library
from pilotfish.runtime.slots import Bools, Longs, within
from pilotfish.steps import Ints

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)  # that attention.h is compiled for


class NativeAttention(Attention):
    """See the module.

    Attributes:
        step: of the last plan, for the kernels; good until the next.
    """

    def __init__(self, shape: AttentionShape, dtype: torch.dtype) -> None:
        self._shape = Shape(
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            page_size=shape.page_size,
            cache_kind=FLOAT_KINDS[dtype],
        )
        self.step = Step()
        self._held: tuple[npt.NDArray[Any], ...] = ()

    def plan(self, batch: Batch) -> None:
        lengths = batch.qo_indptr[1:] - batch.qo_indptr[:-1]
        ends = (batch.kv_indptr[1:] - batch.kv_indptr[:-1] - 1) * self._shape.page_size + batch.last_page_len
        seen = (ends - lengths).repeat(lengths) + within(lengths) + 1
        ancestors, bounds = _ancestors(batch.qo_indptr, ends, seen, batch.trees)
        pages = np.ascontiguousarray(batch.kv_indices, np.int32)
        first_pages = batch.kv_indptr[:-1].astype(np.int64).repeat(lengths)
        seen = seen.astype(np.int32)
        self._held = (pages, first_pages, seen, ancestors, bounds)
        self.step = Step(
            tokens=len(seen),
            threads=cores.threads(),
            pages=pages.ctypes.data,
            first_pages=first_pages.ctypes.data,
            seen=seen.ctypes.data,
            ancestors=ancestors.ctypes.data,
            ancestor_bounds=bounds.ctypes.data,
        )

    def run(self, q: Tensor, kv: Tensor) -> Tensor:
        wide = q.float().contiguous()
        out = torch.empty_like(wide)
        arguments = (ctypes.byref(self._shape), ctypes.byref(self.step), wide.data_ptr(), kv.data_ptr())
        library().pilotfish_attention(*arguments, out.data_ptr())
        return out.to(q.dtype)


def _ancestors(qo_indptr: Ints, ends: Longs, seen: Longs, trees: tuple[Bools | None, ...]) -> tuple[Ints, Longs]:
    """Slots, as indices into the row, that tokens of trees see behind those that all see; changes their ``seen``."""
    counts = np.zeros(int(qo_indptr[-1]), np.int64)
    found = [np.zeros(0, np.int32)]
    for row, tree in enumerate(trees):
        if tree is None:
            continue
        own = slice(qo_indptr[row], qo_indptr[row + 1])
        start = ends[row] - tree.shape[1]
        seen[own], counts[own] = start, tree.sum(1)
        found.append((start + tree.nonzero()[1]).astype(np.int32))
    return np.concatenate(found), np.concatenate(([0], np.cumsum(counts)))
