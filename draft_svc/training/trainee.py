"""The head with everything that judges it: one forward per training step, so that DDP can wrap it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draft_svc.training.data import Batch, gather
from draft_svc.training.heads import Head
from draft_svc.training.losses import Candidates, judge
from draft_svc.training.unroll import Step, unroll
from pilotfish.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Objective:
    """What is minimised: over steps k, decay^k * (soft cross-entropy + hidden_weight * SmoothL1 of states)."""

    steps: int = 2
    """Times the head is unrolled. More are nearer to drafting, and each costs about as much as the first."""
    decay: float = 0.8
    hidden_weight: float = 0.05
    """Weight of the states' loss, for heads whose outputs are states. At 1 it drowns the logits (SmolLM2)."""
    teacher_temperature: float = 1.0
    """Of the target's distribution. Below 1 favours greedy drafting over drafting at temperature 1."""
    later_slots: float = 0.5
    """Share of the slots that go on behind step 0, drawn anew in every batch."""
    other_candidates: int = 512
    """Random tokens beside the teacher's likeliest that stand for the vocabulary in a batch; 0 takes all of it."""

    def __post_init__(self) -> None:
        for name, low in (("steps", 1), ("decay", 0), ("hidden_weight", 0), ("other_candidates", 0)):
            if not getattr(self, name) >= low:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}; must be at least {low}")
        if not self.teacher_temperature > 0:
            raise InvalidArgumentError(f"teacher_temperature is {self.teacher_temperature}; must be above 0")
        if not 0 < self.later_slots <= 1:
            raise InvalidArgumentError(f"later_slots is {self.later_slots}; must be above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class Losses:
    """Sums over a step's rows that have a teacher, each f32[steps]; ``rows`` counts them.

    Attributes:
        logits: soft cross-entropy.
        states: SmoothL1 of outputs against the target's states; zeros where outputs are no states.
        hits: rows whose likeliest token is the teacher's.
        overlaps: sum of min(p, q).
        rows: that were judged.
    """

    logits: Tensor
    states: Tensor
    hits: Tensor
    overlaps: Tensor
    rows: Tensor

    def means(self) -> Losses:
        rows = self.rows.clamp_min(1)
        return Losses(self.logits / rows, self.states / rows, self.hits / rows, self.overlaps / rows, self.rows)


class Trainee(nn.Module):
    """See the module.

    Args:
        head: to train.
        embeddings: of the target, [V, H], frozen.
        output: the target's lm_head on the draft vocabulary, [Vd, H].
        objective: what is minimised.
        train_output: whether the head trains an output layer of its own, which begins as the target's.
    """

    embeddings: Tensor
    output: Tensor

    def __init__(
        self, head: Head, embeddings: Tensor, output: Tensor, objective: Objective, *, train_output: bool = False
    ) -> None:
        super().__init__()
        self.head = head
        self.objective = objective
        self.register_buffer("embeddings", embeddings, persistent=False)
        if train_output:
            self.output = nn.Parameter(output.float().clone())
        else:
            self.register_buffer("output", output, persistent=False)

    def forward(self, batch: Batch, random: torch.Generator) -> Losses:
        """Judges the unrolled head on a batch.

        Args:
            batch: padded for lead + steps tokens ahead.
            random: draws slots and candidates.
        """
        objective, chosen = self.objective, None
        if objective.later_slots < 1 and objective.steps > 1:
            chosen = _choose_slots(batch.is_slot, objective.later_slots, random)
        steps = unroll(self.head, self.embeddings, batch, objective.steps, chosen=chosen)
        sums = [torch.stack(self._sums(step, batch, random)) for step in steps]
        return Losses(*torch.stack(sums, dim=1))

    def loss(self, losses: Losses, rows: Tensor) -> Tensor:
        """The one number to minimise, given how many rows each step has in all processes, f32[steps]."""
        weights = self.objective.decay ** torch.arange(self.objective.steps, device=rows.device)
        sums = losses.logits + self.objective.hidden_weight * losses.states
        return (weights * sums / rows.clamp_min(1)).sum() / weights.sum()

    def _sums(self, step: Step, batch: Batch, random: torch.Generator) -> list[Tensor]:
        valid, behind = step.has_teacher, step.behind
        outputs = step.outputs[valid].float()
        ids = gather(batch.teacher.ids, behind)[valid]
        logits = gather(batch.teacher.logits, behind)[valid]
        probs = torch.softmax(logits.float() / self.objective.teacher_temperature, dim=-1)
        candidates = None
        if others := self.objective.other_candidates:
            candidates = Candidates.choose(ids[:, :_KEPT_PER_ROW], len(self.output), others, random)
        output = self.output.to(self.embeddings.dtype)
        judged = judge(outputs, output, ids, probs, candidates)
        states = outputs.new_zeros(())
        if self.head.returns_states and self.objective.hidden_weight:
            states = F.smooth_l1_loss(outputs, gather(batch.final, behind)[valid].float(), reduction="none")
            states = states.mean(-1).sum()
        rows = judged.losses.new_tensor(len(outputs))
        return [judged.losses.sum(), states, judged.hits.float().sum(), judged.overlaps.sum(), rows]


_KEPT_PER_ROW = 4  # of the teacher's likeliest tokens, among the candidates for certain


def _choose_slots(is_slot: Tensor, share: float, random: torch.Generator) -> Tensor:
    """Indices of slots drawn without replacement, padding last, i64[B, n]."""
    count = max(1, round(is_slot.shape[1] * share))
    order = torch.rand(is_slot.shape, generator=random).to(is_slot.device) - 2 * is_slot.float()
    return torch.argsort(order, dim=1)[:, :count]
