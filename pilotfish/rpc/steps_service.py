"""Step streams: what ``Execute`` does in both workers, whatever the engine behind it.

The event loop only moves messages. Everything that touches a model runs on one thread of its own,
in the order asked for: opening and closing a stream too, so that pages are never given back while a
step still writes to them.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc

from pilotfish.errors import InvalidArgumentError, UnavailableError, shortened
from pilotfish.rpc import status
from pilotfish.steps import Grant
from pilotfish.v1.types_pb2 import StepRefused

log = logging.getLogger(__name__)

WRITE_S = 1.0
"""How long a stream that is stopped waits for a message that is on its way."""

_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]

Step = TypeVar("Step")
Result = TypeVar("Result")
StepIn = TypeVar("StepIn", contravariant=True)
ResultOut = TypeVar("ResultOut", covariant=True)
Value = TypeVar("Value")


class StepEngine(Protocol[StepIn, ResultOut]):
    """What a worker's engine offers to its streams."""

    def open(self, page_count: int | None) -> Grant: ...
    def close(self, grant: Grant) -> None: ...
    def run(self, grant: Grant, step: StepIn) -> ResultOut:
        """Raises ``InvalidArgumentError`` if the step breaks the contract, before anything is written."""


@dataclass(frozen=True)
class Wire(Generic[Step, Result]):
    """How one worker's messages are read and written."""

    step: Callable[[Any], Step]  # from the request's step
    opened: Callable[[Grant], Any]  # a whole response
    result: Callable[[Result], Any]  # a whole response
    refused: Callable[[StepRefused], Any]  # a whole response


class ModelThread:
    """The one thread that runs model code.

    Hands over by a bare queue and one wake-up of the loop: ``run_in_executor`` took 0.15 ms more a step
    on two cores that had slept, which a round pays twice.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    async def call(self, function: Callable[..., Value], *args: Any) -> Value:
        """Runs ``function`` after everything asked for before; cancelling does not stop it."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Value] = loop.create_future()

        def job() -> None:
            try:
                value = function(*args)
            except BaseException as error:
                loop.call_soon_threadsafe(_settle, done, None, error)
            else:
                loop.call_soon_threadsafe(_settle, done, value, None)

        self._jobs.put(job)
        return await done

    def submit(self, function: Callable[..., Any], *args: Any) -> None:
        """As ``call``, without waiting; an error is logged."""
        self._jobs.put(lambda: function(*args))

    def shutdown(self) -> None:
        """Waits for what was asked for, then ends the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # of a loop that has closed meanwhile, or of a job that nobody waits for
                log.exception("a job of the model thread failed")


def _settle(done: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if done.cancelled():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(value)


class StepStreams(Generic[Step, Result]):
    """All open ``Execute`` streams of one worker."""

    def __init__(self, engine: StepEngine[Step, Result], thread: ModelThread, wire: Wire[Step, Result]) -> None:
        self._engine, self._thread, self._wire = engine, thread, wire
        self._scopes: set[asyncio.Timeout] = set()
        self._stopping = False

    async def serve(self, context: status.Context) -> None:
        """Serves one stream until the caller ends it.

        A step that the engine refuses costs nobody anything but that step.

        Raises:
            InvalidArgumentError: if the first message does not open the stream, or a later one is no step.
            OverloadedError: if it asks for more pages than there are.
            UnavailableError: when the worker stops.
        """
        try:
            async with asyncio.timeout(0 if self._stopping else None) as scope:
                self._scopes.add(scope)
                try:
                    await self._serve(context)
                finally:
                    self._scopes.discard(scope)
        except TimeoutError:
            raise UnavailableError(status.SHUTTING_DOWN) from None

    async def stop(self) -> None:
        """Ends all streams, and every later one, with UNAVAILABLE."""
        self._stopping = True
        for scope in self._scopes:
            scope.reschedule(asyncio.get_running_loop().time())

    async def _serve(self, context: status.Context) -> None:
        first = await context.read()
        if first is _EOF:
            return
        if first.WhichOneof("payload") != "open":
            raise InvalidArgumentError("the first message of a stream must be `open`", "payload")
        asked = first.open.page_count if first.open.HasField("page_count") else None
        grant = await self._open(asked)
        peer = shortened(first.open.peer or context.peer())
        log.info("stream of %s opened with %d pages", peer, grant.page_count)
        try:
            await _write(context, self._wire.opened(grant))
            while (request := await context.read()) is not _EOF:
                if request.WhichOneof("payload") != "step":
                    raise InvalidArgumentError("after `open`, every message of a stream must be a `step`", "payload")
                await _write(context, await self._answer(grant, request.step))
        finally:
            # No await here: this also runs when the call is cancelled.
            self._thread.submit(self._engine.close, grant)
            log.info("stream of %s closed", peer)

    async def _answer(self, grant: Grant, message: Any) -> Any:
        try:
            result = await self._thread.call(self._engine.run, grant, self._wire.step(message))
        except InvalidArgumentError as error:
            log.warning("refused a step: %s", error)
            return self._wire.refused(StepRefused(step_id=message.step_id, message=str(error)))
        return self._wire.result(result)

    async def _open(self, page_count: int | None) -> Grant:
        """A grant that is closed again if the caller leaves while it is made."""
        opening = asyncio.ensure_future(self._thread.call(self._engine.open, page_count))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(self._close_abandoned)
            raise

    def _close_abandoned(self, opening: asyncio.Future[Grant]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            self._thread.submit(self._engine.close, opening.result())


async def _write(context: status.Context, message: Any) -> None:
    """Sends a message; if the stream is stopped meanwhile, only once it has left.

    grpc cannot send a status while a message is on its way: the stream would end without one, and its client would
    wait for ever.
    """
    writing = asyncio.ensure_future(context.write(message))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait({writing}, timeout=WRITE_S)  # a client that does not read holds nobody up
        raise
