"""Runs draft steps: grants, checks and timing around whatever drafter is loaded."""

from __future__ import annotations

import time

import numpy as np

from draft_svc.drafters import Drafter
from pilotfish.runtime.grants import PageGrants
from pilotfish.runtime.slots import require_distinct_slots
from pilotfish.steps import DraftResult, DraftStep, Grant, Ints, ProposalKind


class DraftEngine:
    """A drafter with its page grants. Not thread-safe: one thread makes all calls.

    Args:
        drafter: made with as many pages of the same size.
        pages: pages of its cache.
        page_size: slots per page.
        max_step_tokens: most new tokens in one step.
    """

    def __init__(self, drafter: Drafter, *, pages: int, page_size: int = 16, max_step_tokens: int = 4096) -> None:
        self._drafter = drafter
        info = drafter.info
        template = Grant(
            model_id=info.model_id,
            weights_hash=info.weights_hash,
            tokenizer_hash=info.tokenizer_hash,
            vocab_size=info.vocab_size,
            page_size=page_size,
            first_page=0,
            page_count=0,
            max_len=info.max_len,
            max_step_tokens=max_step_tokens,
            incarnation=0,
            features=info.features,
            feature_width=info.feature_width,
        )
        self._grants = PageGrants(pages, template)

    @property
    def kinds(self) -> tuple[ProposalKind, ...]:
        """Ways in which the drafter can propose."""
        return self._drafter.kinds

    def open(self, page_count: int | None) -> Grant:
        """Grants pages to a new stream; see ``PageGrants.open``."""
        return self._grants.open(page_count)

    def close(self, grant: Grant) -> None:
        """Takes a stream's pages back."""
        self._grants.close(grant)

    def run(self, grant: Grant, step: DraftStep) -> DraftResult:
        """Runs one step.

        Raises:
            InvalidArgumentError: on a step that breaks the contract; nothing was written.
            InternalError: if the model answers NaN.
        """
        started = time.perf_counter_ns()
        step.validate(grant, self._drafter.kinds)
        require_distinct_slots(step.rows, grant.page_size, _node_slots(step))
        proposals = self._drafter.propose(step)
        return DraftResult(
            step_id=step.step_id,
            node_counts=proposals.node_counts,
            token_ids=proposals.token_ids,
            parents=proposals.parents,
            supports=proposals.supports,
            support_probs=proposals.support_probs,
            compute_us=(time.perf_counter_ns() - started) // 1000,
        )


def _node_slots(step: DraftStep) -> Ints:
    """Slots per row for the nodes; the last one is proposed and never run, so it needs none."""
    limits = step.node_limits if len(step.node_limits) else step.draft_lengths
    return np.maximum(limits - 1, 0)
