"""Pages that hold hashes instead of K and V, and notice a slot that is not what the row believes it to be.

A slot keeps its *mark*, a hash of the token and its position, and its *prefix*: the sum, in wrapping
64-bit integers, of the marks from the row's first token to it. Like K and V, a prefix is made from the
cache as it was when the slot was written. So before a row is extended, the marks of its cached slots
must add up to the prefix of the last of them. They do not if any was overwritten by another row, was
never written, or was computed after other tokens. What this cannot see is a cache that is another
row's as a whole; then the output is another row's too.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pilotfish.errors import InternalError
from pilotfish.noise import mix
from pilotfish.runtime.config import ModelConfig
from pilotfish.runtime.kv_budget import Need
from pilotfish.runtime.slots import Longs, node_positions, slots_at, trees_and_depths, within, written_slots
from pilotfish.steps import Ints, TokenRows

EMPTY_PREFIX = 0
_POSITIONS = 1 << 32  # token ids are below


def simulated_need(folder: Path, max_len: int | None, page_size: int) -> Need:
    """What a simulated worker takes of memory.

    Args:
        folder: of the model that it is not.
        max_len: longest row in tokens; None for what the model was made for.
        page_size: slots per page.

    Raises:
        NotFoundError, InvalidArgumentError: as of ``read_model``.
    """
    marks_and_prefixes = page_size * 2 * np.dtype(np.int64).itemsize
    longest = ModelConfig.from_folder(folder).limit_len(max_len)
    return Need(weights_bytes=0, page_bytes=marks_and_prefixes, max_len=longest, page_size=page_size)


class HashedPages:
    """Memory of one simulated worker.

    Args:
        pages: pages in all.
        page_size: slots per page.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        slots = np.arange(pages * page_size, dtype=np.int64)
        self._marks = np.zeros(len(slots), np.int64)
        self._prefixes = mix(slots + 1)  # so that a slot that was never written fits nothing

    def extend(self, rows: TokenRows) -> Longs:
        """Does the slot copies, checks what is cached, writes the new tokens; ``rows`` are validated.

        Returns:
            The prefix that ends in each new token, i64[tokens].

        Raises:
            InternalError: if a cached slot is stale; names it.
        """
        for source, target in rows.slot_copies.tolist():
            self._marks[target], self._prefixes[target] = self._marks[source], self._prefixes[source]
        before = np.repeat(self._checked(rows), rows.lengths)
        marks = marks_of(rows.token_ids, node_positions(rows))
        prefixes = before + _sums_along_paths(marks, rows)
        self.write(written_slots(rows, self.page_size), marks, prefixes)
        return prefixes

    def write(self, slots: Longs, marks: Longs, prefixes: Longs) -> None:
        """Fills slots; all i64[n]."""
        self._marks[slots], self._prefixes[slots] = marks, prefixes

    def _checked(self, rows: TokenRows) -> Longs:
        """The prefix that each row's new tokens follow, i64[rows]."""
        starts = rows.starts.astype(np.int64)
        of_rows = np.repeat(np.arange(len(starts)), starts)
        slots = slots_at(rows, of_rows, within(rows.starts), self.page_size)
        sums, ends = np.concatenate(([0], np.cumsum(self._marks[slots]))), np.cumsum(starts)
        added = sums[ends] - sums[ends - starts]
        prefixes = np.full(len(starts), EMPTY_PREFIX)
        cached = starts > 0
        prefixes[cached] = self._prefixes[slots[ends[cached] - 1]]
        if not np.array_equal(added, prefixes):
            row = int((added != prefixes).argmax())
            self._report(row, slots[ends[row] - starts[row] : ends[row]])
        return prefixes

    def _report(self, row: int, slots: Longs) -> None:
        prefixes = self._prefixes[slots]
        fits = prefixes == np.concatenate(([EMPTY_PREFIX], prefixes[:-1])) + self._marks[slots]
        place = int((~fits).argmax())
        where = f"slot {slots[place]} (page {slots[place] // self.page_size}) as its token {place}"
        how = "by another row, after other tokens, or never"
        raise InternalError(f"row {row} of this step reads {where}, but that slot was written {how}")


def marks_of(token_ids: Ints, positions: Longs) -> Longs:
    """What each token adds to its prefix, i64[n]."""
    marks: Longs = mix(positions * _POSITIONS + token_ids + 1)
    return marks


def _sums_along_paths(marks: Longs, rows: TokenRows) -> Longs:
    """Sum of the marks from the row's first new token, or the root of a tree, to each token."""
    sums, offsets = np.cumsum(marks), rows.row_offsets
    sums -= np.repeat(np.concatenate(([0], sums))[offsets[:-1]], rows.lengths)
    for first, sees in zip(offsets, trees_and_depths(rows)[0], strict=False):
        if sees is not None:
            sums[first : first + len(sees)] = sees @ marks[first : first + len(sees)]
    return sums
