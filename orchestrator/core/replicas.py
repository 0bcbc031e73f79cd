"""Draft replicas: what each can do, what it holds, and how much it is asked to catch up."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from orchestrator.core.pages import PagePool
from orchestrator.core.requests import Params, Request
from pilotfish.steps import Capabilities, Grant

FIRST_ALLOWANCE, LEAST_ALLOWANCE = 64, 16
"""Tokens that a replica catches up beside a target step without prompts; see ``Replica.begin_round``."""


@dataclass(slots=True)
class Replica:
    """One draft replica, as long as its stream is open."""

    name: str
    grant: Grant
    capabilities: Capabilities
    pool: PagePool
    columns: npt.NDArray[np.int64] | None = None
    """Where its features stand among the target's; None: it wants none, or all of them as they are."""
    is_late: bool = False
    """It missed a deadline and still owes the answer: it gets no steps until it has given it."""
    is_behind: bool = False
    """It has not yet done with its last catch-up step, so that a proposal step would wait for it."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Slot copies to send with its next step."""
    step_id: int = 0
    sent: deque[tuple[int, tuple[Request, ...]]] = field(default_factory=lambda: deque(maxlen=16))
    """Its last steps: their numbers, and whose rows they hold."""
    caught_up: bool = False
    """It was sent a catch-up step in the last round."""
    allowance: int = FIRST_ALLOWANCE

    @property
    def wants_features(self) -> bool:
        return bool(self.grant.features)

    def suits(self, params: Params) -> bool:
        """Whether it can propose as the request's rule needs it, and is of the kind that the request asks for."""
        is_wanted = params.draft_model in ("", self.grant.model_id, self.capabilities.scheme)
        return is_wanted and params.proposal_kind in self.capabilities.kinds

    def next_step_id(self, rows: Iterable[Request]) -> int:
        """Number of the next step, which holds these rows."""
        self.step_id += 1
        self.sent.append((self.step_id, tuple(rows)))
        return self.step_id

    def begin_round(self, *, is_late: bool, is_behind: bool) -> None:
        """Says where it stands now.

        A catch-up step is to end before the target's does: the allowance doubles when it did, and halves when not.
        """
        if self.caught_up:
            wanted = self.allowance // 2 if is_behind else 2 * self.allowance
            self.allowance = min(max(wanted, LEAST_ALLOWANCE), self.grant.max_step_tokens)
        self.is_late, self.is_behind, self.caught_up = is_late, is_behind, False
