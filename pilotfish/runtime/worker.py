"""Runs a worker process: threads, model, server, graceful end. The same for target and draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pilotfish.rpc.server import AddServices, Server, serve_until_signal
from pilotfish.rpc.steps_service import ModelThread, StepStreams
from pilotfish.runtime.worker_config import WorkerConfig

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
