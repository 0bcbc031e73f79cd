"""Warming up leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from draft_svc.drafters import Drafter, Proposals
from draft_svc.drafters.model import ModelDrafter
from draft_svc.engine import DraftEngine
from pilotfish.runtime.grants import ModelInfo
from pilotfish.runtime.loading import load_model
from pilotfish.runtime.warm_up import warm_up_draft, warm_up_target
from pilotfish.steps import DraftStep, ProposalKind, draft_slots
from target_svc.engine import TargetEngine


@pytest.mark.parametrize("page_size", [1, 16])
def test_both_engines_run_their_steps_and_hold_no_page(page_size: int, model_folder: Callable[..., Path]) -> None:
    model = load_model(model_folder(), device="cpu")
    drafter = ModelDrafter(model, pages=3, page_size=page_size)
    target = TargetEngine(model, pages=3, page_size=page_size)
    warm_up_target(target)
    assert target.open(None).page_count == 3
    draft = DraftEngine(drafter, pages=3, page_size=page_size)
    warm_up_draft(draft, draft.capabilities)
    assert draft.open(None).page_count == 3


class Head(Drafter):
    """Notes what it is asked, and proposes nothing."""

    kinds = (ProposalKind.GREEDY, ProposalKind.SAMPLED)
    tree_width = 10

    def __init__(self) -> None:
        self.asked: list[DraftStep] = []

    @property
    def info(self) -> ModelInfo:
        return ModelInfo("head", "w", "t", 100, 64, ("hidden.1", "final"), 12)

    def propose(self, step: DraftStep) -> Proposals:
        self.asked.append(step)
        return Proposals(np.zeros(1, np.int32), np.zeros(0, np.int32))


@pytest.mark.parametrize(("pages", "trees"), [(1, 0), (2, 0), (3, 1)])
def test_a_head_is_warmed_up_on_features_and_on_trees_that_fit(pages: int, trees: int) -> None:
    head = Head()
    engine = DraftEngine(head, pages=pages, page_size=16)
    warm_up_draft(engine, engine.capabilities)
    assert all(step.features is not None and step.features.shape == (1, 12) for step in head.asked)
    assert [int(step.proposal_kinds[0]) for step in head.asked] == sorted([1, 2] * (1 + trees))
    wanted = [2, 40] if trees else [2]
    assert [int(step.node_limits[0]) for step in head.asked] == wanted * 2


def test_a_row_needs_slots_for_what_is_drafted() -> None:
    assert [draft_slots(length, length, 10) for length in (0, 1, 4)] == [0, 0, 3]
    assert draft_slots(4, 8, 10) == 40
    assert draft_slots(4, 50, 10) == 50
    assert draft_slots(4, 9, 0) == 9
