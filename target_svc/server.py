"""Starts the target worker: configuration, model, server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic_settings import SettingsConfigDict

from pilotfish.errors import PilotfishError
from pilotfish.rpc.server import AddServices, run
from pilotfish.runtime.worker_config import WorkerConfig
from pilotfish.settings import ListenAddress, fail_with, load
from pilotfish.v1 import target_pb2_grpc

if TYPE_CHECKING:
    from pilotfish.rpc.steps_service import ModelThread, StepStreams
    from pilotfish.steps import TargetResult, TargetStep
    from target_svc.service import Engine

PROG = "pilotfish target"


class TargetConfig(WorkerConfig):
    """The target worker: runs the large model, verifies proposals."""

    model_config = SettingsConfigDict(env_prefix="PILOTFISH_TARGET_")

    model: Path
    """Hugging Face model folder: config.json, safetensors, tokenizer.json. `pilotfish pull` fetches one."""

    listen: ListenAddress = "127.0.0.1:50051"
    """HOST:PORT or port to serve on; port 0 takes a free one."""

    features: str = ""
    """Hidden states kept beside every slot for heads that read them, with commas: hidden.8,final. hidden.K is the state
    after K layers, final that behind the last norm; an orchestrator says which ones a head lacks."""

    @property
    def feature_names(self) -> tuple[str, ...]:
        return tuple(filter(None, self.features.split(",")))


def main(argv: list[str]) -> None:
    """Serves until SIGINT or SIGTERM; a start that fails prints why and exits with status 2."""
    # Idle OpenMP threads that spin would take the cores of the draft beside this process.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    config = load(TargetConfig, argv, PROG)
    try:
        run(serve(config))
    except PilotfishError as error:
        fail_with(error, PROG)


async def serve(config: TargetConfig) -> None:
    """Loads the model and serves it until a signal comes."""
    # Imported here, so that a bad flag is reported without waiting for torch.
    from pilotfish.runtime.worker import serve_worker
    from target_svc.service import NAME

    await serve_worker(config, "target", NAME, lambda thread: make_service(config, thread))


def make_service(
    config: TargetConfig, thread: ModelThread
) -> tuple[AddServices, StepStreams[TargetStep, TargetResult]]:
    """Loads the model; gives what registers the service, and its streams."""
    from pilotfish.runtime.warm_up import warm_up_target
    from pilotfish.runtime.worker import decide_pages
    from target_svc.needs import need_of
    from target_svc.service import TargetServicer

    engine = _engine(decide_pages(config, need_of))
    thread.submit(warm_up_target, engine)
    servicer = TargetServicer(engine, thread)
    return lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server), servicer.streams


def _engine(config: TargetConfig) -> Engine:
    if config.simulate is not None:
        from target_svc.simulated import create_simulated

        return create_simulated(config, config.simulate)
    from pilotfish.runtime.loading import load_worker_model
    from target_svc.engine import TargetEngine

    model = load_worker_model(config, config.model)
    return TargetEngine(
        model,
        pages=config.page_count,
        page_size=config.page_size,
        max_len=config.max_len,
        max_step_tokens=config.max_step_tokens,
        features=config.feature_names,
        grammar_limits=config.grammar_limits,
    )
