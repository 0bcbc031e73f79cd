"""Drafters on the target's features, in the pure core: every pair that a fake head ever holds is the right one."""

from __future__ import annotations

import dataclasses

import events
import numpy as np
import pytest
from fakes import STATES, FakeHead, grant, plain_text, prompt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulator import Simulator

from orchestrator.core.acceptance import Rule
from orchestrator.core.scheduler import Limits
from pilotfish.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from pilotfish.steps import Capabilities


def deployed(limits: Limits | None = None, pages: int = 64, **options: object) -> Simulator:
    simulator = Simulator(limits or Limits())
    simulator.open_target(pages=pages, features=STATES)
    simulator.open_draft("d0", pages=pages, features=STATES, **options)  # type: ignore[arg-type]
    return simulator


def test_a_perfect_head_gives_k_plus_one_tokens_a_round() -> None:
    """A short prompt's features come with the prefill's answer, so that the first round drafts."""
    simulator = deployed(agreement=1.0)
    simulator.submit("r", prompt(1, 30), max_tokens=41, draft_length=4)
    simulator.run()
    assert simulator.kinds["r"] == "b" + "aaaab" * 8
    assert not any("reads" in line for line in simulator.trace)


@pytest.mark.parametrize("draft_length", [1, 4, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("branches", [1, 2])
def test_texts_are_the_targets_own(draft_length: int, temperature: float, branches: int) -> None:
    simulator = deployed(Limits(tree_nodes=14 * (branches > 1)), branches=branches)
    for index in range(4):
        simulator.submit(f"r{index}", prompt(index, 9 + index), 20, draft_length, temperature=temperature, seed=index)
    simulator.run()
    for index in range(4):
        assert simulator.texts[f"r{index}"] == plain_text(prompt(index, 9 + index), 20, temperature, index)
        assert "a" in simulator.kinds[f"r{index}"]


@pytest.mark.parametrize("rule", [Rule.RATIO, Rule.BLOCK])
@pytest.mark.parametrize("branches", [1, 2])
def test_rows_of_sampled_proposals_get_their_features_too(rule: Rule, branches: int) -> None:
    simulator = deployed(Limits(tree_nodes=14 * (branches > 1)), branches=branches, agreement=0.5)
    simulator.submit("r", prompt(1, 10), 60, 3, temperature=1.0, seed=1, rule=rule)
    simulator.run()
    assert len(simulator.texts["r"]) == 60
    assert {"a", "r"} <= set(simulator.kinds["r"])


def test_a_long_prompt_is_read_while_the_target_goes_on() -> None:
    simulator = deployed(Limits(max_prefill_tokens=40), agreement=1.0)
    simulator.submit("r", prompt(1, 100), max_tokens=30, draft_length=4)
    simulator.run()
    assert simulator.texts["r"] == plain_text(prompt(1, 100), 30)
    lines = [line.strip() for line in simulator.trace if "reads" in line or "follows" in line or "proposes" in line]
    assert lines[:5] == ["d0 reads 40", "d0 follows r", "d0 reads 40", "d0 follows r", "d0 proposes for r"]


def test_a_replica_that_joins_in_the_middle_catches_up_from_the_targets_pages() -> None:
    simulator = Simulator()
    simulator.open_target(pages=64, features=STATES)
    simulator.submit("r", prompt(1, 50), 60, 4)
    for _ in range(10):
        simulator.round()
    simulator.open_draft("d0", pages=64, features=STATES, agreement=1.0)
    simulator.run()
    assert simulator.texts["r"] == plain_text(prompt(1, 50), 60)
    assert "aaaab" * 6 in simulator.kinds["r"]
    assert simulator.kinds["r"].index("a") <= 15  # within the rounds that its allowance asks for


def test_rows_move_when_a_head_dies() -> None:
    simulator = deployed()
    simulator.submit("r", prompt(1, 50), 60, 4)
    for _ in range(6):
        simulator.round()
    simulator.lose_draft("d0")
    simulator.open_draft("d1", pages=64, features=STATES)
    simulator.run()
    assert simulator.texts["r"] == plain_text(prompt(1, 50), 60)
    assert any("d1 proposes for r" in line for line in simulator.trace)


def test_a_late_read_holds_up_nobody_else() -> None:
    simulator = deployed(agreement=1.0)
    simulator.submit("short", prompt(1, 8), 60, 4)
    simulator.round()
    simulator.read_rounds = 4
    simulator.submit("long", prompt(2, 60), 60, 4)
    for _ in range(5):
        simulator.round()
    assert simulator.kinds["short"] == "b" + "aaaab" * 5
    assert "a" not in simulator.kinds["long"]
    simulator.run()
    assert "aaaab" in simulator.kinds["long"]
    assert simulator.texts["long"] == plain_text(prompt(2, 60), 60)


def test_rows_of_a_read_that_fails_try_again_and_others_go_on() -> None:
    simulator = deployed(agreement=1.0)
    simulator.read_rounds = 1
    simulator.submit("short", prompt(1, 8), 60, 4)
    simulator.submit("long", prompt(2, 60), 60, 4)
    for _ in range(5):
        simulator.round()
        simulator.fail_reads()
    assert simulator.kinds["short"] == "b" + "aaaab" * 4
    assert set(simulator.kinds["long"]) == {"b"}
    simulator.run()
    assert "aaaab" in simulator.kinds["long"]


def test_a_row_that_is_gone_when_its_features_come_is_passed_over() -> None:
    simulator = deployed()
    simulator.read_rounds = 2
    for index in range(2):
        simulator.submit(f"r{index}", prompt(index, 60), 40, 4)
    simulator.round()
    simulator.round()
    simulator.cancel("r0")
    simulator.run()
    assert simulator.texts["r1"] == plain_text(prompt(1, 60), 40)
    follows = [line for line in simulator.trace if "follows" in line]
    assert follows
    assert not any("r0" in line for line in follows)


def test_a_page_is_shared_only_if_the_token_after_it_is_the_same() -> None:
    """Pages of 4: slots 4 to 7 hold tokens 5 to 8, of which the last stands behind the page."""
    simulator = deployed(agreement=1.0)
    shared = prompt(7, 8)
    for name, follower in (("a", 1), ("b", 2), ("c", 2)):
        simulator.submit(name, [*shared, follower, 3, 4, 5, 6], 8, 2)
        simulator.run()
    pool = simulator.scheduler.drafting.replicas["d0"].pool
    tokens = [np.array([*shared, follower, 3, 4], np.int32) for follower in (1, 2, 3)]
    matched = [pool.match(each)[0] for each in tokens]
    assert [len(pages) for pages in matched] == [2, 2, 1]
    assert matched[0][0] == matched[1][0] == matched[2][0]
    assert matched[0][1] != matched[1][1]
    for pages in matched:
        pool.release(pages)


def test_a_head_takes_up_what_an_earlier_turn_cached() -> None:
    simulator = deployed()
    first = prompt(7, 40)
    simulator.submit("cold", first, 12, 2)
    simulator.run()
    simulator.trace.clear()
    turn = [*first, *simulator.texts["cold"], 1, 2, 3]
    simulator.submit("hot", turn, 12, 2)
    simulator.run()
    assert simulator.texts["hot"] == plain_text(turn, 12)
    assert [line.strip() for line in simulator.trace if "reads" in line] == ["d0 reads 4"]  # 48 slots of 54 were there
    assert "a" in simulator.kinds["hot"]


def test_features_of_pages_that_another_row_computed_can_be_read() -> None:
    """The target finds the prompt in its cache; the replica, which came later, has none of it."""
    simulator = Simulator()
    simulator.open_target(pages=64, features=STATES)
    simulator.submit("cold", prompt(7, 60), 4, 2)
    simulator.run()
    simulator.open_draft("d0", pages=64, features=STATES, agreement=1.0)
    simulator.submit("hot", prompt(7, 60), 40, 4)
    simulator.run()
    assert simulator.requests["hot"].cached_tokens == 56
    assert simulator.texts["hot"] == plain_text(prompt(7, 60), 40)
    assert "aaaab" in simulator.kinds["hot"]


def test_preemption_and_a_target_that_comes_back_keep_pairs_and_texts() -> None:
    simulator = deployed(pages=16)
    for index in range(5):
        simulator.submit(f"r{index}", prompt(index, 8), 28, 3)
    for _ in range(8):
        simulator.round()
    simulator.lose_target()
    simulator.open_target(pages=14, first_page=100, features=STATES)
    simulator.run()
    assert sum(request.preemptions for request in simulator.requests.values()) > 0
    for index in range(5):
        assert simulator.texts[f"r{index}"] == plain_text(prompt(index, 8), 28)


def test_a_head_gets_the_states_it_asks_for_in_its_own_order() -> None:
    simulator = Simulator()
    simulator.open_target(pages=64, features=("hidden.0", *STATES))
    for name, states in (("d0", ("final",)), ("d1", ("final", "hidden.0")), ("d2", ("hidden.0", *STATES))):
        simulator.open_draft(name, pages=64, features=states, agreement=1.0)
    for index in range(6):
        simulator.submit(f"r{index}", prompt(index, 12 * index + 4), 30, 3)
    simulator.run()
    assert all("aaab" in kinds for kinds in simulator.kinds.values())
    assert all(replica.fake.held for replica in simulator.replicas.values() if isinstance(replica.fake, FakeHead))


def test_a_head_that_the_target_cannot_feed_is_refused_by_name() -> None:
    simulator = Simulator()
    with pytest.raises(UnavailableError, match="no target has told yet what it stores"):
        simulator.open_draft("d0", pages=8, features=("final",))
    simulator.open_target(pages=64, features=("hidden.1",))
    advice = (
        "wants features final,hidden.1, the target stores hidden.1; start the target with --features hidden.1,final"
    )
    with pytest.raises(FailedPreconditionError, match=advice):
        simulator.open_draft("d0", pages=8, features=("final", "hidden.1"))
    with pytest.raises(FailedPreconditionError, match="wants hidden states of 8 values, those of the target have 4"):
        simulator.scheduler.drafting.opened(
            "d0", dataclasses.replace(grant(8, features=("hidden.1",)), feature_width=8), Capabilities(())
        )
    assert not simulator.scheduler.drafting.replicas
    simulator.lose_target()
    simulator.open_target(pages=64)
    with pytest.raises(FailedPreconditionError, match="stores none; start the target with --features final"):
        simulator.open_draft("d0", pages=8, features=("final",))


def test_a_head_does_not_stay_with_a_target_that_stores_other_states() -> None:
    simulator = deployed()
    simulator.open_draft("plain", pages=64)
    simulator.submit("r", prompt(1, 10), 30, 3)
    for _ in range(3):
        simulator.round()
    simulator.lose_target()
    simulator.open_target(pages=64, features=("final",))
    assert list(simulator.replicas) == ["plain"]
    simulator.run()
    assert simulator.texts["r"] == plain_text(prompt(1, 10), 30)


def test_a_row_that_rests_a_while_drafts_again_at_once() -> None:
    simulator = deployed(agreement=1.0)
    request = simulator.submit("r", prompt(1, 8), 60, None)
    request.draft_length = 3
    kinds = []
    for length in (3, 3, 3, 0, 0, 3, 3):
        request.draft_length = length
        before = len(simulator.kinds["r"])
        simulator.round()
        kinds.append(simulator.kinds["r"][before:])
        request.params = dataclasses.replace(request.params, draft_length=3)  # nobody else is to choose it
    assert kinds == ["b", "aaab", "aaab", "b", "b", "aaab", "aaab"]
    assert not any("reads" in line for line in simulator.trace)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda features: None, r"features is None; shape must be \(8, 8\)"),
        (lambda features: features[:-1], r"features is \(7, 8\); shape must be \(8, 8\)"),
        (lambda features: features[:, 1:], r"features is \(8, 7\); shape must be \(8, 8\)"),
    ],
)
def test_an_answer_with_other_features_commits_nothing(spoil: object, message: str) -> None:
    simulator = deployed()
    request = simulator.submit("r", prompt(1, 8), 20, 3)
    scheduler, target = simulator.scheduler, simulator.target
    assert target is not None
    batch = scheduler.seal(scheduler.plan_target(()), {})
    assert batch is not None
    result = target.run(batch.step)
    with pytest.raises(InvalidArgumentError, match=message):
        scheduler.accept(batch, dataclasses.replace(result, features=spoil(result.features)))  # type: ignore[operator]
    assert request.length == 8


def test_a_read_that_answers_other_features_is_given_up() -> None:
    simulator = deployed()
    simulator.submit("r", prompt(1, 60), 20, 3)
    simulator.round()
    scheduler, target = simulator.scheduler, simulator.target
    assert target is not None
    batch = scheduler.seal(scheduler.plan_target(scheduler.plan_proposals().values()), {})
    assert batch is not None
    scheduler.plan_catch_up(batch)
    (read,) = scheduler.plan_reads(batch)
    with pytest.raises(InvalidArgumentError, match=r"features is \(1, 8\); shape must be \(60, 8\)"):
        scheduler.drafting.plan_read(read, target.read_features(read.slots[:1]))
    scheduler.drafting.give_up(read)
    scheduler.accept(batch, target.run(batch.step))
    simulator.run()
    assert simulator.requests["r"].generated == 20


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    happened=events.lists(
        80,
        events.submissions(most_prompt=60, most_tokens=40, most_seed=4),
        events.openings(most_pages=48),
        *events.HEADS,
    ),
    tree_nodes=st.sampled_from([0, 9]),
    budget=st.sampled_from([8, 64]),
)
def test_any_mix_of_events_leaves_true_pairs_and_exact_texts(
    happened: list[events.Event], tree_nodes: int, budget: int
) -> None:
    """Every pair is checked whenever a head reads it, through rejections, trees, preemption, joins and failed reads."""
    simulator = Simulator(Limits(max_rows=6, max_prefill_tokens=budget, tree_nodes=tree_nodes), draft_deadline=2000)
    simulator.open_target(pages=32, features=STATES)
    simulator.open_draft("d", pages=40, agreement=0.7, branches=1 + (tree_nodes > 0), features=STATES)
    events.Player(simulator, pages=32, features=STATES).play(happened)
