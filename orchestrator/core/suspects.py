"""Finding the row that a worker fails at.

A worker refuses a step whole, or dies of it, and does not always say of which row. If the same rows went into the next
step, it would fail again, and nobody would get a token. So the rows of a failed step are *suspects* until an answer
clears them, and a step takes only some of those that are left:

    refused       half of them; a refusal costs the other rows nothing, and halving finds one row of 64 in 7 refusals
    lost          one of them; a loss costs the worker's cache, and the second must be the last

Beside them go rows that were answered before; those that never were wait until there are no suspects. So a step that
fails with a single suspect in it has found the row.
"""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.core.requests import Request, State


class Suspects:
    """Rows of failed steps of one kind of worker."""

    def __init__(self) -> None:
        self._trusted: set[Request] = set()  # answered, and in no failed step since
        self._suspects: set[Request] = set()
        self._focus: set[Request] = set()  # those of the last failed step: one of them is the row
        self._most = 0  # of the focus in a step

    def answered(self, rows: Iterable[Request]) -> None:
        """A step gave these rows what they wanted."""
        rows = [row for row in rows if row.state is not State.FINISHED]
        self._trusted.update(rows)
        self._drop(rows)

    def forget(self, row: Request) -> None:
        """The row has ended."""
        self._trusted.discard(row)
        self._drop([row])

    def refused(self, rows: Iterable[Request]) -> Request | None:
        """A worker refused a step of these rows; returns the row that it must be."""
        return self._narrow(self._suspects.intersection(rows) or set(rows), most=None)

    def lost(self, rows: Iterable[Request]) -> Request | None:
        """A worker was lost while it ran a step of these rows; returns the row that has now cost two workers.

        A worker is often lost for no fault of any row, so the first loss convicts nobody.
        """
        known = self._suspects.intersection(rows)
        if known:
            return self._narrow(known, most=1)
        self._suspect(set(rows), most=1)
        return None

    def may_join(self, row: Request, step: Iterable[Request]) -> bool:
        """Whether a step that holds those rows so far may hold this one, too."""
        if not self._suspects:
            return True
        if row in self._focus:
            return len(self._focus.intersection(step)) < self._most
        return row in self._trusted

    def widen(self) -> None:
        """No suspect that is due has joined the step; any other may be the next."""
        self._focus = set(self._suspects)

    def _narrow(self, focus: set[Request], most: int | None) -> Request | None:
        if len(focus) > 1:
            self._suspect(focus, most or len(focus) // 2)
            return None
        self._drop(focus)
        return focus.pop()

    def _suspect(self, rows: set[Request], most: int) -> None:
        unfinished = {row for row in rows if row.state is not State.FINISHED}
        self._trusted -= unfinished
        self._suspects |= unfinished
        self._focus, self._most = unfinished or set(self._suspects), most

    def _drop(self, rows: Iterable[Request]) -> None:
        if not self._suspects:
            return
        self._suspects.difference_update(rows)
        self._focus.difference_update(rows)
        if not self._focus:
            self.widen()
