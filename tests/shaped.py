"""The slow twin of ``runtime.shaping``: one node at a time, its history token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rows import Shape


def shaped_slowly(logits: Sequence[float], history: Sequence[int], shape: Shape) -> list[float]:
    """The definition, word by word: one node's logits by id, and every token before the next one."""
    shaped, completion = list(logits), history[shape.prompt_length :]
    for token in range(len(shaped)):
        if shape.allowed and token not in shape.allowed:
            shaped[token] = -math.inf
        shaped[token] += shape.biases.get(token, 0.0)
        if len(completion) < shape.min_tokens and token in shape.ends:
            shaped[token] = -math.inf
        if token in history:
            shaped[token] = shaped[token] / shape.repetition if shaped[token] > 0 else shaped[token] * shape.repetition
        for each in completion:
            if each == token:
                shaped[token] -= shape.frequency
        if token in completion:
            shaped[token] -= shape.presence
    return shaped
