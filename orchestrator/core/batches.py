"""Rows of requests as the arrays of one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orchestrator.core.requests import PARAMS, Request
from orchestrator.core.shaping import shaping_rows
from pilotfish.steps import Ints, SamplingRows, TokenRows, empty_ints

NO_INTS = empty_ints()


class RowPart(NamedTuple):
    """One row of a step.

    Attributes:
        token_ids: new tokens, i32[n].
        start: slot of the first.
        table: page table, i32[pages].
        node_ids: tokens of a proposal that follow them, i32[nodes].
        parents: of the proposal's nodes, as in ``Proposal.parents``, or None for a chain.
    """

    token_ids: Ints
    start: int
    table: Ints
    node_ids: Ints = NO_INTS
    parents: Ints | None = None

    @property
    def length(self) -> int:
        return len(self.token_ids) + len(self.node_ids)


def token_rows(parts: Sequence[RowPart], copies: Sequence[tuple[int, int]]) -> TokenRows:
    """Concatenates rows; parents are given for all of them as soon as one is a tree."""
    is_tree = any(part.parents is not None for part in parts)
    return TokenRows(
        token_ids=np.concatenate([ids for part in parts for ids in (part.token_ids, part.node_ids)]),
        lengths=np.array([part.length for part in parts], np.int32),
        starts=np.array([part.start for part in parts], np.int32),
        page_counts=np.array([len(part.table) for part in parts], np.int32),
        page_ids=np.concatenate([part.table for part in parts]),
        parents=np.concatenate([_parents(part) for part in parts]) if is_tree else NO_INTS,
        slot_copies=np.array(copies, np.int32).reshape(-1, 2),
    )


def _parents(part: RowPart) -> Ints:
    """Parents as in ``TokenRows``: a proposal's root is the last of the row's own tokens."""
    own = len(part.token_ids)
    if part.parents is None:
        return np.arange(-1, part.length - 1, dtype=np.int32)
    return np.concatenate((np.arange(-1, own - 1), part.parents + own)).astype(np.int32)


def params_of(requests: Sequence[Request]) -> npt.NDArray[np.void]:
    """Parameters of each request, ``PARAMS[rows]``."""
    return np.frombuffer(b"".join([request.params.packed for request in requests]), PARAMS)


def sampling_rows(requests: Sequence[Request], params: npt.NDArray[np.void]) -> SamplingRows:
    """How each request samples, in its present round; ``params`` are theirs."""
    shaped = params["is_shaped"].nonzero()[0].tolist()
    return SamplingRows(
        temperatures=params["temperature"],
        top_ks=params["top_k"],
        top_ps=params["top_p"],
        min_ps=params["min_p"],
        seeds=params["seed"],
        rounds=np.array([request.round_index for request in requests], np.int64),
        shaping=shaping_rows(shaped, [requests[row] for row in shaped]) if len(shaped) else None,
    )
