"""The real core driven by fake workers under a virtual clock.

The clock is in microseconds and moves by what each worker is said to cost, so that late replicas and
overlap can be played out without waiting. ``Simulator.round`` is the loop of ``orchestrator/loop.py``
without its IO, and records a line per event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from fakes import FakeDraft, FakeHead, FakeTarget, grant, logprob, top_logprobs

from orchestrator.core.acceptance import TokenKind
from orchestrator.core.draft_steps import DraftPlan, FeatureRead
from orchestrator.core.requests import Params, Request, State
from orchestrator.core.rounds import Run
from orchestrator.core.scheduler import Limits, Scheduler
from orchestrator.core.target_steps import TargetBatch
from pilotfish.errors import InvalidArgumentError, PilotfishError
from pilotfish.steps import DraftResult, Grant, ProposalKind

KIND_LETTERS = {TokenKind.ACCEPTED: "a", TokenKind.RECOVERED: "r", TokenKind.BONUS: "b"}


@dataclass
class Costs:
    """What a worker's step takes, in virtual microseconds."""

    step: int
    token: int


@dataclass
class SimReplica:
    fake: FakeDraft
    costs: Costs
    busy_until: int = 0
    prefills_until: int = 0
    owed: list[tuple[int, DraftResult]] = field(default_factory=list)


@dataclass
class Simulator:
    """A deployment.

    Attributes:
        read_rounds: rounds after which features that are read from the target come; 0: in the same.
        now: virtual time in microseconds.
        texts: tokens that each request has got so far.
        trace: what happened, a line an event.
        make_target, make_draft: what is opened; a step at which one raises is refused, or costs the worker.
        failed: requests that the target failed at.
    """

    limits: Limits = field(default_factory=Limits)
    page_size: int = 4
    target_costs: Costs = field(default_factory=lambda: Costs(1000, 10))
    draft_deadline: int = 5000
    read_rounds: int = 0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits)
        self.target: FakeTarget | None = None
        self.replicas: dict[str, SimReplica] = {}
        self.requests: dict[str, Request] = {}
        self.texts: dict[str, list[int]] = {}
        self.kinds: dict[str, str] = {}
        self.now = 0
        self.rounds = 0
        self.trace: list[str] = []
        self._noted: list[str] = []  # in the round under way
        self.reads: list[tuple[int, FeatureRead]] = []  # under way, and the round in which each is answered
        self.early: list[tuple[str, DraftPlan, DraftResult]] = []  # sent with the last answer of the target
        self.early_rows = 0  # that have got a proposal so
        self.make_target: Callable[[Grant], FakeTarget] = FakeTarget
        self.make_draft: Callable[[Grant, float, int], FakeDraft] = FakeDraft
        self.failed: set[str] = set()

    # Events

    def open_target(
        self, pages: int, first_page: int = 0, features: tuple[str, ...] = (), max_step_tokens: int = 256
    ) -> None:
        given = grant(pages, self.page_size, first_page, features=features, max_step_tokens=max_step_tokens)
        self.target = self.make_target(given)
        for request in self.scheduler.target_opened(given):
            self.scheduler.finish(request)
        for name in self.scheduler.drafting.misfits():
            self.lose_draft(name)

    def lose_target(self) -> None:
        self.scheduler.target_lost()
        self.target = None
        self.fail_reads()

    def open_draft(
        self,
        name: str,
        pages: int,
        agreement: float = 0.7,
        branches: int = 1,
        costs: Costs | None = None,
        kinds: tuple[ProposalKind, ...] = tuple(ProposalKind),
        features: tuple[str, ...] = (),
        max_step_tokens: int = 256,
    ) -> None:
        given = grant(pages, self.page_size, features=features, max_step_tokens=max_step_tokens)
        fake = (FakeHead if features else self.make_draft)(given, agreement, branches)
        self.replicas[name] = SimReplica(fake, costs or Costs(100, 1))
        self.scheduler.drafting.opened(name, given, replace(fake.capabilities, kinds=kinds))

    def fail_reads(self) -> None:
        """Features that were asked for do not come."""
        for _, read in self.reads:
            self.scheduler.drafting.give_up(read)
        self.reads.clear()

    def lose_draft(self, name: str, failed_step: int | None = None) -> None:
        del self.replicas[name]
        guilty = self.scheduler.drafting.lost(name, self.scheduler.rows, failed_step)
        if guilty is not None:
            self.trace.append(f"  {guilty.id} drafts no more")

    def lose_step(self, batch: TargetBatch, error: PilotfishError) -> None:
        """The target refuses a step, or is lost at it and comes back with empty pages."""
        self.trace.append(f"  the target fails: {error}")
        if isinstance(error, InvalidArgumentError):
            guilty = self.scheduler.step_refused(batch)
        else:
            assert self.target is not None
            given = self.target.grant
            self.lose_target()
            guilty = self.scheduler.step_lost(batch)
            self.target = self.make_target(given)
            self.scheduler.target_opened(given)
        if guilty is not None:
            self.scheduler.finish(guilty)
            self.failed.add(guilty.id)

    def submit(
        self, name: str, prompt: list[int], max_tokens: int, draft_length: int | None, **options: object
    ) -> Request:
        priority = options.pop("priority", 0)
        params = Params(max_tokens=max_tokens, draft_length=draft_length, **options)  # type: ignore[arg-type]
        request = Request(name, np.array(prompt, np.int32), params, priority)  # type: ignore[arg-type]
        self.scheduler.submit(request)
        self.requests[name] = request
        self.texts[name], self.kinds[name] = [], ""
        return request

    def cancel(self, name: str) -> None:
        self.scheduler.finish(self.requests[name])

    # Rounds

    def round(self) -> None:
        """One round; does nothing without work."""
        if not self.scheduler.has_work:
            return
        assert self.target is not None
        self.rounds += 1
        began = self.now
        early, self.early = self.early, []
        self._settle_owed()
        early_drafts = [plan for _, plan, _ in early]
        drafts = self.scheduler.plan_proposals(early_drafts)
        asked = [*early_drafts, *drafts.values()]
        started = self.now
        proposals = self._early_proposals(early)
        self.early_rows += len(proposals)
        for name, plan in drafts.items():
            proposals |= self._propose(name, plan, started)
        draft_seconds = (self.now - started) / 1e6
        preempted = {name: request.preemptions for name, request in self.requests.items()}
        plan = self.scheduler.plan_target(asked)
        preempted = {name for name, request in self.requests.items() if request.preemptions > preempted[name]}
        kept = max((row.order for row in self.scheduler.rows), default=None)
        assert not preempted or kept is None or kept < min(self.requests[name].order for name in preempted)
        batch = self.scheduler.seal(plan, proposals)
        if batch is None:
            return
        self.scheduler.choose_draft_lengths()
        catch_up = self.scheduler.plan_catch_up(batch)
        for name, plan_ in catch_up.items():
            self._try_draft(name, plan_, self.now)
        self._read(batch)
        try:
            result = self.target.run(batch.step)
        except PilotfishError as error:
            self.lose_step(batch, error)
            return
        before = self.now
        early_plans = self.scheduler.plan_early(batch)
        self.now += self.target_costs.step + self.target_costs.token * len(batch.step.rows.token_ids)
        for name, plan_ in self.scheduler.draft_early(early_plans, result).items():
            self.early.append((name, plan_, self._run_draft(name, plan_, self.now)))
        runs = self.scheduler.accept(batch, result)
        self.scheduler.timed(batch, asked, runs, (self.now - began) / 1e6, draft_seconds)
        for run in runs:
            self._check_logprobs(run)
            self._check_shown(run)
            self.texts[run.request.id] += run.token_ids
            self.kinds[run.request.id] += "".join(KIND_LETTERS[kind] for kind in run.kinds)
        self._record(started, before, batch, runs, drafts, catch_up, preempted)
        self.check()

    def run(self, most: int = 10_000) -> None:
        """Rounds until nothing is left to do."""
        for _ in range(most):
            if not self.scheduler.has_work:
                return
            self.round()
        raise AssertionError(f"work is left after {most} rounds: a livelock?")

    def check(self) -> None:
        """Every invariant of every pool, and that no row is in two places."""
        scheduler = self.scheduler
        pools = [replica.pool for replica in scheduler.drafting.replicas.values()]
        if scheduler.target is not None:
            pools.append(scheduler.target.pool)
        for pool in pools:
            pool.check()
        assert all(row.state in (State.PREFILL, State.RUNNING) for row in scheduler.rows)
        assert all(row.state is State.WAITING and row.target is None for row in scheduler.waiting)
        for rows in (scheduler.waiting, scheduler.rows):
            orders = [row.order for row in rows]
            assert orders == sorted(orders), "requests are out of order"
        if not scheduler.rows and not scheduler.waiting:
            assert all(pool.available == pool.page_count for pool in pools), "pages leaked"

    def _check_logprobs(self, run: Run) -> None:
        """They are there if they were asked for, and each is its token's in its place."""
        request = run.request
        prompt, written = tuple(request.prompt.tolist()), self.texts[request.id]
        for asked, tokens, found, first in (
            (request.params.logprobs, [*written, *run.token_ids], run.logprobs, len(prompt) + len(written)),
            (request.params.prompt_logprobs, [], request.prompt_logprobs, 1),
        ):
            history = (*prompt, *tokens)
            expected = range(first, len(history)) if asked is not None else range(0)
            assert len(found) == len(expected)
            for place, token in zip(expected, found, strict=True):
                assert abs(token.logprob - logprob(history[:place], history[place])) < 1e-4
                tops = top_logprobs(history[:place], asked or 0)
                assert [token_id for token_id, _ in token.top] == [token_id for token_id, _ in tops]
                assert np.allclose([value for _, value in token.top], [value for _, value in tops], atol=1e-4)

    @staticmethod
    def _check_shown(run: Run) -> None:
        """A proposal is shown if there was one and it was asked for, and the run begins with what was kept of it."""
        assert (run.judged is not None) == (run.request.params.show_proposals and run.drafted > 0)
        if run.judged is not None:
            proposal, path = run.judged
            assert tuple(proposal.token_ids[list(path)].tolist()) == run.token_ids[: len(path)]
            assert [proposal.parents[node] for node in path] == [-1, *path][: len(path)]
            assert run.kinds.count(TokenKind.ACCEPTED) == len(path)

    def _read(self, batch: TargetBatch) -> None:
        """Asks for features, and sends the steps of those that have come."""
        assert self.target is not None
        for read in self.scheduler.plan_reads(batch):
            self._noted.append(f"  {read.replica.name} reads {len(read.slots)}")
            self.reads.append((self.rounds + self.read_rounds, read))
        due = [read for at, read in self.reads if at <= self.rounds]
        self.reads = [(at, read) for at, read in self.reads if at > self.rounds]
        for read in due:
            plan = self.scheduler.drafting.plan_read(read, self.target.read_features(read.slots))
            if plan is not None:
                self._noted.append(f"  {read.replica.name} follows {_ids(plan)}")
                self._run_draft(read.replica.name, plan, self.now)

    def _early_proposals(self, early: list[tuple[str, DraftPlan, DraftResult]]) -> dict:
        proposals = {}
        for name, plan, result in early:
            if name in self.replicas:
                self.now = max(self.now, self.replicas[name].busy_until)
                proposals |= plan.proposals(result, grant(1).vocab_size)
        return proposals

    def _propose(self, name: str, plan: DraftPlan, sent_at: int) -> dict:
        result = self._try_draft(name, plan, sent_at)
        if result is None:
            return {}
        replica = self.replicas[name]
        if replica.busy_until - sent_at > self.draft_deadline:
            self.scheduler.drafting.replicas[name].is_late = True
            replica.owed.append((replica.busy_until, result))
            self.now = max(self.now, sent_at + self.draft_deadline)
            return {}
        self.now = max(self.now, replica.busy_until)
        try:
            proposals = plan.proposals(result, grant(1).vocab_size)
        except PilotfishError as error:
            self.trace.append(f"  {name} answered garbage: {error}")
            self.lose_draft(name)
            return {}
        self.scheduler.drafting.answered(plan)
        return proposals

    def _try_draft(self, name: str, plan: DraftPlan, sent_at: int) -> DraftResult | None:
        """As ``_run_draft``; a replica that fails is lost, and comes back with empty pages."""
        try:
            return self._run_draft(name, plan, sent_at)
        except PilotfishError as error:
            self.trace.append(f"  lost {name}: {error}")
            fake = self.replicas[name].fake
            self.lose_draft(name, plan.step.step_id)
            self.open_draft(name, fake.grant.page_count, fake.agreement, fake.branches)
            return None

    def _run_draft(self, name: str, plan: DraftPlan, sent_at: int) -> DraftResult:
        replica = self.replicas[name]
        tokens = len(plan.step.rows.token_ids) + int(plan.step.draft_lengths.sum())
        replica.busy_until = max(replica.busy_until, sent_at) + replica.costs.step + replica.costs.token * tokens
        if not plan.step.draft_lengths.any():
            replica.prefills_until = replica.busy_until
        return replica.fake.run(plan.step)

    def _settle_owed(self) -> None:
        for name, replica in self.replicas.items():
            if replica.owed and replica.owed[-1][0] <= self.now:
                replica.owed.clear()
            known = self.scheduler.drafting.replicas[name]
            is_behind = bool(replica.owed) or replica.prefills_until > self.now
            known.begin_round(is_late=bool(replica.owed), is_behind=is_behind)

    def _record(
        self,
        started: int,
        verified_from: int,
        batch: TargetBatch,
        runs: list[Run],
        drafts: dict[str, DraftPlan],
        catch_up: dict[str, DraftPlan],
        preempted: set[str],
    ) -> None:
        self.trace.append(f"round {self.rounds} at {started}: drafted by {verified_from}, verified by {self.now}")
        for name, plan in drafts.items():
            self.trace.append(f"  {name} proposes for {_ids(plan)}")
        for name, plan in catch_up.items():
            self.trace.append(f"  {name} catches up {_ids(plan)}")
        self.trace += [*self._noted, *(f"  preempt {name}" for name in sorted(preempted))]
        self._noted.clear()
        for row in batch.rows:
            if row.is_round:
                self.trace.append(f"  verify {row.request.id} from {row.start}, {len(row.proposal.token_ids)} drafted")
            else:
                self.trace.append(f"  prefill {row.request.id} [{row.start}, {row.end})")
        for run in runs:
            kinds = "".join(KIND_LETTERS[kind] for kind in run.kinds)
            ending = f", ends: {run.reason.name.lower()}" if run.reason is not None else ""
            self.trace.append(f"  {run.request.id} +{len(run.token_ids)} {kinds}{ending}")


def _ids(plan: DraftPlan) -> str:
    return " ".join(request.id for request, *_ in plan.rows)
