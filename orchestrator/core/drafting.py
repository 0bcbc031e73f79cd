"""Draft replicas: which row drafts where, and what each replica is asked to do.

Two kinds of steps. A *proposal* step is on the critical path: it brings the tokens committed since
the replica last saw each row and asks for a proposal. A *catch-up* step runs while the target
verifies: it prefills rows that are far behind, new ones and those that lost their replica.

A replica runs steps in the order sent, so what a step will cache counts as cached once it is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from orchestrator.core.batches import RowPart, params_of, sampling_rows, token_rows
from orchestrator.core.pages import OutOfPagesError, PagePool, RowCache
from orchestrator.core.proposals import Proposal, proposals_from
from orchestrator.core.requests import PROPOSE_BEHIND, DraftPlace, Request, State
from pilotfish.steps import Capabilities, DraftResult, DraftStep, Grant, ProposalKind, draft_slots, empty_ints

FIRST_ALLOWANCE, LEAST_ALLOWANCE = 64, 16
"""Tokens that a replica catches up beside a target step without prompts; see ``Replica.begin_round``."""


@dataclass(slots=True)
class Replica:
    """One draft replica, as long as its stream is open."""

    name: str
    grant: Grant
    capabilities: Capabilities
    pool: PagePool
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

    def begin_round(self, *, is_late: bool, is_behind: bool) -> None:
        """Says where it stands now.

        A catch-up step is to end before the target's does: the allowance doubles when it did, and halves when not.
        """
        if self.caught_up:
            wanted = self.allowance // 2 if is_behind else 2 * self.allowance
            self.allowance = min(max(wanted, LEAST_ALLOWANCE), self.grant.max_step_tokens)
        self.is_late, self.is_behind, self.caught_up = is_late, is_behind, False


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A step for one replica and whose rows it holds."""

    step: DraftStep
    rows: tuple[tuple[Request, DraftPlace], ...]
    is_delayed: bool
    """The replica had still to prefill when it was asked."""

    def proposals(self, result: DraftResult, vocab_size: int) -> dict[str, Proposal]:
        """The proposals that the replica answered, by request id, of rows that still draft there.

        Raises:
            InvalidArgumentError: if the answer breaks the contract.
        """
        step = self.step
        sampled = step.proposal_kinds == ProposalKind.SAMPLED
        found = proposals_from(result, step.draft_lengths, step.node_limits, vocab_size, sampled, step.support_limit)
        rows = zip(self.rows, found, strict=True)
        return {request.id: proposal for (request, place), proposal in rows if request.draft is place}


class Drafting:
    """Assigns rows to replicas and plans their steps.

    Args:
        support_limit: most ids in a support.
        max_catch_up: most tokens that a catch-up step feeds to a replica.
        tree_nodes: most nodes in a proposal; 0 asks for chains.
    """

    def __init__(self, support_limit: int, max_catch_up: int, tree_nodes: int = 0) -> None:
        self._support_limit = support_limit
        self._max_catch_up = max_catch_up
        self._tree_nodes = tree_nodes
        self.replicas: dict[str, Replica] = {}

    def opened(self, name: str, grant: Grant, capabilities: Capabilities) -> None:
        """A replica answers; its pages are empty."""
        assert name not in self.replicas
        pool = PagePool(grant.first_page, grant.page_count, grant.page_size)
        self.replicas[name] = Replica(name, grant, capabilities, pool)

    def lost(self, name: str, rows: Iterable[Request]) -> None:
        """A replica's stream ended, and with it all that it cached; its rows move at their next step."""
        if self.replicas.pop(name, None) is None:
            return
        for request in rows:
            if request.draft is not None and request.draft.replica == name:
                request.drop_draft()

    def plan_proposals(self, rows: Sequence[Request], target: Grant) -> dict[str, DraftPlan]:
        """One step per replica that has rows ready to draft, by replica name.

        Args:
            rows: of the target's next batch.
            target: what the target can verify.
        """
        node_budget = target.max_step_tokens - len(rows)
        ready: dict[str, list[_Part]] = {}
        budgets = {name: replica.grant.max_step_tokens for name, replica in self.replicas.items()}
        for request in rows:
            limit = request.draft_limit if request.state is State.RUNNING else 0
            place = self._place(request) if limit else None
            if place is None or request.draft_lag > PROPOSE_BEHIND:
                continue
            nodes_left = min(node_budget, target.max_len - request.length)
            part = self._proposing(request, place, limit, nodes_left)
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
            if place is None or request.draft_lag <= PROPOSE_BEHIND:
                continue
            known = min(request.length - 1, self.replicas[place.replica].grant.max_len)
            count = min(known - place.cache.length, budgets[place.replica])
            part = _part(request, place, place.cache.length + count)
            if count > 0 and self._knows(part) and _reserve(place.cache, part.end):
                budgets[place.replica] -= count
                chunks.setdefault(place.replica, []).append(part)
                self.replicas[place.replica].caught_up = True
        return {name: self._plan(self.replicas[name], parts) for name, parts in chunks.items()}

    def accepted(self, request: Request, proposal: Proposal, path: tuple[int, ...]) -> None:
        """Keeps what the replica cached of an accepted path: its nodes that have children.

        Called before the path is committed to the request.
        """
        place = request.draft
        if place is None or place.cache.length < request.length:
            return  # the replica that proposed is gone
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
        request.draft = DraftPlace(replica.name, RowCache(replica.pool))
        request.draft.cache.attach(request.tokens[:-1])
        _reserve(request.draft.cache, request.length)  # so that the next row finds the replica so much fuller
        return request.draft

    def _catch_up_budget(self, replica: Replica, beside: int) -> int:
        if replica.is_behind:
            return 0
        return min(self._max_catch_up, replica.grant.max_step_tokens, replica.allowance + beside)

    def _knows(self, part: _Part) -> bool:
        """Whether the replica has all the tokens; it may lack ids that only the target's output layer pads."""
        return part.request.highest_token < self.replicas[part.place.replica].grant.vocab_size

    def _proposing(self, request: Request, place: DraftPlace, length: int, nodes_left: int) -> _Part | None:
        """A part that asks for a tree, or for a chain where no tree is wanted or has room; None if neither fits."""
        for nodes in sorted({self._tree_nodes, length}, reverse=True):
            part = _part(request, place, request.length, length, nodes)
            if length <= nodes <= nodes_left and self._reserve_nodes(part):
                return part
        return None

    def _reserve_nodes(self, part: _Part) -> bool:
        replica = self.replicas[part.place.replica]
        width = replica.capabilities.tree_width
        if part.nodes > part.draft_length and not width:
            return False
        slots = part.end + draft_slots(part.draft_length, part.nodes, width)
        return slots <= replica.grant.max_len and _reserve(part.place.cache, slots)

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
            node_limits=np.array([part.nodes for part in parts], np.int32) if self._tree_nodes else empty_ints(),
            proposal_kinds=params["proposal_kind"],
            support_limit=self._support_limit,
        )
        for part in parts:
            part.place.cache.commit(part.request.tokens, part.end)
        return DraftPlan(step, tuple((part.request, part.place) for part in parts), replica.is_behind)


class _Part(NamedTuple):
    """A row of a draft step: feeds the request's tokens from ``start`` to ``end``, then proposes."""

    request: Request
    place: DraftPlace
    start: int
    end: int
    draft_length: int
    nodes: int

    @property
    def token_count(self) -> int:
        return self.end - self.start

    def row(self) -> RowPart:
        return RowPart(self.request.tokens[self.start : self.end], self.start, self.place.cache.table)


def _part(request: Request, place: DraftPlace, end: int, draft_length: int = 0, nodes: int = 0) -> _Part:
    """Begins where the replica stands, but at least one token is sent, again if need be."""
    return _Part(request, place, min(place.cache.length, end - 1), end, draft_length, nodes)


def _reserve(cache: RowCache, slots: int) -> bool:
    try:
        cache.reserve(slots)
    except OutOfPagesError:
        return False
    return True
