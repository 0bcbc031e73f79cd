"""Soft cross-entropy against the target's distribution, through a frozen or a trained lm_head, in little memory.

For the frozen lm_head the gradient of a row's loss needs nothing that comes later, so it is computed with the loss, a
few rows at a time: no more than those rows' logits ever exist.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ROWS = 256
_SMALL = 1e-20


@dataclass(frozen=True, slots=True)
class Candidates:
    """A part of the draft vocabulary that stands for the whole in one batch (sampled softmax, arXiv 1412.2007).

    Most of a softmax goes to tokens that neither teacher nor head would take. Kept are the teacher's likeliest tokens
    of all rows, and a random few of the rest, each standing for many: its logit gains the log of how many.

    Attributes:
        ids: i64[C], draft ids.
        gains: f32[C], added to their logits.
        places: i64[Vd], index in ``ids`` of every draft id; -1 if it is not there.
    """

    ids: Tensor
    gains: Tensor
    places: Tensor

    @classmethod
    def choose(cls, teacher_ids: Tensor, vocab_size: int, others: int, random: torch.Generator) -> Candidates:
        """Chooses for the rows of a batch.

        Args:
            teacher_ids: i32[n, k], draft ids that are to be kept.
            vocab_size: draft ids.
            others: how many of the rest.
            random: draws them.
        """
        device = teacher_ids.device
        kept = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        kept[teacher_ids.flatten().long()] = True
        order = torch.rand(vocab_size, generator=random).to(device).masked_fill(kept, 2.0).argsort()
        rest = vocab_size - int(kept.sum())
        others = min(others, rest)
        ids = torch.cat((kept.nonzero().squeeze(-1), order[:others]))
        gains = torch.zeros(len(ids), device=device)
        if others:
            gains[-others:] = math.log(rest / others)
        places = torch.full((vocab_size,), -1, dtype=torch.int64, device=device)
        places[ids] = torch.arange(len(ids), device=device)
        return cls(ids, gains, places)


@dataclass(frozen=True, slots=True)
class Judged:
    """How a step's rows compare with the teacher.

    Attributes:
        losses: f32[n], cross-entropy; differentiable.
        hits: bool[n], whether the likeliest token is the teacher's.
        overlaps: f32[n], sum of min(p, q): chance that a token drawn at temperature 1 is accepted.
    """

    losses: Tensor
    hits: Tensor
    overlaps: Tensor


def judge(outputs: Tensor, head: Tensor, ids: Tensor, probs: Tensor, candidates: Candidates | None = None) -> Judged:
    """Cross-entropy of softmax(outputs @ head.T) against a sparse teacher.

    Args:
        outputs: f32[n, H].
        head: [Vd, H] of the target, or of the head if it trains its own.
        ids: i32[n, k], draft ids, likeliest first.
        probs: f32[n, k], their probabilities, summing to 1.
        candidates: stand for the draft vocabulary; None for all of it.
    """
    return Judged(*_SoftCrossEntropy.apply(outputs, head, ids.long(), probs, candidates))  # type: ignore[no-untyped-call]


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, outputs: Tensor, head: Tensor, ids: Tensor, probs: Tensor, candidates: Candidates | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if candidates is not None:
            ids = candidates.places[ids]
            probs = probs.masked_fill(ids < 0, 0.0)
            probs = probs / probs.sum(-1, keepdim=True)
            ids = ids.clamp_min(0)
        # Autocast does not reach in here; the head comes in the precision that is meant.
        rows = head.detach() if candidates is None else head.detach()[candidates.ids]
        losses, hits, overlaps = [], [], []
        gradients = torch.empty_like(outputs, dtype=torch.float32)
        head_gradient = torch.zeros_like(rows, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for begin in range(0, len(outputs), _ROWS):
            part = slice(begin, begin + _ROWS)
            x, p = outputs[part].to(rows.dtype), probs[part]
            logits = (x @ rows.T).float()
            if candidates is not None:
                logits += candidates.gains
            hits.append(logits.argmax(-1) == ids[part, 0])
            q = torch.softmax(logits, dim=-1)
            of_teacher = q.gather(1, ids[part])
            losses.append(-(p * (of_teacher + _SMALL).log()).sum(-1))
            overlaps.append(torch.minimum(p, of_teacher).sum(-1))
            slope = q.scatter_add_(1, ids[part], -p).to(rows.dtype)  # d loss / d logits is q - p
            gradients[part] = slope @ rows
            if head_gradient is not None:
                head_gradient += (slope.T @ x).float()
        ctx.candidates, ctx.head_shape = candidates, head.shape
        ctx.save_for_backward(gradients, head_gradient)
        judged = torch.cat(losses), torch.cat(hits), torch.cat(overlaps)
        ctx.mark_non_differentiable(*judged[1:])
        return judged

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        gradients, head_gradient = ctx.saved_tensors
        of_rows = slopes[0]
        if head_gradient is not None:
            # The rows' logits are gone by now, and with them what unequal weights would need.
            head_gradient = head_gradient * of_rows[0]
            if ctx.candidates is not None:
                whole = head_gradient.new_zeros(ctx.head_shape)
                head_gradient = whole.index_copy_(0, ctx.candidates.ids, head_gradient)
        return gradients * of_rows.unsqueeze(-1), head_gradient, None, None, None
