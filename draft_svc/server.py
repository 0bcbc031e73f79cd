"""Starts a draft replica: configuration, drafter, server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from draft_svc.drafters.head_spec import Switches
from pilotfish.errors import InvalidArgumentError, PilotfishError
from pilotfish.rpc.server import AddServices, run
from pilotfish.runtime.worker_config import WorkerConfig
from pilotfish.settings import ListenAddress, fail_with, load
from pilotfish.v1 import draft_pb2_grpc

if TYPE_CHECKING:
    from pilotfish.rpc.steps_service import ModelThread, StepStreams
    from pilotfish.steps import DraftResult, DraftStep

PROG = "pilotfish draft"


class DraftConfig(WorkerConfig):
    """A draft replica: proposes tokens for the target to verify."""

    model_config = SettingsConfigDict(env_prefix="PILOTFISH_DRAFT_")

    drafter: str = "auto"
    """Drafting method. model: a small language model of the target's tokenizer; mtp, eagle, eagle3, medusa: a
    head on the target's hidden states; auto: what the folder holds."""

    model: Path | None = None
    """Folder of the drafter: a Hugging Face model, or a head. The target's own makes a draft with --quantize int8 or
    --layers."""

    target_model: Path | None = None
    """Folder of the target, for what the drafter's lacks: embeddings, output layer, tokenizer."""

    h_source: Literal["post_norm", "pre_norm"] | None = None
    """State that an MTP head reads: behind the target's last norm, or before; default: as its config.json says."""

    feedback: Literal["post_norm", "pre_norm"] | None = None
    """What a head takes for a state after the first draft token: its own output behind its last norm, or before."""

    aux_layers: str | None = None
    """After which layers of the target an EAGLE-3 head's states are taken, with commas: 2,15,27."""

    listen: ListenAddress = "127.0.0.1:50052"
    """HOST:PORT or port to serve on; port 0 takes a free one."""

    tree_width: int = Field(8, ge=0, le=64)
    """Most nodes that a head runs per level of a tree, and children of each that it looks at. 0 drafts chains only.
    Not beside --tree, whose file says it."""

    tree: Path | None = None
    """JSON list of paths of ranks, as EAGLE-1 and Medusa publish them: the shape of all trees. Left out: trees grow to
    their likeliest nodes, but those whose tokens are sampled have a shape of ours."""

    def switches(self) -> Switches:
        """What was said against a head's config.json."""
        layers = None
        if self.aux_layers is not None:
            parts = self.aux_layers.split(",")
            if not all(part.strip().isdecimal() for part in parts):
                raise InvalidArgumentError(f"aux_layers is {self.aux_layers!r}; must be numbers with commas: 2,15,27")
            layers = tuple(map(int, parts))
        return Switches(self.h_source, self.feedback, layers)


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
    from draft_svc.drafters.needs import need_of
    from draft_svc.engine import DraftEngine
    from draft_svc.service import DraftServicer
    from pilotfish.runtime.warm_up import warm_up_draft
    from pilotfish.runtime.worker import decide_pages

    config = decide_pages(config, need_of)
    engine = DraftEngine(
        create_drafter(config),
        pages=config.page_count,
        page_size=config.page_size,
        max_step_tokens=config.max_step_tokens,
    )
    thread.submit(warm_up_draft, engine, engine.capabilities)
    servicer = DraftServicer(engine, thread)
    return lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server), servicer.streams
