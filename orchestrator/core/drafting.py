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

from collections.abc import Iterable, Mapping, Sequence

from orchestrator.core.draft_steps import (
    DraftPlan,
    FeatureRead,
    Part,
    missing_slots,
    part_of,
    plan_step,
    reserve_nodes,
)
from orchestrator.core.features import Array, Features, columns, joined
from orchestrator.core.pages import PagePool, RowCache
from orchestrator.core.proposals import Proposal
from orchestrator.core.replicas import Replica
from orchestrator.core.requests import PROPOSE_BEHIND, DraftPlace, Request, State
from orchestrator.core.suspects import Suspects
from pilotfish.errors import PilotfishError, shown
from pilotfish.steps import Capabilities, Grant, require


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
        self.suspects = Suspects()  # of steps that replicas failed at
        self._target: Grant | None = None  # the last that was opened
        self._reading: set[DraftPlace] = set()  # places that a read is under way for
        self._known: set[tuple[str, str]] = set()  # names and schemes of all that have ever been opened

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
        self._known.add((grant.model_id, capabilities.scheme))

    def require_known(self, draft_model: str) -> None:
        """Requires that a replica of that name or scheme answers, or has answered and may come back.

        Raises:
            InvalidArgumentError: there is none, naming those that there are.
        """
        if draft_model and not any(draft_model in names for names in self._known):
            drafts = ", ".join(f"{name} ({scheme})" for name, scheme in sorted(self._known))
            require(False, "draft_model", shown(draft_model), f"this server has {drafts or 'no draft'}")

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
        heads = [replica for replica in self.replicas.values() if replica.wants_features]
        return request.draft_limit > 0 and any(replica.suits(request.params) for replica in heads)

    def lost(self, name: str, rows: Iterable[Request], failed_step: int | None = None) -> Request | None:
        """A replica's stream ended, and with it all that it cached; its rows move at their next step.

        Args:
            name: of the replica.
            rows: scheduled.
            failed_step: the step that it was lost at, if it owed an answer.

        Returns:
            The row that replicas fail at, once it is known: it goes on, and drafts no more.
        """
        replica = self.replicas.pop(name, None)
        if replica is None:
            return None
        for request in rows:
            if request.draft is not None and request.draft.replica == name:
                request.drop_draft()
        if failed_step is None:
            return None
        guilty = self.suspects.lost(dict(replica.sent).get(failed_step, ()))
        if guilty is not None:
            guilty.may_draft = False
            guilty.drop_draft()
        return guilty

    def answered(self, plan: DraftPlan) -> None:
        """A replica has answered a step soundly."""
        self.suspects.answered(row.request for row in plan.rows)

    def plan_proposals(self, rows: Sequence[Request], node_budget: int, max_len: int) -> dict[str, DraftPlan]:
        """One step per replica that has rows ready to draft, by replica name.

        Args:
            rows: of the target's next batch.
            node_budget: most draft tokens that the target's step has room for.
            max_len: of a row in the target.
        """
        ready: dict[str, list[Part]] = {}
        budgets = {name: replica.grant.max_step_tokens for name, replica in self.replicas.items()}
        for request in rows:
            limit = request.draft_limit if request.state is State.RUNNING else 0
            place = self._place(request) if limit else None
            if place is None or request.draft_lag > PROPOSE_BEHIND or not self._may_join(request, place, ready):
                continue
            part = self._proposing(request, place, limit, min(node_budget, max_len - request.length))
            if part is not None and part.token_count <= budgets[place.replica] and self._knows(part):
                budgets[place.replica] -= part.token_count
                node_budget -= part.nodes
                ready.setdefault(place.replica, []).append(part)
        if not ready:
            self.suspects.widen()  # of those that are due none drafts
        return {name: plan_step(self.replicas[name], parts, self._support_limit) for name, parts in ready.items()}

    def plan_catch_up(self, rows: Iterable[Request], beside: int = 0) -> dict[str, DraftPlan]:
        """One step per replica with rows that are far behind, by replica name.

        Args:
            rows: scheduled.
            beside: prompt tokens that the target prefills meanwhile; as many cost a replica no more.
        """
        chunks: dict[str, list[Part]] = {}
        budgets = {name: self._catch_up_budget(replica, beside) for name, replica in self.replicas.items()}
        for request in rows:
            if request.draft_length == 0 and request.draft_lag > PROPOSE_BEHIND:
                request.drop_draft()  # others can use its pages, and what is still cached is found again
            place = self._place(request) if request.draft_limit > 0 else None
            if place is None or request.draft_lag <= PROPOSE_BEHIND or place.lookahead:
                continue
            if not self._may_join(request, place, chunks):
                continue
            part = self._catching_up(request, place, request.length - 1, budgets[place.replica])
            if part is not None:
                budgets[place.replica] -= part.token_count
                chunks.setdefault(place.replica, []).append(part)
                self.replicas[place.replica].caught_up = True
        return {name: plan_step(self.replicas[name], parts, self._support_limit) for name, parts in chunks.items()}

    def plan_reads(self, rows: Iterable[Request], beside: int = 0) -> list[FeatureRead]:
        """Catch-up steps of the replicas that draft on features, as what they wait for.

        Args:
            rows, beside: as for ``plan_catch_up``, which comes first.
        """
        heads = {name: replica for name, replica in self.replicas.items() if replica.wants_features}
        if not heads:
            return []
        chunks: dict[str, list[Part]] = {}
        budgets = {name: self._catch_up_budget(replica, beside) for name, replica in heads.items()}
        for request in rows:
            place, cached = request.draft, request.target
            if place is None or cached is None or place.replica not in heads or place in self._reading:
                continue
            if request.draft_limit == 0 or not self._must_catch_up(request, place, cached.length):
                continue
            if not self._may_join(request, place, chunks):
                continue
            part = self._catching_up(request, place, cached.length, budgets[place.replica])
            if part is not None:
                budgets[place.replica] -= part.token_count
                chunks.setdefault(place.replica, []).append(part)
        self._reading.update(part.place for parts in chunks.values() for part in parts)
        return [FeatureRead(heads[name], missing_slots(parts), tuple(parts)) for name, parts in chunks.items()]

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
        return plan_step(read.replica, parts, self._support_limit)

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
        choices = [choice for choice in self.replicas.values() if not choice.is_late and choice.suits(request.params)]
        if not choices:
            return None
        request.drop_draft()  # of a replica that hangs; its steps still run in order, so its pages are safe
        replica = max(choices, key=lambda choice: choice.pool.available / choice.pool.page_count)
        cache, drafter = RowCache(replica.pool), replica.grant.model_id
        request.draft = DraftPlace(replica.name, cache, replica.pool.lookahead, drafter)
        request.draft.cache.attach(request.tokens[:-1])
        request.draft.cache.try_reserve(request.length)  # so that the next row finds the replica so much fuller
        return request.draft

    def _may_join(self, request: Request, place: DraftPlace, steps: Mapping[str, list[Part]]) -> bool:
        """Whether the row may be in the next step of its replica beside those that are; see ``suspects``."""
        return self.suspects.may_join(request, (part.request for part in steps.get(place.replica, ())))

    def _must_catch_up(self, request: Request, place: DraftPlace, computed: int) -> bool:
        """Whether the features that come next will not be enough to propose with."""
        if computed <= place.cache.length:
            return False
        return request.draft_lag > PROPOSE_BEHIND or part_of(request, place, computed).missing > 0

    def _catching_up(self, request: Request, place: DraftPlace, known: int, budget: int) -> Part | None:
        """The next part of a row's first ``known`` slots, within the budget; None if there is none or no room."""
        count = min(min(known, self.replicas[place.replica].grant.max_len) - place.cache.length, budget)
        if count <= 0:
            return None
        part = part_of(request, place, place.cache.length + count)
        return part if self._knows(part) and place.cache.try_reserve(part.end) else None

    def _catch_up_budget(self, replica: Replica, beside: int) -> int:
        if replica.is_behind:
            return 0
        return min(self._max_catch_up, replica.grant.max_step_tokens, replica.allowance + beside)

    def _knows(self, part: Part) -> bool:
        """Whether the replica has all the tokens; it may lack ids that only the target's output layer pads."""
        return part.request.highest_token < self.replicas[part.place.replica].grant.vocab_size

    def _proposing(self, request: Request, place: DraftPlace, length: int, nodes_left: int) -> Part | None:
        """A part that asks for a tree, or for a chain where no tree is wanted or has room.

        None if neither has room, or features are missing.
        """
        replica = self.replicas[place.replica]
        part = part_of(request, place, request.length - place.lookahead, length, length)
        if place.lookahead and part.missing:
            return None
        if request.tree_nodes > length and replica.capabilities.tree_width:
            tree = part._replace(nodes=request.tree_nodes)
            if tree.nodes <= nodes_left and reserve_nodes(replica, tree):
                return tree
        return part if length <= nodes_left and reserve_nodes(replica, part) else None
