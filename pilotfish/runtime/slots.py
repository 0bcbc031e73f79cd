"""Where the tokens of a step lie: slots, positions, and who sees whom; imports no torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pilotfish.steps import Ints, TokenRows, require

Bools = npt.NDArray[np.bool_]
Longs = npt.NDArray[np.int64]


def node_positions(rows: TokenRows) -> Longs:
    """Absolute position of every token of the step: start + depth. i64[tokens]."""
    return np.repeat(rows.starts.astype(np.int64), rows.lengths) + trees_and_depths(rows)[1]


def written_slots(rows: TokenRows, page_size: int, reserved: Ints | None = None) -> Longs:
    """Slots that the step's tokens, and ``reserved`` more per row, are written to. i64[tokens + reserved]."""
    lengths = rows.lengths if reserved is None else rows.lengths + reserved
    places = np.repeat(rows.starts.astype(np.int64), lengths) + within(lengths)
    return slots_at(rows, np.repeat(np.arange(len(lengths)), lengths), places, page_size)


def slots_at(rows: TokenRows, of_rows: Longs, places: Longs, page_size: int) -> Longs:
    """Slots at the given places, counted from each row's first token; rows and places i64[n], parallel."""
    first_pages = np.cumsum(rows.page_counts, dtype=np.int64) - rows.page_counts
    pages = rows.page_ids[first_pages[of_rows] + places // page_size]
    slots: Longs = pages.astype(np.int64) * page_size + places % page_size
    return slots


def require_distinct_slots(rows: TokenRows, page_size: int, reserved: Ints | None = None) -> None:
    """Raises ``InvalidArgumentError`` if two tokens of a step would be written to the same slot."""
    written = written_slots(rows, page_size, reserved)
    if len(set(written.tolist())) < len(written):
        slots, counts = np.unique(written, return_counts=True)
        shared = slots[counts > 1]
        place = f"slot {shared[0]} (page {shared[0] // page_size})"
        require(False, "page_ids", "inconsistent", f"{place} would be written by two tokens of this step")


def within(lengths: Ints) -> Longs:
    """Index of each element within its row. i64[sum of lengths]."""
    firsts = np.cumsum(lengths, dtype=np.int64) - lengths
    return np.arange(lengths.sum(), dtype=np.int64) - np.repeat(firsts, lengths)


def trees_and_depths(rows: TokenRows) -> tuple[tuple[Bools | None, ...], Longs]:
    """Who sees whom in each row, and the depth of every token."""
    depths = within(rows.lengths)
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
