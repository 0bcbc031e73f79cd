"""Rows of requests as the arrays of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.core.requests import Request
from pilotfish.steps import Ints, SamplingRows, TokenRows, empty_ints


@dataclass(frozen=True, slots=True)
class RowPart:
    """One row of a step.

    Attributes:
        token_ids: new tokens, i32[n].
        start: slot of the first.
        pages: page table.
        parents: as in ``TokenRows.parents``, i32[n], or None for a chain.
    """

    token_ids: Ints
    start: int
    pages: list[int]
    parents: Ints | None = None


def token_rows(parts: Sequence[RowPart], copies: Sequence[tuple[int, int]]) -> TokenRows:
    """Concatenates rows; parents are given for all of them as soon as one is a tree."""
    is_tree = any(part.parents is not None for part in parts)
    return TokenRows(
        token_ids=np.concatenate([part.token_ids for part in parts]).astype(np.int32, copy=False),
        lengths=np.array([len(part.token_ids) for part in parts], np.int32),
        starts=np.array([part.start for part in parts], np.int32),
        page_counts=np.array([len(part.pages) for part in parts], np.int32),
        page_ids=np.array([page for part in parts for page in part.pages], np.int32),
        parents=np.concatenate([_parents(part) for part in parts]) if is_tree else empty_ints(),
        slot_copies=np.array(copies, np.int32).reshape(-1, 2),
    )


def _parents(part: RowPart) -> Ints:
    if part.parents is not None:
        return part.parents
    return np.arange(-1, len(part.token_ids) - 1, dtype=np.int32)


def sampling_rows(requests: Sequence[Request]) -> SamplingRows:
    """How each request samples, in its present round."""
    params = [request.params for request in requests]
    return SamplingRows(
        temperatures=np.array([p.temperature for p in params], np.float32),
        top_ks=np.array([p.top_k for p in params], np.int32),
        top_ps=np.array([p.top_p for p in params], np.float32),
        min_ps=np.array([p.min_p for p in params], np.float32),
        seeds=np.array([p.seed for p in params], np.uint64),
        rounds=np.array([request.round_index for request in requests], np.int64),
    )
