"""The laws of models that do not exist: which tokens may follow a prefix, and draws from them.

After every prefix there are 64 possible tokens with Zipf's probabilities, 1 / (1 + rank)**2: their ids
follow each other from one that the prefix decides. The draft's law is the same, or, where the two
disagree, the same on the next 64 ids. So acceptance is the profile's agreement at every temperature
and under every rule, and supports and tails are as large as those of real models.

``pilotfish.runtime.sampling`` does the same for any logits; tests hold the two together.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pilotfish.errors import InvalidArgumentError
from pilotfish.noise import mix, uniform
from pilotfish.runtime.slots import Longs
from pilotfish.steps import Floats, Ints, SamplingRows, Supports, empty_floats

Doubles = npt.NDArray[np.float64]

WIDTH = 64
"""Tokens that may follow a prefix."""

LOGITS = -2 * np.log1p(np.arange(WIDTH))
"""By rank, for every prefix."""

_SPOIL = 0x5EED  # keeps the coin of agreement apart from the choice of tokens


class Law:
    """Laws over one vocabulary.

    Args:
        vocab_size: ids are below it.

    Raises:
        InvalidArgumentError: if it has no room for a draft that disagrees.
    """

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 2 * WIDTH:
            raise InvalidArgumentError(f"the tokenizer has {vocab_size} ids; a simulated model needs {2 * WIDTH}")
        self._vocab_size = vocab_size

    def target(self, prefixes: Longs) -> Longs:
        """The likeliest token after each prefix, i64[n]; less likely ones follow it."""
        firsts: Longs = (mix(prefixes).view(np.uint64) % np.uint64(self._vocab_size)).astype(np.int64)
        return firsts

    def draft(self, prefixes: Longs, agreement: float) -> Longs:
        """The same of a draft that agrees after so many of the prefixes."""
        coins = (mix(prefixes ^ _SPOIL).view(np.uint64) >> np.uint64(11)) * 2.0**-53
        return self.token(self.target(prefixes), np.where(coins < agreement, 0, WIDTH))

    def token(self, firsts: Longs, ranks: Longs) -> Longs:
        """The token of each rank below the likeliest; the arrays broadcast."""
        return (firsts + ranks) % self._vocab_size

    def rank(self, firsts: Longs, token_ids: Ints) -> Longs:
        """Inverse of ``token``; WIDTH or more for a token that cannot follow."""
        return (token_ids - firsts) % self._vocab_size


def shares(sampling: SamplingRows) -> Doubles:
    """Probability by rank as each row samples: temperature, top-k, top-p, min-p. f64[rows, WIDTH]."""
    warm = sampling.temperatures > 0
    scores = LOGITS / np.where(warm, sampling.temperatures, 1.0).astype(np.float64)[:, None]
    kept = np.arange(WIDTH) < np.where(sampling.top_ks > 0, sampling.top_ks, WIDTH)[:, None]
    p = _normalised(np.exp(scores) * kept)
    before = np.cumsum(p, axis=1) - p
    p = _normalised(p * ((before < sampling.top_ps[:, None]) | (np.arange(WIDTH) == 0)))
    p = _normalised(p * (p >= sampling.min_ps[:, None] * p[:, :1]))
    return np.where(warm[:, None], p, np.arange(WIDTH) == 0)


def race(weights: Doubles, keys: Longs, token_ids: Longs) -> Longs:
    """Rank drawn in proportion to each row's weights; 0 for a row without a positive one. i64[n].

    Args:
        weights: f64[n, WIDTH], non-negative.
        keys: noise keys, i64[n].
        token_ids: of the ranks, i64[n, WIDTH].
    """
    with np.errstate(divide="ignore", over="ignore"):
        ranks: Longs = (-np.log(uniform(keys[:, None], token_ids)) / weights).argmin(axis=1)
    return ranks


def draw(law: Law, firsts: Longs, p: Doubles, keys: Longs) -> Ints:
    """One token after each prefix. i32[n].

    Args:
        firsts: the likeliest token after each, i64[n].
        p: by rank, f64[n, WIDTH].
        keys: noise keys, i64[n].
    """
    ids = law.token(firsts[:, None], np.arange(WIDTH))
    return law.token(firsts, race(p, keys, ids)).astype(np.int32)


def draw_outside(law: Law, firsts: Longs, p: Doubles, keys: Longs, supports: Supports) -> tuple[Ints, Floats, Floats]:
    """A token from outside each support, the mass there, and p on the supports; as in ``TargetResult``."""
    groups = np.repeat(np.arange(len(firsts)), supports.counts)
    ranks = law.rank(firsts[groups], supports.token_ids)
    known = ranks < WIDTH
    inside = np.zeros(len(ranks))
    inside[known] = p[groups[known], ranks[known]]
    rest = p.copy()
    rest[groups[known], ranks[known]] = 0
    tails = rest.sum(axis=1)
    tokens = np.where(tails > 0, draw(law, firsts, rest, keys), -1).astype(np.int32)
    return tokens, tails.astype(np.float32), inside.astype(np.float32)


def truncate(p: Doubles, limit: int) -> Doubles:
    """The sparse q of a drafter: its likeliest tokens, renormalised. f64[n, WIDTH], exactly what float32 carries."""
    return _normalised(p * (np.arange(WIDTH) < limit)).astype(np.float32).astype(np.float64)


def no_supports(outputs: int) -> tuple[Floats, Floats]:
    """Tail masses and probabilities of outputs without supports."""
    return np.ones(outputs, np.float32), empty_floats()


def _normalised(weights: Doubles) -> Doubles:
    sums: Doubles = weights / weights.sum(axis=1, keepdims=True)
    return sums
