"""Steps that mean nothing, run before the first that does: it must not wait for what is made on first use."""

from __future__ import annotations

from typing import Any

import numpy as np

from pilotfish.rpc.steps_service import StepEngine
from pilotfish.steps import DraftStep, DrawRule, Grant, ProposalKind, SamplingRows, TargetStep, TokenRows


def warm_up_target(engine: StepEngine[TargetStep, Any]) -> None:
    """Runs one token and a page of them, greedy and sampled."""
    grant = engine.open(1)
    try:
        for tokens in (1, min(grant.page_size, grant.max_len, grant.max_step_tokens)):
            for temperature in (0.0, 1.0):
                engine.run(grant, _target_step(grant, tokens, temperature))
    finally:
        engine.close(grant)


def warm_up_draft(engine: StepEngine[DraftStep, Any], kinds: tuple[ProposalKind, ...]) -> None:
    """Drafts in every way that the drafter can."""
    grant = engine.open(1)
    try:
        for kind in kinds:
            engine.run(grant, _draft_step(grant, kind))
    finally:
        engine.close(grant)


def _target_step(grant: Grant, tokens: int, temperature: float) -> TargetStep:
    return TargetStep(
        step_id=0,
        rows=_row(grant, tokens),
        sampling=_sampling(temperature),
        output_nodes=np.arange(tokens, dtype=np.int32),
        draw_rules=np.array([DrawRule.MATCH], np.uint8),
    )


def _draft_step(grant: Grant, kind: ProposalKind) -> DraftStep:
    return DraftStep(
        step_id=0,
        rows=_row(grant, 1),
        sampling=_sampling(0.0 if kind is ProposalKind.GREEDY else 1.0),
        draft_lengths=np.array([min(2, grant.page_size, grant.max_len)], np.int32),
        proposal_kinds=np.array([kind], np.uint8),
        support_limit=8,
    )


def _row(grant: Grant, tokens: int) -> TokenRows:
    """One row on the first page of the grant."""
    return TokenRows(
        token_ids=np.zeros(tokens, np.int32),
        lengths=np.array([tokens], np.int32),
        starts=np.zeros(1, np.int32),
        page_counts=np.ones(1, np.int32),
        page_ids=np.array([grant.first_page], np.int32),
    )


def _sampling(temperature: float) -> SamplingRows:
    """One row's, with top-k and top-p if it is warm."""
    is_warm = temperature > 0
    return SamplingRows(
        temperatures=np.array([temperature], np.float32),
        top_ks=np.array([8 if is_warm else 0], np.int32),
        top_ps=np.array([0.9 if is_warm else 1.0], np.float32),
        min_ps=np.zeros(1, np.float32),
        seeds=np.zeros(1, np.uint64),
        rounds=np.zeros(1, np.int64),
    )
