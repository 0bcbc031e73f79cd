"""A head run on its own outputs, for all slots of a batch at once.

Serving fills a head's cache with true pairs up to a slot, then drafts from there on the head's own outputs. Unrolling
does that from every slot side by side: step 0 is the true pairs, later steps draft (``Context`` says what they see).
With true tokens in place of drafts this is the training-time test of EAGLE-3 (arXiv 2503.01840, section 3.2; HEADS.md,
section 3.2); with the head's own tokens it is drafting itself, and so measures what serving would accept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from draft_svc.training.data import Batch, gather
from draft_svc.training.heads import Head, MedusaHeads, RecurrentHead
from draft_svc.training.modules import Context


@dataclass(frozen=True, slots=True)
class Step:
    """What a step of the unrolled head says.

    Attributes:
        number: k.
        outputs: f32[B, n, H], what lm_head reads.
        slots: i64[B, n], whose they are.
        has_teacher: bool[B, n], where the target's answer is known.
        behind: i64[B, n], at which token the target answers.
    """

    number: int
    outputs: Tensor
    slots: Tensor
    has_teacher: Tensor
    behind: Tensor


NextTokens = Callable[[Step], Tensor]
"""The tokens i64[B, n] that enter the step behind this one."""


def unroll(
    head: Head,
    embeddings: Tensor,
    batch: Batch,
    steps: int,
    next_tokens: NextTokens | None = None,
    chosen: Tensor | None = None,
) -> Iterator[Step]:
    """Runs a head ``steps`` times.

    Args:
        head: to run.
        embeddings: of the target, [V, H].
        batch: padded for at least lead + steps tokens ahead.
        steps: at least 1.
        next_tokens: None for the tokens of the text.
        chosen: indices into the batch's slots that go on behind step 0, i64[B, n]; None for all. Medusa's all do.
    """
    if isinstance(head, MedusaHeads):
        yield from _side_by_side(head, batch, steps)
        return
    assert isinstance(head, RecurrentHead)
    length = batch.features.shape[1]
    contexts = [Context() for _ in head.layers]
    slots, is_slot = batch.slots, batch.is_slot

    def run(tokens: Tensor, states: Tensor, positions: Tensor) -> Tensor:
        x, beside = head.enter(embeddings[tokens], states)
        angles = head.positions(positions)
        for i, (layer, context) in enumerate(zip(head.layers, contexts, strict=True)):
            x = layer(x, angles, context, beside if i == 0 else None)
        return x

    every = torch.arange(length, device=slots.device).expand(len(slots), -1)
    x = run(batch.token_ids[:, head.lead : head.lead + length], head.read(batch.features), every)
    x = gather(x, slots)
    for number in range(steps):
        outputs, states = head.leave(x)
        ahead = head.lead + number
        step = Step(number, outputs, slots, batch.targets(slots, is_slot, ahead), slots + ahead)
        yield step
        if number + 1 == steps:
            return
        tokens = batch.token_ids.gather(1, step.behind + 1) if next_tokens is None else next_tokens(step)
        if number == 0:
            if chosen is not None:
                slots, is_slot = slots.gather(1, chosen), is_slot.gather(1, chosen)
                tokens, states = tokens.gather(1, chosen), gather(states, chosen)
            for context in contexts:
                context.choose(slots)
        x = run(tokens, states, slots + number + 1)


def _side_by_side(head: MedusaHeads, batch: Batch, steps: int) -> Iterator[Step]:
    """Medusa's heads see no drafts, so that there is nothing to unroll."""
    states = gather(batch.features, batch.slots)
    for number in range(steps):
        ahead = head.lead + number
        has_teacher = batch.targets(batch.slots, batch.is_slot, ahead)
        yield Step(number, head(states, number), batch.slots, has_teacher, batch.slots + ahead)
