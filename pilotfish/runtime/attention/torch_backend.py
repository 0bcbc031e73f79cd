"""Paged attention in plain torch, on any device.

Rows are cut into pieces and pieces of like size are batched with padding, so that a long prefill
chunk and short verification rows in one step do not pad each other. A piece gathers its pages with
one ``index_select`` per K and V. Short pieces fold the query heads that share a KV head into query
rows, so that K and V are read once per group; in long ones the mask would grow too much for that.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from pilotfish.runtime.attention.base import Attention, AttentionShape
from pilotfish.runtime.batch import Batch
from pilotfish.runtime.slots import Bools
from pilotfish.steps import Ints

# Queries of a chain are cut here: a piece sees no slot after its last query, which halves the work
# of a long chunk and bounds the mask to this many rows.
PIECE_QUERIES = 256
# Below these sizes padding costs next to nothing, so smaller pieces count as equally large.
_SMALL_QUERIES = 8
_SMALL_SLOTS = 256
# Up to here query heads are folded into query rows.
_FOLD_QUERIES = 32


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive queries of one row."""

    first_query: int  # index into the step's tokens
    queries: int
    kv_len: int
    pages: Ints  # [ceil(kv_len / page_size)]
    tree: Bools | None  # [queries, last slots of the row]


@dataclass(frozen=True, slots=True)
class _Group:
    """Pieces that run as one padded batch."""

    pieces: int
    queries: int  # padded
    query_index: Tensor  # i64[pieces * queries], token of each padded query
    kept: Tensor  # i64[n], padded queries that are real
    tokens: Tensor  # i64[n], their tokens
    k_pages: Tensor  # i64[pieces * padded pages], rows of K in the cache seen as [pages * 2, ...]
    mask: Tensor | None  # [pieces, 1, query rows, slots], 0 or -inf
    fold: bool


class TorchAttention(Attention):
    """See the module."""

    def __init__(self, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._groups: list[_Group] = []

    def plan(self, batch: Batch) -> None:
        classes: dict[tuple[int, int], list[_Piece]] = defaultdict(list)
        for row, tree in enumerate(batch.trees):
            pages = batch.kv_indices[batch.kv_indptr[row] : batch.kv_indptr[row + 1]]
            kv_len = (len(pages) - 1) * self._shape.page_size + int(batch.last_page_len[row])
            for piece in self._pieces(int(batch.qo_indptr[row]), int(batch.qo_indptr[row + 1]), kv_len, pages, tree):
                classes[_size_class(piece)].append(piece)
        self._groups = [self._group(pieces) for pieces in classes.values()]

    def run(self, q: Tensor, kv: Tensor) -> Tensor:
        if len(self._groups) == 1 and self._groups[0].kept.numel() == self._groups[0].query_index.numel():
            return self._run_group(self._groups[0], q, kv)
        out = torch.empty_like(q)
        for group in self._groups:
            out.index_copy_(0, group.tokens, self._run_group(group, q, kv).index_select(0, group.kept))
        return out

    def _pieces(self, first: int, last: int, kv_len: int, pages: Ints, tree: Bools | None) -> list[_Piece]:
        if tree is not None:
            return [_Piece(first, last - first, kv_len, pages, tree)]
        pieces = []
        start = kv_len - (last - first)
        for query in range(first, last, PIECE_QUERIES):
            count = min(PIECE_QUERIES, last - query)
            seen = start + query - first + count
            pieces.append(_Piece(query, count, seen, pages[: -(-seen // self._shape.page_size)], None))
        return pieces

    def _group(self, pieces: list[_Piece]) -> _Group:
        shape = self._shape
        queries = max(piece.queries for piece in pieces)
        pages = max(len(piece.pages) for piece in pieces)
        query_index = np.zeros((len(pieces), queries), np.int64)
        real = np.zeros((len(pieces), queries), np.bool_)
        page_table = np.zeros((len(pieces), pages), np.int64)  # filler is page 0: masked, and finite
        for i, piece in enumerate(pieces):
            query_index[i, : piece.queries] = np.arange(piece.first_query, piece.first_query + piece.queries)
            real[i, : piece.queries] = True
            page_table[i, : len(piece.pages)] = piece.pages
        fold = queries <= _FOLD_QUERIES
        mask = _mask(pieces, queries, pages * shape.page_size)
        bias = None if mask is None else self._bias(mask, shape.heads // shape.kv_heads if fold else 1)
        kept = np.flatnonzero(real)
        return _Group(
            pieces=len(pieces),
            queries=queries,
            query_index=self._to_device(query_index.ravel()),
            kept=self._to_device(kept),
            tokens=self._to_device(query_index.ravel()[kept]),
            k_pages=self._to_device(page_table.ravel() * 2),
            mask=bias,
            fold=fold,
        )

    def _bias(self, mask: Bools, repeats: int) -> Tensor:
        sees = self._to_device(mask)
        bias = torch.zeros(mask.shape, dtype=self._dtype, device=self._device).masked_fill_(~sees, float("-inf"))
        return bias.repeat_interleave(repeats, dim=1).unsqueeze(1)

    def _to_device(self, array: npt.NDArray[np.int64] | Bools) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _run_group(self, group: _Group, q: Tensor, kv: Tensor) -> Tensor:
        """Output of the padded queries, [pieces * queries, heads, head_dim]."""
        shape = self._shape
        heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
        rows = kv.view(-1, shape.page_size * kv_heads * dim)
        k = rows.index_select(0, group.k_pages).view(group.pieces, -1, kv_heads, dim).transpose(1, 2)
        v = rows.index_select(0, group.k_pages + 1).view(group.pieces, -1, kv_heads, dim).transpose(1, 2)
        padded = q.index_select(0, group.query_index)
        if not group.fold:
            queries = padded.view(group.pieces, group.queries, heads, dim).transpose(1, 2)
            out = functional.scaled_dot_product_attention(queries, k, v, group.mask, enable_gqa=True)
            return out.transpose(1, 2).reshape(-1, heads, dim)
        split = (group.pieces, group.queries, kv_heads, heads // kv_heads, dim)
        queries = padded.view(split).permute(0, 2, 1, 3, 4).reshape(group.pieces, kv_heads, -1, dim)
        out = functional.scaled_dot_product_attention(queries, k, v, group.mask)
        out = out.view(group.pieces, kv_heads, group.queries, -1, dim).permute(0, 2, 1, 3, 4)
        return out.reshape(-1, heads, dim)


def _size_class(piece: _Piece) -> tuple[int, int]:
    """Pieces of one class differ by less than a factor of two in queries and in slots."""
    queries, slots = max(piece.queries, _SMALL_QUERIES), max(piece.kv_len, _SMALL_SLOTS)
    return (queries - 1).bit_length(), (slots - 1).bit_length()


def _mask(pieces: list[_Piece], queries: int, slots: int) -> Bools | None:
    """Who sees what, bool[pieces, queries, slots]; None where everybody sees everything."""
    if queries == 1 and all(piece.kv_len == slots and piece.tree is None for piece in pieces):
        return None
    mask = np.zeros((len(pieces), queries, slots), np.bool_)
    mask[:, :, 0] = True  # a padded query must see something, or its softmax is NaN
    for i, piece in enumerate(pieces):
        last = np.tri(piece.queries, dtype=np.bool_) if piece.tree is None else piece.tree
        first = piece.kv_len - last.shape[1]
        mask[i, : piece.queries, :first] = True
        mask[i, : piece.queries, first : piece.kv_len] = last
    return mask
