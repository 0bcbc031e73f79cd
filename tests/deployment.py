"""A whole deployment inside the test process: real gRPC services on loopback, one event loop thread.

The services are those that the processes run; only the process boundaries are missing, which lets a
test share loaded weights, look into the page pools, and stop a worker at will.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from waiting import eventually

from draft_svc.drafters import Drafter
from draft_svc.drafters.model import ModelDrafter
from draft_svc.engine import DraftEngine
from draft_svc.service import NAME as DRAFT_NAME
from draft_svc.service import DraftServicer
from orchestrator.core.scheduler import Scheduler
from orchestrator.server import Orchestrator, OrchestratorSettings
from pilotfish import Client
from pilotfish.rpc.server import Server
from pilotfish.rpc.steps_service import ModelThread
from pilotfish.runtime.loading import LoadedModel
from pilotfish.v1 import draft_pb2_grpc, target_pb2_grpc
from target_svc.engine import TargetEngine
from target_svc.service import NAME as TARGET_NAME
from target_svc.service import Engine, TargetServicer

Value = TypeVar("Value")


class Worker:
    """One worker service. ``start`` and ``stop`` it on the deployment's loop."""

    def __init__(
        self,
        name: str,
        make_servicer: Callable[[ModelThread], Any],
        add: Callable[[Any, Any], None],
        listen: str = "127.0.0.1:0",
    ) -> None:
        self._thread = ModelThread()
        self._servicer = make_servicer(self._thread)
        self._server = Server(listen, name)
        self._server.add(lambda to: add(self._servicer, to))
        self.address = self._server.address

    async def start(self) -> None:
        await self._server.start()
        await self._server.set_serving(True)

    async def stop(self) -> None:
        await self._servicer.streams.stop()
        await self._server.stop(0.5)
        self._thread.shutdown()


class Deployment:
    """A target, draft replicas and an orchestrator; a context manager.

    Args:
        folder: model folder, for the tokenizer.
        model: loaded target model, or what makes an engine.
        drafts: one per replica, a loaded model or a drafter.
        pages: of every worker.
        page_size: slots per page.
        features: states that the target stores.
        kinds: of workers to speak to instead of those over gRPC, as ``Orchestrator`` takes them.
        **settings: of the orchestrator.
    """

    def __init__(
        self,
        folder: Path,
        model: LoadedModel | Callable[[], Engine],
        drafts: tuple[LoadedModel | Drafter, ...] = (),
        *,
        pages: int = 256,
        page_size: int = 16,
        features: tuple[str, ...] = (),
        kinds: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self._folder, self._settings, self._kinds = folder, settings, kinds or {}
        self._make_engine: Callable[[], Engine] = (
            (lambda: TargetEngine(model, pages=pages, page_size=page_size, features=features))
            if isinstance(model, LoadedModel)
            else model
        )
        self._drafters = [
            draft if isinstance(draft, Drafter) else ModelDrafter(draft, pages=pages, page_size=page_size)
            for draft in drafts
        ]
        self._pages, self._page_size = pages, page_size
        self.drafts: dict[int, Worker] = {}
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._loop.run_forever, name="deployment")

    def __enter__(self) -> Deployment:
        self._loop_thread.start()
        try:
            self.call(self._start())
        except BaseException:
            self._end_loop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self._stop())
        self._end_loop()

    def call(self, coroutine: Coroutine[Any, Any, Value], timeout_s: float = 60) -> Value:
        """Runs a coroutine on the deployment's loop and waits for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def client(self) -> Client:
        return Client(self.address)

    def look(self, function: Callable[[Scheduler], Value]) -> Value:
        """What ``function`` says of the scheduler, asked between rounds."""

        async def ask() -> Value:
            return function(self.orchestrator.loop.scheduler)

        return self.call(ask())

    def check_pools(self) -> None:
        """Every pool's invariants, and that nothing is held once no request is running."""

        def check(scheduler: Scheduler) -> None:
            pools = [replica.pool for replica in scheduler.drafting.replicas.values()]
            if scheduler.target is not None:
                pools.append(scheduler.target.pool)
            for pool in pools:
                pool.check()
                assert pool.available == pool.page_count, "pages are still held"

        self.look(check)

    async def start_draft(self, index: int, listen: str = "127.0.0.1:0") -> None:
        """The draft service of that index, with an empty cache."""
        engine = DraftEngine(self._drafters[index], pages=self._pages, page_size=self._page_size)
        add = draft_pb2_grpc.add_DraftServiceServicer_to_server
        self.drafts[index] = Worker(DRAFT_NAME, lambda thread: DraftServicer(engine, thread), add, listen)
        await self.drafts[index].start()

    async def start_target(self, listen: str = "127.0.0.1:0") -> None:
        """The target service, with an empty cache."""
        add, engine = target_pb2_grpc.add_TargetServiceServicer_to_server, self._make_engine()
        self.target = Worker(TARGET_NAME, lambda thread: TargetServicer(engine, thread), add, listen)
        await self.target.start()

    async def _start(self) -> None:
        await self.start_target()
        for index in range(len(self._drafters)):
            await self.start_draft(index)
        defaults: dict[str, Any] = {"model": self._folder, "target": self.target.address, "listen": "127.0.0.1:0"}
        defaults |= {"draft_length": 4, "draft_tree": "off"}  # what is drafted must not depend on times here
        defaults |= {"draft": [draft.address for draft in self.drafts.values()]}
        self.orchestrator = Orchestrator(OrchestratorSettings(**(defaults | self._settings)), **self._kinds)
        try:
            self._server = await self.orchestrator.start()
        except BaseException:
            await self._stop_workers()
            raise
        await self._server.start()
        self.address = self._server.address

    async def _stop(self) -> None:
        await self.orchestrator.stop()
        await self._server.stop(0.5)
        await self._stop_workers()

    async def _stop_workers(self) -> None:
        for worker in [*self.drafts.values(), self.target]:
            await worker.stop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join()
        self._loop.close()


def wait_until_idle(deployment: Deployment) -> None:
    """Until no request is left, and nothing is held; fails where one stays."""
    is_idle = eventually(lambda: deployment.look(lambda scheduler: not (scheduler.rows or scheduler.waiting)))
    assert is_idle, "requests are still there"
    deployment.check_pools()
