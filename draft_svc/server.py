"""Starts a draft replica: configuration, drafter, server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic_settings import SettingsConfigDict

from pilotfish.errors import PilotfishError
from pilotfish.rpc.server import AddServices, run
from pilotfish.runtime.worker_config import WorkerConfig
from pilotfish.settings import fail_with, load
from pilotfish.v1 import draft_pb2_grpc

if TYPE_CHECKING:
    from pilotfish.rpc.steps_service import ModelThread, StepStreams
    from pilotfish.steps import DraftResult, DraftStep

PROG = "pilotfish draft"


class DraftConfig(WorkerConfig):
    """A draft replica: proposes tokens for the target to verify."""

    model_config = SettingsConfigDict(env_prefix="PILOTFISH_DRAFT_")

    drafter: str = "model"
    """Drafting method. model: a small language model of the target's tokenizer."""

    model: Path | None = None
    """Hugging Face model folder of the drafter. The target's own makes a draft with --quantize int8 or --layers."""

    listen: str = "127.0.0.1:50052"
    """Address to serve on, HOST:PORT; port 0 takes a free one."""


def main(argv: list[str]) -> None:
    """Serves until SIGINT or SIGTERM; a start that fails prints why and exits with status 2."""
    # Idle OpenMP threads that spin would take the cores of the target beside this process.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    config = load(DraftConfig, argv, PROG)
    try:
        run(serve(config))
    except PilotfishError as error:
        fail_with(error, PROG)


async def serve(config: DraftConfig) -> None:
    """Loads the drafter and serves it until a signal comes."""
    # Imported here, so that a bad flag is reported without waiting for torch.
    from draft_svc.service import NAME
    from pilotfish.runtime.worker import serve_worker

    await serve_worker(config, "draft", NAME, lambda thread: make_service(config, thread))


def make_service(config: DraftConfig, thread: ModelThread) -> tuple[AddServices, StepStreams[DraftStep, DraftResult]]:
    """Loads the drafter; gives what registers the service, and its streams."""
    from draft_svc.drafters import create_drafter
    from draft_svc.engine import DraftEngine
    from draft_svc.service import DraftServicer
    from pilotfish.runtime.warm_up import warm_up_draft

    engine = DraftEngine(
        create_drafter(config),
        pages=config.pages,
        page_size=config.page_size,
        max_step_tokens=config.max_step_tokens,
    )
    thread.submit(warm_up_draft, engine, engine.capabilities)
    servicer = DraftServicer(engine, thread)
    return lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server), servicer.streams
