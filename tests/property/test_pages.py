"""Page pools under random operations, against a memory that shows every wrong write and every stale read.

What a slot holds depends on all tokens up to it, as K and V do; in the pool of a head on the one after
it, too. So a slot is written with the whole prefix, and a row may only ever see its own.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from orchestrator.core.pages import OutOfPagesError, PagePool, RowCache

PAGE_SIZE = 3
FIRST_PAGE = 5
PAGE_COUNT = 7
Tokens = tuple[int, ...]


class Row:
    """A row of a client: all its tokens, and its place in the pool."""

    def __init__(self, pool: PagePool, tokens: Tokens) -> None:
        self.cache = RowCache(pool)
        self.tokens = tokens

    @property
    def array(self) -> np.ndarray:
        return np.array(self.tokens, np.int32)


class Pages(RuleBasedStateMachine):
    lookahead = 0

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(FIRST_PAGE, PAGE_COUNT, PAGE_SIZE, self.lookahead)
        self.memory: dict[int, object] = {}
        self.rows: list[Row] = []
        self.published: set[Tokens] = set()
        self.has_evicted = False

    def row(self, choice: int) -> Row:
        return self.rows[choice % len(self.rows)]

    def prefix(self, row: Row, slots: int) -> Tokens:
        """What the first ``slots`` slots depend on."""
        return row.tokens[: slots + self.lookahead] if slots else ()

    @precondition(lambda self: len(self.rows) < 4)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple))
    def arrive(self, tokens: Tokens) -> None:
        row = Row(self.pool, tokens)
        row.cache.attach(row.array[:-1])
        assert row.cache.length == len(row.cache.pages) * PAGE_SIZE < len(tokens)
        if not self.has_evicted:  # then all that was ever published can be found
            ends = range(0, max(len(tokens) - self.lookahead, 1), PAGE_SIZE)
            assert row.cache.length == max((end for end in ends if self.prefix(row, end) in self.published), default=0)
        self.rows.append(row)

    @precondition(lambda self: self.rows)
    @rule(choice=st.integers(0, 3), count=st.integers(1, 7), ahead=st.integers(0, 4))
    def compute(self, choice: int, count: int, ahead: int) -> None:
        """Computes the next tokens, and guesses beyond them that are rolled back."""
        row = self.row(choice)
        cache, before = row.cache, (list(row.cache.pages), row.cache.length, self.pool.available)
        end = max(min(cache.length + count, len(row.tokens) - self.lookahead), cache.length)
        missing = cache.missing(end + ahead)
        self.has_evicted |= self.pool.free_count < missing
        if missing > self.pool.available:
            with pytest.raises(OutOfPagesError):
                cache.reserve(end + ahead)
            assert before == (cache.pages, cache.length, self.pool.available)
            return
        cache.reserve(end + ahead)
        assert len(cache.pages) == max(len(before[0]), -(-(end + ahead) // PAGE_SIZE))
        for slot in range(cache.length, end):
            self.memory[cache.slot(slot)] = self.prefix(row, slot + 1)
        for slot in range(end, end + ahead):
            self.memory[cache.slot(slot)] = "rejected"
        cache.commit(row.array, end)
        self.published |= {self.prefix(row, full) for full in range(0, end + 1, PAGE_SIZE)}

    @precondition(lambda self: self.rows)
    @rule(choice=st.integers(0, 3), token=st.integers(0, 1))
    def generate(self, choice: int, token: int) -> None:
        row = self.row(choice)
        if len(row.tokens) < 18:
            row.tokens += (token,)

    @precondition(lambda self: self.rows)
    @rule(choice=st.integers(0, 3))
    def leave(self, choice: int) -> None:
        row = self.rows.pop(choice % len(self.rows))
        row.cache.release()
        assert (row.cache.pages, row.cache.length) == ([], 0)

    @precondition(lambda self: self.rows)
    @rule(choice=st.integers(0, 3))
    def preempt(self, choice: int) -> None:
        """Gives everything up and takes up what is still cached."""
        row = self.row(choice)
        row.cache.release()
        row.cache.attach(row.array[:-1])

    @invariant()
    def pool_is_consistent(self) -> None:
        self.pool.check()

    @invariant()
    def every_page_is_held_or_available(self) -> None:
        held = {page for row in self.rows for page in row.cache.pages}
        assert len(held) + self.pool.available == PAGE_COUNT
        assert held <= set(range(FIRST_PAGE, FIRST_PAGE + PAGE_COUNT))

    @invariant()
    def rows_read_what_they_wrote(self) -> None:
        for row in self.rows:
            for slot in range(row.cache.length):
                assert self.memory[row.cache.slot(slot)] == self.prefix(row, slot + 1)

    @invariant()
    def only_full_committed_pages_are_shared(self) -> None:
        for one in self.rows:
            for other in self.rows:
                if one is not other:
                    for page in set(one.cache.pages) & set(other.cache.pages):
                        assert (one.cache.pages.index(page) + 1) * PAGE_SIZE <= one.cache.length

    def teardown(self) -> None:
        for row in self.rows:
            row.cache.release()
        self.pool.check()
        assert self.pool.available == PAGE_COUNT


class PagesOfHead(Pages):
    lookahead = 1


Pages.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestPages = Pages.TestCase
PagesOfHead.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestPagesOfHead = PagesOfHead.TestCase


def filled(pool: PagePool, tokens: list[int]) -> RowCache:
    cache = RowCache(pool)
    cache.reserve(len(tokens))
    cache.commit(np.array(tokens, np.int32), len(tokens))
    return cache


def test_the_end_of_the_least_recently_used_prefix_is_evicted_first() -> None:
    pool = PagePool(0, 4, 1)
    old, new = filled(pool, [1, 2]), filled(pool, [3, 4])
    old.release()
    new.release()
    assert pool.free_count == 0
    third = filled(pool, [5])
    assert [len(pool.match(np.array(t, np.int32))[0]) for t in ([1, 2], [3, 4])] == [1, 2]
    pool.check()
    assert third.pages == [1]


def test_a_prefix_that_is_used_again_is_kept_longer() -> None:
    pool = PagePool(0, 2, 1)
    for tokens in ([1], [2]):
        filled(pool, tokens).release()
    again = RowCache(pool)
    again.attach(np.array([1], np.int32))
    again.release()
    filled(pool, [3])
    assert [len(pool.match(np.array(t, np.int32))[0]) for t in ([1], [2])] == [1, 0]


def test_slots_are_named_as_one_by_one() -> None:
    pool = PagePool(3, 8, 4)
    cache = RowCache(pool)
    cache.reserve(14)
    assert cache.slots(2, 13).tolist() == [cache.slot(index) for index in range(2, 13)]
    assert not len(cache.slots(5, 5))


def test_equal_rows_computed_side_by_side_leave_one_cached_copy() -> None:
    pool = PagePool(0, 4, 2)
    one, other = filled(pool, [1, 2]), filled(pool, [1, 2])
    assert one.pages != other.pages
    one.release()
    other.release()
    pool.check()
    assert (pool.available, pool.free_count) == (4, 3)
