"""Where the tokens of a step lie: slots, positions, and who sees whom; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pilotfish.steps import Ints, TokenRows, require

Bools = npt.NDArray[np.bool_]
Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TreeRows:
    """New tokens of trees that grow level by level, after committed tokens that all of them see.

    ``TokenRows`` cannot say this: there the new tokens of a row are in slots that follow each other, and their
    parents are among them. Here ancestors may have been written by earlier steps.
    """

    token_ids: Ints  # [tokens]
    lengths: Ints  # [rows], new tokens of each
    bases: Ints  # [rows], committed slots; places and depths count from here
    places: Ints | Longs  # [tokens], where each is written
    depths: Ints | Longs  # [tokens], of its position
    ancestor_counts: Ints | Longs  # [tokens]
    ancestors: Ints | Longs  # [sum of ancestor_counts], places that each sees beside its own
    page_counts: Ints  # [rows]
    page_ids: Ints  # [sum of page_counts]


def node_positions(rows: TokenRows) -> Longs:
    """Absolute position of every token of the step: start + depth. i64[tokens]."""
    return rows.starts.astype(np.int64).repeat(rows.lengths) + trees_and_depths(rows)[1]


def path_to(rows: TokenRows, row: int, token: int) -> list[int]:
    """Tokens of the step that lead to one of them, which is the last.

    Args:
        rows: of the step.
        row: of the token.
        token: index among the tokens of the step.
    """
    first = int(rows.row_offsets[row])
    if not len(rows.parents):
        chain: list[int] = rows.token_ids[first : token + 1].tolist()
        return chain
    path, node = [], token - first
    while node >= 0:
        path.append(int(rows.token_ids[first + node]))
        node = int(rows.parents[first + node])
    return path[::-1]


def written_slots(rows: TokenRows, page_size: int, reserved: Ints | None = None) -> Longs:
    """Slots that the step's tokens, and ``reserved`` more per row, are written to. i64[tokens + reserved]."""
    lengths = rows.lengths if reserved is None else rows.lengths + reserved
    places = rows.starts.astype(np.int64).repeat(lengths) + within(lengths)
    return slots_at(rows, np.arange(len(lengths)).repeat(lengths), places, page_size)


def slots_at(rows: TokenRows | TreeRows, of_rows: Longs, places: Longs, page_size: int) -> Longs:
    """Slots at the given places, counted from each row's first token; rows and places i64[n], parallel."""
    first_pages = rows.page_counts.cumsum(dtype=np.int64) - rows.page_counts
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
    ends = lengths.cumsum(dtype=np.int64)
    count = int(ends[-1]) if len(ends) else 0
    return np.arange(count, dtype=np.int64) - (ends - lengths).repeat(lengths)


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


def seen_of_trees(rows: TreeRows) -> tuple[Bools, ...]:
    """Per row, which places each of its tokens sees, bool[n, last place + 1]."""
    tokens = np.arange(len(rows.places))
    tokens = np.concatenate((tokens, np.repeat(tokens, rows.ancestor_counts)))
    places = np.concatenate((rows.places, rows.ancestors))
    in_rows, of_rows = within(rows.lengths)[tokens], np.repeat(np.arange(len(rows.lengths)), rows.lengths)[tokens]
    trees = []
    for row, length in enumerate(rows.lengths):
        own = of_rows == row
        sees = np.zeros((length, places[own].max() + 1), np.bool_)
        sees[in_rows[own], places[own]] = True
        trees.append(sees)
    return tuple(trees)
