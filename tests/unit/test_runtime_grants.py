"""Streams get disjoint page ranges, each under an incarnation of its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.errors import InvalidArgumentError, NotFoundError, OverloadedError
from pilotfish.runtime.grants import ModelInfo, PageGrants
from pilotfish.steps import Grant

INFO = ModelInfo("m", "w", "t", vocab_size=100, max_len=512)


def page_grants(pages: int) -> PageGrants:
    return PageGrants(INFO, pages=pages, page_size=16, max_step_tokens=64)


def test_a_stream_may_ask_for_some_pages_or_for_all_that_are_left() -> None:
    grants = page_grants(10)
    first, rest = grants.open(4), grants.open(None)
    assert [(g.first_page, g.page_count) for g in (first, rest)] == [(0, 4), (4, 6)]
    assert first.model_id == "m"
    with pytest.raises(OverloadedError, match="all free pages asked for, but at most 0 of 10"):
        grants.open(None)
    grants.close(first)
    with pytest.raises(OverloadedError, match="5 pages asked for, but at most 4 of 10"):
        grants.open(5)
    assert grants.open(4).incarnation != first.incarnation


@pytest.mark.parametrize("count", [0, -1])
def test_asking_for_nothing_is_refused(count: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"page_count is {count}"):
        page_grants(10).open(count)


def test_an_incarnation_is_known_while_its_stream_is_open() -> None:
    grants = page_grants(10)
    grant = grants.open(1)
    assert grants.find(grant.incarnation) is grant
    grants.close(grant)
    with pytest.raises(NotFoundError, match=f"{grant.incarnation:#x}"):
        grants.find(grant.incarnation)


@given(st.lists(st.one_of(st.integers(1, 9), st.none(), st.tuples(st.integers(0, 9))), max_size=40))
def test_open_grants_never_overlap_and_refusals_are_true(moves: list[int | tuple[int] | None]) -> None:
    """A number or None opens, a tuple closes the grant of that index."""
    grants, open_grants = page_grants(20), list[Grant]()
    for move in moves:
        taken = {p for g in open_grants for p in range(g.first_page, g.first_page + g.page_count)}
        free = "".join("x" if page in taken else "." for page in range(20))
        longest = max(map(len, free.split("x")))
        if isinstance(move, tuple):
            if open_grants:
                grants.close(open_grants.pop(move[0] % len(open_grants)))
            continue
        if longest == 0 or (move is not None and move > longest):
            with pytest.raises(OverloadedError):
                grants.open(move)
            continue
        grant = grants.open(move)
        pages = set(range(grant.first_page, grant.first_page + grant.page_count))
        assert pages <= set(range(20)) - taken
        assert grant.page_count == (longest if move is None else move)
        open_grants.append(grant)
