"""A training run on disk: where it stands, and all it needs to go on as if it had never stopped.

Nothing random is kept: what is drawn in a step follows from the seed and the step's number.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draft_svc.training.trainee import Trainee
from pilotfish.errors import FailedPreconditionError, InvalidArgumentError

FILE = "checkpoint.pt"


@dataclass(slots=True)
class Position:
    """How far a run is.

    Attributes:
        step: optimizer steps taken.
        visits: answer tokens seen.
        epoch: pass over the documents.
        batch: batches taken in this epoch.
        seconds: spent.
        best: most tokens per round on the documents held out; 0 before the first measurement.
    """

    step: int = 0
    visits: int = 0
    epoch: int = 0
    batch: int = 0
    seconds: float = 0.0
    best: float = 0.0


def save(
    folder: Path,
    trainee: Trainee,
    optimizers: Sequence[torch.optim.Optimizer],
    position: Position,
    vocabulary: Tensor,
    identity: dict[str, Any],
) -> None:
    """Replaces the folder's checkpoint at once."""
    part = folder / f"{FILE}.part"
    torch.save(
        {
            "trainee": trainee.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "position": asdict(position),
            "vocabulary": vocabulary,
            "identity": identity,
        },
        part,
    )
    os.replace(part, folder / FILE)


def load(
    folder: Path, trainee: Trainee, optimizers: Sequence[torch.optim.Optimizer], identity: dict[str, Any]
) -> Position:
    """Goes on from the folder's checkpoint; a fresh position if there is none.

    Raises:
        InvalidArgumentError: if the file is damaged.
        FailedPreconditionError: if the checkpoint is of another configuration, naming what differs.
    """
    stored = _read(folder)
    if stored is None:
        return Position()
    differing = [
        f"{name} {stored['identity'].get(name)!r} there and {value!r} here"
        for name, value in identity.items()
        if stored["identity"].get(name) != value
    ]
    if differing:
        raise FailedPreconditionError(f"{folder / FILE} is of another run: {'; '.join(differing)}; use another --out")
    trainee.load_state_dict(stored["trainee"])
    for optimizer, state in zip(optimizers, stored["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    return Position(**stored["position"])


def load_vocabulary(folder: Path) -> Tensor | None:
    """The draft vocabulary of the folder's checkpoint, i64[Vd]; None if there is none."""
    stored = _read(folder)
    return None if stored is None else stored["vocabulary"]


def _read(folder: Path) -> dict[str, Any] | None:
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        stored: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged archive fails in any way it likes
        raise InvalidArgumentError(f"{path} cannot be read ({error}); remove it to begin anew") from error
    return stored
