"""What a step wants to know of the model's own laws, answered in the order of target.proto."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pilotfish.runtime.logprobs import Laws
from pilotfish.steps import Floats, Ints, Logprobs, TargetStep, WantedLogprobs, empty_floats, empty_ints

SCORED_AT_ONCE = 64
"""Prompt tokens whose logits are held at a time."""


def laws_of(wanted: WantedLogprobs, logits: Tensor, token_limit: int) -> Laws:
    """The laws of the outputs that are asked for, before their logits are shaped.

    Args:
        wanted: of the step.
        logits: of all its outputs, f32[outputs, vocab].
        token_limit: as in ``Laws``.
    """
    asked = torch.from_numpy(np.flatnonzero(wanted.counts >= 0)).to(logits.device)
    return Laws(logits.index_select(0, asked), token_limit)


def answer(
    step: TargetStep, draws: Ints, laws: Laws, logits_of: Callable[[Ints], Tensor], token_limit: int
) -> Logprobs:
    """The step's log probabilities.

    Args:
        step: that wants some.
        draws: token of each output, i32[outputs].
        laws: of ``laws_of``.
        logits_of: logits f32[n, vocab] of tokens of the step, by index.
        token_limit: as in ``Laws``.
    """
    wanted = step.logprobs
    assert wanted is not None
    asked = wanted.counts >= 0
    top_token_ids, top = laws.likeliest(wanted.counts[asked])
    tokens, ids, tops = [laws.of(np.arange(asked.sum()), draws[asked])], [top_token_ids], [top]
    for begin in range(0, len(wanted.scored_nodes), SCORED_AT_ONCE):
        part = slice(begin, begin + SCORED_AT_ONCE)
        scored = Laws(logits_of(wanted.scored_nodes[part]), token_limit)
        top_token_ids, top = scored.likeliest(wanted.scored_counts[part])
        tokens.append(scored.of(np.arange(len(wanted.scored_nodes[part])), wanted.scored_token_ids[part]))
        ids.append(top_token_ids)
        tops.append(top)
    return Logprobs(np.concatenate(tokens), _of_supports(step, asked, laws), np.concatenate(ids), np.concatenate(tops))


def _of_supports(step: TargetStep, asked: np.ndarray, laws: Laws) -> Floats:
    """Of the ids in the supports of the outputs asked for, in their order."""
    counts, ids = step.supports.counts, step.supports.token_ids
    if not len(counts):
        return empty_floats()
    places = np.repeat(np.cumsum(asked) - 1, counts)
    is_asked = np.repeat(asked, counts)
    return laws.of(places[is_asked], ids[is_asked] if len(ids) else empty_ints())
