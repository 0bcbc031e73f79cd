"""The core against fake workers that notice every paging mistake."""

from __future__ import annotations

from dataclasses import replace

import events
import numpy as np
import pytest
from fakes import VOCAB, grant, plain_text, prompt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulator import Costs, Simulator

from orchestrator.core.acceptance import Rule
from orchestrator.core.requests import Params, Request, State
from orchestrator.core.scheduler import Limits, Scheduler
from pilotfish.errors import AlreadyExistsError, InvalidArgumentError, OverloadedError
from pilotfish.steps import ProposalKind


@pytest.mark.parametrize("draft_length", [0, 1, 4, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_match_text_is_the_targets_own_whatever_the_draft(draft_length: int, temperature: float) -> None:
    simulator = Simulator()
    simulator.open_target(pages=64)
    simulator.open_draft("d0", pages=64)
    for index in range(4):
        simulator.submit(f"r{index}", prompt(index, 9 + index), 20, draft_length, temperature=temperature, seed=index)
    simulator.run()
    for index in range(4):
        expected = plain_text(prompt(index, 9 + index), 20, temperature, index)
        assert simulator.texts[f"r{index}"] == expected


def test_a_perfect_draft_gives_k_plus_one_tokens_a_round() -> None:
    simulator = Simulator()
    simulator.open_target(pages=64)
    simulator.open_draft("d0", pages=64, agreement=1.0)
    simulator.submit("r", prompt(1, 40), max_tokens=41, draft_length=4)
    simulator.run()
    assert simulator.kinds["r"] == "b" + "aaaab" * 8  # the prefill's own token, then eight full rounds


@pytest.mark.parametrize("rule", [Rule.RATIO, Rule.BLOCK])
def test_a_perfect_sampled_draft_is_always_accepted(rule: Rule) -> None:
    simulator = Simulator()
    simulator.open_target(pages=64)
    simulator.open_draft("d0", pages=64, agreement=1.0)
    simulator.submit("r", prompt(1, 40), 41, 4, temperature=1.0, seed=3, rule=rule)
    simulator.run()
    assert simulator.kinds["r"] == "b" + "aaaab" * 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_keep_the_text_and_move_their_slots(temperature: float) -> None:
    simulator = Simulator(Limits(tree_nodes=14))
    simulator.open_target(pages=64)
    simulator.open_draft("d0", pages=64, agreement=0.5, branches=2)
    for index in range(3):
        simulator.submit(f"r{index}", prompt(index, 10), 30, 3, temperature=temperature, seed=index)
    simulator.run()
    for index in range(3):
        assert simulator.texts[f"r{index}"] == plain_text(prompt(index, 10), 30, temperature, index)
    assert any("a" in kinds for kinds in simulator.kinds.values())


@pytest.mark.parametrize("rule", [Rule.RATIO, Rule.BLOCK])
def test_sampled_trees_run_through(rule: Rule) -> None:
    simulator = Simulator(Limits(tree_nodes=14))
    simulator.open_target(pages=64)
    simulator.open_draft("d0", pages=64, agreement=0.5, branches=2)
    simulator.submit("r", prompt(1, 10), 60, 3, temperature=1.0, seed=1, rule=rule)
    simulator.run()
    assert len(simulator.texts["r"]) == 60
    assert {"a", "r"} <= set(simulator.kinds["r"])


def test_preemption_keeps_every_text() -> None:
    simulator = Simulator(page_size=4)
    simulator.open_target(pages=14)
    simulator.open_draft("d0", pages=14)
    for index in range(5):
        simulator.submit(f"r{index}", prompt(index, 8), 24, 3)
    simulator.run()
    assert sum(request.preemptions for request in simulator.requests.values()) > 0
    for index in range(5):
        assert simulator.texts[f"r{index}"] == plain_text(prompt(index, 8), 24)


def test_the_newest_row_is_preempted_and_the_queue_keeps_its_order() -> None:
    simulator = Simulator(page_size=4)
    simulator.open_target(pages=12)
    for index in range(4):
        simulator.submit(f"r{index}", prompt(index, 8), 24, 0)
    simulator.run()
    assert simulator.requests["r0"].preemptions == 0
    finishing = [line.split()[0] for line in simulator.trace if "ends" in line]
    assert finishing == ["r0", "r1", "r2", "r3"]


def test_the_queue_goes_by_priority_and_then_by_arrival() -> None:
    simulator = Simulator(Limits(max_rows=1))
    simulator.open_target(pages=32)
    for name, priority in (("first", 5), ("late", 1), ("b", 0), ("c", 0), ("urgent", -3)):
        simulator.submit(name, prompt(1, 8), 4, 0, priority=priority)
        if name == "first":
            simulator.round()  # it runs, and none that comes later takes its place
    simulator.run()
    finishing = [line.split()[0] for line in simulator.trace if "ends" in line]
    assert finishing == ["first", "urgent", "b", "c", "late"]


def test_the_newest_row_of_the_lowest_priority_is_preempted() -> None:
    simulator = Simulator(page_size=4)
    simulator.open_target(pages=12)
    for index, priority in enumerate([2, 2, 0, 1]):
        simulator.submit(f"r{index}", prompt(index, 8), 24, 0, priority=priority)
    simulator.run()
    finishing = [line.split()[0] for line in simulator.trace if "ends" in line]
    assert finishing == ["r2", "r3", "r0", "r1"]
    assert simulator.requests["r2"].preemptions == 0
    assert simulator.requests["r1"].preemptions >= simulator.requests["r0"].preemptions > 0
    for index in range(4):
        assert simulator.texts[f"r{index}"] == plain_text(prompt(index, 8), 24)


def test_a_prefix_in_the_cache_is_not_computed_again() -> None:
    simulator = Simulator(page_size=4)
    simulator.open_target(pages=32)
    simulator.open_draft("d0", pages=32)
    shared = prompt(7, 18)
    simulator.submit("cold", shared, 4, 2)
    simulator.run()
    next_turn = [*shared, *simulator.texts["cold"], 1, 2, 3]
    simulator.submit("hot", next_turn, 4, 2)
    simulator.run()
    assert simulator.requests["cold"].cached_tokens == 0
    assert simulator.requests["hot"].cached_tokens == 20  # 18 of the prompt and 2 of the completion, by pages of 4
    assert simulator.texts["hot"] == plain_text(next_turn, 4)


def test_a_whole_cached_prompt_still_computes_its_last_token() -> None:
    simulator = Simulator(page_size=4)
    simulator.open_target(pages=32)
    for name in ("cold", "hot"):
        simulator.submit(name, prompt(7, 16), 4, 0)
        simulator.run()
    assert simulator.requests["hot"].cached_tokens == 12
    assert simulator.texts["hot"] == simulator.texts["cold"]


@pytest.mark.parametrize("tree_nodes", [0, 9])
@pytest.mark.parametrize("rule", [None, *Rule])
def test_every_token_has_its_logprob_whatever_the_rule(rule: Rule | None, tree_nodes: int) -> None:
    """The simulator checks each run; here are drafts that are kept, that fail and that are cut by the end."""
    simulator = Simulator(Limits(tree_nodes=tree_nodes))
    simulator.open_target(pages=64)
    simulator.open_draft("d0", pages=64, agreement=0.6, branches=2 if tree_nodes else 1)
    options = {} if rule is None else {"temperature": 1.0, "seed": 3, "rule": rule}
    simulator.submit("asks", prompt(1, 9), 41, 4, logprobs=3, **options)
    simulator.submit("does not", prompt(2, 9), 30, 4, **options)
    simulator.submit("asks for its own", prompt(3, 9), 30, 4, logprobs=0, prompt_logprobs=2, **options)
    simulator.run()
    assert {"a", "r"} <= set(simulator.kinds["asks"])


def test_prompts_are_scored_once_and_not_out_of_the_cache() -> None:
    simulator = Simulator(Limits(max_prefill_tokens=8), page_size=4)
    simulator.open_target(pages=20)
    simulator.submit("cold", prompt(1, 30), 4, 0)
    simulator.run()
    simulator.submit("other", prompt(2, 20), 30, 0)
    simulator.round()
    request = simulator.submit("scored", prompt(1, 30), 6, 0, prompt_logprobs=1, priority=1)
    for _ in range(2):
        simulator.round()
    assert request.state is State.PREFILL
    before = sum(line.startswith("  prefill scored") for line in simulator.trace)
    simulator.scheduler._preempt(request)  # in the middle of its prompt
    known = len(request.prompt_logprobs)
    assert 0 < known < 29
    simulator.run()
    assert request.cached_tokens == 0
    starts = [int(line.split()[2].strip("[,")) for line in simulator.trace if line.startswith("  prefill scored")]
    assert starts[0] == 0
    assert 0 < starts[before] <= known  # what is known need not be computed again, if it is in the cache
    assert len(request.prompt_logprobs) == 29
    assert simulator.texts["scored"] == plain_text(prompt(1, 30), 6)


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        (None, None, "logprobs is absent; they were asked for"),
        ("tokens", [-1.0], "length of logprobs.tokens is 1; must be 2"),
        ("tokens", [-1.0, 0.5], r"logprobs.tokens\[1\] is 0.5; must be at most 0"),
        ("tokens", [float("nan"), -1.0], "logprobs.tokens.0. is nan"),
        ("top_token_ids", [1, 2, 3, 99], r"logprobs.top_token_ids\[3\] is 99; must be in \[0, 50\)"),
        ("supports", [-1.0], "length of logprobs.supports is 1; must be 0"),
    ],
)
def test_logprobs_that_break_the_contract_are_named(field: str | None, values: object, message: str) -> None:
    simulator = Simulator()
    simulator.open_target(pages=32)
    simulator.submit("r", [1, 2], 4, 0, logprobs=2, prompt_logprobs=2)
    scheduler, target = simulator.scheduler, simulator.target
    assert target is not None
    batch = scheduler.seal(scheduler.plan_target({}), {})
    assert batch is not None
    result = target.run(batch.step)
    assert result.logprobs is not None
    broken = None
    if field is not None:
        broken = replace(result.logprobs, **{field: np.array(values, getattr(result.logprobs, field).dtype)})
    with pytest.raises(InvalidArgumentError, match=message):
        scheduler.accept(batch, replace(result, logprobs=broken))
    scheduler.accept(batch, result)


def test_a_target_without_logprobs_refuses_by_name() -> None:
    scheduler = Scheduler(Limits())
    scheduler.target_opened(replace(grant(32), gives_logprobs=False))
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(InvalidArgumentError, match=f"{name} is given; target fake has none"):
            scheduler.submit(Request("r", np.array([1], np.int32), Params(max_tokens=4, **{name: 0})))


def test_long_prompts_come_in_chunks_beside_running_rows() -> None:
    simulator = Simulator(Limits(max_prefill_tokens=16))
    simulator.open_target(pages=64)
    simulator.submit("short", prompt(1, 4), 30, 0)
    simulator.round()
    simulator.submit("long", prompt(2, 100), 4, 0)
    simulator.run()
    chunks = [line for line in simulator.trace if line.startswith("  prefill long")]
    assert chunks[0] == "  prefill long [0, 16)"
    assert len(chunks) == 7
    assert simulator.texts["short"] == plain_text(prompt(1, 4), 30)
    assert simulator.texts["long"] == plain_text(prompt(2, 100), 4)


def test_rows_that_come_together_are_spread_over_the_replicas() -> None:
    """Their prompts are short: the first step that brings them takes pages, and until then all replicas look empty."""
    simulator = Simulator()
    simulator.open_target(pages=64)
    for name in ("d0", "d1", "d2"):
        simulator.open_draft(name, pages=64)
    for index in range(12):
        simulator.submit(f"r{index}", prompt(index, 9), 20, 4)
    for _ in range(3):
        simulator.round()
    places = [request.draft.replica for request in simulator.scheduler.rows if request.draft is not None]
    assert sorted(places) == sorted(["d0", "d1", "d2"] * 4)


def test_rows_move_when_a_replica_dies_and_come_back_to_a_new_one() -> None:
    simulator = Simulator()
    simulator.open_target(pages=64)
    simulator.open_draft("d0", pages=64)
    simulator.submit("r", prompt(1, 50), 60, 4)
    for _ in range(3):
        simulator.round()
    simulator.lose_draft("d0")
    simulator.round()
    simulator.open_draft("d1", pages=64)
    simulator.run()
    assert simulator.texts["r"] == plain_text(prompt(1, 50), 60)
    assert any("d1 catches up r" in line for line in simulator.trace)
    assert any("d1 proposes for r" in line for line in simulator.trace)


def test_a_late_replica_costs_one_round_without_proposals() -> None:
    simulator = Simulator(draft_deadline=500)
    simulator.open_target(pages=64)
    simulator.open_draft("slow", pages=64, costs=Costs(step=3000, token=0))
    simulator.submit("r", prompt(1, 8), 40, 4)
    simulator.run()
    assert simulator.texts["r"] == plain_text(prompt(1, 8), 40)
    assert simulator.kinds["r"] == "b" * 40


def test_rows_of_a_late_replica_move_to_another() -> None:
    simulator = Simulator(draft_deadline=500)
    simulator.open_target(pages=64)
    simulator.open_draft("slow", pages=65, agreement=1.0, costs=Costs(step=50_000, token=0))
    simulator.submit("r", prompt(1, 8), 41, 4)
    simulator.round()
    simulator.round()
    assert simulator.kinds["r"] == "bb"  # the first round went without: its replica was late
    simulator.open_draft("quick", pages=64, agreement=1.0)
    simulator.run()
    assert "quick proposes for r" in "\n".join(simulator.trace)
    assert simulator.kinds["r"].startswith("bbaaaab")
    assert simulator.texts["r"] == plain_text(prompt(1, 8), 41)


def test_rows_wait_for_a_target_that_went_away() -> None:
    simulator = Simulator()
    simulator.open_target(pages=64)
    simulator.open_draft("d0", pages=64)
    simulator.submit("r", prompt(1, 30), 40, 4)
    for _ in range(3):
        simulator.round()
    simulator.lose_target()
    assert not simulator.scheduler.has_work
    simulator.open_target(pages=48, first_page=100)
    simulator.run()
    assert simulator.texts["r"] == plain_text(prompt(1, 30), 40)


def test_cancelling_releases_everything() -> None:
    simulator = Simulator()
    simulator.open_target(pages=64)
    simulator.open_draft("d0", pages=64)
    for index in range(3):
        simulator.submit(f"r{index}", prompt(index, 20), 40, 4)
    simulator.round()
    simulator.round()
    simulator.cancel("r1")
    simulator.cancel("r1")  # harmless
    assert simulator.requests["r1"].state is State.FINISHED
    simulator.run()
    assert simulator.texts["r0"] == plain_text(prompt(0, 20), 40)
    assert simulator.texts["r2"] == plain_text(prompt(2, 20), 40)


def test_a_replica_that_cannot_propose_as_needed_is_not_asked() -> None:
    simulator = Simulator()
    simulator.open_target(pages=64)
    simulator.open_draft("d0", pages=64, kinds=(ProposalKind.GREEDY,))
    simulator.submit("r", prompt(1, 8), 20, 4, temperature=1.0, seed=5)
    simulator.run()
    assert simulator.texts["r"] == plain_text(prompt(1, 8), 20, 1.0, 5)
    assert not any("proposes" in line for line in simulator.trace)


@pytest.mark.parametrize(
    ("length", "max_tokens", "message"),
    [
        (600, 4, "prompt is 600 tokens; at most 511"),
        (500, 50, "max_tokens is 50; at most 12"),
        (100, 100, "server has cache for 128"),
    ],
)
def test_requests_that_can_never_fit_are_refused_by_name(length: int, max_tokens: int, message: str) -> None:
    simulator = Simulator()
    simulator.open_target(pages=32)
    with pytest.raises(InvalidArgumentError, match=message):
        simulator.submit("r", prompt(1, length), max_tokens, 4)
    simulator.check()


def test_ids_are_unique_and_the_queue_is_bounded() -> None:
    simulator = Simulator(Limits(max_waiting=2))
    simulator.open_target(pages=32)
    simulator.submit("a", prompt(1, 4), 4, 0)
    with pytest.raises(AlreadyExistsError, match="'a' is running"):
        simulator.submit("a", prompt(1, 4), 4, 0)
    simulator.submit("b", prompt(1, 4), 4, 0)
    with pytest.raises(OverloadedError, match="2 requests are waiting"):
        simulator.submit("c", prompt(1, 4), 4, 0)


def test_every_answer_draws_with_noise_of_its_own() -> None:
    simulator = Simulator()
    simulator.open_target(pages=64)
    simulator.open_draft("d0", pages=64)
    request = simulator.submit("r", prompt(1, 8), 30, 3, temperature=1.0, seed=1, rule=Rule.RATIO)
    simulator.run()
    assert request.round_index == simulator.rounds  # the prefill's answer and every round's


def test_a_request_enters_only_if_everybodys_next_round_fits() -> None:
    simulator = Simulator(page_size=4)
    simulator.open_target(pages=7)
    simulator.submit("a", prompt(1, 11), 14, 0)  # three pages now, a fourth next round
    simulator.round()
    simulator.submit("b", prompt(2, 14), 4, 0)  # four pages: free now, but a needs one of them
    simulator.run()
    assert simulator.requests["b"].preemptions == 0
    assert simulator.texts["b"] == plain_text(prompt(2, 14), 4)


def test_a_row_cancelled_while_its_step_is_planned_or_under_way_is_passed_over() -> None:
    simulator = Simulator()
    simulator.open_target(pages=64)
    for name in ("planned", "sent", "stays"):
        simulator.submit(name, prompt(1, 9), 8, 0)
    simulator.round()
    scheduler, target = simulator.scheduler, simulator.target
    assert target is not None
    plan = scheduler.plan_target(scheduler.plan_proposals().values())
    simulator.cancel("planned")
    batch = scheduler.seal(plan, {})
    assert batch is not None
    assert [row.request.id for row in batch.rows] == ["sent", "stays"]
    simulator.cancel("sent")
    runs = scheduler.accept(batch, target.run(batch.step))
    assert [run.request.id for run in runs] == ["stays"]
    simulator.check()


@pytest.mark.parametrize("lost_after", ["proposing", "sealing"])
def test_a_replica_lost_in_the_middle_of_a_round_keeps_the_text(lost_after: str) -> None:
    simulator = Simulator()
    simulator.open_target(pages=64)
    simulator.open_draft("d0", pages=64, agreement=1.0)
    simulator.submit("r", prompt(1, 40), 30, 4)
    simulator.round()
    simulator.round()
    scheduler, target = simulator.scheduler, simulator.target
    assert target is not None
    drafts = scheduler.plan_proposals()
    answer = simulator.replicas["d0"].fake.run(drafts["d0"].step)
    if lost_after == "proposing":
        simulator.lose_draft("d0")
    proposals = drafts["d0"].proposals(answer, VOCAB)
    assert bool(proposals) == (lost_after == "sealing")  # of rows that still draft there
    batch = scheduler.seal(scheduler.plan_target(drafts.values()), proposals)
    assert batch is not None
    if lost_after == "sealing":
        simulator.lose_draft("d0")
    simulator.open_draft("d1", pages=64, agreement=1.0)
    for name, plan in scheduler.plan_catch_up(batch).items():  # the row moves before its verdict is known
        simulator.replicas[name].fake.run(plan.step)
    for run in scheduler.accept(batch, target.run(batch.step)):
        simulator.texts["r"] += run.token_ids
    simulator.run()
    assert simulator.texts["r"] == plain_text(prompt(1, 40), 30)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    happened=events.lists(
        60,
        events.submissions(most_prompt=40, most_tokens=30, most_seed=3),
        events.openings(most_pages=40),
    ),
    tree_nodes=st.sampled_from([0, 0, 9]),
    budget=st.sampled_from([8, 64]),
)
def test_any_mix_of_events_leaves_sound_pools_and_exact_texts(
    happened: list[events.Event], tree_nodes: int, budget: int
) -> None:
    simulator = Simulator(Limits(max_rows=6, max_prefill_tokens=budget, tree_nodes=tree_nodes))
    simulator.open_target(pages=24)
    events.Player(simulator, pages=24).play(happened)


@pytest.mark.parametrize("length", [1, 40, 64 * 4])
def test_a_request_for_no_tokens_ends_with_its_prompt(length: int) -> None:
    """Without an output of the target, beside a row that goes on; a prompt may fill the cache."""
    simulator = Simulator(Limits(max_prefill_tokens=16))
    simulator.open_target(pages=64)
    simulator.open_draft("d0", pages=64)
    simulator.submit("other", prompt(2, 9), 20, 4)
    simulator.submit("scored", prompt(1, length), 0, 4)
    simulator.run()
    assert simulator.texts["scored"] == []
    assert simulator.texts["other"] == plain_text(prompt(2, 9), 20)
