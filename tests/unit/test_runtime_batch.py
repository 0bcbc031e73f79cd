"""Rows become slots, positions, page lists and trees exactly as types.proto words it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rows import Row, ints, token_rows

from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.batch import build_batch
from pilotfish.runtime.slots import node_positions, require_distinct_slots, written_slots

CPU = torch.device("cpu")


@st.composite
def ragged(draw: st.DrawFn) -> tuple[int, list[Row]]:
    """A page size and rows with page tables as long as they need, or longer."""
    page_size = draw(st.sampled_from([1, 4, 16]))
    rows, free = [], 0
    for _ in range(draw(st.integers(1, 5))):
        length, start = draw(st.integers(1, 9)), draw(st.integers(0, 40))
        count = -(-(start + length) // page_size) + draw(st.integers(0, 2))
        parents = [draw(st.integers(-1, i - 1)) for i in range(length)] if draw(st.booleans()) else ()
        rows.append(Row(range(length), start, range(free, free + count), parents))
        free += count
    return page_size, rows


@given(ragged())
def test_batches_equal_those_built_token_by_token(case: tuple[int, list[Row]]) -> None:
    page_size, rows = case
    batch = build_batch(token_rows(*rows), page_size, CPU)
    slots: list[int] = []
    indices: list[int] = []
    positions, qo, kv, last = [], [0], [0], []
    for number, row in enumerate(rows):
        parents = list(row.parents) or list(range(-1, len(row.tokens) - 1))
        ancestors: list[set[int]] = []
        for i, parent in enumerate(parents):
            ancestors.append({i} | (ancestors[parent] if parent >= 0 else set()))
            slots.append(row.pages[(row.start + i) // page_size] * page_size + (row.start + i) % page_size)
            positions.append(row.start + len(ancestors[i]) - 1)
        end = row.start + len(row.tokens)
        used = -(-end // page_size)
        qo.append(qo[-1] + len(row.tokens))
        kv.append(kv[-1] + used)
        indices += row.pages[:used]
        last.append(end - (used - 1) * page_size)
        tree = batch.trees[number]
        if tree is None:
            assert parents == list(range(-1, len(parents) - 1))
        else:
            assert [set(np.flatnonzero(line).tolist()) for line in tree] == ancestors
    assert batch.token_ids.tolist() == [t for row in rows for t in row.tokens]
    assert batch.slots.slots.tolist() == slots
    assert batch.slots.k_rows.tolist() == [s // page_size * 2 * page_size + s % page_size for s in slots]
    assert batch.slots.v_rows.tolist() == [k + page_size for k in batch.slots.k_rows.tolist()]
    assert batch.positions.tolist() == positions == node_positions(token_rows(*rows)).tolist()
    assert [a.tolist() for a in (batch.qo_indptr, batch.kv_indptr, batch.kv_indices)] == [qo, kv, indices]
    assert batch.last_page_len.tolist() == last


def test_reserved_slots_follow_the_tokens_of_their_row() -> None:
    rows = token_rows(Row([1, 2], 3, [9, 4]), Row([5], 0, [7]))
    assert written_slots(rows, 4).tolist() == [39, 16, 28]
    assert written_slots(rows, 4, ints(2, 1)).tolist() == [39, 16, 17, 18, 28, 29]


def test_two_tokens_for_one_slot_are_refused() -> None:
    shared = token_rows(Row([1], 0, [3]), Row([2], 0, [3]))
    with pytest.raises(InvalidArgumentError, match=r"page_ids.*slot 48 \(page 3\)"):
        require_distinct_slots(shared, 16)
    beside = token_rows(Row([1], 0, [3]), Row([2], 1, [3]))
    require_distinct_slots(beside, 16)
    with pytest.raises(InvalidArgumentError, match="slot 49"):
        require_distinct_slots(beside, 16, ints(1, 0))
