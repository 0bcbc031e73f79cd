"""The enumerator itself: it visits every outcome once, with its probability."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tests.paper.enumeration import Language, World, difference, law


def test_law_of_two_dice_that_depend_on_each_other() -> None:
    def experiment(world: World) -> int:
        first = world.choose([0.5, 0.25, 0.25])
        return first if first == 2 else first + 10 * world.choose([0.75, 0.0, 0.25])

    assert law(experiment) == pytest.approx({0: 3 / 8, 20: 1 / 8, 1: 3 / 16, 21: 1 / 16, 2: 1 / 4}, abs=1e-15)


def test_language_is_a_law_and_exact_in_float32() -> None:
    language = Language(vocab_size=4, support_size=3, seed=1)
    sequences = language.sequences(3)
    assert sum(sequences.values()) == pytest.approx(1, abs=1e-12)
    assert all(Fraction(value).denominator <= 16**3 for value in sequences.values())
    assert len(language.q(()).nonzero()[0]) == 3


def test_difference_sees_a_missing_outcome() -> None:
    assert difference({1: 1.0}, {1: 0.75, 2: 0.25}) == 0.25
