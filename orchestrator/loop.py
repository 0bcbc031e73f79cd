"""The loop: steps target and draft replicas in lockstep, one round after another.

    draft      ▐ extend, propose ▌                      ▐ extend, propose ▌
    loop       ▐ emit, plan      ▌▐ catch up, emit   ▌▐ accept ▌
    target                        ▐ verify, prefill  ▌
    features                       ▐ read ▌ catch up

The critical path of a round is draft, target, two hops and ``accept``; text is detokenised and sent,
and the next batch planned, while a worker is busy. Sending text to hundreds of clients takes longer than
a draft step, so it is done a few rows at a time: an answer that comes meanwhile waits for those few only.

Features that are read from the target for rows that catch up become a draft step while the target is
busy, in this round or a later one: never while replicas draft, which would wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from orchestrator.core.draft_steps import DraftPlan, FeatureRead
from orchestrator.core.proposals import Proposal
from orchestrator.core.requests import Request
from orchestrator.core.rounds import Run
from orchestrator.core.scheduler import Scheduler
from orchestrator.core.target_steps import TargetBatch
from orchestrator.outputs import Output
from orchestrator.trace import NO_TRACE, Trace
from orchestrator.usage import RoundTimes
from orchestrator.workers import Backoff, Reply, StepRefusedError, WorkerStream
from pilotfish.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    PilotfishError,
    UnavailableError,
)
from pilotfish.steps import DraftResult, DraftStep, Grant, Ints, TargetResult, TargetStep

log = logging.getLogger(__name__)

TargetStream = WorkerStream[TargetStep, TargetResult]
DraftStream = WorkerStream[DraftStep, DraftResult]
ReadFeatures = Callable[[Grant, Ints], Awaitable[npt.NDArray[Any]]]
"""As ``FeatureReader.read``."""

EMIT_ROWS = 8
"""Rows whose text is sent before anything else has its turn."""

EMIT_EARLY = 32
"""Most rows whose text is sent while replicas draft; more wait for the target, unless drafting took longer."""

STUCK = (
    "after {} tokens no token may follow: the grammar, allowed_token_ids, banned_token_ids and a logit_bias of -100 "
    "leave none, or the grammar takes too long to say; ask for less"
)

SETTLE_S = 0.001
"""How long the choice of draft lengths leaves the processor to the step that was sent and to the text before it."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A draft step under way, and the ``time.perf_counter`` seconds at which it was sent."""

    plan: DraftPlan
    stream: DraftStream
    reply: asyncio.Future[Reply[DraftResult]]
    sent_at: float


class RoundClock:
    """Splits one round into its parts; all in seconds of ``time.perf_counter``."""

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._waited = 0.0
        self.draft_seconds = 0.0
        self._target_us = 0
        self._draft_us = 0
        self._feature_read_us = 0
        self._feature_bytes = 0

    def sent(self, asked: Sequence[_Asked]) -> None:
        """Counts the features of draft steps."""
        self._feature_bytes += sum(_bytes(each.plan.step.features) for each in asked)

    def read(self, begin: float, end: float, features: npt.NDArray[Any]) -> None:
        """Counts features that were read from the target; the longest read counts, as reads go on side by side."""
        self._feature_read_us = max(self._feature_read_us, int((end - begin) * 1e6))
        self._feature_bytes += features.nbytes

    def drafted(self, asked: Sequence[_Asked], replies: list[Reply[DraftResult]], given_up_at: float) -> None:
        """Counts proposal steps; the slowest replica is the one that was waited for.

        Args:
            asked: the steps.
            replies: that came.
            given_up_at: when the last that did not come was given up; 0 if all came.
        """
        begin = max(min((each.sent_at for each in asked), default=0.0), self._begin)
        self.draft_seconds = max([begin, given_up_at, *(reply.arrived_at for reply in replies)]) - begin
        self._waited += self.draft_seconds
        self._draft_us = max((reply.result.compute_us for reply in replies), default=0)

    def verified(self, sent_at: float, reply: Reply[TargetResult]) -> None:
        """Counts the target step."""
        self._waited += reply.arrived_at - sent_at
        self._target_us = reply.result.compute_us
        self._feature_bytes += _bytes(reply.result.features)

    def split(self, end: float) -> RoundTimes:
        """The round's parts, ending now."""
        waited_us = int(self._waited * 1e6)
        return RoundTimes(
            target_us=self._target_us,
            draft_us=self._draft_us,
            hops_us=max(0, waited_us - self._target_us - self._draft_us),
            orchestrator_us=max(0, int((end - self._begin) * 1e6) - waited_us),
            feature_read_us=self._feature_read_us,
            feature_bytes=self._feature_bytes,
        )


@dataclass(frozen=True, slots=True)
class _Answered:
    """A read that has ended, when it began and when it ended; its features, or why there are none."""

    read: FeatureRead
    begin: float
    end: float
    features: npt.NDArray[Any] | PilotfishError


class Loop:
    """Drives a scheduler against its workers and hands each request's tokens to its output.

    Args:
        scheduler: the pure core; nobody else touches it.
        read_features: from the target.
        draft_timeout_s: how long a round waits for proposals, and rows that catch up for features.
        target_timeout_s: how long requests wait for a target that went away.
        step_timeout_s: how long the target may take for a step before it is given up.
        trace: of what happens when.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        read_features: ReadFeatures,
        draft_timeout_s: float,
        target_timeout_s: float,
        step_timeout_s: float = 300.0,
        trace: Trace = NO_TRACE,
    ) -> None:
        self.scheduler = scheduler
        self._read_features = read_features
        self._reads: set[asyncio.Task[_Answered]] = set()
        self._read_backoff = Backoff()
        self._no_reads_before = 0.0  # time.perf_counter seconds: the last one failed
        self._early: list[_Asked] = []  # sent with the last answer of the target
        self._trace = trace
        trace.watch(scheduler)
        self.target: TargetStream | None = None
        self.drafts: dict[str, DraftStream] = {}
        self._draft_timeout_s = draft_timeout_s
        self._target_timeout_s = target_timeout_s
        self._step_timeout_s = step_timeout_s
        self._outputs: dict[Request, Output] = {}
        self._runs: deque[tuple[Run, RoundTimes]] = deque()  # accepted, not yet emitted
        self._may_emit = asyncio.Event()
        self._times = RoundTimes()  # of the last round
        self._wake = asyncio.Event()
        self._given_up: UnavailableError | None = None
        self._giving_up: asyncio.TimerHandle | None = None
        self._round_began = 0.0

    # Requests

    def require_room(self, prompt: int, max_tokens: int) -> None:
        """See ``Scheduler.require_room``."""
        self.scheduler.require_room(prompt, max_tokens)

    def submit(self, request: Request, output: Output) -> None:
        """Queues a request; its tokens go to ``output``.

        Raises:
            PilotfishError: the request cannot be taken; see ``Scheduler.submit``.
        """
        if self._given_up is not None:
            raise self._given_up
        self.scheduler.submit(request)
        self._outputs[request] = output
        self._wake.set()

    def cancel(self, request: Request) -> None:
        """Ends a request whose client has left; harmless if it has ended."""
        self.scheduler.finish(request)
        self._outputs.pop(request, None)

    def fail(self, request: Request, error: PilotfishError) -> None:
        """Ends a request with an error; harmless if it has ended."""
        output = self._outputs.get(request)
        self.cancel(request)
        if output is not None:
            output.fail(error)

    # Workers

    def target_opened(self, stream: TargetStream) -> None:
        """A target answers; requests that cannot fit it fail."""
        self.target = stream
        stream.on_answer = self._trace.worker("target", stream.address)
        for request in self.scheduler.target_opened(stream.grant):
            self.fail(request, FailedPreconditionError("the target came back with too few pages for this request"))
        for address, error in self.scheduler.drafting.misfits().items():
            misfit = self.drafts[address]
            self.draft_lost(misfit, error)
            misfit.close(error)  # its link tries again, and says why that is no use
        self._given_up = None
        self._read_again()
        if self._giving_up is not None:
            self._giving_up.cancel()
        self._wake.set()

    def target_lost(self, stream: TargetStream, reason: PilotfishError) -> None:
        """The target went away; its rows wait for another for a while."""
        self.target = None
        self.scheduler.target_lost()
        self._giving_up = asyncio.get_running_loop().call_later(self._target_timeout_s, self._give_up, reason)

    def draft_opened(self, stream: DraftStream) -> None:
        """A draft replica answers.

        Raises:
            PilotfishError: it wants features that the target does not have; see ``Drafting.opened``.
        """
        self.scheduler.drafting.opened(stream.address, stream.grant, stream.capabilities)
        self.drafts[stream.address] = stream
        stream.on_answer = self._trace.worker("draft", stream.address)

    def draft_lost(self, stream: DraftStream, reason: PilotfishError) -> None:
        """A draft replica went away; its rows go on without proposals and move to another."""
        self.drafts.pop(stream.address, None)
        guilty = self.scheduler.drafting.lost(stream.address, self.scheduler.rows, stream.failed_step)
        if guilty is not None:
            log.warning("request %s goes on without a draft: replicas fail at it (%s)", guilty.id, reason)

    # Rounds

    async def run(self) -> None:
        """Runs rounds for ever; a bug in one fails the requests it held, not the service."""
        emitting = asyncio.create_task(self._emit_runs(), name="emit")
        try:
            await self._run_rounds()
        finally:
            emitting.cancel()
            for read in self._reads:
                read.cancel()

    async def _run_rounds(self) -> None:
        while True:
            if not self.scheduler.has_work:
                self._may_emit.set()
                self._wake.clear()
                await self._wake.wait()
                self._round_began = time.perf_counter()
                continue
            try:
                await self._round()
            except Exception as error:
                log.exception("a round failed; its requests fail, and the workers start afresh")
                await self._start_afresh(InternalError(f"a round failed: {type(error).__name__}: {error}"))

    async def _round(self) -> None:
        """One round. Workers may come and go at every await: a target that is no longer ours ends it."""
        target, clock = self.target, RoundClock(self._round_began)
        asked, self._early = self._early, []
        early = {each.stream.address: each.plan.step.step_id for each in asked}
        for name, stream in self.drafts.items():
            replica = self.scheduler.drafting.replicas[name]
            replica.begin_round(is_late=stream.is_late, is_behind=stream.next_due not in (None, early.get(name)))
        drafts = self.scheduler.plan_proposals([each.plan for each in asked])
        asked += await self._send(drafts, self._draft_timeout_s)
        clock.sent(asked)
        if asked and (len(self._runs) <= EMIT_EARLY or self._times.draft_us > self._times.target_us):
            self._may_emit.set()
        if target is None or self.target is not target:
            return
        plan = self.scheduler.plan_target([each.plan for each in asked])
        proposals = await self._collect(asked, target.grant.vocab_size, clock)
        batch = self.scheduler.seal(plan, proposals) if self.target is target else None
        if batch is None:
            return
        self._note_scheduled(batch)
        sent_at, reply = time.perf_counter(), await target.submit(batch.step, self._step_timeout_s)
        self._may_emit.set()
        if self.scheduler.is_adaptive:
            await asyncio.wait({reply}, timeout=SETTLE_S)
        self.scheduler.choose_draft_lengths()
        await self._send(self.scheduler.plan_catch_up(batch))
        if time.perf_counter() >= self._no_reads_before:
            self._reads |= {self._begin(read, target.grant) for read in self.scheduler.plan_reads(batch)}
        early_plans = self.scheduler.plan_early(batch)
        await self._follow(clock)  # first, so that rows catch up however quickly the target answers
        while self._reads and not reply.done():
            under_way: set[asyncio.Future[Any]] = {reply, *self._reads}
            await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            await self._follow(clock)
        try:
            verified = await reply
            clock.verified(sent_at, verified)
            early_drafts = self.scheduler.draft_early(early_plans, verified.result)
            self._early = await self._send(early_drafts, self._draft_timeout_s)
            runs = self.scheduler.accept(batch, verified.result) if self.target is target else []
        except PilotfishError as error:
            await self._step_failed(target, batch, error)
            runs = []
        now = time.perf_counter()
        self.scheduler.timed(batch, [each.plan for each in asked], runs, now - self._round_began, clock.draft_seconds)
        times = self._times = clock.split(now)
        self._trace.round(self._round_began, now, len(batch.rows), times)
        self._round_began = now
        self._runs += [(run, times) for run in runs]

    async def _step_failed(self, target: TargetStream, batch: TargetBatch, error: PilotfishError) -> None:
        """The step was refused, its stream ended, or its answer breaks the contract: the request that it failed at
        ends once it is known, and all others are in later steps."""
        if isinstance(error, StepRefusedError) and self.target is target:
            log.warning("the target refused a step: %s", error)
            guilty = self.scheduler.step_refused(batch)
            reason: PilotfishError = InvalidArgumentError(f"the target refuses this request: {error}")
        else:
            guilty = None if target.was_stopped else self.scheduler.step_lost(batch)
            reason = InternalError(f"the target failed twice at this request, which is not tried again: {error}")
            await _end(target, error)
        if guilty is not None:
            log.error("request %s: %s", guilty.id, reason)
            self.fail(guilty, reason)

    async def _send(self, plans: Mapping[str, DraftPlan], timeout_s: float | None = None) -> list[_Asked]:
        # Chosen before the first await: a replica that is lost and opened again has other pages.
        to, sent_at = [(plan, self.drafts[name]) for name, plan in plans.items()], time.perf_counter()
        replies = await asyncio.gather(*(stream.submit(plan.step, timeout_s) for plan, stream in to))
        return [_Asked(plan, stream, reply, sent_at) for (plan, stream), reply in zip(to, replies, strict=True)]

    def _begin(self, read: FeatureRead, grant: Grant) -> asyncio.Task[_Answered]:
        return asyncio.create_task(self._answer(read, grant, time.perf_counter()), name="read features")

    async def _answer(self, read: FeatureRead, grant: Grant, begin: float) -> _Answered:
        """Reads features until the deadline."""
        features: npt.NDArray[Any] | PilotfishError
        try:
            async with asyncio.timeout(self._draft_timeout_s):
                features = await self._read_features(grant, read.slots)
        except TimeoutError:
            features = DeadlineExceededError(f"features did not come within {self._draft_timeout_s:g} s")
        except PilotfishError as error:
            features = error
        return _Answered(read, begin, time.perf_counter(), features)

    async def _follow(self, clock: RoundClock) -> None:
        """Sends the steps of reads that have ended; rows whose features did not come look for another place."""
        drafting, ended = self.scheduler.drafting, {task for task in self._reads if task.done()}
        self._reads -= ended
        for answer in [task.result() for task in ended]:
            try:
                if isinstance(answer.features, PilotfishError):
                    raise answer.features
                plan = drafting.plan_read(answer.read, answer.features)
            except PilotfishError as error:
                log.warning("no features to catch up with: %s; their rows go on without proposals", error)
                drafting.give_up(answer.read)
                self._read_later()
                continue
            self._read_again()
            clock.read(answer.begin, answer.end, answer.features)
            self._trace.read(answer.begin, answer.end, len(answer.read.slots))
            if plan is not None:
                clock.sent(await self._send({answer.read.replica.name: plan}))

    def _read_later(self) -> None:
        """What failed once would fail again in the next round, and in every one."""
        now = time.perf_counter()
        if now >= self._no_reads_before:  # of reads side by side the first to fail counts
            self._no_reads_before = now + self._read_backoff.failed()

    def _read_again(self) -> None:
        self._read_backoff.succeeded()
        self._no_reads_before = 0.0

    async def _collect(self, asked: Sequence[_Asked], vocab_size: int, clock: RoundClock) -> dict[str, Proposal]:
        """Waits for proposals until the deadline; rows of a replica without a sound answer get none."""
        proposals: dict[str, Proposal] = {}
        arrived, given_up_at = [], 0.0
        for each in asked:
            try:
                reply = await each.reply
                arrived.append(reply)
                proposals |= each.plan.proposals(reply.result, vocab_size)
                self.scheduler.drafting.answered(each.plan)
            except DeadlineExceededError as error:
                given_up_at = time.perf_counter()
                log.warning("draft %s; its rows go on without proposals", error)
                if self.drafts.get(each.stream.address) is each.stream:
                    self.scheduler.drafting.replicas[each.stream.address].is_late = True  # it gets no more this round
            except PilotfishError as error:
                each.stream.close(error, at=each.plan.step.step_id)  # its link opens a new one, or has done so
        clock.drafted(asked, arrived, given_up_at)
        return proposals

    # Outputs

    async def _emit_runs(self) -> None:
        while True:
            await self._may_emit.wait()
            if self._runs:
                with self._trace.span("emit"):
                    for _ in range(min(EMIT_ROWS, len(self._runs))):
                        self._emit(*self._runs.popleft())
            if not self._runs:
                self._may_emit.clear()
            await asyncio.sleep(0)

    def _emit(self, run: Run, times: RoundTimes) -> None:
        """Turns accepted tokens into text for the client; ends the request if its stop text has come."""
        output = self._outputs.get(run.request)
        if output is None:
            return  # the client left, or a stop text came earlier
        try:
            ended = output.push(run, times) if run.token_ids or run.reason is not None else False
        except Exception as error:
            log.exception("request %s: its output failed", run.request.id)
            self.fail(run.request, InternalError(f"output failed: {type(error).__name__}: {error}"))
            return
        if ended:  # maybe by a stop text before the place where nothing follows
            self.cancel(run.request)
        elif run.is_stuck:
            self.fail(run.request, FailedPreconditionError(STUCK.format(run.request.generated)))

    def _note_scheduled(self, batch: TargetBatch) -> None:
        for row in batch.rows:
            if not row.is_round and row.request in self._outputs:
                self._outputs[row.request].scheduled()

    def fail_all(self, error: PilotfishError) -> None:
        """Ends every request with an error."""
        for request in list(self._outputs):
            self.fail(request, error)
        self._runs.clear()

    def _give_up(self, reason: PilotfishError) -> None:
        self._given_up = UnavailableError(f"the target has been away for {self._target_timeout_s:g} s ({reason})")
        log.error("%s; waiting requests fail", self._given_up)
        self.fail_all(self._given_up)

    async def _start_afresh(self, error: PilotfishError) -> None:
        """Ends everything without trusting what is left of the state; the links open new streams."""
        outputs, self._outputs = self._outputs, {}
        self._runs.clear()
        for output in outputs.values():
            output.fail(error)
        self.scheduler.clear()
        for draft in list(self.drafts.values()):
            await _end(draft, error)
        if self.target is not None:
            await _end(self.target, error)


def _bytes(features: npt.NDArray[Any] | None) -> int:
    return 0 if features is None else features.nbytes


async def _end(stream: TargetStream | DraftStream, error: PilotfishError) -> None:
    """Ends a stream; its link has reported the loss on return."""
    stream.close(error)
    await stream.wait_closed()
    await asyncio.sleep(0)
