"""Which drafter a folder is for, and which states of the target it reads; imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from draft_svc.drafters import eagle, eagle3, medusa, mtp
from draft_svc.drafters.checkpoint import Checkpoint
from draft_svc.drafters.eagle3 import Eagle3Spec
from draft_svc.drafters.head_spec import Switches
from draft_svc.drafters.pair_head import PairSpec
from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.config import ModelConfig, read_json

Reader = Callable[[Checkpoint, ModelConfig | None, Switches], PairSpec | Eagle3Spec]

READERS: dict[str, Reader] = {"mtp": mtp.read, "eagle": eagle.read, "eagle3": eagle3.read}
KINDS = ("model", *READERS, "medusa")


def kind_of(checkpoint: Checkpoint) -> str:
    """One of ``KINDS``, by config.json where speculators wrote it, else by the tensors' names.

    Raises:
        InvalidArgumentError: if it is a drafter of a kind that is not built.
    """
    names, said = checkpoint.shapes, checkpoint.config.get("speculators_model_type")
    if said is not None:
        if said not in READERS:
            raise InvalidArgumentError(f"speculators_model_type is {said!r}; known are {', '.join(READERS)}")
        return str(said)
    if mtp.is_mtp(checkpoint):
        return "mtp"
    if {"fc.weight", "fusion_fc.weight"} & names.keys():
        is_wide = any(name.startswith("midlayer.") or name.endswith(".hidden_norm.weight") for name in names)
        return "eagle3" if is_wide else "eagle"
    if medusa.is_medusa(names):
        return "medusa"
    return "model"


def describe(
    folder: Path, target_folder: Path | None, switches: Switches | None = None, kind: str = "auto"
) -> PairSpec | Eagle3Spec | None:
    """What head the folder holds; None for a drafter that is none of ``READERS``.

    Args:
        folder: of the drafter.
        target_folder: of its target; None if it is not known. A head in its target's shards knows its own.
        switches: what was said against config.json.
        kind: one of ``KINDS``; auto asks ``kind_of``.
    """
    checkpoint = Checkpoint.read(folder)
    found = kind_of(checkpoint) if kind == "auto" else kind
    if found not in READERS:
        return None
    target = target_folder_of(checkpoint, target_folder)
    sizes = None if target is None else sizes_of(target)
    return READERS[found](checkpoint, sizes, switches or Switches())


def target_folder_of(checkpoint: Checkpoint, given: Path | None) -> Path | None:
    """The target's folder: as given, else the head's own if it lies among the target's tensors."""
    if given is None and "model.norm.weight" in checkpoint.shapes:
        return checkpoint.folder
    return given


def wanted_features(
    folder: Path, target_folder: Path | None, switches: Switches | None = None, kind: str = "auto"
) -> tuple[str, ...]:
    """States of the target that a drafter reads, by the names of types.proto; none for a model.

    A target that is to serve it must be started with ``--features`` of these. Arguments as for ``describe``.
    """
    spec = describe(folder, target_folder, switches, kind)
    if spec is not None:
        return spec.features
    found = kind_of(Checkpoint.read(folder)) if kind == "auto" else kind
    return medusa.FEATURES if found == "medusa" else ()


def sizes_of(folder: Path) -> ModelConfig:
    """Sizes of a target whose architecture may be one that only others run."""
    return ModelConfig.from_dict({**read_json(folder, "config.json"), "architectures": ["LlamaForCausalLM"]})
