"""Adaptive tree sizes under a virtual clock, against every fixed size and length on the same deployment."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from fakes import plain_text, prompt
from simulator import Costs, Simulator
from virtual import Virtual, always, cpu, saturated

from orchestrator.core.draft_length import CHAINS, SIZES, TRIAL
from orchestrator.core.requests import Request
from orchestrator.core.scheduler import Limits


def bushy(chance: float) -> Callable[[float, Request], float]:
    """A drafter whose trees halve the misses of its chains with 8 nodes, and a quarter more with each doubling."""

    def kept(now: float, row: Request) -> float:
        return 1 - (1 - chance) * (0.5 * 0.75 ** np.log2(row.tree_nodes / 8) if row.tree_nodes else 1.0)

    return kept


def wide(seconds: float, overhead: float = 0.0) -> Callable[[int, float], float]:
    """A draft that is bound by arithmetic from 32 rows a pass on; a step takes ``overhead`` beside its passes."""
    return lambda depth, rows: overhead + depth * seconds * max(1.0, rows / 32)


def adaptive(rows: int, *regime: Callable[..., float], **options: object) -> Virtual:
    return Virtual(rows, *regime, sizes=SIZES, **options)  # type: ignore[arg-type]


def fixed(rows: int, size: int, length: int, *regime: Callable[..., float]) -> Virtual:
    return Virtual(rows, *regime, sizes=(size,), length=length)  # type: ignore[arg-type]


def share_of_trees(virtual: Virtual, rounds: int) -> float:
    return float(np.mean([size > 0 and max(asked) > 0 for asked, size in last(virtual, rounds)]))


def last(virtual: Virtual, rounds: int) -> list[tuple[list[int], int]]:
    return list(zip(virtual.lengths[-rounds:], virtual.sizes_asked[-rounds:], strict=True))


REGIMES = {
    "cheap verification": (cpu, wide(0.002), bushy(0.5)),
    "dear verification": (saturated, wide(0.002), bushy(0.5)),
    "trees keep no more": (cpu, wide(0.002), always(0.6)),
    "a dear draft": (cpu, wide(0.012), bushy(0.6)),
    "a poor head, far away": (cpu, wide(0.0007, overhead=0.004), bushy(0.4)),
    "a useless draft": (cpu, wide(0.004), always(0.01)),
}


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("regime", REGIMES)
def test_it_comes_up_to_the_best_fixed_size_and_length(regime: str, rows: int) -> None:
    found = [adaptive(rows, *REGIMES[regime], seed=seed) for seed in (1, 2, 3)]
    for virtual in found:
        virtual.run(200)
    rate = float(np.mean([virtual.run(1500) for virtual in found]))
    rates = {
        (size, length): fixed(rows, size, length, *REGIMES[regime]).run(2000 // (3 + rows))
        for size in SIZES
        for length in (1, 2, 4, 6, 8, 12)
    }
    plain = fixed(rows, CHAINS, 0, *REGIMES[regime]).run(2000 // (3 + rows))
    best = max(rates, key=rates.__getitem__)
    assert rate >= 0.97 * plain, "slower than without a draft"
    assert rate >= 0.92 * rates[best], f"{best} gives {rates[best]:.0f} tokens/s, adaptive {rate:.0f}"


def test_trees_for_one_row_and_chains_for_many() -> None:
    regime = saturated, wide(0.001), bushy(0.7)
    few, many = adaptive(1, *regime), adaptive(64, *regime)
    for virtual in (few, many):
        virtual.run(400)
    assert share_of_trees(few, 200) > 0.8
    assert share_of_trees(many, 200) < 0.1


def test_a_size_is_tried_once_the_one_before_it_is_known() -> None:
    """Of a step so much larger than all before nothing is known, and it may be dear."""
    virtual = adaptive(1, cpu, wide(0.002), bushy(0.5))
    virtual.run(400)
    asked = [size for lengths, size in last(virtual, 400) if max(lengths) > 0]
    for smaller, size in pairwise(SIZES):
        if size in asked:
            assert asked[: asked.index(size)].count(smaller) >= 3
    assert max(asked) > SIZES[1]


@pytest.mark.parametrize("regime", ["cheap verification", "dear verification", "trees keep no more"])
def test_a_size_is_tried_with_short_paths_first(regime: str) -> None:
    """Hope alone grows trees as deep as can be, and every level of them is waited for."""
    virtual = adaptive(1, *REGIMES[regime])
    virtual.run(600)
    tried = {CHAINS: 0}
    deepest = max(TRIAL)
    for lengths, size in last(virtual, 600):
        if depth := max(lengths):
            tried[size] = tried.get(size, 0) + 1
            if tried[size] > 3:
                deepest = max(deepest, depth)
            elif size:
                assert depth <= deepest, f"trees of {size}"
    assert len(tried) > 1


def test_a_batch_that_grows_turns_from_trees_to_chains_and_back() -> None:
    """A target that is free up to 16 tokens."""
    virtual = adaptive(1, lambda tokens: 0.02 * max(1.0, tokens / 16), wide(0.001), bushy(0.6))
    virtual.run(300)
    assert share_of_trees(virtual, 100) > 0.8
    virtual.rows = 64
    virtual.run(300)
    assert share_of_trees(virtual, 100) < 0.1
    virtual.rows, virtual._running = 1, virtual._running[:1]
    virtual.run(300)
    assert share_of_trees(virtual, 100) > 0.8


def test_off_when_useless_and_no_slower_than_without_a_draft() -> None:
    regime = cpu, wide(0.010), always(0.05)
    virtual, plain = adaptive(2, *regime, noise=0.0), fixed(2, CHAINS, 0, *regime)
    virtual.run(100)
    assert virtual.run(4000) > 0.98 * plain.run(4000)
    drafted = [max(asked) > 0 for asked in virtual.lengths[-2000:]]
    assert np.mean(drafted) < 0.02


def test_a_drafter_whose_trees_get_good_later_is_noticed() -> None:
    """Trees keep no more than chains up to 60 s."""
    better = bushy(0.5)
    virtual = adaptive(1, cpu, wide(0.002), lambda now, row: better(now, row) if now > 60 else 0.5)
    while virtual.now < 60:
        virtual.round()
    virtual.run(3000)
    assert share_of_trees(virtual, 300) > 0.8


def test_rows_that_name_a_length_get_trees_where_they_pay() -> None:
    """Their lengths stay; without plain rounds too."""
    virtual = adaptive(1, cpu, wide(0.002), bushy(0.5), length=4)
    virtual.run(200)
    for _ in range(100):
        row = virtual._running[0]
        room = 0 if virtual._ended(row) else row.draft_room  # the row that follows it catches up first
        virtual.round()
        assert virtual.lengths[-1] == [min(4, room)]
    assert share_of_trees(virtual, 100) > 0.8
    assert np.mean([max(asked) == 4 for asked in virtual.lengths[-100:]]) > 0.9


# The scheduler


def tree_simulator(agreement: float, tree_nodes: int | None, branches: int = 3) -> Simulator:
    simulator = Simulator(Limits(tree_nodes=tree_nodes), target_costs=Costs(1000, 2))
    simulator.open_target(pages=300)
    simulator.open_draft("d0", pages=600, agreement=agreement, branches=branches, costs=Costs(50, 0))
    return simulator


def nodes_drafted(simulator: Simulator) -> list[int]:
    return [int(line.split()[-2]) for line in simulator.trace if line.startswith("  verify ")]


@pytest.mark.parametrize("agreement", [0.0, 0.6])
@pytest.mark.parametrize("tree_nodes", [None, 12])
def test_the_text_is_the_targets_own_whatever_is_chosen(agreement: float, tree_nodes: int | None) -> None:
    simulator = tree_simulator(agreement, tree_nodes)
    for index in range(3):
        simulator.submit(f"r{index}", prompt(index, 45), 80, None, temperature=float(index), seed=index)
    simulator.run()
    for index in range(3):
        assert simulator.texts[f"r{index}"] == plain_text(prompt(index, 45), 80, float(index), index)


def test_trees_are_asked_for_once_they_are_known_to_pay() -> None:
    simulator = tree_simulator(0.3, None)
    simulator.submit("r", prompt(1, 45), 400, None, temperature=1.0)
    simulator.run()
    nodes = nodes_drafted(simulator)
    assert max(nodes[:10]) <= 4, "calibrated with chains"
    assert np.mean([count >= 8 for count in nodes[-40:]]) > 0.7


def test_a_size_that_is_named_is_kept_and_one_of_zero_means_chains() -> None:
    for size in (0, 12):
        simulator = tree_simulator(0.6, size)
        simulator.submit("r", prompt(1, 45), 100, 3, temperature=1.0)
        simulator.run()
        assert {count for count in nodes_drafted(simulator)[1:-6] if count} == {size or 3}


def test_rows_that_all_name_a_length_have_their_sizes_chosen_too() -> None:
    simulator = tree_simulator(0.3, None)
    simulator.submit("r", prompt(1, 45), 400, 4, temperature=1.0)
    simulator.run()
    assert np.mean([count >= 8 for count in nodes_drafted(simulator)[-60:-10]]) > 0.7


def test_a_drafter_of_chains_alone_is_asked_for_chains() -> None:
    simulator = tree_simulator(0.6, None, branches=1)
    simulator.submit("r", prompt(1, 45), 200, None)
    simulator.run()
    assert max(nodes_drafted(simulator)) <= 16
    assert simulator.texts["r"] == plain_text(prompt(1, 45), 200)
