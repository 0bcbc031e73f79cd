"""Page pools: who owns which KV page of one worker, and which pages hold a reusable prefix.

There is one pool per worker, the target and each draft replica, all of this class. A page is free,
referenced by one or more rows, or cached: unreferenced, but still holding a prefix that a later row
may take up. Rows never write to a page that others may read: only full pages of committed tokens
are shared, and a row writes from its first uncommitted slot on.

A full page is found by the hash of its tokens chained to the hash of the page before it, so equal
digests mean equal prefixes from the first token on. Cached pages are evicted least recently used
first, the end of a prefix before its beginning.

What a head on the target's features keeps in a slot depends on the token that FOLLOWS too, so in its
pool a page's hash reaches one token further (``lookahead``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from pilotfish.steps import Ints, empty_ints

ROOT = b""


class OutOfPagesError(Exception):
    """Fewer pages are free or cached than asked for; nothing was allocated."""


class PagePool:
    """Allocator and prefix cache over the page ids ``first_page .. first_page + page_count - 1``.

    Args:
        first_page: first id of the worker's grant.
        page_count: pages in the grant.
        page_size: slots per page.
        lookahead: tokens after those of its slots that the contents of a page depend on.
    """

    def __init__(self, first_page: int, page_count: int, page_size: int, lookahead: int = 0) -> None:
        self.page_size = page_size
        self.lookahead = lookahead
        self.page_count = page_count
        self._ids = range(first_page, first_page + page_count)
        self._free = list(reversed(self._ids))  # a stack: low ids first, which keeps rows contiguous
        self._references: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # unreferenced prefix pages, oldest first
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Pages that ``allocate`` could give now."""
        return len(self._free) + len(self._cached)

    @property
    def free_count(self) -> int:
        """Pages that hold nothing of use."""
        return len(self._free)

    def pages_for(self, slots: int) -> int:
        """Pages that ``slots`` slots need."""
        return -(-slots // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` pages, evicting cached ones when none are free.

        Raises:
            OutOfPagesError: if fewer are available; the pool is unchanged.
        """
        if count > self.available:
            raise OutOfPagesError(f"{count} pages asked for, {self.available} of {self.page_count} available")
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Gives up one reference to each page; prefix pages that nobody holds any more stay cached."""
        for page in reversed(pages):  # the end of a prefix is evicted before its beginning
            self._references[page] -= 1
            if self._references[page]:
                continue
            del self._references[page]
            if page in self._digest_of:
                self._cached[page] = None
            else:
                self._free.append(page)

    def match(self, token_ids: Ints) -> tuple[list[int], bytes]:
        """Takes a reference to the longest cached prefix of full pages.

        Returns:
            The pages, to be released like allocated ones, and the digest of the last (or ROOT).
        """
        pages, digest, span = [], ROOT, self.page_size + self.lookahead
        for begin in range(0, len(token_ids) - span + 1, self.page_size):
            following = self.digest(digest, token_ids[begin : begin + span])
            page = self._page_of.get(following)
            if page is None:
                break
            self._cached.pop(page, None)
            self._references[page] = self._references.get(page, 0) + 1
            pages.append(page)
            digest = following
        return pages, digest

    def publish(self, page: int, parent: bytes, token_ids: Ints) -> bytes:
        """Offers a full page of committed tokens to later rows; returns its digest.

        Args:
            page: referenced by the caller.
            parent: digest of the page before it, ROOT for the first.
            token_ids: that the page depends on, i32[page_size + lookahead].
        """
        digest = self.digest(parent, token_ids)
        if digest not in self._page_of:  # else another row computed the same; its copy serves
            self._page_of[digest] = page
            self._digest_of[page] = digest
        return digest

    @staticmethod
    def digest(parent: bytes, token_ids: Ints) -> bytes:
        """Hash of a page's tokens chained to the digest of the page before it."""
        return blake2b(parent + token_ids.tobytes(), digest_size=16).digest()

    def check(self) -> None:
        """Raises ``AssertionError`` unless every page is in exactly one place and the indices agree."""
        free, cached, referenced = set(self._free), set(self._cached), set(self._references)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & cached, "a page is free and cached"
        assert not (free | cached) & referenced, "a page is available and referenced"
        assert free | cached | referenced == set(self._ids), "a page is lost or foreign"
        assert all(count > 0 for count in self._references.values()), "a reference count is not positive"
        assert {page: digest for digest, page in self._page_of.items()} == self._digest_of, "the indices disagree"
        assert cached <= self._digest_of.keys(), "a cached page holds no prefix"
        assert not free & self._digest_of.keys(), "a free page holds a prefix"

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._digest_of.pop(page)]
        return page


class RowCache:
    """One row's pages in one pool.

    Attributes:
        pages: page table of the row, in order.
        table: the same as i32[pages], for steps; never written to.
        length: slots, from the first, that hold committed tokens.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.pages: list[int] = []
        self.table = empty_ints()
        self.length = 0
        self._published = 0  # full pages offered to others
        self._digest = ROOT  # of the last of them

    def attach(self, token_ids: Ints) -> None:
        """Takes up the longest cached prefix of ``token_ids``; only on a new, empty row."""
        assert not self.pages, "attach comes first"
        self.pages, self._digest = self.pool.match(token_ids)
        self.table = np.array(self.pages, np.int32)
        self._published = len(self.pages)
        self.length = self._published * self.pool.page_size

    def missing(self, slots: int) -> int:
        """Pages that ``reserve(slots)`` would allocate."""
        return max(0, self.pool.pages_for(slots) - len(self.pages))

    def reserve(self, slots: int) -> None:
        """Makes the page table cover ``slots`` slots.

        Raises:
            OutOfPagesError: if the pool cannot; the row is unchanged.
        """
        if slots > len(self.pages) * self.pool.page_size:
            self.pages += self.pool.allocate(self.missing(slots))
            self.table = np.array(self.pages, np.int32)

    def try_reserve(self, slots: int) -> bool:
        """As ``reserve``; says whether the pool could."""
        try:
            self.reserve(slots)
        except OutOfPagesError:
            return False
        return True

    def commit(self, token_ids: Ints, length: int) -> None:
        """Declares the first ``length`` slots computed; offers pages that became full to other rows.

        Args:
            token_ids: of the row, at least ``length`` and the pool's lookahead.
            length: never less than before, and covered by the page table.
        """
        assert self.length <= length <= len(self.pages) * self.pool.page_size
        self.length = length
        size, span = self.pool.page_size, self.pool.page_size + self.pool.lookahead
        while (self._published + 1) * size <= length:
            begin = self._published * size
            page = self.pages[self._published]
            self._digest = self.pool.publish(page, self._digest, token_ids[begin : begin + span])
            self._published += 1

    def slot(self, index: int) -> int:
        """Id of the row's slot ``index``: page_id * page_size + offset."""
        page, offset = divmod(index, self.pool.page_size)
        return self.pages[page] * self.pool.page_size + offset

    def slots(self, start: int, end: int) -> Ints:
        """Ids of the row's slots in ``[start, end)``, i32[end - start]."""
        pages, offsets = np.divmod(np.arange(start, end, dtype=np.int32), np.int32(self.pool.page_size))
        ids: Ints = self.table[pages] * np.int32(self.pool.page_size) + offsets
        return ids

    def release(self) -> None:
        """Gives all pages back; the row is empty afterwards."""
        self.pool.release(self.pages)
        self.pages, self.table, self.length, self._published, self._digest = [], empty_ints(), 0, 0, ROOT
