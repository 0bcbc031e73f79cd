"""Steps that mean nothing, run before the first that does: it must not wait for what is made on first use."""

from __future__ import annotations

from typing import Any

import numpy as np

from pilotfish.rpc.steps_service import StepEngine
from pilotfish.steps import (
    Capabilities,
    DraftStep,
    DrawRule,
    Grant,
    ProposalKind,
    SamplingRows,
    TargetStep,
    TokenRows,
    draft_slots,
)


def warm_up_target(engine: StepEngine[TargetStep, Any]) -> None:
    """Runs one token and a page of them, greedy and sampled."""
    grant = engine.open(1)
    try:
        for tokens in (1, min(grant.page_size, grant.max_len, grant.max_step_tokens)):
            for temperature in (0.0, 1.0):
                engine.run(grant, _target_step(grant, tokens, temperature))
    finally:
        engine.close(grant)


def warm_up_draft(engine: StepEngine[DraftStep, Any], capabilities: Capabilities) -> None:
    """Drafts in every way that the drafter can: a chain of two, and a tree as deep if its pages can hold it."""
    grant, width = engine.open(None), capabilities.tree_width
    length = min(2, grant.page_size, grant.max_len)
    try:
        for kind in capabilities.kinds:
            for nodes in (length, 2 * length * width):
                slots = 1 + draft_slots(length, nodes, width)
                if nodes and slots <= min(grant.max_len, grant.page_count * grant.page_size):
                    engine.run(grant, _draft_step(grant, kind, length, nodes, slots))
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


def _draft_step(grant: Grant, kind: ProposalKind, length: int, nodes: int, slots: int) -> DraftStep:
    """So many nodes after one token, in so many slots."""
    width = grant.feature_width
    return DraftStep(
        step_id=0,
        rows=_row(grant, 1, pages=-(-slots // grant.page_size)),
        sampling=_sampling(0.0 if kind is ProposalKind.GREEDY else 1.0),
        draft_lengths=np.array([length], np.int32),
        node_limits=np.array([nodes], np.int32),
        proposal_kinds=np.array([kind], np.uint8),
        support_limit=8,
        features=np.zeros((1, width), np.uint16) if width else None,  # 0 in bfloat16, too
    )


def _row(grant: Grant, tokens: int, pages: int = 1) -> TokenRows:
    """One row on the first pages of the grant."""
    return TokenRows(
        token_ids=np.zeros(tokens, np.int32),
        lengths=np.array([tokens], np.int32),
        starts=np.zeros(1, np.int32),
        page_counts=np.array([pages], np.int32),
        page_ids=np.arange(grant.first_page, grant.first_page + pages, dtype=np.int32),
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
