"""Workers in the orchestrator's own process: no gRPC, no messages, the same streams, engines and model threads.

Only for comparing and for tests: what is left of a round's hops without a wire, and whether it changes anything.
"""

from __future__ import annotations

import asyncio
from typing import Any

from orchestrator.workers import WorkerKind
from pilotfish.errors import InvalidArgumentError
from pilotfish.rpc.steps_service import ModelThread, StepEngine
from pilotfish.steps import Capabilities, Grant
from pilotfish.v1.types_pb2 import StepRefused

NO_DRAFTS = Capabilities(kinds=())


def in_process(
    name: str, engine: StepEngine[Any, Any], thread: ModelThread, capabilities: Capabilities = NO_DRAFTS
) -> WorkerKind[Any, Any]:
    """How to speak to an engine of this process; takes the place of ``workers.TARGET`` or ``workers.DRAFT``.

    Args:
        name: of the kind of worker.
        engine: whose pages nobody else uses.
        thread: makes all calls of the engine.
        capabilities: of a drafter.
    """

    def opened(grant: Grant) -> tuple[Grant, Capabilities]:
        return grant, capabilities

    return WorkerKind(
        name=name,
        execute=lambda _: lambda: _Call(engine, thread),
        open_request=lambda message: None,
        opened=opened,
        step_request=lambda step: step,
        result=lambda result: result,
        refused=lambda answer: answer if isinstance(answer, StepRefused) else None,
        survives_refusals=name == "target",
    )


class _Call:
    """What a stream uses of a gRPC call: the first message opens it, every other is a step, answers come in order."""

    def __init__(self, engine: StepEngine[Any, Any], thread: ModelThread) -> None:
        self._engine, self._thread = engine, thread
        self._grant: Grant | None = None
        self._answers: asyncio.Queue[asyncio.Future[Any]] = asyncio.Queue()

    async def write(self, step: Any) -> None:
        job = self._run(step) if self._grant is not None else self._thread.call(self._engine.open, None)
        self._answers.put_nowait(asyncio.ensure_future(job))

    async def _run(self, step: Any) -> Any:
        try:
            return await self._thread.call(self._engine.run, self._grant, step)
        except InvalidArgumentError as error:
            return StepRefused(step_id=step.step_id, message=str(error))

    async def read(self) -> Any:
        answer = await (await self._answers.get())
        if self._grant is None:
            self._grant = answer
        return answer

    def cancel(self) -> None:
        """Ends the stream; a read that waits, or comes later, is cancelled, as gRPC does it."""
        if self._grant is not None:
            self._thread.submit(self._engine.close, self._grant)
            self._grant = None
        ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        ended.cancel()
        self._answers.put_nowait(ended)
