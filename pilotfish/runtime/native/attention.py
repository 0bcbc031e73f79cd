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
from pilotfish.runtime.native.library import FLOAT_KINDS, Shape, Step, library
from pilotfish.runtime.slots import Bools, Longs
from pilotfish.steps import Ints

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)  # that kernels.cpp is compiled for


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

    def plan(
        self,
        qo_indptr: Ints,
        kv_indptr: Ints,
        kv_indices: Ints,
        last_page_len: Ints,
        trees: tuple[Bools | None, ...],
    ) -> None:
        lengths = np.diff(qo_indptr)
        ends = (np.diff(kv_indptr) - 1) * self._shape.page_size + last_page_len
        tokens = int(qo_indptr[-1])
        within = np.arange(tokens) - np.repeat(qo_indptr[:-1], lengths)
        seen = np.repeat(ends - lengths, lengths) + within + 1
        ancestors, bounds = _ancestors(qo_indptr, seen, trees)
        pages = np.ascontiguousarray(kv_indices, np.int32)
        first_pages = np.repeat(kv_indptr[:-1], lengths).astype(np.int64)
        self._held = (pages, first_pages, seen.astype(np.int32), ancestors, bounds)
        self.step = Step(tokens, cores.threads(), None, None, None, None, *(a.ctypes.data for a in self._held))

    def run(self, q: Tensor, kv: Tensor) -> Tensor:
        wide = q.float().contiguous()
        out = torch.empty_like(wide)
        arguments = (ctypes.byref(self._shape), ctypes.byref(self.step), wide.data_ptr(), kv.data_ptr())
        library().pilotfish_attention(*arguments, out.data_ptr())
        return out.to(q.dtype)


def _ancestors(qo_indptr: Ints, seen: npt.NDArray[Any], trees: tuple[Bools | None, ...]) -> tuple[Ints, Longs]:
    """Slots, as indices into the row, that tokens of trees see behind the cached ones; changes their ``seen``."""
    counts = np.zeros(int(qo_indptr[-1]), np.int64)
    found = [np.zeros(0, np.int32)]
    for row, tree in enumerate(trees):
        if tree is None:
            continue
        own = slice(qo_indptr[row], qo_indptr[row + 1])
        start = seen[qo_indptr[row]] - 1
        seen[own], counts[own] = start, tree.sum(1)
        found.append((start + tree.nonzero()[1]).astype(np.int32))
    return np.concatenate(found), np.concatenate(([0], np.cumsum(counts)))
