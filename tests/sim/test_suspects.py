"""A row that workers fail at is found, fails alone, and changes nobody else's text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from fakes import FakeDraft, FakeTarget, plain_text, prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator import Simulator

from orchestrator.core.requests import Params, Request
from orchestrator.core.scheduler import Limits
from orchestrator.core.suspects import Suspects
from pilotfish.errors import InternalError, InvalidArgumentError, PilotfishError
from pilotfish.steps import DraftResult, DraftStep, TargetResult, TargetStep

POISON = 666  # a seed


def requests(count: int) -> list[Request]:
    return [Request(f"r{index}", np.ones(2, np.int32), Params(max_tokens=4)) for index in range(count)]


def steps_of(suspects: Suspects, rows: Sequence[Request]) -> Iterator[list[Request]]:
    """The steps that a scheduler would make of these rows, for ever."""
    while True:
        step: list[Request] = []
        for row in rows:
            if suspects.may_join(row, step):
                step.append(row)
        yield step


@given(st.integers(1, 64), st.data())
def test_halving_finds_the_row_of_a_refusal(count: int, data: st.DataObject) -> None:
    rows, suspects = requests(count), Suspects()
    guilty = rows[data.draw(st.integers(0, count - 1))]
    refusals = 0
    for step in steps_of(suspects, rows):
        if guilty in step:
            refusals += 1
            if found := suspects.refused(step):
                break
        else:
            suspects.answered(step)
    assert found is guilty
    assert refusals <= 1 + int(np.ceil(np.log2(count)))


@given(st.integers(2, 64), st.data())
def test_the_second_loss_finds_the_row_of_a_loss(count: int, data: st.DataObject) -> None:
    rows, suspects = requests(count), Suspects()
    guilty = rows[data.draw(st.integers(0, count - 1))]
    found = []
    for step in steps_of(suspects, rows):
        if guilty in step:
            found.append(suspects.lost(step))
            if found[-1]:
                break
        else:
            suspects.answered(step)
    assert found == [None, guilty]


def test_one_loss_convicts_nobody_even_where_a_step_holds_one_row() -> None:
    [row], suspects = requests(1), Suspects()
    assert suspects.lost([row]) is None
    assert suspects.may_join(row, [])
    suspects.answered([row])  # an answer
    assert suspects.lost([row]) is None


def test_a_row_that_ended_meanwhile_makes_nobody_else_guilty() -> None:
    """Of two rows of a refused step the guilty one is cancelled before the answer comes."""
    simulator = Simulator()
    simulator.open_target(pages=64)
    cancelled = simulator.submit("cancelled", prompt(0, 4), 4, 0)
    simulator.submit("other", prompt(1, 4), 4, 0)
    batch = simulator.scheduler.seal(simulator.scheduler.plan_target(()), {})
    assert batch is not None
    simulator.scheduler.finish(cancelled)
    assert simulator.scheduler.step_refused(batch) is None
    simulator.run()
    assert simulator.texts["other"] == plain_text(prompt(1, 4), 4)


@dataclass
class PoisonedTarget(FakeTarget):
    """Fails at rows with the seed ``POISON``."""

    error: PilotfishError = field(default_factory=lambda: InvalidArgumentError("poison"))

    def run(self, step: TargetStep) -> TargetResult:
        if POISON in step.sampling.seeds:
            raise self.error
        return super().run(step)


@dataclass
class PoisonedDraft(FakeDraft):
    """Fails at the same."""

    def run(self, step: DraftStep) -> DraftResult:
        if POISON in step.sampling.seeds:
            raise InternalError("poison")
        return super().run(step)


@pytest.mark.parametrize("tree", [0, 14])
@pytest.mark.parametrize("error", [InvalidArgumentError("poison"), InternalError("poison")], ids=["refused", "lost"])
@settings(max_examples=15, deadline=None)
@given(count=st.integers(1, 12), poisonous=st.sets(st.integers(0, 11), max_size=3), late=st.integers(0, 6))
def test_the_others_keep_their_texts(
    tree: int, error: PilotfishError, count: int, poisonous: set[int], late: int
) -> None:
    simulator = Simulator(Limits(tree_nodes=tree))
    simulator.make_target = lambda grant: PoisonedTarget(grant, error)
    simulator.open_target(pages=200)
    simulator.open_draft("d0", pages=200, agreement=0.5, branches=2 if tree else 1)
    for index in range(count):
        if index == late:  # the others have run for a while
            for _ in range(4):
                simulator.round()
        simulator.submit(f"r{index}", prompt(index, 6 + index), 12, 3, seed=POISON if index in poisonous else index)
    simulator.run()
    assert simulator.failed == {f"r{index}" for index in poisonous if index < count}
    for index in set(range(count)) - poisonous:
        assert simulator.texts[f"r{index}"] == plain_text(prompt(index, 6 + index), 12)


def test_a_row_that_replicas_fail_at_goes_on_without_a_draft() -> None:
    simulator = Simulator()
    simulator.open_target(pages=200)
    simulator.make_draft = PoisonedDraft
    simulator.open_draft("d0", pages=200)
    names = [f"r{index}" for index in range(6)]
    for index, name in enumerate([*names, "bad"]):
        simulator.submit(name, prompt(index, 10), 20, 3, seed=POISON if name == "bad" else index)
    simulator.run()
    for index, name in enumerate([*names, "bad"]):
        assert simulator.texts[name] == plain_text(prompt(index, 10), 20)
        assert simulator.requests[name].may_draft == (name != "bad")
    assert sum("lost d0" in line for line in simulator.trace) == 2
    assert all("a" in simulator.kinds[name] for name in names)
