"""Which tokens a head with a vocabulary of its own may draft.

A head's output layer is most of what a draft step costs, and a small part of the vocabulary is nearly all that a model
writes. EAGLE-3 checkpoints store the choice as offsets: draft id j is token j + d2t[j] (HEADS.md, section 3.3).
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from pilotfish.errors import InvalidArgumentError


def choose_vocabulary(counts: Tensor, size: int, always: Collection[int] = ()) -> Tensor:
    """The most frequent tokens, as ascending ids.

    Args:
        counts: i64[V], how often the answers hold each token.
        size: tokens to choose; ties, and places that no token earns, go to lower ids.
        always: tokens chosen whatever their count, as those that end an answer.

    Returns:
        i64[size].

    Raises:
        InvalidArgumentError: if there are not so many tokens, or more that are always chosen.
    """
    if not len(always) < size <= len(counts):
        raise InvalidArgumentError(
            f"draft_vocab is {size}; must be above {len(always)} special tokens and at most {len(counts)}"
        )
    ranks = counts.clone()
    ranks[list(always)] = int(counts.max()) + 1
    order = torch.sort(ranks, descending=True, stable=True).indices
    return torch.sort(order[:size]).values


def to_offsets(vocabulary: Tensor) -> Tensor:
    """d2t i64[Vd] of ascending token ids."""
    return vocabulary - torch.arange(len(vocabulary))


def to_mask(vocabulary: Tensor, vocab_size: int) -> Tensor:
    """t2d bool[V]: which tokens have a draft id."""
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[vocabulary] = True
    return mask
