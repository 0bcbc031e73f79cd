"""Streams to the target and the draft replicas.

A ``WorkerStream`` is one open Execute call: steps out, results in, in order. A ``WorkerLink`` keeps
one worker: it opens a stream, reports it, waits for its end, reports that, and tries again. A
``FeatureReader`` reads features of the target beside the stream, on a connection of its own: bulk
that would hold up the steps.

Every new stream is a new incarnation with empty pages, so nothing that an old stream still owes can
be taken for an answer of the new one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc
import numpy as np
import numpy.typing as npt

from pilotfish.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    PilotfishError,
    UnavailableError,
)
from pilotfish.rpc import codec
from pilotfish.rpc.channel import connect
from pilotfish.rpc.status import from_grpc, is_shutting_down
from pilotfish.steps import (
    Capabilities,
    DraftResult,
    DraftStep,
    Grammar,
    Grant,
    Ints,
    TargetResult,
    TargetStep,
    require,
)
from pilotfish.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, types_pb2

log = logging.getLogger(__name__)


class Numbered(Protocol):
    """A step or a result."""

    @property
    def step_id(self) -> int: ...


Step = TypeVar("Step", bound=Numbered)
Result = TypeVar("Result", bound=Numbered)

RETRY_S = (0.1, 0.5)  # first and longest wait between attempts; requests may be waiting for the worker
STEADY_S = 30.0  # a stream that lasted so long starts the waits anew; a worker that flaps is left alone longer
UNFIT = (FailedPreconditionError, InvalidArgumentError)  # errors that trying again will not mend


@dataclass(frozen=True, slots=True)
class WorkerKind(Generic[Step, Result]):
    """How to speak to one kind of worker; all the protobuf that a stream needs."""

    name: str
    execute: Callable[[grpc.aio.Channel], Any]
    open_request: Callable[[types_pb2.StreamOpen], Any]
    opened: Callable[[Any], tuple[Grant, Capabilities]]
    step_request: Callable[[Step], Any]
    result: Callable[[Any], Result]
    refused: Callable[[Any], types_pb2.StepRefused | None]
    survives_refusals: bool
    """Whether the stream is of use after a refusal: not if steps that were sent already build on the refused one."""


TargetKind = WorkerKind[TargetStep, TargetResult]
DraftKind = WorkerKind[DraftStep, DraftResult]

TARGET: TargetKind = WorkerKind(
    name="target",
    execute=lambda channel: target_pb2_grpc.TargetServiceStub(channel).Execute,
    open_request=lambda message: target_pb2.ExecuteTargetRequest(open=message),
    opened=lambda response: (codec.grant_from_pb(response.opened), Capabilities(kinds=())),
    step_request=lambda step: target_pb2.ExecuteTargetRequest(step=codec.target_step_to_pb(step)),
    result=lambda response: codec.target_result_from_pb(response.result),
    refused=lambda response: response.refused if response.HasField("refused") else None,
    survives_refusals=True,
)
DRAFT: DraftKind = WorkerKind(
    name="draft",
    execute=lambda channel: draft_pb2_grpc.DraftServiceStub(channel).Execute,
    open_request=lambda message: draft_pb2.ExecuteDraftRequest(open=message),
    opened=lambda response: codec.draft_opened_from_pb(response.opened),
    step_request=lambda step: draft_pb2.ExecuteDraftRequest(step=codec.draft_step_to_pb(step)),
    result=lambda response: codec.draft_result_from_pb(response.result),
    refused=lambda response: response.refused if response.HasField("refused") else None,
    survives_refusals=False,
)


@dataclass(frozen=True, slots=True)
class Reply(Generic[Result]):
    """A result and the ``time.perf_counter`` seconds at which it was here."""

    result: Result
    arrived_at: float


@dataclass(frozen=True, slots=True)
class _Sent(Generic[Step, Result]):
    """A step under way, and the ``time.perf_counter`` seconds at which it was sent."""

    step: Step
    at: float
    reply: asyncio.Future[Reply[Result]]


class StepRefusedError(InvalidArgumentError):
    """The worker did not run the step, which breaks the contract."""


class Backoff:
    """Waits between attempts: each failure doubles the next one, up to a limit."""

    def __init__(self) -> None:
        self._wait = RETRY_S[0]

    def failed(self) -> float:
        """Seconds to wait now."""
        wait, self._wait = self._wait, min(2 * self._wait, RETRY_S[1])
        return wait

    def succeeded(self) -> None:
        """The next failure is a first one."""
        self._wait = RETRY_S[0]


class WorkerStream(Generic[Step, Result]):
    """One open Execute stream.

    Attributes:
        address: of the worker.
        grant: what the worker granted.
        capabilities: how a drafter can propose; a target cannot.
        failed_step: number of the step at which the stream failed; None if it owed no answer then, or was stopped.
        was_stopped: whether it ended because the worker was told to stop.
        on_answer: called with a step, its result, when it was sent and when the result was here; for traces.
    """

    def __init__(
        self,
        kind: WorkerKind[Step, Result],
        address: str,
        call: Any,
        opened: tuple[Grant, Capabilities],
    ) -> None:
        self.address = address
        self.grant, self.capabilities = opened
        self._kind = kind
        self._call = call
        self.on_answer: Callable[[Step, Result, float, float], None] | None = None
        self._pending: deque[_Sent[Step, Result]] = deque()
        self._closed_by: PilotfishError | None = None
        self.failed_step: int | None = None
        self.was_stopped = False
        self._reader = asyncio.create_task(self._read(), name=f"{kind.name} {address}")

    @classmethod
    async def open(
        cls, kind: WorkerKind[Step, Result], address: str, channel: grpc.aio.Channel
    ) -> WorkerStream[Step, Result]:
        """Opens the stream and takes all the pages that the worker has left.

        Raises:
            PilotfishError: as the worker answered, ``UnavailableError`` if nobody did.
        """
        call = kind.execute(channel)()
        try:
            await call.write(kind.open_request(types_pb2.StreamOpen(peer="orchestrator")))
            response = await call.read()
            if response is grpc.aio.EOF:  # type: ignore[attr-defined]
                raise UnavailableError(f"{address}: closed the stream before opening it ({await call.details()})")
        except grpc.RpcError as error:
            raise from_grpc(error, address) from None
        except asyncio.InvalidStateError:  # the call ended before the write; its status says why
            raise UnavailableError(f"{address}: {await call.details()}") from None
        return cls(kind, address, call, kind.opened(response))

    @property
    def is_late(self) -> bool:
        """Whether the answer that is due next has missed its deadline."""
        return bool(self._pending) and self._pending[0].reply.done()

    @property
    def next_due(self) -> int | None:
        """Number of the step whose answer it owes next; None if it owes none."""
        return self._pending[0].step.step_id if self._pending else None

    async def submit(self, step: Step, timeout_s: float | None = None) -> asyncio.Future[Reply[Result]]:
        """Sends a step.

        Returns:
            A future that becomes the reply, ``DeadlineExceededError`` after ``timeout_s`` seconds, or the
            error that ended the stream.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply[Result]] = loop.create_future()
        future.add_done_callback(_retrieve)
        if self._closed_by is not None:
            future.set_exception(self._closed_by)
            return future
        self._pending.append(_Sent(step, time.perf_counter(), future))
        with suppress(grpc.RpcError, asyncio.InvalidStateError):  # the reader learns why and fails the future
            await self._call.write(self._kind.step_request(step))
        if timeout_s is not None:
            timer = loop.call_later(timeout_s, self._expire, future, timeout_s)
            future.add_done_callback(lambda _: timer.cancel())
        return future

    def close(self, reason: PilotfishError | None = None, at: int | None = None) -> None:
        """Ends the stream; everything still owed fails with ``reason``. ``at`` is the step that is to blame, if any."""
        self._closed_by = self._closed_by or reason
        self.failed_step = self.failed_step or at
        self._call.cancel()

    async def wait_closed(self) -> PilotfishError:
        """Waits until the stream has ended and returns why."""
        await asyncio.wait({self._reader})  # unlike a plain await, leaves the reader alone if we are cancelled
        assert self._closed_by is not None
        return self._closed_by

    async def _read(self) -> None:
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                refused = self._kind.refused(response)
                if refused is not None:
                    self._refuse(refused)
                else:
                    self._settle(self._kind.result(response), time.perf_counter())
            reason: PilotfishError = UnavailableError(f"{self.address}: the worker closed the stream")
        except grpc.RpcError as error:
            reason = from_grpc(error, self.address)
        except asyncio.CancelledError:  # how grpc ends a read after close
            reason = UnavailableError(f"{self.address}: the stream was closed")
        except PilotfishError as error:  # an answer that cannot be read
            reason = error
        self._call.cancel()
        self._closed_by = self._closed_by or reason
        self.was_stopped = is_shutting_down(reason)
        if self.failed_step is None and not self.was_stopped:
            self.failed_step = self.next_due
        for sent in self._pending:
            if not sent.reply.done():
                sent.reply.set_exception(self._closed_by)
        self._pending.clear()

    def _expire(self, future: asyncio.Future[Reply[Result]], timeout_s: float) -> None:
        if not future.done():
            future.set_exception(DeadlineExceededError(f"{self.address}: no answer within {timeout_s:g} s"))

    def _due(self, step_id: int) -> _Sent[Step, Result] | None:
        """The step that an answer to ``step_id`` settles; None for a stale answer."""
        if self.next_due != step_id:
            log.warning("%s %s: dropped a stale answer to step %d", self._kind.name, self.address, step_id)
            return None
        return self._pending.popleft()

    def _refuse(self, refused: types_pb2.StepRefused) -> None:
        sent = self._due(refused.step_id)
        if sent is None:
            return
        error = StepRefusedError(f"{self.address}: {refused.message}")
        if not sent.reply.done():
            sent.reply.set_exception(error)
        if not self._kind.survives_refusals:
            self.close(error, at=refused.step_id)

    def _settle(self, result: Result, now: float) -> None:
        sent = self._due(result.step_id)
        if sent is None:
            return
        if not sent.reply.done():
            sent.reply.set_result(Reply(result, now))
        if self.on_answer is not None:
            self.on_answer(sent.step, result, sent.at, now)


class FeatureReader:
    """Reads features from one target; ``close`` it.

    Args:
        address: ``host:port``.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        # Without an option of its own, a channel to the same address would share the connection of the steps.
        self._channel = connect(address, shared=False)

    async def read(self, grant: Grant, slots: Ints) -> npt.NDArray[Any]:
        """Features of slots that the target has computed, ``[slots, feature_width]``.

        Args:
            grant: of the target's stream.
            slots: as page_id * page_size + offset, i32[n]; committed tokens of rows that hold their pages.

        Raises:
            PilotfishError: as the target answered, ``UnavailableError`` if it did not.
        """
        request = target_pb2.ReadFeaturesRequest(incarnation=grant.incarnation, slots=codec.pack(slots, "<i4"))
        chunks = []
        try:
            async for response in target_pb2_grpc.TargetServiceStub(self._channel).ReadFeatures(request):
                chunks.append(codec.tensor_from_pb(response.features, "features"))
        except grpc.RpcError as error:
            raise from_grpc(error, self._address) from None
        for chunk in chunks:
            require(chunk.ndim == 2, "features", chunk.shape, "a chunk has two axes")
            width = grant.feature_width
            require(chunk.shape[1] == width, "features", chunk.shape, f"a chunk has {width} values a slot")
        return np.concatenate(chunks) if chunks else np.zeros((0, grant.feature_width), np.float32)

    async def close(self) -> None:
        """Closes the connection; a read under way fails."""
        await self._channel.close(None)


class GrammarCompiler:
    """Has one target compile grammars; ``close`` it.

    Args:
        address: ``host:port``.
    """

    def __init__(self, address: str) -> None:
        self._address, self._channel = address, connect(address)

    async def compile(self, grammar: Grammar) -> None:
        """Returns when the target has compiled it.

        Raises:
            InvalidArgumentError: it is no grammar.
            PilotfishError: as the target answered, ``UnavailableError`` if it did not.
        """
        request = target_pb2.CompileGrammarRequest(grammar=codec.grammar_to_pb(grammar))
        try:
            await target_pb2_grpc.TargetServiceStub(self._channel).CompileGrammar(request)
        except grpc.RpcError as error:
            raise from_grpc(error, self._address) from None

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close(None)


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Marks an error as seen: steps that nobody waits for fail with their stream, which is reported once."""
    if not future.cancelled():
        future.exception()


class WorkerLink(Generic[Step, Result]):
    """Keeps a stream to one worker open, for ever.

    Args:
        kind: of the worker.
        address: ``host:port``.
        on_opened: a stream is open; may raise a PilotfishError to refuse it.
        on_lost: the stream that was reported has ended, and why.
    """

    def __init__(
        self,
        kind: WorkerKind[Step, Result],
        address: str,
        on_opened: Callable[[WorkerStream[Step, Result]], None],
        on_lost: Callable[[WorkerStream[Step, Result], PilotfishError], None],
    ) -> None:
        self._kind = kind
        self.address = address
        self._on_opened = on_opened
        self._on_lost = on_lost
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._first.add_done_callback(_retrieve)
        self._last_error: PilotfishError = UnavailableError(f"{address}: not tried yet")
        self._task = asyncio.create_task(self._run(), name=f"link {address}")

    async def wait_opened(self, timeout_s: float) -> None:
        """Waits for the first stream.

        Raises:
            UnavailableError: nobody answered in time; names the last reason.
            PilotfishError: the worker answered, but was refused.
        """
        try:
            await asyncio.wait_for(asyncio.shield(self._first), timeout_s)
        except TimeoutError:
            raise UnavailableError(
                f"no {self._kind.name} answers at {self.address} after {timeout_s:g} s; is it running there? start one "
                f"with `pilotfish {self._kind.name} --listen {self.address}` (last error: {self._last_error})"
            ) from None

    async def close(self) -> None:
        """Ends the stream and stops trying."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        backoff = Backoff()
        while True:
            opened_at = time.monotonic()
            try:
                async with connect(self.address) as channel:
                    stream = await WorkerStream.open(self._kind, self.address, channel)
                    opened_at = time.monotonic()
                    await self._serve(stream)
            except PilotfishError as error:
                if not self._first.done() and isinstance(error, UNFIT):
                    self._first.set_exception(error)
                elif str(error) != str(self._last_error):
                    log.warning("%s", error)
                self._last_error = error
            if time.monotonic() - opened_at > STEADY_S:
                backoff.succeeded()
            await asyncio.sleep(backoff.failed())

    async def _serve(self, stream: WorkerStream[Step, Result]) -> None:
        try:
            self._on_opened(stream)
            log.info("%s %s: open, %d pages", self._kind.name, self.address, stream.grant.page_count)
            if not self._first.done():
                self._first.set_result(None)
            reason = await stream.wait_closed()
            log.warning("%s %s: lost: %s", self._kind.name, self.address, reason)
            self._on_lost(stream, reason)
        finally:
            stream.close(InternalError("closed"))
