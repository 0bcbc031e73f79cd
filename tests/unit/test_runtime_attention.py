"""Paged attention equals a loop over rows, queries and heads in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import Row, token_rows
from torch import Tensor

from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.attention import AttentionShape, create_attention, torch_backend
from pilotfish.runtime.batch import build_batch
from pilotfish.runtime.native.attention import NativeAttention
from pilotfish.runtime.native.library import is_available

CPU = torch.device("cpu")


def naive(rows: list[Row], q: Tensor, kv: Tensor, page_size: int) -> Tensor:
    """One query and one head at a time."""
    heads, dim = q.shape[1:]
    group = heads // kv.shape[3]
    out, token = torch.zeros(q.shape, dtype=torch.float64), 0
    for row in rows:
        parents = list(row.parents) or list(range(-1, len(row.tokens) - 1))
        for i in range(len(row.tokens)):
            seen, node = list(range(row.start)), i
            while node >= 0:
                seen.append(row.start + node)
                node = parents[node]
            places = [(row.pages[s // page_size], s % page_size) for s in seen]
            for head in range(heads):
                k = torch.stack([kv[p, 0, o, head // group] for p, o in places]).double()
                v = torch.stack([kv[p, 1, o, head // group] for p, o in places]).double()
                out[token, head] = (k @ q[token, head].double() / dim**0.5).softmax(0) @ v
            token += 1
    return out


@st.composite
def cases(draw: st.DrawFn, head_dims: tuple[int, ...] = (8,)) -> tuple[AttentionShape, list[Row]]:
    page_size = draw(st.sampled_from([1, 4, 16]))
    kv_heads = draw(st.sampled_from([1, 2]))
    head_dim = draw(st.sampled_from(head_dims))
    shape = AttentionShape(kv_heads * draw(st.sampled_from([1, 3])), kv_heads, head_dim, page_size)
    sizes = [(draw(st.integers(0, 60)), draw(st.integers(1, 40))) for _ in range(draw(st.integers(1, 5)))]
    pages = list(range(sum(-(-(start + n) // page_size) for start, n in sizes)))
    draw(st.randoms(use_true_random=False)).shuffle(pages)
    rows = []
    for start, n in sizes:
        table = [pages.pop() for _ in range(-(-(start + n) // page_size))]
        tree = n > 1 and draw(st.booleans())
        parents = [draw(st.integers(-1, i - 1)) for i in range(n)] if tree else ()
        rows.append(Row([0] * n, start, table, parents))
    return shape, rows


def run(shape: AttentionShape, rows: list[Row], q: Tensor, kv: Tensor) -> Tensor:
    batch = build_batch(token_rows(*rows), shape.page_size, CPU)
    attention = create_attention("torch", shape, q.dtype, CPU)
    attention.plan(batch)
    return attention.run(q, kv)


def tensors(shape: AttentionShape, rows: list[Row], seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pages = 1 + max(p for row in rows for p in row.pages)
    kv = torch.randn(pages, 2, shape.page_size, shape.kv_heads, shape.head_dim, generator=generator)
    q = 2 * torch.randn(sum(len(r.tokens) for r in rows), shape.heads, shape.head_dim, generator=generator)
    return q, kv


@given(case=cases(), piece=st.sampled_from([3, 16, 256]), fold=st.sampled_from([0, 4, 32]))
@settings(max_examples=60, deadline=None)
def test_any_ragged_batch_equals_the_naive_loop(case: tuple[AttentionShape, list[Row]], piece: int, fold: int) -> None:
    """Also with pieces cut short and heads folded or not, which only sizes decide otherwise."""
    shape, rows = case
    q, kv = tensors(shape, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "PIECE_QUERIES", piece)
        patch.setattr(torch_backend, "_FOLD_QUERIES", fold)
        out = run(shape, rows, q, kv)
    torch.testing.assert_close(out.double(), naive(rows, q, kv, shape.page_size), atol=2e-5, rtol=0)


def test_bfloat16_is_as_near_as_bfloat16_can_be() -> None:
    shape = AttentionShape(6, 2, 16, 16)
    rows = [Row([0] * 5, 30, [2, 0, 3]), Row([0], 7, [1]), Row([0] * 3, 0, [4], [-1, 0, 0])]
    q, kv = tensors(shape, rows)
    out = run(shape, rows, q.bfloat16(), kv.bfloat16())
    wanted = naive(rows, q.bfloat16(), kv.bfloat16(), 16)
    torch.testing.assert_close(out.double(), wanted, atol=3e-2, rtol=0)


def test_a_row_is_not_touched_by_what_stands_beside_it() -> None:
    """Other rows, other pages, and slots after the row's end may hold anything."""
    shape = AttentionShape(4, 2, 8, 4)
    row = Row([0, 0], 5, [3, 1])
    other = Row([0] * 30, 20, [*range(5, 18)])
    q, kv = tensors(shape, [row, other])
    alone = run(shape, [row], q[:2], kv)
    noisy = kv.clone()
    noisy[[0, 2, 4]] = 1e4
    noisy[1, :, 3] = -1e4
    both = run(shape, [row, other], q, noisy)
    torch.testing.assert_close(both[:2], alone, atol=1e-5, rtol=0)


@given(case=cases(head_dims=(16, 32, 80)), is_half=st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_kernels_equal_the_naive_loop(case: tuple[AttentionShape, list[Row]], is_half: bool) -> None:
    if not is_available():
        pytest.skip("no C++ compiler here")
    shape, rows = case
    q, kv = tensors(shape, rows)
    kv = kv.bfloat16() if is_half else kv
    attention = NativeAttention(shape, kv.dtype)
    batch = build_batch(token_rows(*rows), shape.page_size, CPU)
    attention.plan(batch)
    torch.testing.assert_close(attention.run(q, kv).double(), naive(rows, q, kv, shape.page_size), atol=2e-5, rtol=0)


def test_short_rows_are_not_padded_to_a_long_chunk_beside_them() -> None:
    shape = AttentionShape(2, 1, 8, 16)
    rows = [Row([0] * 600, 0, range(38)), *(Row([0] * 4, 20, [40 + 2 * i, 41 + 2 * i]) for i in range(6))]
    q, kv = tensors(shape, rows)
    batch = build_batch(token_rows(*rows), 16, CPU)
    attention = torch_backend.TorchAttention(shape, torch.float32, CPU)
    attention.plan(batch)
    scores = sum(g.query_index.numel() * g.k_pages.numel() // g.pieces * 16 for g in attention._groups)
    needed = sum(len(r.tokens) * (r.start + len(r.tokens)) for r in rows)
    assert scores < 2 * needed
    torch.testing.assert_close(attention.run(q, kv)[600:].double(), naive(rows[1:], q[600:], kv, 16), atol=2e-5, rtol=0)


def test_other_backends_are_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'flash'.*torch"):
        create_attention("flash", AttentionShape(1, 1, 8, 16), torch.float32, CPU)


def test_planning_again_forgets_the_step_before() -> None:
    shape = AttentionShape(4, 2, 8, 4)
    attention = create_attention("torch", shape, torch.float32, CPU)
    for rows in ([Row([0] * 9, 3, [0, 1, 2])], [Row([0], 2, [1]), Row([0], 0, [0])]):
        q, kv = tensors(shape, rows)
        batch = build_batch(token_rows(*rows), 4, CPU)
        attention.plan(batch)
        wanted = naive(rows, q, kv, 4)
        np.testing.assert_allclose(attention.run(q, kv).numpy(), wanted.numpy(), atol=2e-5)
