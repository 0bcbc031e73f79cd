"""Steps of draft replicas: the rows that they hold, and what they leave to be read from the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from orchestrator.core.batches import RowPart, params_of, sampling_rows, token_rows
from orchestrator.core.features import Array
from orchestrator.core.proposals import Proposal, proposals_from
from orchestrator.core.replicas import Replica
from orchestrator.core.requests import DraftPlace, Request
from pilotfish.steps import DraftResult, DraftStep, Ints, ProposalKind, draft_slots, empty_ints

_NO_FEATURES = np.zeros(0)


class DraftRow(NamedTuple):
    """Whose row it is that a replica drafts for, where, and behind how many tokens."""

    request: Request
    place: DraftPlace
    length: int

    @property
    def is_current(self) -> bool:
        """Whether the request still drafts there, and goes on behind these tokens."""
        return self.request.draft is self.place and self.request.length == self.length


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A step for one replica and whose rows it holds."""

    step: DraftStep
    rows: tuple[DraftRow, ...]

    def proposals(self, result: DraftResult, vocab_size: int) -> dict[str, Proposal]:
        """The proposals that the replica answered, by request id, of rows that go on from where they begin.

        Raises:
            InvalidArgumentError: if the answer breaks the contract.
        """
        step = self.step
        sampled = step.proposal_kinds == ProposalKind.SAMPLED
        found = proposals_from(result, step.draft_lengths, step.node_limits, vocab_size, sampled, step.support_limit)
        rows = zip(self.rows, found, strict=True)
        return {row.request.id: proposal for row, proposal in rows if row.is_current}


class Part(NamedTuple):
    """A row of a draft step: fills the replica's slots from ``start`` to ``end``, then proposes.

    Attributes:
        features: of the last of these slots, as far as they are at hand, ``[n, width]`` of the target; None if
            the replica wants none.
    """

    request: Request
    place: DraftPlace
    start: int
    end: int
    draft_length: int
    nodes: int
    features: Array | None

    @property
    def token_count(self) -> int:
        return self.end - self.start

    @property
    def missing(self) -> int:
        """First slots whose features are not at hand."""
        return 0 if self.features is None else self.token_count - len(self.features)

    def with_features(self, first: Array) -> Part:
        """With those that were missing."""
        if self.features is None or not len(first):
            return self
        return self._replace(features=np.concatenate((first, self.features)) if len(self.features) else first)

    def row(self) -> RowPart:
        ahead = self.place.lookahead
        token_ids = self.request.tokens[self.start + ahead : self.end + ahead]
        return RowPart(token_ids, self.start, self.place.cache.table)


@dataclass(frozen=True, slots=True, eq=False)
class FeatureRead:
    """Features that a catch-up step of one replica waits for.

    Attributes:
        replica: that will get the step.
        slots: of the target, as page_id * page_size + offset, i32[n].
    """

    replica: Replica
    slots: Ints
    parts: tuple[Part, ...]


def part_of(request: Request, place: DraftPlace, end: int, draft_length: int = 0, nodes: int = 0) -> Part:
    """The part that ends at a slot and begins where the replica stands; one token at least is sent, again if need be.

    Args:
        request: whose tokens they are.
        place: of the request.
        end: the slot after the last.
        draft_length, nodes: longest path and most nodes to propose behind it.
    """
    start = min(place.cache.length, end - 1)
    features: Array | None = None
    if place.lookahead:
        kept = request.features
        features = kept.between(start, end) if kept is not None and kept.first < end <= kept.end else _NO_FEATURES
    return Part(request, place, start, end, draft_length, nodes, features)


def reserve_nodes(replica: Replica, part: Part) -> bool:
    """Reserves the slots that the replica may use for a part and its proposal; False if there are too few."""
    slots = part.end + draft_slots(part.draft_length, part.nodes, replica.capabilities.tree_width)
    return slots <= replica.grant.max_len and part.place.cache.try_reserve(slots)


def missing_slots(parts: Sequence[Part]) -> Ints:
    """Slots of the target whose features the parts lack."""
    caches = [(part, part.request.target) for part in parts]
    slots = [cache.slots(part.start, part.start + part.missing) for part, cache in caches if cache is not None]
    return np.concatenate(slots)


def plan_step(replica: Replica, parts: Sequence[Part], support_limit: int) -> DraftPlan:
    """The replica's next step; what it will cache counts as cached.

    Args:
        replica: which gets the step.
        parts: rows, with all their features if it wants any.
        support_limit: most ids in a support.
    """
    copies, replica.copies = replica.copies, []
    requests = [part.request for part in parts]
    params = params_of(requests)
    step = DraftStep(
        step_id=replica.next_step_id(requests),
        rows=token_rows([part.row() for part in parts], copies),
        sampling=sampling_rows(requests, params),
        draft_lengths=np.array([part.draft_length for part in parts], np.int32),
        node_limits=_node_limits(parts),
        proposal_kinds=params["proposal_kind"],
        support_limit=support_limit,
        features=_features(replica, parts) if replica.wants_features else None,
    )
    for part in parts:
        part.place.cache.commit(part.request.tokens, part.end)
    rows = tuple(DraftRow(part.request, part.place, part.request.length) for part in parts)
    return DraftPlan(step, rows)


def _features(replica: Replica, parts: Sequence[Part]) -> Array:
    """Features beside the tokens of a step, ``[tokens, feature_width]`` of the replica."""
    features = np.concatenate([part.features for part in parts if part.features is not None])
    return features if replica.columns is None else features[:, replica.columns]


def _node_limits(parts: Sequence[Part]) -> Ints:
    """Most nodes of each row's proposal; none are said if all are chains."""
    if all(part.nodes <= part.draft_length for part in parts):
        return empty_ints()
    return np.array([part.nodes for part in parts], np.int32)
