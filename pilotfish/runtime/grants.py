"""Which pages belong to which stream."""

from __future__ import annotations

import secrets
from dataclasses import replace

from pilotfish.errors import NotFoundError, OverloadedError
from pilotfish.steps import Grant, require


class PageGrants:
    """Hands out contiguous ranges of pages, one per stream, under a new incarnation each time.

    Args:
        pages: pages in all.
        template: what is the same in every grant; its range and incarnation are replaced.
    """

    def __init__(self, pages: int, template: Grant) -> None:
        self._pages, self._template = pages, template
        self._open: dict[int, Grant] = {}

    def open(self, page_count: int | None) -> Grant:
        """Grants ``page_count`` pages; None for the longest free range.

        Raises:
            InvalidArgumentError: if fewer than one is asked for.
            OverloadedError: if no free range is that long.
        """
        require(page_count is None or page_count >= 1, "page_count", page_count, "must be >= 1, or absent for all")
        ranges = self._free()
        wanted = max((size for _, size in ranges), default=0) if page_count is None else page_count
        first = next((first for first, size in ranges if size >= wanted > 0), None)
        if first is None:
            longest = max((size for _, size in ranges), default=0)
            asked = "all free pages" if page_count is None else f"{page_count} pages"
            raise OverloadedError(
                f"{asked} asked for, but at most {longest} of {self._pages} can be granted; "
                "ask for fewer, close another stream, or start the worker with more pages"
            )
        incarnation = secrets.randbits(64)
        grant = replace(self._template, first_page=first, page_count=wanted, incarnation=incarnation)
        self._open[incarnation] = grant
        return grant

    def close(self, grant: Grant) -> None:
        """Takes the pages of an open grant back."""
        del self._open[grant.incarnation]

    def find(self, incarnation: int) -> Grant:
        """The open grant of that incarnation.

        Raises:
            NotFoundError: if there is none, as after its stream ended.
        """
        grant = self._open.get(incarnation)
        if grant is None:
            raise NotFoundError(f"incarnation {incarnation:#x} is not open here; its stream has ended")
        return grant

    def _free(self) -> list[tuple[int, int]]:
        """Free ranges as (first page, pages), in order."""
        ranges, free_from = [], 0
        for grant in sorted(self._open.values(), key=lambda grant: grant.first_page):
            ranges.append((free_from, grant.first_page - free_from))
            free_from = grant.first_page + grant.page_count
        ranges.append((free_from, self._pages - free_from))
        return [(first, size) for first, size in ranges if size]
