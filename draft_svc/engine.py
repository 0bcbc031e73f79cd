"""Runs draft steps: grants, checks and timing around whatever drafter is loaded."""

from __future__ import annotations

import time

from draft_svc.drafters import Drafter
from pilotfish.errors import InternalError
from pilotfish.runtime.grants import GrantingEngine
from pilotfish.runtime.slots import require_distinct_slots
from pilotfish.steps import Capabilities, DraftResult, DraftStep, Grant


class DraftEngine(GrantingEngine):
    """A drafter with its page grants. Not thread-safe: one thread makes all calls.

    Args:
        drafter: made with as many pages of the same size.
        pages: pages of its cache.
        page_size: slots per page.
        max_step_tokens: most new tokens in one step.
    """

    def __init__(self, drafter: Drafter, *, pages: int, page_size: int = 16, max_step_tokens: int = 4096) -> None:
        self._drafter = drafter
        super().__init__(drafter.info, pages=pages, page_size=page_size, max_step_tokens=max_step_tokens)

    @property
    def capabilities(self) -> Capabilities:
        """How the drafter proposes."""
        return Capabilities(self._drafter.kinds, self._drafter.tree_width, self._drafter.scheme)

    def run(self, grant: Grant, step: DraftStep) -> DraftResult:
        """Runs one step.

        Raises:
            InvalidArgumentError: on a step that breaks the contract; nothing was written.
            InternalError: if the model answers NaN.
        """
        started = time.perf_counter_ns()
        step.validate(grant, self.capabilities)
        require_distinct_slots(step.rows, grant.page_size, step.draft_slots(self._drafter.tree_width))
        try:
            proposals = self._drafter.propose(step)
        except InternalError:
            self._drafter.scrub(step.rows.page_ids)
            raise
        return DraftResult(
            step_id=step.step_id,
            node_counts=proposals.node_counts,
            token_ids=proposals.token_ids,
            parents=proposals.parents,
            supports=proposals.supports,
            support_probs=proposals.support_probs,
            compute_us=(time.perf_counter_ns() - started) // 1000,
        )
