"""Which tokens' features a target ships, against the obvious way."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from fakes import grant
from rows import Row, greedy_rows, ints, token_rows

from pilotfish.errors import InvalidArgumentError
from pilotfish.steps import DrawRule, FeatureRule, TargetStep
from target_svc.features import wanted_tokens

NONE, ALL, MATCHED = FeatureRule


def step(rows: list[Row], rules: list[int], outputs: list[int]) -> TargetStep:
    return TargetStep(
        step_id=1,
        rows=token_rows(*rows),
        sampling=greedy_rows(len(rows)),
        output_nodes=ints(*outputs),
        draw_rules=np.full(len(rows), DrawRule.MATCH, np.uint8),
        feature_rules=np.array(rules, np.uint8),
    )


def slow_path(tokens: list[int], parents: list[int], draws: list[int]) -> list[int]:
    """At each node, looks through all the others for the child that was drawn."""
    path = [0]
    while children := [n for n, parent in enumerate(parents) if parent == path[-1] and tokens[n] == draws[parent]]:
        path.append(children[0])
    return path


def random_row(random: np.random.Generator, start: int, page: int) -> Row:
    """Few tokens and wide trees, so that draws are often among the children."""
    count = int(random.integers(1, 12))
    parents = [-1, *(int(random.integers(-1, node)) for node in range(1, count))] if random.random() < 0.7 else ()
    return Row(random.integers(0, 3, count).tolist(), start, [page], parents)


@pytest.mark.parametrize("seed", range(200))
def test_the_tokens_of_each_rule_are_those_of_the_slow_twin(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows = [random_row(random, int(random.integers(0, 5)), page) for page in range(int(random.integers(1, 6)))]
    rules = random.integers(1, 4, len(rows)).tolist()
    outputs, wanted, draws, first = [], [], [], 0
    for row, rule in zip(rows, rules, strict=True):
        count = len(row.tokens)
        every = rule == MATCHED or random.random() < 0.5
        outputs += range(first, first + count) if every else [first + count - 1]
        drawn = random.integers(0, 3, count if every else 1).tolist()
        draws += drawn
        if rule == MATCHED:
            parents = list(row.parents or range(-1, count - 1))
            wanted += [first + node for node in slow_path(list(row.tokens), parents, drawn)]
        elif rule == ALL:
            wanted += range(first, first + count)
        first += count
    asked = step(rows, rules, outputs)
    asked.validate(dataclasses.replace(grant(8, page_size=16), features=("final",), feature_width=4))
    assert wanted_tokens(asked, ints(*draws)).tolist() == wanted


@pytest.mark.parametrize("spoil", ["an output is missing", "another rule draws"])
def test_only_rows_whose_draws_decide_may_ask_for_the_path_alone(spoil: str) -> None:
    rows = [Row([1, 2], 0, [0]), Row([1, 2, 3], 0, [1])]
    asked = step(rows, [ALL, MATCHED], [0, 1, 2, 4] if spoil == "an output is missing" else [0, 1, 2, 3, 4])
    if spoil == "another rule draws":
        asked = dataclasses.replace(asked, draw_rules=np.array([DrawRule.MATCH, DrawRule.OUTSIDE], np.uint8))
    given = dataclasses.replace(grant(8), features=("final",), feature_width=4)
    with pytest.raises(InvalidArgumentError, match=r"feature_rules\[1\] is 3; MATCHED needs a row of draw rule MATCH"):
        asked.validate(given)
