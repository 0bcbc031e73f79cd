"""Simulated models for tests, and the slow twin of what they say."""

from __future__ import annotations

import numpy as np

from pilotfish.noise import mix
from pilotfish.runtime.grants import ModelInfo
from pilotfish.simulate.law import Law
from pilotfish.simulate.model import SimulatedModel
from pilotfish.simulate.profile import Cost, Profile

IDS = 280  # of the byte tokenizer of tiny_models


def instant(agreement: float) -> Profile:
    """A profile that takes no time."""
    free = Cost(weights_us=0.0, token_us=0.0)
    return Profile(agreement=agreement, target=free, draft=free)


def model(tokenizer_hash: str = "tokens", ids: int = IDS) -> SimulatedModel:
    return SimulatedModel(
        ModelInfo("simulated", "weights", tokenizer_hash, vocab_size=ids, max_len=512), token_limit=ids
    )


def prefix_of(tokens: list[int]) -> int:
    """The prefix hash, one token at a time."""
    prefix = np.zeros(1, np.int64)
    for position, token in enumerate(tokens):
        prefix += mix(np.array([position * 2**32 + token + 1]))
    return int(prefix[0])


def greedy(prompt: list[int], count: int) -> list[int]:
    """What the simulated target writes at temperature 0."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(Law(IDS).target(np.array([prefix_of(tokens)]))[0]))
    return tokens[len(prompt) :]
