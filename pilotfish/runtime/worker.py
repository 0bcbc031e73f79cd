"""Runs a worker process: threads, model, server, graceful end. The same for target and draft."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from pilotfish.rpc.server import AddServices, Server, serve_until_signal
from pilotfish.rpc.steps_service import ModelThread, StepStreams
from pilotfish.runtime.kv_budget import Need, decide
from pilotfish.runtime.memory import cpu_memory, gpu_memory
from pilotfish.runtime.worker_config import WorkerConfig

log = logging.getLogger(__name__)
Config = TypeVar("Config", bound=WorkerConfig)
MakeService = Callable[[ModelThread], tuple[AddServices, StepStreams[Any, Any]]]


async def serve_worker(config: WorkerConfig, name: str, service: str, make: MakeService) -> None:
    """Serves until a signal; then streams end with UNAVAILABLE and a running step is waited for.

    Args:
        config: of the worker.
        name: of the process, in its ready line.
        service: full name of the gRPC service.
        make: loads the model, and gives what registers the service and its streams.
    """
    if config.threads is not None:
        import torch  # simulated workers run without

        torch.set_num_threads(config.threads)
    if config.share_cores is not None:
        from pilotfish.runtime import cores

        cores.share(config.share_cores, cores.threads())
    server, thread = Server(config.listen, service), ModelThread()
    try:
        add, streams = make(thread)
        await thread.call(lambda: None)  # everything that loading has asked of the thread is done
        server.add(add)
        await serve_until_signal(server, name, before_stop=streams.stop)
    finally:
        thread.shutdown()


def decide_pages(config: Config, need_of: Callable[[Config, str], Need]) -> Config:
    """The same settings with a number of pages that fits into the memory that is free now; says how many.

    Args:
        config: of the worker, before it has loaded anything.
        need_of: what it needs on cpu or cuda.

    Raises:
        InvalidArgumentError: the pages that it asks for do not fit, or the device is none.
    """
    memory, device = cpu_memory(), "cpu"
    if config.simulate is None:
        from pilotfish.runtime.loading import resolve_device  # torch takes its time

        where = resolve_device(config.device)
        if where.type == "cuda":
            memory, device = gpu_memory(where.index or 0), "cuda"
    share = config.gpu_memory_utilization
    budget = decide(config.pages, [need_of(config, device)], memory, device=device, utilization=share)
    # Whoever started this one for people has told of the pages of all.
    log.log(logging.DEBUG if config.loading_lines else logging.INFO, "%s", budget)
    return config.with_pages(budget.pages)
