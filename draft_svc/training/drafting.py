"""How many tokens a head would have accepted: greedy chains drafted from every slot of greedy documents.

Where the target answered at temperature 0, its text is what it would have answered to every accepted draft too. So the
text judges a chain exactly, and no target is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draft_svc.training.data import Batch, Document, epoch_batches
from draft_svc.training.trainee import Trainee
from draft_svc.training.unroll import unroll

_BATCH_TOKENS = 2048  # drafted on at once


@dataclass(frozen=True, slots=True)
class ChainQuality:
    """Greedy acceptance of chains.

    Attributes:
        conditional: of each draft token, where those before it were accepted.
        tokens_per_round: tokens that a round yields when rounds follow one another through the text.
        rounds: that were counted.
    """

    conditional: tuple[float, ...]
    tokens_per_round: float
    rounds: int


@torch.inference_mode()
def measure_chains(
    trainee: Trainee, documents: Sequence[Document], vocabulary: Tensor, *, length: int = 4
) -> ChainQuality | None:
    """Drafts chains through documents that the target answered greedily; None if there are none.

    Args:
        trainee: whose head drafts.
        documents: captured.
        vocabulary: i64[Vd], token of every draft id.
        length: of the chains, at most; Medusa drafts no more tokens than it has heads.
    """
    greedy = [document for document in documents if document.is_greedy]
    length = min(length, trainee.head.depth or length)
    reached, rounds, text = torch.zeros(length + 1), 0, 0
    for indices in epoch_batches(greedy, _BATCH_TOKENS, seed=0, epoch=0):
        batch = Batch.of([greedy[i] for i in indices], ahead=trainee.head.lead + length)
        accepted = _accepted(trainee, batch.to(vocabulary.device), vocabulary, length)
        drafting = batch.targets(batch.slots, batch.is_slot, trainee.head.lead)
        for depth in range(length + 1):
            reached[depth] += int((accepted[drafting.to(accepted.device)] >= depth).sum())
        for row, is_slot in zip(accepted.tolist(), drafting.tolist(), strict=True):
            more_rounds, more_text = _walk([n for n, there in zip(row, is_slot, strict=True) if there])
            rounds, text = rounds + more_rounds, text + more_text
    if not rounds:
        return None
    conditional = (reached[1:] / reached[:-1].clamp_min(1)).tolist()
    return ChainQuality(tuple(round(rate, 4) for rate in conditional), text / rounds, rounds)


def _accepted(trainee: Trainee, batch: Batch, vocabulary: Tensor, length: int) -> Tensor:
    """Length of the accepted part of the chain from each slot, i64[B, A]."""
    drafted: list[Tensor] = []
    right: list[Tensor] = []
    for step in unroll(trainee.head, trainee.embeddings, batch, length, lambda step: drafted[step.number]):
        logits = step.outputs.to(trainee.output.dtype) @ trainee.output.T
        tokens = vocabulary[logits.argmax(-1)]
        drafted.append(tokens)
        right.append((tokens == batch.token_ids.gather(1, step.behind + 1)) & step.has_teacher)
    return torch.stack(right).cumprod(0).sum(0)


def _walk(accepted: list[int]) -> tuple[int, int]:
    """Rounds and tokens of decoding through slots, each round going on behind what it accepted."""
    rounds, at = 0, 0
    while at < len(accepted):
        rounds, at = rounds + 1, at + accepted[at] + 1
    return rounds, at
