"""What ``pilotfish train fit`` is asked for."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draft_svc.training.trainee import Objective
from pilotfish.errors import InvalidArgumentError

SCHEMES = ("mtp", "eagle", "eagle3", "medusa", "distill")
OPTIMIZERS = ("muon", "adamw")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class FitConfig:
    """One training run. A folder with a checkpoint goes on only with the same, ``visits`` apart."""

    scheme: str
    """mtp, eagle (mtp with norms none), eagle3, medusa with as many heads as steps, or distill: a draft model cut
    from the target."""
    data: Path
    """Folder of ``pilotfish train capture``."""
    target_model: Path
    """Hugging Face folder of the target whose text it is."""
    out: Path
    """Checkpoint, log and exported head go there."""
    init: Path | None = None
    """Folder of a head to begin from, as trained before; None to begin from the target's own layers."""
    layers: int = 1
    """Decoder layers of a head, or blocks of each of Medusa's. A second layer costs a third more per draft token, and
    accepts a little more."""
    norms: str = "all"
    """all, or none for the head of EAGLE-1; mtp only."""
    draft_layers: tuple[int, ...] = (0, 1, 29)
    """Layers of the target that a draft model begins from; distill only."""
    draft_vocab: int = 8192
    """Tokens that are trained on, and that a head with its own vocabulary can draft."""
    train_output: bool = False
    """Train an output layer of its own instead of keeping the target's rows; eagle3 only."""
    objective: Objective = field(default_factory=Objective)
    whole_text: bool = False
    """Train on the tokens of prompts too. The target did not write them, but it has an opinion on what follows each,
    and a head that has seen little text learns more from more of it than from the same again."""
    optimizer: str = "muon"
    """muon for matrices beside AdamW for the rest, or adamw for all. Muon needs several times fewer visits."""
    lr: float = 2e-3
    """Peak learning rate, of both optimizers."""
    weight_decay: float = 0.01
    warmup_steps: int = 40
    cooldown: float = 0.3
    """Last part of the visits, in which the learning rate falls to 0."""
    batch_tokens: int = 2048
    """Tokens of a batch over all processes, prompts and padding included."""
    visits: int = 1_000_000
    """Answer tokens to train on in all; a token counts once each time it is seen."""
    seed: int = 0
    dtype: str = "bfloat16"
    """Of matrix products; weights, norms and sums are float32 either way."""
    measure_every: int = 200
    """Steps between measurements on the documents held out, each with an export of the best."""

    def __post_init__(self) -> None:
        for name, options in (("scheme", SCHEMES), ("optimizer", OPTIMIZERS), ("dtype", DTYPES)):
            if getattr(self, name) not in options:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)!r}; must be one of {', '.join(options)}")
        for name in ("layers", "batch_tokens", "visits", "measure_every"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}; must be at least 1")
        for name in ("warmup_steps", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}; must be at least 0")
        if not self.lr > 0:
            raise InvalidArgumentError(f"lr is {self.lr}; must be above 0")
        if not 0 <= self.cooldown <= 1:
            raise InvalidArgumentError(f"cooldown is {self.cooldown}; must be in [0, 1]")
        if self.train_output and self.scheme != "eagle3":
            raise InvalidArgumentError(
                f"train_output is true; only eagle3 heads store an output layer, not {self.scheme}"
            )
        if self.norms != "all" and self.scheme != "mtp":
            raise InvalidArgumentError(f"norms is {self.norms!r}; only mtp has the choice, not {self.scheme}")

    def identity(self) -> dict[str, Any]:
        """What must not change when a run goes on; paths may move and the end may be put off."""
        left_out = ("data", "target_model", "out", "visits", "measure_every")
        kept = {name: value for name, value in asdict(self).items() if name not in left_out}
        return kept | {"init": None if self.init is None else str(self.init)}
