"""The account of excursions: when a draft that does not pay is tried again."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.core.probing import BUDGET, MOST_DOUBLINGS, PATIENCE, PROBE_ROUNDS, Probing
from orchestrator.core.requests import Params, Request


def request(name: str, prompt: int = 10) -> Request:
    return Request(name, np.zeros(prompt, np.int32), Params(max_tokens=100, draft_length=None))


def resting(lost: float = 1.0) -> Probing:
    """Rests after an excursion that lost so many seconds."""
    probing = Probing()
    probing.observe(10.0, lost, 0.5, was_judged=True)
    assert not probing.begins()
    return probing


def wait(probing: Probing, seconds: float) -> bool:
    probing.observe(seconds, 0.0, 0.0, was_judged=False)
    return probing.begins()


def probe(probing: Probing, lost: float) -> None:
    """A probe that comes to nothing."""
    for _ in range(PROBE_ROUNDS):
        assert probing.is_probing
        probing.observe(0.0, lost / PROBE_ROUNDS, 0.0, was_judged=True)
    assert not probing.is_probing
    assert not probing.begins()


def test_the_wait_makes_up_for_the_loss() -> None:
    probing = resting(lost=1.0)
    assert not wait(probing, 0.99 / BUDGET)
    assert wait(probing, 0.01 / BUDGET)
    assert probing.is_probing


def test_each_excursion_that_gains_nothing_doubles_the_wait_up_to_a_limit() -> None:
    probing, waits = resting(lost=1.0), []
    for _ in range(MOST_DOUBLINGS + 3):
        waited = 0.0
        while not wait(probing, 10.0):
            waited += 10.0
        waits.append(waited + 10.0)
        probe(probing, lost=1.0)
    assert waits == pytest.approx([1 / BUDGET * 2 ** min(doublings, MOST_DOUBLINGS) for doublings in range(len(waits))])


def test_probes_never_lose_more_than_their_budget() -> None:
    probing, lost = resting(lost=0.001), 0.0
    for _ in range(20_000):
        if wait(probing, 0.1):
            probe(probing, lost=0.3)
            lost += 0.3
    assert 0.3 <= lost <= BUDGET * 2_000


def test_after_a_gain_the_doubling_starts_anew() -> None:
    probing = resting(lost=1.0)
    for _ in range(3):
        while not wait(probing, 10.0):
            pass
        probe(probing, lost=1.0)
    probing.drafting()
    probing.observe(10_000.0, -5.0, 2.0, was_judged=True)
    assert probing.begins()  # the excursion ends, and the wait from before it is long over
    probe(probing, lost=1.0)
    assert not wait(probing, 0.99 / BUDGET)
    assert wait(probing, 0.01 / BUDGET)


def test_a_gain_does_not_cut_a_wait_short() -> None:
    probing = resting(lost=1.0)
    for _ in range(9):
        probing.drafting()
        probing.observe(1.0, -0.1, 0.1, was_judged=True)
        assert not probing.begins()
    assert not wait(probing, 0.9 / BUDGET)
    assert wait(probing, 0.1 / BUDGET)


def test_a_probe_that_noise_calls_a_gain_costs_the_time_that_it_waited() -> None:
    probing = resting(lost=0.001)
    assert wait(probing, 1.0)
    for _ in range(PROBE_ROUNDS):
        probing.observe(1.0, -0.1, 0.02, was_judged=True)
    assert not probing.begins()
    waited = 2 * 0.02 * PROBE_ROUNDS  # doubled: the second in a row
    assert not wait(probing, 0.99 * waited / BUDGET)
    assert wait(probing, 0.01 * waited / BUDGET)


def test_a_probe_without_a_verdict_ends_too() -> None:
    probing = resting(lost=0.001)
    assert wait(probing, 1.0)
    for _ in range(PATIENCE):
        assert probing.is_probing
        probing.observe(0.1, 0.0, 0.0, was_judged=False)
    assert not probing.is_probing


def test_the_row_with_the_least_to_catch_up_is_probed_until_it_ends() -> None:
    probing = resting(lost=0.001)
    long, short = request("long", 900), request("short", 30)
    assert wait(probing, 1.0)
    assert probing.row([long, short]) is short
    newer = request("newer", 10)
    assert probing.row([long, short, newer]) is short
    assert probing.row([long, newer]) is newer
