"""Shapes of static trees: what is refused, what a limit leaves, and which paths are the likeliest."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path

import pytest

from draft_svc.drafters.tree_shapes import DEFAULT, EAGLE_1, MEDUSA, Shape, cut, likeliest, read_shape
from pilotfish.errors import InvalidArgumentError, NotFoundError

# Of EAGLE's choices.py, mc_sim_7b_63.
EAGLE_1_PATHS = """0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"""


def test_the_tree_of_eagle_1() -> None:
    assert EAGLE_1.paths == tuple(tuple(map(int, path)) for path in EAGLE_1_PATHS.split())
    assert (EAGLE_1.depth, EAGLE_1.branches, EAGLE_1.width) == (5, 4, 4)


@pytest.mark.parametrize("fall", [1.0, 0.6])
@pytest.mark.parametrize("count", [1, 5, 30])
def test_the_likeliest_paths_are_the_likeliest(count: int, fall: float) -> None:
    chances, depth = [0.5, 0.2, 0.1], 4

    def chance(path: tuple[int, ...]) -> float:
        return math.prod(chances[rank] * fall**level for level, rank in enumerate(path))

    every = [path for length in range(1, depth + 1) for path in product(range(3), repeat=length)]
    best = sorted((chance(path) for path in every), reverse=True)[:count]
    assert [chance(path) for path in likeliest(chances, count, depth, fall).paths] == pytest.approx(best)


def test_of_few_paths_all_are_taken() -> None:
    assert set(likeliest([0.5, 0.2], 100, 2).paths) == {(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize("shape", [EAGLE_1, DEFAULT, MEDUSA])
def test_a_beginning_of_a_shape_is_the_shape_of_a_smaller_limit(shape: Shape) -> None:
    for limit in range(1, len(shape.paths) + 1):
        assert cut(shape, limit, 99, 99).paths == shape.paths[:limit]


def test_a_cut_keeps_depth_and_width() -> None:
    shape = cut(DEFAULT, 40, 3, 2)
    assert (shape.depth, shape.width, len(shape.paths)) == (3, 2, len(set(shape.paths)))
    assert cut(DEFAULT, 5, 5, 1).paths[:2] == ((0,), (0, 0))
    assert cut(Shape(((0,), (1,), (1, 0), (0, 0))), 4, 2, 1).paths == ((0,), (1,), (1, 0))


@pytest.mark.parametrize(
    ("paths", "fault"),
    [
        ([], "tree paths is 0; must be 1 to 256"),
        ([()], r"tree path \[0\] is \[\]; must be ranks"),
        ([(0,), (-1,)], r"tree path \[1\] is \[-1\]; must be ranks"),
        ([(0,), (0,)], r"tree path \[1\] is \[0\]; is given twice"),
        ([(0,), (1, 0)], r"its parent \[1\] must come before it"),
    ],
)
def test_what_is_no_tree_is_refused(paths: list[tuple[int, ...]], fault: str) -> None:
    with pytest.raises(InvalidArgumentError, match=fault):
        Shape(tuple(paths))


def test_a_file_of_paths_is_read_parents_first(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps([[1, 0], [0], [1], [0, 0]]))
    assert read_shape(file).paths == ((1,), (1, 0), (0,), (0, 0))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "cannot be read"),
        ('{"0": 1}', "must hold a JSON list of lists"),
        ("[[0], 1]", "must hold a JSON list of lists"),
        ("[[0], [true]]", "must hold a JSON list of lists"),
        ("[[0], [0]]", "is given twice"),
        ("[[0], [1, 0]]", "must come before it"),
        ("[]", "must be 1 to 256"),
    ],
)
def test_a_file_that_holds_no_tree_is_refused_by_name(text: str, fault: str, tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(text)
    with pytest.raises(InvalidArgumentError, match=f"tree.json.*{fault}"):
        read_shape(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"nowhere\.json is missing"):
        read_shape(tmp_path / "nowhere.json")
