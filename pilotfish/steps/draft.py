"""Steps of a draft replica (draft.proto)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from pilotfish.steps.arrays import Bytes, Floats, Ints, empty_floats, empty_ints, require, require_range
from pilotfish.steps.grants import Grant
from pilotfish.steps.rows import SamplingRows, Supports, TokenRows


class ProposalKind(IntEnum):
    """How a drafter proposes (draft.proto)."""

    GREEDY = 1
    SAMPLED = 2
    MATCHED = 3


@dataclass(frozen=True, slots=True)
class Capabilities:
    """How a drafter can propose; fields as in ``DraftOpened``."""

    kinds: tuple[ProposalKind, ...]
    tree_width: int = 0
    scheme: str = ""


@dataclass(frozen=True, slots=True)
class DraftStep:
    """One batch for a draft replica; see draft.proto."""

    step_id: int
    rows: TokenRows
    sampling: SamplingRows
    draft_lengths: Ints  # [rows], 0 only extends
    proposal_kinds: Bytes  # [rows], ProposalKind
    support_limit: int
    node_limits: Ints = field(default_factory=empty_ints)  # [rows], or [0] for chains
    features: npt.NDArray[Any] | None = None  # [tokens, feature_width]

    def validate(self, grant: Grant, capabilities: Capabilities) -> None:
        """Raises ``InvalidArgumentError`` naming the first field at fault.

        Args:
            grant: of the stream that the step came on.
            capabilities: of the drafter.
        """
        self.rows.validate_counts(grant)
        rows = len(self.rows.lengths)
        for name in ("draft_lengths", "proposal_kinds"):
            count = len(getattr(self, name))
            require(count == rows, f"length of {name}", count, f"must equal the {rows} rows")
        require_range(self.draft_lengths, "draft_lengths", 0, grant.max_len, f"must be in [0, {grant.max_len}]")
        limits = self.node_limits if len(self.node_limits) else self.draft_lengths
        require(len(limits) == rows, "length of node_limits", len(limits), f"must be 0 or equal the {rows} rows")
        too_few = limits < self.draft_lengths
        require(not too_few.any(), "node_limits", "below draft_lengths", "a path of that length needs the nodes")
        self.rows.validate(grant, self.draft_slots(capabilities.tree_width))
        self.sampling.validate(rows)
        require(self.support_limit >= 1, "support_limit", self.support_limit, "must be >= 1")
        for kind in np.unique(self.proposal_kinds[self.draft_lengths > 0]):
            known = ", ".join(k.name for k in capabilities.kinds)
            require(int(kind) in capabilities.kinds, "proposal_kinds", kind, f"this drafter can do {known}")
        if (self.features is None) == bool(grant.feature_width):
            wanted = f"[tokens, {grant.feature_width}]" if grant.feature_width else "absent"
            require(False, "features", "absent" if self.features is None else "given", f"must be {wanted}")
        if self.features is not None:
            shape = (len(self.rows.token_ids), grant.feature_width)
            require(self.features.shape == shape, "features", self.features.shape, f"shape must be {shape}")

    def draft_slots(self, tree_width: int) -> Ints:
        """Slots after its tokens that each row's page table covers, for what is drafted. i32[rows]."""
        limits = self.node_limits if len(self.node_limits) else self.draft_lengths
        rows = zip(self.draft_lengths.tolist(), limits.tolist(), strict=True)
        return np.array([draft_slots(length, nodes, tree_width) for length, nodes in rows], np.int32)


def draft_slots(draft_length: int, node_limit: int, tree_width: int) -> int:
    """Slots that a drafter may write to after the tokens of a row.

    The last node of a chain is proposed and never run, so it needs none. A tree is grown in levels of
    ``tree_width`` nodes, most of which are not proposed in the end.

    Args:
        draft_length: longest path.
        node_limit: most nodes; more than the longest path is a tree.
        tree_width: of the drafter.
    """
    if node_limit > draft_length:
        return max(node_limit, draft_length * tree_width)
    return draft_length - 1 if draft_length else 0


@dataclass(frozen=True, slots=True)
class DraftResult:
    """Answer to a DraftStep; see draft.proto."""

    step_id: int
    node_counts: Ints  # [rows]
    token_ids: Ints  # [nodes]
    compute_us: int
    parents: Ints = field(default_factory=empty_ints)  # [nodes], or [0] for chains
    supports: Supports = field(default_factory=Supports)  # [nodes + rows] groups, or none
    support_probs: Floats = field(default_factory=empty_floats)  # [sum of support counts]
