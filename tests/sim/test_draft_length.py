"""Adaptive draft lengths under a virtual clock, against every fixed length on the same deployment."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fakes import plain_text, prompt
from simulator import Costs, Simulator
from virtual import Virtual, always, cpu, draft, saturated

from orchestrator.core.requests import State

FIXED = (0, 1, 2, 3, 4, 6, 8, 16)


REGIMES = {
    "a good draft, cheap": (cpu, draft(0.002), always(0.8)),
    "a good draft, dear": (cpu, draft(0.012), always(0.9)),
    "a bad draft, cheap": (cpu, draft(0.001), always(0.3)),
    "a poor head, far away": (cpu, draft(0.0007, overhead=0.004), always(0.45)),
    "a useless draft": (cpu, draft(0.004), always(0.01)),
    "a useless draft, dear": (cpu, draft(0.030), always(0.01)),
    "verification dear": (saturated, draft(0.002), always(0.7)),
}


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("regime", REGIMES)
def test_it_comes_up_to_the_best_fixed_length(regime: str, rows: int) -> None:
    adaptive = Virtual(rows, *REGIMES[regime])
    adaptive.run(100)
    found = adaptive.run(1500)
    rates = {length: Virtual(rows, *REGIMES[regime], length=length).run(6000 // (3 + rows)) for length in FIXED}
    best = max(rates, key=rates.__getitem__)
    assert found >= 0.97 * rates[0], "slower than without a draft"
    assert found >= 0.95 * rates[best], f"length {best} gives {rates[best]:.0f} tokens/s, adaptive {found:.0f}"


@pytest.mark.parametrize("rows", [1, 8])
def test_noise_of_a_third_neither_fools_it_nor_moves_it_every_round(rows: int) -> None:
    for regime in ("a good draft, cheap", "a useless draft", "verification dear"):
        adaptive, plain = (Virtual(rows, *REGIMES[regime], noise=0.3, length=length) for length in (None, 0))
        adaptive.run(300)
        assert adaptive.run(1500) >= 0.97 * plain.run(1500)
    steady = Virtual(1, *REGIMES["a good draft, cheap"], noise=0.3)
    steady.run(1000)
    changes = np.count_nonzero(np.diff([max(asked) for asked in steady.lengths[-500:]]))
    assert changes < 100


def test_each_row_gets_what_its_own_draft_tokens_are_worth() -> None:
    """Rows of two kinds at once; one length for all is best for neither."""
    virtual = Virtual(8, cpu, draft(0.001), lambda now, row: 0.95 if int(row.id) % 2 else 0.2, completion=2000)
    virtual.run(600)
    kinds = {0: 0, 1: 0}
    for row in virtual._running:
        kinds[int(row.id) % 2] = row.draft_length
    assert kinds[1] >= kinds[0] + 3


def test_it_follows_a_draft_that_collapses_and_recovers() -> None:
    """Between 60 s and 160 s nothing is kept."""
    virtual = Virtual(4, cpu, draft(0.002), lambda now, row: 0.02 if 60 < now < 160 else 0.8)
    while virtual.now < 62:
        virtual.round()
    collapsed = len(virtual.lengths)
    while virtual.now < 160:
        virtual.round()
    recovered = len(virtual.lengths)
    idle = sum(not any(asked) for asked in virtual.lengths[collapsed:])
    assert idle > 0.97 * (recovered - collapsed)
    plain = Virtual(4, cpu, draft(0.002), always(0.8), length=0)
    while virtual.now < 300 and not all(virtual.lengths[-1]):
        virtual.round()
    assert virtual.now < 300, "it never tried again"
    assert virtual.run(500) > 1.7 * plain.run(500)


def test_a_draft_that_never_pays_loses_a_hundredth_at_most_and_less_and_less() -> None:
    """With its prefill, which takes cores from the target."""
    plain = Virtual(2, cpu, draft(0.010), always(0.05), noise=0.0, length=0)
    virtual = Virtual(2, cpu, draft(0.010), always(0.05), noise=0.0)
    virtual.run(100)
    assert virtual.run(4000) > 0.985 * plain.run(4000)
    tried = virtual.catch_up_tokens
    assert virtual.run(8000) > 0.995 * plain.run(8000)
    assert virtual.catch_up_tokens > tried, "it gave up for good"


def test_a_batch_that_grows_and_shrinks_goes_its_own_way_each_time() -> None:
    virtual = Virtual(16, saturated, draft(0.002), always(0.7))
    virtual.run(300)
    assert not any(virtual.lengths[-1])
    virtual.rows = 1
    virtual._running = virtual._running[:1]
    virtual.run(400)
    alone = np.mean([max(asked) for asked in virtual.lengths[-50:]])
    assert alone > 1.5
    virtual.rows = 16
    virtual.run(100)
    assert np.mean([sum(asked) for asked in virtual.lengths[-50:]]) < 2


def test_a_row_with_less_to_write_than_to_catch_up_is_left_alone() -> None:
    virtual = Virtual(16, saturated, draft(0.002), always(0.7), completion=400)
    virtual.run(300)
    assert not any(virtual.lengths[-1])
    row = max(virtual._running, key=lambda row: row.generated)
    while row.draft_room >= row.draft_lag:
        virtual.round()
    virtual.rows, virtual._running, before = 1, [row], virtual.catch_up_tokens
    virtual.run(row.draft_room)
    assert virtual.catch_up_tokens == before
    virtual.run(100)
    assert np.mean([max(asked) for asked in virtual.lengths[-50:]]) > 1.5, "the next row drafts"


def test_another_drafter_is_tried_from_the_start() -> None:
    virtual = Virtual(1, cpu, draft(0.002), always(0.01), completion=5000)
    virtual.run(200)
    assert not any(virtual.lengths[-1])
    virtual.chance = always(0.9)
    virtual.choice.forget_draft()
    virtual.run(40)
    assert max(virtual.lengths[-1]) > 2


# The scheduler


def adaptive_simulator(agreement: float, draft_step: int = 100) -> Simulator:
    simulator = Simulator()
    simulator.open_target(pages=200)
    simulator.open_draft("d0", pages=200, agreement=agreement, costs=Costs(draft_step, 1))
    return simulator


@pytest.mark.parametrize("agreement", [0.0, 0.6, 1.0])
def test_the_text_is_the_targets_own_whatever_is_chosen(agreement: float) -> None:
    simulator = adaptive_simulator(agreement)
    for index in range(3):
        simulator.submit(f"r{index}", prompt(index, 45), 60, None, temperature=float(index), seed=index)
    simulator.run()
    for index in range(3):
        assert simulator.texts[f"r{index}"] == plain_text(prompt(index, 45), 60, float(index), index)


def test_a_good_draft_is_used_and_a_useless_one_is_let_be() -> None:
    good, useless = adaptive_simulator(1.0), adaptive_simulator(0.0, draft_step=1000)
    for simulator in (good, useless):
        simulator.submit("r", prompt(1, 45), 200, None)
        simulator.run()
    assert good.rounds < 60
    later = [line for line in useless.trace[len(useless.trace) // 2 :] if line.startswith("  d0")]
    assert len(later) < 12


def test_while_the_draft_rests_new_prompts_are_not_sent_to_it() -> None:
    simulator = adaptive_simulator(0.0, draft_step=3000)
    simulator.submit("first", prompt(1, 45), 150, None)
    simulator.run()
    begun = len(simulator.trace)
    simulator.submit("second", prompt(2, 60), 20, None)
    simulator.run()
    assert not [line for line in simulator.trace[begun:] if line.startswith("  d0")]
    assert simulator.texts["second"] == plain_text(prompt(2, 60), 20)


def test_a_row_that_drafts_no_more_gives_its_draft_pages_back() -> None:
    simulator = adaptive_simulator(0.0, draft_step=3000)
    request = simulator.submit("r", prompt(1, 45), 150, None)
    while request.state is not State.FINISHED and request.generated < 120:
        simulator.round()
    assert request.draft is None
    pool = simulator.scheduler.drafting.replicas["d0"].pool
    assert pool.available == pool.page_count


def test_a_request_that_names_a_length_gets_it_beside_others_that_do_not() -> None:
    simulator = adaptive_simulator(1.0)
    simulator.submit("named", prompt(1, 20), 60, 3)
    simulator.submit("none", prompt(2, 20), 60, 0)
    simulator.submit("free", prompt(3, 20), 60, None)
    simulator.run()
    drafted = {name: [] for name in ("named", "none", "free")}
    for line in simulator.trace:
        if line.startswith("  verify "):
            name, count = line.split()[1], int(line.split()[-2])
            drafted[name].append(count)
    assert drafted["named"][:-1] == [3] * (len(drafted["named"]) - 1)
    assert set(drafted["none"]) == {0}
    assert len(set(drafted["free"])) > 1


def test_a_replica_with_other_weights_is_another_drafter() -> None:
    simulator = adaptive_simulator(0.0, draft_step=3000)
    simulator.submit("r", prompt(1, 45), 400, None)
    for _ in range(100):
        simulator.round()
    simulator.lose_draft("d0")
    simulator.open_draft("d1", pages=200, agreement=1.0)
    replica = simulator.scheduler.drafting.replicas["d1"]
    for _ in range(30):
        simulator.round()
    assert not [line for line in simulator.trace if "d1" in line], "the same weights need no new trial"
    replica.grant = replace(replica.grant, weights_hash="other")
    for _ in range(30):
        simulator.round()
    assert [line for line in simulator.trace if "d1 proposes" in line]


def moved_to(costs: Costs) -> Simulator:
    """A row of 300 tokens whose replica is lost, so that the next one has it all to catch up."""
    simulator = Simulator(page_size=16)
    simulator.open_target(pages=100)
    simulator.open_draft("d0", pages=100, agreement=1.0)
    simulator.submit("r", prompt(1, 300), 100, 4)
    for _ in range(3):
        simulator.round()
    simulator.lose_draft("d0")
    simulator.open_draft("d1", pages=100, agreement=1.0, costs=costs)
    return simulator


def test_what_a_replica_catches_up_at_once_shrinks_until_it_ends_before_the_targets_step() -> None:
    simulator = moved_to(Costs(step=100, token=50))  # 64 tokens take 3.3 ms, the target's step 1 ms
    replica, allowances = simulator.scheduler.drafting.replicas["d1"], []
    while not any("d1 proposes" in line for line in simulator.trace):
        simulator.round()
        allowances.append(replica.allowance)
    assert allowances[0] == 64
    assert min(allowances) == 16
    simulator.run()
    assert simulator.texts["r"] == plain_text(prompt(1, 300), 100)


def test_what_a_quick_replica_catches_up_at_once_grows() -> None:
    simulator = moved_to(Costs(step=10, token=1))
    for _ in range(4):
        simulator.round()
    assert sum("d1 catches up r" in line for line in simulator.trace) == 3  # 64 tokens, 128, the rest
    assert "d1 proposes for r" in simulator.trace[-3]


def test_what_has_grown_for_long_shrinks_at_once() -> None:
    simulator = Simulator()
    simulator.open_draft("d1", 64)
    replica = simulator.scheduler.drafting.replicas["d1"]
    for _ in range(1000):
        replica.caught_up = True
        replica.begin_round(is_late=False, is_behind=False)
    assert replica.allowance == replica.grant.max_step_tokens
    replica.caught_up = True
    replica.begin_round(is_late=False, is_behind=True)
    assert replica.allowance == replica.grant.max_step_tokens // 2


def test_a_replica_that_has_not_caught_up_yet_is_not_sent_more() -> None:
    simulator = moved_to(Costs(step=5000, token=0))
    for _ in range(12):
        simulator.round()
    asked = [line for line in simulator.trace if "d1 catches up" in line]
    assert 0 < len(asked) <= 4
