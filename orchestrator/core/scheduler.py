"""The scheduler: which rows the target computes next, and what its answer means for them.

Pure: events in (submit, finish, opened, lost), plans out. One round is

    drafts   = scheduler.plan_proposals(early)      sent to the replicas
    plan     = scheduler.plan_target(drafts)        while they draft, and for the early ones
    batch    = scheduler.seal(plan, proposals)      sent to the target
    scheduler.choose_draft_lengths()                while it verifies
    catch_up = scheduler.plan_catch_up(batch)       sent to the replicas while it verifies
    reads    = scheduler.plan_reads(batch)          asked of the target meanwhile; answered, they become steps
    plans    = scheduler.plan_early(batch)          laid out meanwhile
    early    = scheduler.draft_early(plans, result) sent before anything is judged; of the next round
    runs     = scheduler.accept(batch, result)     or, where no answer came, scheduler.step_refused, step_lost
    scheduler.timed(...)                            what the round took, for draft lengths to come

Continuous batching: rows join and leave at every round. Running rows come first; what is left of the token budget
goes to prefill chunks, and then to waiting requests, each kind by priority and then by arrival. When pages run out the
newest row of the lowest priority is preempted: it gives its pages up and is prefilled again later. A request that
waits preempts nobody, whatever its priority.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter

from orchestrator.core.acceptance import TokenKind, Verdict
from orchestrator.core.draft_length import CHAINS, SIZES, DraftLengths
from orchestrator.core.draft_steps import DraftPlan, FeatureRead
from orchestrator.core.drafting import Drafting
from orchestrator.core.early import EarlyPlan, fill, plan_early, settle
from orchestrator.core.finish import FinishReason, cut_run
from orchestrator.core.logprobs import RowLogprobs, split_logprobs
from orchestrator.core.pages import PagePool, RowCache
from orchestrator.core.proposals import EMPTY, NOTHING_FOLLOWS, Proposal
from orchestrator.core.replicas import Replica
from orchestrator.core.requests import Params, Request, State
from orchestrator.core.rounds import Judged, Run, Timed, asked_for, observed
from orchestrator.core.shaping import NOTHING
from orchestrator.core.suspects import Suspects
from orchestrator.core.target_steps import RowPlan, TargetBatch, TargetPlan, judge, split_features, target_step
from pilotfish.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    OverloadedError,
)
from pilotfish.steps import Grant, TargetResult, require, require_range

_ORDER = attrgetter("order")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler may put together."""

    max_rows: int = 64
    """Most rows in a batch. More rows share a pass over the weights, and each waits longer for it."""
    max_prefill_tokens: int = 512
    """Most prefill tokens beside running rows in one step. More fills prompts sooner, and makes running
    rows wait longer for their next tokens."""
    max_waiting: int = 1024
    """Requests that may wait; more are refused."""
    support_limit: int = 64
    """Most ids in a draft support. More accepts slightly more, and costs 8 bytes each per draft token."""
    tree_nodes: int | None = 0
    """Nodes in a proposal, for drafters that grow trees; 0 asks for chains. None: the server chooses, from round to
    round."""
    early_drafts: bool = False
    """Rows with a draft length of 1 draft as soon as the target has answered, from both outcomes; see ``early``."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The menu of ``DraftLengths``."""
        return SIZES if self.tree_nodes is None else (self.tree_nodes,)


@dataclass(slots=True)
class Target:
    """The target, as long as its stream is open."""

    grant: Grant
    pool: PagePool
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Slot copies to send with its next step."""
    step_id: int = 0


class Scheduler:
    """Requests, the target's pages, and the batches made of them.

    Attributes:
        drafting: the draft replicas and their steps.
        rows: scheduled requests (prefill or running), by ``Request.order``.
        waiting: the others, by the same.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.drafting = Drafting(limits.support_limit, limits.max_prefill_tokens)
        self.target: Target | None = None
        self.rows: list[Request] = []
        self.waiting: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        self._lengths = DraftLengths(limits.sizes)
        self._drafters: set[str] = set()  # hashes of the weights that the lengths are learnt from
        self._timed: list[Timed] = []  # not yet learnt from
        self._suspects = Suspects()  # of steps that the target failed at

    # Events

    def require_room(self, prompt: int, max_tokens: int) -> None:
        """Returns if so many tokens fit the target, before anything is made of them; while it is away, any may.

        Raises:
            InvalidArgumentError: they never will.
        """
        if self.target is not None:
            _require_room(prompt, max_tokens, self.target.grant)

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
            AlreadyExistsError: its id is running.
            OverloadedError: the queue is full.
            InvalidArgumentError: it can never fit.
        """
        if request.id in self._requests:
            raise AlreadyExistsError(f"request_id {request.id!r} is running; use another, or none")
        if len(self.waiting) >= self.limits.max_waiting:
            raise OverloadedError(f"{len(self.waiting)} requests are waiting, the most allowed; try again later")
        if self.target is not None:
            self._require_fit(request, self.target)
        self.drafting.require_known(request.params.draft_model)
        self._arrivals += 1
        request.arrival = self._arrivals
        request.tree_nodes = self.limits.tree_nodes or CHAINS
        self._requests[request.id] = request
        self._wait(request)

    def finish(self, request: Request) -> None:
        """Ends a request, wherever it stands, and releases all that it holds; harmless if it ended before."""
        if request.state is State.FINISHED:
            return
        (self.waiting if request.state is State.WAITING else self.rows).remove(request)
        request.move(State.FINISHED)
        request.drop_target()
        request.drop_draft()
        self._suspects.forget(request)
        self.drafting.suspects.forget(request)
        del self._requests[request.id]

    def target_opened(self, grant: Grant) -> list[Request]:
        """The target answers, with empty pages; returns the waiting requests that cannot fit it."""
        assert self.target is None
        pool = PagePool(grant.first_page, grant.page_count, grant.page_size)
        self.target = Target(grant, pool)
        self.drafting.target_opened(grant)
        return [request for request in self.waiting if not self._fits(request, self.target)]

    def target_lost(self) -> None:
        """The target's stream ended, and with it all that it cached; every row waits for the next one."""
        for request in self.rows[::-1]:
            self._unschedule(request)
        self.target = None

    def clear(self) -> None:
        """Forgets every request without touching pools, after a bug; the workers must be opened anew."""
        for request in self._requests.values():
            request.state, request.target, request.draft = State.FINISHED, None, None
        self.rows.clear()
        self.waiting.clear()
        self._requests.clear()

    # The round

    @property
    def has_work(self) -> bool:
        return self.target is not None and bool(self.rows or self.waiting)

    @property
    def is_adaptive(self) -> bool:
        """Whether any row leaves its draft length, or the size of its trees, to the server."""
        chooses_sizes = self.limits.tree_nodes is None and _grow_trees(self.drafting.replicas.values())
        return chooses_sizes or any(request.params.draft_length is None for request in self.rows)

    def plan_proposals(self, early: Iterable[DraftPlan] = ()) -> dict[str, DraftPlan]:
        """What each replica is to propose for the running rows, as far as the target's step has room.

        Args:
            early: sent with the last answer of the target; their rows are served.
        """
        assert self.target is not None
        served = set().union(*map(settle, early))
        node_budget = self._node_budget(self.target) - len(served)
        rows = [row for row in self.rows if row not in served]
        return self.drafting.plan_proposals(rows, node_budget, self.target.grant.max_len)

    def plan_catch_up(self, batch: TargetBatch) -> dict[str, DraftPlan]:
        """What each replica is to prefill while the target is busy with ``batch``."""
        return self.drafting.plan_catch_up(self.rows, batch.prompt_tokens)

    def plan_reads(self, batch: TargetBatch) -> list[FeatureRead]:
        """What each replica that drafts on features needs to catch up; comes after ``plan_catch_up``."""
        return self.drafting.plan_reads(self.rows, batch.prompt_tokens) if self.drafting.has_heads else []

    def plan_early(self, batch: TargetBatch) -> list[EarlyPlan]:
        """What replicas are to draft once the target has answered ``batch``, before the answer is judged."""
        if self.target is None or not (self.limits.early_drafts and self.drafting.has_heads):
            return []  # the target may have been lost since the batch was sent
        return plan_early(self.drafting, batch, self._node_budget(self.target), self.limits.support_limit)

    def draft_early(self, plans: Sequence[EarlyPlan], result: TargetResult) -> dict[str, DraftPlan]:
        """The steps of ``plan_early``, filled in, by replica name; ``accept`` comes next."""
        filled = [plan for early in plans if (plan := fill(self.drafting, early, result)) is not None]
        return {plan.rows[0].place.replica: plan for plan in filled}

    def choose_draft_lengths(self) -> None:
        """Learns from the round before, and sets the draft length of each row that leaves it to the server."""
        timed, self._timed = self._timed, []
        for each in timed:
            self._lengths.learn(observed(each))
        usable = [replica for replica in self.drafting.replicas.values() if not replica.is_late]
        drafters = {replica.grant.weights_hash for replica in usable}
        if not drafters <= self._drafters:
            self._lengths.forget_draft()
            self._drafters = drafters
        self._lengths.choose(self.rows, len(usable), trees=_grow_trees(usable))

    def timed(
        self,
        batch: TargetBatch,
        drafts: Sequence[DraftPlan],
        runs: Sequence[Run],
        seconds: float,
        draft_seconds: float,
    ) -> None:
        """Notes what a round took; it is looked at when there is time.

        Args:
            batch, runs: of the round.
            drafts: all that proposed for it.
            seconds: since the end of the round before.
            draft_seconds: of those, waited for proposals.
        """
        replicas, asked = self.drafting.replicas, {plan.rows[0].place.replica for plan in drafts}
        caught_up = any(replica.caught_up for replica in replicas.values())
        was_delayed = any(replicas[name].is_behind for name in asked & replicas.keys())
        self._timed.append(Timed(batch, drafts, caught_up, was_delayed, runs, seconds, draft_seconds))

    def plan_target(self, drafts: Iterable[DraftPlan]) -> TargetPlan:
        """Chooses rows and allocates pages for the worst case of the proposals asked for.

        Args:
            drafts: all that propose for it, the early ones first.
        """
        assert self.target is not None
        plans, preempted = self._plan_running({name: nodes for name, (_, nodes) in asked_for(drafts).items()})
        used = sum(1 + row.room for row in plans)
        budget = min(self.target.grant.max_step_tokens - used, self.limits.max_prefill_tokens)
        for request in [row for row in self.rows if row.state is State.PREFILL]:
            budget -= self._plan_chunk(request, budget, plans)
        while self.waiting and budget > 0 and not preempted and self._admit(self.waiting[0], plans):
            budget -= self._plan_chunk(self.rows[-1], budget, plans)
        self.rows.sort(key=_ORDER)
        if not plans:
            self._suspects.widen()  # others of them may hold the pages that are missing
        return TargetPlan(tuple(plans))

    def seal(self, plan: TargetPlan, proposals: Mapping[str, Proposal]) -> TargetBatch | None:
        """The step to send, now that the proposals are known; None if no row is left."""
        assert self.target is not None
        rows = tuple(row for row in plan.rows if row.request.target is row.cache)
        if not rows:
            return None
        for row in rows:
            if row.room:
                row.proposal = proposals.get(row.request.id, EMPTY)
                row.drafter = row.request.draft.drafter if row.request.draft is not None else ""
        copies, self.target.copies = self.target.copies, []
        self.target.step_id += 1
        wants_features = self.drafting.wants_features if self.drafting.has_heads else None
        return TargetBatch(target_step(self.target.step_id, rows, copies, wants_features), rows)

    def accept(self, batch: TargetBatch, result: TargetResult) -> list[Run]:
        """Judges proposals, commits tokens, and ends requests whose last token has come.

        Rows that ended while the step was under way are passed over.

        Raises:
            InvalidArgumentError: if the answer breaks the contract; nothing was committed.
        """
        assert self.target is not None
        step_id = batch.step.step_id
        require(result.step_id == step_id, "step_id", result.step_id, f"must be {step_id}")
        answered = [row for row in batch.rows if row.wants_output]
        is_shaped = batch.step.sampling.shaping is not None
        verdicts = judge(answered, result, self.target.grant.vocab_size, shaped=is_shaped)
        features = split_features(batch, verdicts, result, self.target.grant.feature_width)
        vocab_size = self.target.grant.vocab_size
        logprobs = split_logprobs(batch.rows, batch.step.logprobs, result.logprobs, vocab_size)
        for row, found in zip(batch.rows, logprobs, strict=True):
            if row.request.target is row.cache:
                if found.scored:
                    row.request.prompt_logprobs += found.scored
                if not row.wants_output:
                    row.cache.commit(row.request.tokens, row.end)
        of_answered = [found for row, found in zip(batch.rows, logprobs, strict=True) if row.wants_output]
        runs = [
            self._accept_row(row, verdict, found)
            for row, verdict, found in zip(answered, verdicts, of_answered, strict=True)
            if row.request.target is row.cache
        ]
        self._suspects.answered([row.request for row in answered])
        for row, new in features:
            if row.request.target is row.cache:
                row.request.features = self.drafting.keep(row.request, new)
        return runs + self._end_without_tokens(batch.rows)

    def step_refused(self, batch: TargetBatch) -> Request | None:
        """The target did not run the step; returns the row at fault once it is known.

        What it cached stays, and its rows are in later steps, not all in the same one; see ``suspects``.
        """
        if self.target is not None:
            self.target.copies[:0] = [(source, slot) for source, slot in batch.step.rows.slot_copies.tolist()]
        return self._suspects.refused([row.request for row in batch.rows])

    def step_lost(self, batch: TargetBatch) -> Request | None:
        """The target was lost while it ran the step, or answered it wrongly; returns the row at fault once it is known.

        Comes beside ``target_lost``, before or after.
        """
        return self._suspects.lost([row.request for row in batch.rows])

    # Planning

    def _node_budget(self, target: Target) -> int:
        """Draft tokens that the target's next step has room for beside one token of every row."""
        return target.grant.max_step_tokens - len(self.rows)

    def _plan_running(self, nodes: Mapping[str, int]) -> tuple[list[RowPlan], bool]:
        plans: list[RowPlan] = []
        preempted = False
        for request in list(self.rows):
            if request.state is not State.RUNNING or not self._may_join(request, plans):
                continue  # it prefills, or a row before it has just preempted it, or it is a suspect
            room = nodes.get(request.id, 0)
            cache = _cache(request)
            if not cache.try_reserve(request.length + room):  # rather no proposal than another row's work undone
                room = 0
            while request.state is State.RUNNING and not cache.try_reserve(request.length + room):
                self._preempt(self.rows[-1])
                preempted = True
            if request.state is State.RUNNING:
                plans.append(RowPlan(request, cache, request.length - 1, request.length, True, True, room))
        return plans, preempted

    def _plan_chunk(self, request: Request, budget: int, plans: list[RowPlan]) -> int:
        """Plans the next prefill chunk within the budget; returns its tokens."""
        cache = _cache(request)
        count = min(request.length - cache.length, budget) if self._may_join(request, plans) else 0
        if count > 0:
            end = cache.length + count
            wants_output = end == request.length and request.params.max_tokens > 0
            plans.append(RowPlan(request, cache, cache.length, end, False, wants_output))
        return max(count, 0)

    def _may_join(self, request: Request, plans: Iterable[RowPlan]) -> bool:
        return self._suspects.may_join(request, (plan.request for plan in plans))

    def _admit(self, request: Request, plans: Iterable[RowPlan]) -> bool:
        """Schedules the first waiting request if its pages fit beside everybody's worst case next round."""
        assert self.target is not None
        if len(self.rows) >= min(self.limits.max_rows, self.target.grant.max_step_tokens):
            return False
        if not self._may_join(request, plans):
            return False
        cache = RowCache(self.target.pool)
        cache.attach(request.tokens[: request.reusable])
        slots = min(request.length + 1 + request.draft_limit, len(request.prompt) + request.params.max_tokens)
        headroom = sum(_cache(row).missing(_next_round_slots(row)) for row in self.rows)
        if cache.missing(slots) + headroom > self.target.pool.available:
            cache.release()
            return False
        cache.reserve(slots)
        if request.cached_tokens is None:
            request.cached_tokens = cache.length
        del self.waiting[0]
        request.move(State.PREFILL)
        request.target = cache
        self.rows.append(request)
        return True

    def _preempt(self, request: Request) -> None:
        request.preemptions += 1
        self._unschedule(request)

    def _unschedule(self, request: Request) -> None:
        request.move(State.WAITING)
        request.drop_target()
        request.drop_draft()
        self.rows.remove(request)
        self._wait(request)

    def _wait(self, request: Request) -> None:
        insort(self.waiting, request, key=_ORDER)

    def _fits(self, request: Request, target: Target) -> bool:
        try:
            self._require_fit(request, target)
        except InvalidArgumentError:
            return False
        return True

    def _require_fit(self, request: Request, target: Target) -> None:
        grant = target.grant
        _require_room(len(request.prompt), request.params.max_tokens, grant)
        known = f"must be in [0, {grant.vocab_size})"
        require_range(request.prompt, "prompt token_ids", 0, grant.vocab_size - 1, known)
        for token_id in request.params.end_token_ids:
            require(0 <= token_id < grant.vocab_size, "stop_token_ids", token_id, known)
        if request.params.wants_logprobs:
            name = "logprobs" if request.params.logprobs is not None else "prompt_logprobs"
            require(grant.gives_logprobs, name, "given", f"target {grant.model_id} has none; leave it out")
        if request.params.is_shaped:
            _require_shapeable(request.params, grant)

    # Accepting

    def _end_without_tokens(self, rows: Sequence[RowPlan]) -> list[Run]:
        """Ends the requests that want none, and whose prompt is computed now."""
        runs = []
        for row in rows:
            request = row.request
            if not request.params.max_tokens and row.end == request.length and request.target is row.cache:
                self.finish(request)
                runs.append(Run(request, (), (), 0, False, FinishReason.LENGTH))
        return runs

    def _accept_row(self, row: RowPlan, verdict: Verdict, logprobs: RowLogprobs) -> Run:
        assert self.target is not None
        request, proposal, path = row.request, row.proposal, verdict.path
        params = request.params
        request.round_index += 1
        accepted = proposal.token_ids[: len(path)] if proposal.is_chain else proposal.token_ids[list(path)]
        tokens = [*accepted.tolist(), verdict.token]
        kept, reason = cut_run(tokens, request.generated, params.max_tokens, params.end_token_ids)
        self.drafting.accepted(request, proposal, path)
        if not proposal.is_chain:
            self.target.copies += [
                (row.cache.slot(row.end + node), row.cache.slot(row.end + depth))
                for depth, node in enumerate(path)
                if node != depth
            ]
        del tokens[kept:]
        is_stuck = tokens[-1] == NOTHING_FOLLOWS
        if is_stuck:
            tokens.pop()
            reason = None
        request.append(tokens)
        row.cache.commit(request.tokens, min(row.end + len(path), request.length))
        if not row.is_round:
            request.move(State.RUNNING)
        if reason is not None or is_stuck:
            self.finish(request)
        kinds = (*[TokenKind.ACCEPTED] * len(path), verdict.kind)[: len(tokens)]
        shown = Judged(proposal, path[:kept]) if params.show_proposals and len(proposal.token_ids) else None
        found = logprobs.of(verdict, tokens)
        return Run(
            request, tuple(tokens), kinds, proposal.depth, row.is_round, reason, found, shown, is_stuck, row.drafter
        )


def _require_room(prompt: int, max_tokens: int, grant: Grant) -> None:
    """So many tokens fit the target's model and its pages."""
    most = grant.max_len - min(max_tokens, 1)
    require(prompt <= most, "prompt", f"{prompt} tokens", f"at most {most} fit this model")
    advice = f"at most {grant.max_len - prompt} fit after a prompt of {prompt} tokens (length {grant.max_len})"
    require(prompt + max_tokens <= grant.max_len, "max_tokens", max_tokens, advice)
    slots = grant.page_count * grant.page_size
    advice = f"with {prompt} of the prompt: the server has cache for {slots} in all; start the target with more --pages"
    require(prompt + max_tokens <= slots, "max_tokens", max_tokens, advice)


def _require_shapeable(params: Params, grant: Grant) -> None:
    """The target can do what a request asks for, and leaves it a token to go on with."""
    shaping, vocab_size = params.shaping, grant.vocab_size
    asked = ", ".join(field.name for field in fields(NOTHING) if getattr(shaping, field.name) != field.default)
    require(grant.shapes_logits, asked, "given", f"target {grant.model_id} draws without logits; leave it out")
    ids = [("logit_bias", token_id) for token_id, _ in shaping.logit_bias]
    for name, token_id in ids + [("allowed_token_ids", token_id) for token_id in shaping.allowed_token_ids]:
        require(0 <= token_id < vocab_size, name, f"of token {token_id}", f"ids must be in [0, {vocab_size})")
    barred = shaping.banned_token_ids | (params.end_token_ids if shaping.min_tokens else frozenset())
    allowed = set(shaping.allowed_token_ids)
    left = len(allowed - barred) if allowed else vocab_size - len(barred)
    require(left > 0, "allowed_token_ids", "used up", "bans and min_tokens must leave a token to go on with")


def _cache(request: Request) -> RowCache:
    assert request.target is not None
    return request.target


def _next_round_slots(request: Request) -> int:
    """Slots a row may need by the end of its next round, whatever this round accepts."""
    most = len(request.prompt) + request.params.max_tokens
    return min(request.length + 2 * (1 + request.draft_length), most)


def _grow_trees(replicas: Iterable[Replica]) -> bool:
    return any(replica.capabilities.tree_width for replica in replicas)
