"""Counter-based noise: every random number is a hash of what it is for.

Nothing here has state, so a draw does not depend on batch, replica, retry or order. The key of a
draw is (seed, purpose, round, position) and the counter is the token id, never its rank. Purposes
never share noise; only MATCH is used by target and drafter alike, which is what lets a seeded
drafter guess the target's own draws. Draws that must be fresh in every round carry the round; MATCH
leaves it 0, so that the text for a seed does not depend on how rounds fell.

The hash is the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014), in wrapping 64-bit integers. ``uniform`` works on numpy and torch arrays
with the same lines, so both give the same bits.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

Array = TypeVar("Array")  # a numpy or torch array of int64


class Purpose(IntEnum):
    """What a draw is for; part of its key."""

    DRAFT = 1
    """Children that a drafter samples from q."""
    COIN = 2
    """Accept or reject a node."""
    RESIDUAL = 3
    """The token after a rejection, inside the support."""
    OUTSIDE = 4
    """The target's draw outside a support; with an empty support its plain draw."""
    MATCH = 5
    """The target's draw that a drafter may share."""


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _mix_int(h: int) -> int:
    h &= _MASK
    h = ((h ^ (h >> 30)) * _FIRST) & _MASK
    h = ((h ^ (h >> 27)) * _SECOND) & _MASK
    return h ^ (h >> 31)


def _shift(h: Any, bits: int) -> Any:
    """Logical right shift of signed 64-bit integers."""
    return (h >> bits) & ((1 << (64 - bits)) - 1)


def mix(h: Any) -> Any:
    """``_mix_int`` on an array of int64, numpy or torch, wrapping."""
    h = (h ^ _shift(h, 30)) * _signed(_FIRST)
    h = (h ^ _shift(h, 27)) * _signed(_SECOND)
    return h ^ _shift(h, 31)


def key(seed: int, purpose: Purpose, round_index: int, position: int) -> int:
    """Key of a draw, a signed 64-bit integer.

    Args:
        seed: of the request, in [0, 2**64).
        purpose: what the draw is for.
        round_index: of the row; 0 for MATCH.
        position: absolute position of the token being drawn, or the node index for coins.
    """
    h = _mix_int(seed + _GOLDEN * int(purpose))
    h = _mix_int(h + _GOLDEN * (round_index + 1))
    return _signed(_mix_int(h + _GOLDEN * (position + 1)))


def keys(
    seeds: npt.NDArray[np.uint64], purpose: Purpose, rounds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """``key`` of many draws, all arrays [n]."""
    h = mix(seeds.astype(np.int64) + _signed(_GOLDEN * int(purpose)))
    h = mix(h + _signed(_GOLDEN) * (rounds + 1))
    mixed: npt.NDArray[np.int64] = mix(h + _signed(_GOLDEN) * (positions + 1))
    return mixed


def uniform(keys: Array, token_ids: Array) -> Array:
    """Uniform numbers in the open interval (0, 1), 52 bits each, float64.

    A 53rd bit would leave no room for the half that keeps them off 0 and 1: the last would round to 1.

    Args:
        keys: from ``key``, int64, any shape that broadcasts with ``token_ids``.
        token_ids: int64, numpy or torch like ``keys``.

    >>> round(float(uniform(np.array([key(7, Purpose.COIN, 0, 3)]), np.array([42]))[0]), 6)
    0.576325
    """
    bits: Any = _shift(mix(keys + token_ids * _signed(_GOLDEN)), 12)  # type: ignore[operator]
    doubles: Any = bits.astype(np.float64) if isinstance(bits, np.ndarray) else bits.double()
    return (doubles + 0.5) * 2.0**-52  # type: ignore[no-any-return]


def uniform_one(seed: int, purpose: Purpose, round_index: int, position: int, token_id: int = 0) -> float:
    """One uniform number, for a coin."""
    h = _mix_int(key(seed, purpose, round_index, position) + _GOLDEN * token_id)
    return ((h >> 12) + 0.5) * 2.0**-52


def race(keys: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64], weights: npt.NDArray[Any]) -> int:
    """Index of one token drawn with probability proportional to ``weights``.

    The exponential race (the Gumbel-max trick in other clothes): E_v / w_v is smallest for v with
    probability w_v / sum(w).

    Args:
        keys: one key, int64[1].
        token_ids: int64[n].
        weights: non-negative, at least one positive, [n].
    """
    with np.errstate(divide="ignore"):
        return int(np.argmin(-np.log(uniform(keys, token_ids)) / weights))
