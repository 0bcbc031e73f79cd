"""Which pages belong to which stream."""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass

from pilotfish.errors import NotFoundError, OverloadedError
from pilotfish.steps import Grant, require


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What an orchestrator is told about a model or a drafter; fields as in ``StreamOpened``."""

    model_id: str
    weights_hash: str
    tokenizer_hash: str
    vocab_size: int
    max_len: int
    features: tuple[str, ...] = ()
    feature_width: int = 0
    shapes_logits: bool = False
    gives_logprobs: bool = False


class GrantingEngine:
    """What every worker's engine does for its streams beside running steps."""

    def __init__(self, info: ModelInfo, *, pages: int, page_size: int, max_step_tokens: int) -> None:
        self._grants = PageGrants(info, pages=pages, page_size=page_size, max_step_tokens=max_step_tokens)

    def open(self, page_count: int | None) -> Grant:
        """Grants pages to a new stream; see ``PageGrants.open``."""
        return self._grants.open(page_count)

    def close(self, grant: Grant) -> None:
        """Takes a stream's pages back."""
        self._grants.close(grant)


class PageGrants:
    """Hands out contiguous ranges of pages, one per stream, under a new incarnation each time.

    Args:
        info: told with every grant.
        pages: pages in all.
        page_size: slots per page.
        max_step_tokens: most new tokens in one step.
    """

    def __init__(self, info: ModelInfo, *, pages: int, page_size: int, max_step_tokens: int) -> None:
        self._info, self._pages = info, pages
        self._page_size, self._max_step_tokens = page_size, max_step_tokens
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
                "ask for fewer, close another stream, or start the worker with more pages",
                "page_count",
                asked,
            )
        incarnation = secrets.randbits(64)
        grant = Grant(
            **asdict(self._info),
            page_size=self._page_size,
            first_page=first,
            page_count=wanted,
            max_step_tokens=self._max_step_tokens,
            incarnation=incarnation,
        )
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
