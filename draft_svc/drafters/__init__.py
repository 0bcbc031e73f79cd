"""Drafting methods by name; the heavy imports happen when one is made.

A method is one file with one ``Drafter``. It gets validated steps on the model thread and keeps
nothing about rows beyond what their pages hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.grants import ModelInfo
from pilotfish.steps import DraftStep, Floats, Ints, ProposalKind, Supports, empty_floats, empty_ints

if TYPE_CHECKING:
    from draft_svc.server import DraftConfig


_OF_HEADS = ("h_source", "feedback", "aux_layers", "tree", "tree_width")  # settings


@dataclass(frozen=True, slots=True)
class Proposals:
    """What a drafter proposes for the rows of a step; fields as in ``DraftResult``."""

    node_counts: Ints
    token_ids: Ints
    parents: Ints = field(default_factory=empty_ints)
    supports: Supports = field(default_factory=Supports)
    support_probs: Floats = field(default_factory=empty_floats)


class Drafter(ABC):
    """A drafting method with its pages. One thread makes all calls."""

    kinds: tuple[ProposalKind, ...]
    """Ways in which it can propose."""

    tree_width: int = 0
    """Most nodes that it runs per level of a tree; 0: it proposes chains only."""

    scheme: str = "model"
    """How it drafts, in a word by which requests may choose it: one of ``DRAFTERS``, or simulated."""

    @property
    @abstractmethod
    def info(self) -> ModelInfo:
        """Its name and limits; never changes."""

    @abstractmethod
    def propose(self, step: DraftStep) -> Proposals:
        """Caches the step's committed tokens and proposes from their end.

        Args:
            step: checked against the grant and against ``kinds``.

        Raises:
            InternalError: if the model answers NaN.
        """

    def scrub(self, page_ids: Ints) -> None:  # noqa: B027 - most of what has no K and V has nothing to do
        """Clears pages of what is not finite; see ``KVCache.scrub``."""


def _model(config: DraftConfig, folder: Path) -> Drafter:
    from draft_svc.drafters.model import ModelDrafter
    from pilotfish.runtime.loading import load_worker_model

    config.refuse("a language model has no such choice", *_OF_HEADS)
    model = load_worker_model(config, folder, config.target_model)
    return ModelDrafter(
        model,
        pages=config.page_count,
        page_size=config.page_size,
        max_len=config.max_len,
        grammar_limits=config.grammar_limits,
    )


def _head(kind: str, config: DraftConfig, folder: Path) -> Drafter:
    from draft_svc.drafters.head_loading import load_head

    return load_head(config, folder, kind)


def _medusa(config: DraftConfig, folder: Path) -> Drafter:
    from draft_svc.drafters.medusa_loading import load_medusa

    return load_medusa(config, folder)


def _simulated(config: DraftConfig, profile: str) -> Drafter:
    from draft_svc.drafters.simulated import SimulatedDrafter
    from pilotfish.simulate.model import read_model
    from pilotfish.simulate.profile import load_profile

    config.refuse_with_simulate("device", "dtype", "quantize", "kernels", "layers", "threads", "drafter")
    config.refuse_with_simulate("target_model", "gpu_memory_utilization", *_OF_HEADS)
    return SimulatedDrafter(
        load_profile(profile),
        read_model(simulated_model_folder(config), config.name or f"simulated-{Path(profile).stem}", config.max_len),
        pages=config.page_count,
        page_size=config.page_size,
    )


def simulated_model_folder(config: DraftConfig) -> Path:
    """Raises ``InvalidArgumentError`` if there is none."""
    if config.model is None:
        raise InvalidArgumentError("model is missing; --simulate needs --model FOLDER for its tokenizer")
    return config.model


DRAFTERS: dict[str, Callable[[DraftConfig, Path], Drafter]] = {
    "model": _model,
    "mtp": partial(_head, "mtp"),
    "eagle": partial(_head, "eagle"),
    "eagle3": partial(_head, "eagle3"),
    "medusa": _medusa,
}


def create_drafter(config: DraftConfig) -> Drafter:
    """Makes the drafter that ``config.drafter`` names, or the simulated one.

    Raises:
        InvalidArgumentError: if there is none of that name, or it cannot run as configured.
        NotFoundError: if its folder is missing.
    """
    if config.simulate is not None:
        return _simulated(config, config.simulate)
    kind, folder = method_of(config)
    drafter = DRAFTERS[kind](config, folder)
    drafter.scheme = kind
    return drafter


def method_of(config: DraftConfig) -> tuple[str, Path]:
    """Which of ``DRAFTERS`` is asked for, or what the folder holds; and the folder.

    Raises:
        InvalidArgumentError: if there is none of that name, or no folder.
        NotFoundError: if the folder is missing.
    """
    if config.drafter not in ("auto", *DRAFTERS):
        raise InvalidArgumentError(f"drafter is {config.drafter!r}; known are auto, {', '.join(sorted(DRAFTERS))}")
    if config.model is None:
        raise InvalidArgumentError("model is missing; a draft needs --model FOLDER")
    if config.drafter != "auto":
        return config.drafter, config.model
    from draft_svc.drafters.checkpoint import Checkpoint
    from draft_svc.drafters.kinds import kind_of

    return kind_of(Checkpoint.read(config.model)), config.model
