"""Warming up leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from draft_svc.drafters.model import ModelDrafter
from draft_svc.engine import DraftEngine
from pilotfish.runtime.loading import load_model
from pilotfish.runtime.warm_up import warm_up_draft, warm_up_target
from target_svc.engine import TargetEngine


@pytest.mark.parametrize("page_size", [1, 16])
def test_both_engines_run_their_steps_and_hold_no_page(page_size: int, model_folder: Callable[..., Path]) -> None:
    model = load_model(model_folder(), device="cpu")
    drafter = ModelDrafter(model, pages=3, page_size=page_size)
    target = TargetEngine(model, pages=3, page_size=page_size)
    warm_up_target(target)
    assert target.open(None).page_count == 3
    draft = DraftEngine(drafter, pages=3, page_size=page_size)
    warm_up_draft(draft, draft.kinds)
    assert draft.open(None).page_count == 3
