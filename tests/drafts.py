"""Drafts of every kind for a tiny target of three layers, behind the real services."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deployment import Deployment
from safetensors.torch import load_file, save_file
from tiny_heads import FORMATS

from draft_svc.drafters import Drafter, Proposals, create_drafter
from draft_svc.drafters.model import ModelDrafter
from draft_svc.server import DraftConfig
from pilotfish.runtime.grants import ModelInfo
from pilotfish.runtime.loading import LoadedModel, load_model
from pilotfish.steps import DraftStep

DRAFTS = [
    ("near", "off"),
    *((kind, tree) for kind in ("own-reduced-pre-norm", "eagle3", "medusa") for tree in ("off", "12")),
]
"""Kinds, and what ``draft_tree`` asks for."""


def medusa(folder: Path, target: Path) -> Path:
    """Heads that are the target's own output layer behind a random block, in vLLM's names."""
    width = load_file(target / "model.safetensors")["model.norm.weight"].shape[0]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"original_lm_head": True}))
    generator = torch.Generator().manual_seed(1)
    blocks = {f"blocks.{j}.layers.0.weight": torch.randn(width, width, generator=generator) / 8 for j in range(3)}
    save_file(blocks, folder / "model.safetensors")
    return folder


def load_head(head: Path, target: Path, **settings: Any) -> Drafter:
    """The head of a folder, for the target of another."""
    defaults = {"model": head, "target_model": target, "pages": 256, "dtype": "float32", "device": "cpu"}
    return create_drafter(DraftConfig(**(defaults | settings)))


@dataclass
class Wrapped(Drafter):
    """A drafter in the place of another, which it asks."""

    drafter: Drafter

    def __post_init__(self) -> None:
        self.kinds, self.tree_width = self.drafter.kinds, self.drafter.tree_width

    @property
    def info(self) -> ModelInfo:
        return self.drafter.info

    def propose(self, step: DraftStep) -> Proposals:
        return self.drafter.propose(step)


@contextmanager
def drafting(
    kind: str,
    folder: Path,
    target: LoadedModel,
    where: Path,
    *,
    wrap: Callable[[Drafter], Drafter] | None = None,
    **settings: Any,
) -> Iterator[Deployment]:
    """A deployment with one draft.

    Args:
        kind: self: the target itself; near: its first two layers; medusa, or a format of a head.
        folder, target: the target.
        where: a head may be written.
        wrap: takes the drafter's place.
        **settings: of the deployment.
    """
    drafter: LoadedModel | Drafter
    features: tuple[str, ...] = ()
    if kind in ("self", "near"):
        drafter = target if kind == "self" else load_model(folder, dtype="float32", layers=2)
    else:
        head = medusa(where / "head", folder) if kind == "medusa" else FORMATS[kind].write(where / "head")
        drafter = load_head(head, folder, tree_width=4)
        features = drafter.info.features
    if wrap is not None:
        own = drafter if isinstance(drafter, Drafter) else ModelDrafter(drafter, pages=256)
        drafter = wrap(own)
    with Deployment(folder, target, (drafter,), features=features, **settings) as deployment:
        yield deployment
