"""Counter noise: three twins with the same bits, uniform and independent. All seeds are fixed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest

from pilotfish import noise
from pilotfish.noise import Purpose, key, race, uniform, uniform_one

SEEDS = [0, 1, 7, 2**31, 2**63, 2**64 - 1]
PINNED_KEY = 7809585962377632801
PINNED_UNIFORM = 0.576324897782622
LIMIT = 1e-4  # of p-values; nothing is random here, a failure is a change of the hash


def spec(seed: int, purpose: int, round_index: int, position: int, token_id: int) -> int:
    """The slow twin: SplitMix64's finaliser over the parts of the key, in plain integers; 52 bits."""

    def mix(h: int) -> int:
        h %= 2**64
        h ^= h >> 30
        h = h * 0xBF58476D1CE4E5B9 % 2**64
        h ^= h >> 27
        h = h * 0x94D049BB133111EB % 2**64
        return h ^ (h >> 31)

    golden = 0x9E3779B97F4A7C15
    h = mix(seed + golden * purpose)
    for part in (round_index, position):
        h = mix(h + golden * (part + 1))
    return mix(h + golden * token_id) >> 12


CASES = list(itertools.product(SEEDS, Purpose, [0, 1, 2**40], [0, 5, 2**20], [0, 1, 49151, 2**31 - 1]))


def test_numpy_torch_and_integers_give_the_same_bits() -> None:
    keys = np.array([key(seed, purpose, r, position) for seed, purpose, r, position, _ in CASES])
    ids = np.array([token for *_, token in CASES])
    assert keys.dtype == np.int64
    by_numpy = uniform(keys, ids)
    by_torch = uniform(torch.from_numpy(keys), torch.from_numpy(ids))
    by_integers = [uniform_one(*case) for case in CASES]
    assert by_numpy.dtype == np.float64
    assert by_numpy.tolist() == by_torch.tolist() == by_integers
    assert [int(value * 2**52) for value in by_integers] == [spec(*case) for case in CASES]


def test_keys_of_many_draws_are_those_of_each() -> None:
    seeds, rounds = [0, 7, 2**63, 2**64 - 1], [0, 3, 2**40, 1]
    positions = [5, 0, 2**31, 8]
    found = noise.keys(np.array(seeds, np.uint64), Purpose.OUTSIDE, np.array(rounds), np.array(positions))
    each = [key(*draw) for draw in zip(seeds, [Purpose.OUTSIDE] * 4, rounds, positions, strict=True)]
    assert found.tolist() == each


def test_keys_broadcast_against_tokens() -> None:
    keys = np.array([[key(1, Purpose.MATCH, 0, 0)], [key(1, Purpose.MATCH, 0, 1)]])
    grid = uniform(keys, np.arange(3)[None, :])
    assert grid.shape == (2, 3)
    assert grid[1, 2] == uniform_one(1, Purpose.MATCH, 0, 1, 2)
    assert torch.equal(uniform(torch.from_numpy(keys), torch.arange(3)[None, :]), torch.from_numpy(grid))


def test_the_hash_stays_what_it_is() -> None:
    """Pinned: another hash would change the text of every seed."""
    assert key(7, Purpose.COIN, 0, 3) == PINNED_KEY
    assert uniform_one(7, Purpose.COIN, 0, 3, 42) == PINNED_UNIFORM


def sample(purpose: Purpose = Purpose.MATCH, rounds: int = 1, positions: int = 16, tokens: int = 1024) -> np.ndarray:
    """Uniforms of one seed, [rounds, positions, tokens]."""
    keys = [[[key(11, purpose, r, position)] for position in range(positions)] for r in range(rounds)]
    return uniform(np.array(keys), np.arange(tokens)[None, None, :])


@pytest.mark.parametrize("purpose", list(Purpose))
def test_uniform_over_tokens_and_positions(purpose: Purpose) -> None:
    values = sample(purpose).ravel()
    assert values.min() > 0
    assert values.max() < 1
    assert chisquare(np.histogram(values, 64, (0, 1))[0]).pvalue > LIMIT
    assert kstest(values, "uniform").pvalue > LIMIT


def test_uniform_over_seeds_and_over_rounds() -> None:
    for values in (
        [uniform_one(seed, Purpose.COIN, 0, 0) for seed in range(8192)],
        [uniform_one(3, Purpose.COIN, r, 0) for r in range(8192)],
    ):
        assert chisquare(np.histogram(values, 32, (0, 1))[0]).pvalue > LIMIT


def test_low_bits_are_uniform_too() -> None:
    bits = (sample().ravel() * 2**52).astype(np.int64) % 64
    assert chisquare(np.bincount(bits, minlength=64)).pvalue > LIMIT


def independent(left: np.ndarray, right: np.ndarray) -> bool:
    """Pairs fill an 8 by 8 grid evenly, and are not correlated."""
    grid = np.histogram2d(left.ravel(), right.ravel(), 8, [[0, 1], [0, 1]])[0]
    correlation = np.corrcoef(left.ravel(), right.ravel())[0, 1] * left.size**0.5
    return bool(chisquare(grid.ravel()).pvalue > LIMIT and abs(correlation) < 4)


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(Purpose, 2)))
def test_purposes_share_no_noise(one: Purpose, other: Purpose) -> None:
    assert independent(sample(one), sample(other))


@pytest.mark.parametrize("lag", [1, 2, 3, 8])
def test_neighbours_share_no_noise(lag: int) -> None:
    tokens = sample()[0]
    assert independent(tokens[:, lag:], tokens[:, :-lag])
    assert independent(tokens[lag:], tokens[:-lag])
    rounds = sample(Purpose.OUTSIDE, rounds=16, positions=4, tokens=256)
    assert independent(rounds[lag:], rounds[:-lag])
    seeds = np.array([[uniform_one(seed, Purpose.COIN, 0, p) for p in range(8)] for seed in range(1024)])
    assert independent(seeds[lag:], seeds[:-lag])


def test_round_and_position_do_not_trade_places() -> None:
    rounds = sample(Purpose.COIN, rounds=24, positions=24, tokens=32)
    upper = np.triu_indices(24, 1)
    assert independent(rounds[upper], rounds.transpose(1, 0, 2)[upper])


def test_the_independence_check_can_fail() -> None:
    values = sample()
    assert not independent(values, values)
    assert not independent(values, 1 - values)
    assert not independent(values, (values * 8) % 1 * 0.5 + (values > 0.5) * 0.5)


@pytest.mark.parametrize("weights", [[1, 1, 1, 1], [0.5, 0.3, 0.15, 0.05], [8, 0, 1, 3]])
def test_race_draws_in_proportion_to_weights(weights: list[float]) -> None:
    ids, shares = np.array([5, 900, 17, 3]), np.array(weights, np.float64)
    counts = np.zeros(4)
    for position in range(6000):
        counts[race(np.array([key(2, Purpose.RESIDUAL, 1, position)]), ids, shares)] += 1
    assert (counts[shares == 0] == 0).all()
    assert chisquare(counts[shares > 0], 6000 * shares[shares > 0] / shares.sum()).pvalue > LIMIT


def test_race_goes_by_token_and_not_by_rank() -> None:
    ids, weights, order = np.array([5, 900, 17, 3]), np.array([0.4, 0.3, 0.2, 0.1]), np.array([2, 0, 3, 1])
    for position in range(50):
        keys = np.array([key(2, Purpose.RESIDUAL, 1, position)])
        assert ids[race(keys, ids, weights)] == ids[order][race(keys, ids[order], weights[order])]


def test_noise_stays_inside_the_open_interval_at_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least and the greatest hash: a uniform of 0 or 1 would make log or 1 - u infinite."""
    for bits, numbers in ((0, "least"), (-1, "greatest")):
        monkeypatch.setattr(noise, "mix", lambda h, bits=bits: np.full_like(h, bits))
        value = float(uniform(np.array([1]), np.array([1]))[0])
        assert 0 < value < 1, numbers
