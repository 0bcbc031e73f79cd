"""Rows of one draft token: the head drafts from both outcomes before it is known which came."""

from __future__ import annotations

from dataclasses import replace

import events
import pytest
from fakes import STATES, VOCAB, plain_text, prompt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulator import Costs, Simulator

from orchestrator.core.acceptance import Rule
from orchestrator.core.scheduler import Limits
from pilotfish.steps import FeatureRule

EARLY = Limits(early_drafts=True)


def deployed(limits: Limits = EARLY, agreement: float = 0.6, costs: Costs | None = None) -> Simulator:
    simulator = Simulator(limits)
    simulator.open_target(pages=64, features=STATES)
    simulator.open_draft("d0", pages=64, features=STATES, agreement=agreement, costs=costs)
    return simulator


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("agreement", [0.0, 0.6, 1.0])
def test_every_round_but_the_first_two_drafts_early_and_the_text_is_the_same(
    temperature: float, agreement: float
) -> None:
    texts = {}
    for early in (True, False):
        simulator = deployed(Limits(early_drafts=early), agreement)
        for index in range(3):
            simulator.submit(f"r{index}", prompt(index, 9 + index), 30, 1, temperature=temperature, seed=index)
        simulator.run()
        texts[early] = (simulator.texts, simulator.kinds)
        rounds = sum(kinds.count("r") + kinds.count("b") for kinds in simulator.kinds.values())
        assert simulator.early_rows >= (rounds - 3 * 4 if early else 0)
        assert early or simulator.early_rows == 0
    assert texts[True] == texts[False]  # the proposals too: each row gets that of the outcome which came
    for index in range(3):
        assert texts[True][0][f"r{index}"] == plain_text(prompt(index, 9 + index), 30, temperature, index)


def test_a_perfect_head_never_misses() -> None:
    simulator = deployed(agreement=1.0)
    simulator.submit("r", prompt(1, 10), 41, 1)
    simulator.run()
    assert simulator.kinds["r"] == "b" + "ab" * 20


@pytest.mark.parametrize(("draft_length", "rule"), [(2, Rule.MATCH), (1, Rule.RATIO), (1, Rule.BLOCK)])
def test_longer_drafts_and_rules_that_toss_coins_keep_the_ordinary_schedule(draft_length: int, rule: Rule) -> None:
    simulator = deployed()
    temperature = 0.0 if rule is Rule.MATCH else 1.0
    simulator.submit("r", prompt(1, 10), 40, draft_length, rule=rule, temperature=temperature, seed=1)
    simulator.run()
    assert simulator.early_rows == 0
    assert "a" in simulator.kinds["r"]


def test_a_batch_with_longer_drafts_waits_for_the_verdict() -> None:
    """The features of their accepted nodes come first or last, nobody knows how many."""
    simulator = deployed(agreement=1.0)
    simulator.submit("short", prompt(1, 10), 40, 1)
    simulator.submit("long", prompt(2, 10), 12, 4)
    simulator.run()
    assert simulator.texts == {"short": plain_text(prompt(1, 10), 40), "long": plain_text(prompt(2, 10), 12)}
    assert 0 < simulator.early_rows < 20


@pytest.mark.parametrize("lost", ["draft", "target"])
def test_who_is_lost_meanwhile_takes_nothing_with_him(lost: str) -> None:
    simulator = deployed()
    simulator.submit("r", prompt(1, 10), 40, 1)
    for _ in range(6):
        simulator.round()
    assert simulator.early
    if lost == "draft":
        simulator.lose_draft("d0")
        simulator.open_draft("d1", pages=64, features=STATES)
    else:
        simulator.lose_target()
        simulator.open_target(pages=64, first_page=100, features=STATES)
    simulator.run()
    assert simulator.texts["r"] == plain_text(prompt(1, 10), 40)


def test_an_answer_that_the_replica_could_not_take_is_not_sent_to_it() -> None:
    simulator = deployed()
    simulator.submit("r", prompt(1, 10), 40, 1)
    for _ in range(4):
        simulator.round()
    scheduler, target = simulator.scheduler, simulator.target
    assert target is not None
    drafts = scheduler.plan_proposals([plan for _, plan, _ in simulator.early])
    batch = scheduler.seal(scheduler.plan_target(drafts.values()), {})
    assert batch is not None
    assert set(batch.step.feature_rules.tolist()) == {FeatureRule.ALL}
    plans, result = scheduler.plan_early(batch), target.run(batch.step)
    assert plans
    for garbage in (
        replace(result, token_ids=result.token_ids + VOCAB),
        replace(result, token_ids=result.token_ids[:0]),
        replace(result, features=None),
    ):
        assert scheduler.draft_early(plans, garbage) == {}
    assert list(scheduler.draft_early(plans, result)) == ["d0"]


@pytest.mark.parametrize(("target_tokens", "draft_tokens"), [(9, 256), (256, 9), (7, 7)])
def test_no_step_is_larger_than_its_worker_takes(target_tokens: int, draft_tokens: int) -> None:
    """The fake workers refuse such a step; what has no room in one keeps the ordinary schedule."""
    simulator = Simulator(EARLY)
    simulator.open_target(pages=64, features=STATES, max_step_tokens=target_tokens)
    simulator.open_draft("d0", pages=64, features=STATES, agreement=0.6, max_step_tokens=draft_tokens)
    for index in range(6):
        simulator.submit(f"r{index}", prompt(index, 4), 30, 1)
    simulator.run()
    assert simulator.early_rows > 0
    for index in range(6):
        assert simulator.texts[f"r{index}"] == plain_text(prompt(index, 4), 30)


def test_what_waits_for_a_prefill_is_not_taken_for_the_time_of_a_pass() -> None:
    simulator = deployed(costs=Costs(1500, 1))  # a prefill outlasts the target's step
    simulator.submit("r", prompt(1, 10), 60, 1)
    simulator.submit("long", prompt(2, 90), 40, 1)
    delayed = {True: set(), False: set()}
    follows = False
    while simulator.scheduler.has_work:
        early, before = len(simulator.early), len(simulator.trace)
        simulator.round()
        if early:
            delayed[follows].add(simulator.scheduler._timed[-1].was_delayed)
        follows = any("follows" in line for line in simulator.trace[before:])
    assert delayed == {True: {True}, False: {False}}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    happened=events.lists(
        80,
        events.submissions(most_prompt=50, most_tokens=40, most_seed=2, draft_lengths=st.sampled_from([1, 1, 1, 0])),
        events.openings(most_pages=48),
        *events.HEADS,
    ),
    step_tokens=st.sampled_from([7, 256]),
)
def test_any_mix_of_events_leaves_true_pairs_and_exact_texts(happened: list[events.Event], step_tokens: int) -> None:
    """Preempted, cancelled, moved, late, lost, opened anew: every pair is checked whenever a head reads it."""
    simulator = Simulator(Limits(max_rows=6, early_drafts=True), draft_deadline=2000)
    simulator.open_target(pages=32, features=STATES)
    simulator.open_draft("d", pages=40, features=STATES, max_step_tokens=step_tokens)
    events.Player(simulator, pages=32, features=STATES).play(happened)
