"""Draft replicas: which row drafts where, and what each replica is asked to do.

Two kinds of steps. A *proposal* step is on the critical path: it brings the tokens committed since
the replica last saw each row and asks for a proposal. A *catch-up* step runs while the target
verifies: it prefills rows that are far behind, new ones and those that lost their replica.

A replica runs steps in the order sent, so what a step will cache counts as cached once it is sent.

A replica that drafts on features follows the target: it can only be fed slots that the target has
computed. A row proposes if the features of all its new slots have come with the target's answers; else
it catches up by a *read*, which names the slots of the target whose features it lacks. A read becomes a
step when it is answered; until then its rows do not draft, and all others go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orchestrator.core.batches import RowPart, params_of, sampling_rows, token_rows
from orchestrator.core.features import Array, Features, columns, joined
from orchestrator.core.pages import PagePool, RowCache
from orchestrator.core.proposals import Proposal, proposals_from
from orchestrator.core.requests import PROPOSE_BEHIND, DraftPlace, Request, State
from pilotfish.errors import PilotfishError
from pilotfish.steps import (
    Capabilities,
    DraftResult,
    DraftStep,
    Grant,
    Ints,
    ProposalKind,
    draft_slots,
    empty_ints,
    require,
)

FIRST_ALLOWANCE, LEAST_ALLOWANCE = 64, 16
"""Tokens that a replica catches up beside a target step without prompts; see ``Replica.begin_round``."""


@dataclass(slots=True)
class Replica:
    """One draft replica, as long as its stream is open."""

    name: str
    grant: Grant
    capabilities: Capabilities
    pool: PagePool
    columns: npt.NDArray[np.int64] | None = None
    """Where its features stand among the target's; None: it wants none, or all of them as they are."""
    is_late: bool = False
    """It missed a deadline and still owes the answer: it gets no steps until it has given it."""
    is_behind: bool = False
    """It has not yet done with its last catch-up step, so that a proposal step would wait for it."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Slot copies to send with its next step."""
    step_id: int = 0
    caught_up: bool = False
    """It was sent a catch-up step in the last round."""
    allowance: int = FIRST_ALLOWANCE

    @property
    def wants_features(self) -> bool:
        return bool(self.grant.features)

    def begin_round(self, *, is_late: bool, is_behind: bool) -> None:
        """Says where it stands now.

        A catch-up step is to end before the target's does: the allowance doubles when it did, and halves when not.
        """
        if self.caught_up:
            wanted = self.allowance // 2 if is_behind else 2 * self.allowance
            self.allowance = min(max(wanted, LEAST_ALLOWANCE), self.grant.max_step_tokens)
        self.is_late, self.is_behind, self.caught_up = is_late, is_behind, False


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


@dataclass(frozen=True, slots=True, eq=False)
class FeatureRead:
    """Features that a catch-up step of one replica waits for.

    Attributes:
        replica: that will get the step.
        slots: of the target, as page_id * page_size + offset, i32[n].
    """

    replica: Replica
    slots: Ints
    parts: tuple[_Part, ...]


class Drafting:
    """Assigns rows to replicas and plans their steps.

    Args:
        support_limit: most ids in a support.
        max_catch_up: most tokens that a catch-up step feeds to a replica.
    """

    def __init__(self, support_limit: int, max_catch_up: int) -> None:
        self._support_limit = support_limit
        self._max_catch_up = max_catch_up
        self.replicas: dict[str, Replica] = {}
        self._target: Grant | None = None  # the last that was opened
        self._reading: set[DraftPlace] = set()  # places that a read is under way for

    def opened(self, name: str, grant: Grant, capabilities: Capabilities) -> None:
        """A replica answers; its pages are empty.

        Raises:
            UnavailableError: it wants features, and no target has told yet what it stores.
            FailedPreconditionError: it wants features that the target does not store.
        """
        assert name not in self.replicas
        own = columns(self._target, grant) if grant.features else None
        pool = PagePool(grant.first_page, grant.page_count, grant.page_size, lookahead=1 if grant.features else 0)
        self.replicas[name] = Replica(name, grant, capabilities, pool, own)

    def target_opened(self, grant: Grant) -> None:
        """The target answers, maybe with other features than before; see ``misfits``."""
        self._target = grant

    def misfits(self) -> dict[str, PilotfishError]:
        """Replicas that do not suit the target any more, by name, and why; their streams are to be closed."""
        found: dict[str, PilotfishError] = {}
        for name, replica in self.replicas.items():
            try:
                replica.columns = columns(self._target, replica.grant) if replica.wants_features else None
            except PilotfishError as error:
                found[name] = error
        return found

    @property
    def has_heads(self) -> bool:
        """Whether any replica drafts on features."""
        return any(replica.wants_features for replica in self.replicas.values())

    def wants_features(self, request: Request) -> bool:
        """Whether the features of a row's new slots will be of use.

        Those of a row that rests are still asked for as long as it keeps its place: without a gap it drafts
        again at once.
        """
        if request.draft is not None:
            return self.replicas[request.draft.replica].wants_features
        kind = request.params.proposal_kind
        heads = [replica for replica in self.replicas.values() if replica.wants_features]
        return request.draft_limit > 0 and any(kind in replica.capabilities.kinds for replica in heads)

    def lost(self, name: str, rows: Iterable[Request]) -> None:
        """A replica's stream ended, and with it all that it cached; its rows move at their next step."""
        if self.replicas.pop(name, None) is None:
            return
        for request in rows:
            if request.draft is not None and request.draft.replica == name:
                request.drop_draft()

    def plan_proposals(self, rows: Sequence[Request], node_budget: int, max_len: int) -> dict[str, DraftPlan]:
        """One step per replica that has rows ready to draft, by replica name.

        Args:
            rows: of the target's next batch.
            node_budget: most draft tokens that the target's step has room for.
            max_len: of a row in the target.
        """
        ready: dict[str, list[_Part]] = {}
        budgets = {name: replica.grant.max_step_tokens for name, replica in self.replicas.items()}
        for request in rows:
            limit = request.draft_limit if request.state is State.RUNNING else 0
            place = self._place(request) if limit else None
            if place is None or request.draft_lag > PROPOSE_BEHIND:
                continue
            part = self._proposing(request, place, limit, min(node_budget, max_len - request.length))
            if part is not None and part.token_count <= budgets[place.replica] and self._knows(part):
                budgets[place.replica] -= part.token_count
                node_budget -= part.nodes
                ready.setdefault(place.replica, []).append(part)
        return {name: self._plan(self.replicas[name], parts) for name, parts in ready.items()}

    def plan_catch_up(self, rows: Iterable[Request], beside: int = 0) -> dict[str, DraftPlan]:
        """One step per replica with rows that are far behind, by replica name.

        Args:
            rows: scheduled.
            beside: prompt tokens that the target prefills meanwhile; as many cost a replica no more.
        """
        chunks: dict[str, list[_Part]] = {}
        budgets = {name: self._catch_up_budget(replica, beside) for name, replica in self.replicas.items()}
        for request in rows:
            if request.draft_length == 0 and request.draft_lag > PROPOSE_BEHIND:
                request.drop_draft()  # others can use its pages, and what is still cached is found again
            place = self._place(request) if request.draft_limit > 0 else None
            if place is None or request.draft_lag <= PROPOSE_BEHIND or place.lookahead:
                continue
            part = self._catching_up(request, place, request.length - 1, budgets[place.replica])
            if part is not None:
                budgets[place.replica] -= part.token_count
                chunks.setdefault(place.replica, []).append(part)
                self.replicas[place.replica].caught_up = True
        return {name: self._plan(self.replicas[name], parts) for name, parts in chunks.items()}

    def plan_reads(self, rows: Iterable[Request], beside: int = 0) -> list[FeatureRead]:
        """Catch-up steps of the replicas that draft on features, as what they wait for.

        Args:
            rows, beside: as for ``plan_catch_up``, which comes first.
        """
        heads = {name: replica for name, replica in self.replicas.items() if replica.wants_features}
        if not heads:
            return []
        chunks: dict[str, list[_Part]] = {}
        budgets = {name: self._catch_up_budget(replica, beside) for name, replica in heads.items()}
        for request in rows:
            place, cached = request.draft, request.target
            if place is None or cached is None or place.replica not in heads or place in self._reading:
                continue
            if request.draft_limit == 0 or not self._must_catch_up(request, place, cached.length):
                continue
            part = self._catching_up(request, place, cached.length, budgets[place.replica])
            if part is not None:
                budgets[place.replica] -= part.token_count
                chunks.setdefault(place.replica, []).append(part)
        self._reading.update(part.place for parts in chunks.values() for part in parts)
        return [FeatureRead(heads[name], _missing_slots(parts), tuple(parts)) for name, parts in chunks.items()]

    def plan_read(self, read: FeatureRead, answer: Array) -> DraftPlan | None:
        """The step of a read that was answered; None if no row waits for it any more.

        Args:
            read: of ``plan_reads``, once.
            answer: features of its slots, ``[slots, feature_width]``; not trusted.

        Raises:
            InvalidArgumentError: if they are not as many, or of another width; give the read up.
        """
        assert self._target is not None
        wanted = (len(read.slots), self._target.feature_width)
        require(answer.shape == wanted, "features", answer.shape, f"shape must be {wanted}")
        fed, begin = [], 0
        for part in read.parts:
            end = begin + part.missing
            fed.append(part.with_features(answer[begin:end]))
            begin = end
        self._reading.difference_update(part.place for part in read.parts)
        parts = [part for part in fed if part.request.draft is part.place]
        if not parts or read.replica.is_late:
            return None
        read.replica.caught_up = True
        return self._plan(read.replica, parts)

    def give_up(self, read: FeatureRead) -> None:
        """A read failed or came too late: its rows look for another place."""
        self._reading.difference_update(part.place for part in read.parts)
        for part in read.parts:
            if part.request.draft is part.place:
                part.request.drop_draft()

    def keep(self, request: Request, new: Features) -> Features:
        """What a row keeps of features now that new ones have come: those that its replica still lacks."""
        place = request.draft
        return joined(request.features, new, place.cache.length if place is not None else 0, PROPOSE_BEHIND)

    def accepted(self, request: Request, proposal: Proposal, path: tuple[int, ...]) -> None:
        """Keeps what the replica cached of an accepted path: its nodes that have children.

        Called before the path is committed to the request.
        """
        place = request.draft
        if place is None or place.lookahead or place.cache.length < request.length:
            return  # the replica that proposed is gone, or wants true features in place of those it made up
        if proposal.is_chain:
            if path:
                place.cache.length += min(len(path), len(proposal.token_ids) - 1)
            return
        parents = set(proposal.parents.tolist())
        base, copies = place.cache.length, self.replicas[place.replica].copies
        for depth, node in enumerate(path):
            if node not in parents:
                break
            if node != depth:
                copies.append((place.cache.slot(base + node), place.cache.slot(base + depth)))
            place.cache.length += 1

    def _place(self, request: Request) -> DraftPlace | None:
        """Where the row can draft now; one that has no replica, or a late one, gets the least loaded that suits it."""
        if request.draft is not None and not self.replicas[request.draft.replica].is_late:
            return request.draft
        kind = request.params.proposal_kind
        choices = [
            choice for choice in self.replicas.values() if not choice.is_late and kind in choice.capabilities.kinds
        ]
        if not choices:
            return None
        request.drop_draft()  # of a replica that hangs; its steps still run in order, so its pages are safe
        replica = max(choices, key=lambda choice: choice.pool.available / choice.pool.page_count)
        request.draft = DraftPlace(replica.name, RowCache(replica.pool), replica.pool.lookahead)
        request.draft.cache.attach(request.tokens[:-1])
        request.draft.cache.try_reserve(request.length)  # so that the next row finds the replica so much fuller
        return request.draft

    def _must_catch_up(self, request: Request, place: DraftPlace, computed: int) -> bool:
        """Whether the features that come next will not be enough to propose with."""
        if computed <= place.cache.length:
            return False
        return request.draft_lag > PROPOSE_BEHIND or _part(request, place, computed).missing > 0

    def _catching_up(self, request: Request, place: DraftPlace, known: int, budget: int) -> _Part | None:
        """The next part of a row's first ``known`` slots, within the budget; None if there is none or no room."""
        count = min(min(known, self.replicas[place.replica].grant.max_len) - place.cache.length, budget)
        if count <= 0:
            return None
        part = _part(request, place, place.cache.length + count)
        return part if self._knows(part) and place.cache.try_reserve(part.end) else None

    def _catch_up_budget(self, replica: Replica, beside: int) -> int:
        if replica.is_behind:
            return 0
        return min(self._max_catch_up, replica.grant.max_step_tokens, replica.allowance + beside)

    def _knows(self, part: _Part) -> bool:
        """Whether the replica has all the tokens; it may lack ids that only the target's output layer pads."""
        return part.request.highest_token < self.replicas[part.place.replica].grant.vocab_size

    def _proposing(self, request: Request, place: DraftPlace, length: int, nodes_left: int) -> _Part | None:
        """A part that asks for a tree, or for a chain where no tree is wanted or has room.

        None if neither has room, or features are missing.
        """
        replica = self.replicas[place.replica]
        part = _part(request, place, request.length - place.lookahead, length, length)
        if place.lookahead and part.missing:
            return None
        if request.tree_nodes > length and replica.capabilities.tree_width:
            tree = part._replace(nodes=request.tree_nodes)
            if tree.nodes <= nodes_left and _reserve_nodes(replica, tree):
                return tree
        return part if length <= nodes_left and _reserve_nodes(replica, part) else None

    def _plan(self, replica: Replica, parts: list[_Part]) -> DraftPlan:
        copies, replica.copies = replica.copies, []
        replica.step_id += 1
        requests = [part.request for part in parts]
        params = params_of(requests)
        step = DraftStep(
            step_id=replica.step_id,
            rows=token_rows([part.row() for part in parts], copies),
            sampling=sampling_rows(requests, params),
            draft_lengths=np.array([part.draft_length for part in parts], np.int32),
            node_limits=_node_limits(parts),
            proposal_kinds=params["proposal_kind"],
            support_limit=self._support_limit,
            features=_features(replica, parts) if replica.wants_features else None,
        )
        for part in parts:
            part.place.cache.commit(part.request.tokens, part.end)
        rows = tuple(DraftRow(part.request, part.place, part.request.length) for part in parts)
        return DraftPlan(step, rows)


class _Part(NamedTuple):
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

    def with_features(self, first: Array) -> _Part:
        """With those that were missing."""
        if self.features is None or not len(first):
            return self
        return self._replace(features=np.concatenate((first, self.features)) if len(self.features) else first)

    def row(self) -> RowPart:
        ahead = self.place.lookahead
        token_ids = self.request.tokens[self.start + ahead : self.end + ahead]
        return RowPart(token_ids, self.start, self.place.cache.table)


_NO_FEATURES = np.zeros(0)


def _part(request: Request, place: DraftPlace, end: int, draft_length: int = 0, nodes: int = 0) -> _Part:
    """Begins where the replica stands, but at least one token is sent, again if need be."""
    start = min(place.cache.length, end - 1)
    features: Array | None = None
    if place.lookahead:
        kept = request.features
        features = kept.between(start, end) if kept is not None and kept.first < end <= kept.end else _NO_FEATURES
    return _Part(request, place, start, end, draft_length, nodes, features)


def _missing_slots(parts: Sequence[_Part]) -> Ints:
    """Slots of the target whose features the parts lack."""
    caches = [(part, part.request.target) for part in parts]
    slots = [cache.slots(part.start, part.start + part.missing) for part, cache in caches if cache is not None]
    return np.concatenate(slots)


def _features(replica: Replica, parts: Sequence[_Part]) -> Array:
    """Features beside the tokens of a step, ``[tokens, feature_width]`` of the replica."""
    features = np.concatenate([part.features for part in parts if part.features is not None])
    return features if replica.columns is None else features[:, replica.columns]


def _reserve_nodes(replica: Replica, part: _Part) -> bool:
    slots = part.end + draft_slots(part.draft_length, part.nodes, replica.capabilities.tree_width)
    return slots <= replica.grant.max_len and part.place.cache.try_reserve(slots)


def _node_limits(parts: Sequence[_Part]) -> Ints:
    """Most nodes of each row's proposal; none are said if all are chains."""
    if all(part.nodes <= part.draft_length for part in parts):
        return empty_ints()
    return np.array([part.nodes for part in parts], np.int32)
