"""Steps of the target (target.proto)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from pilotfish.steps.arrays import Bytes, Floats, Ints, empty_bytes, require, require_range
from pilotfish.steps.grants import Grant
from pilotfish.steps.logprobs import Logprobs, WantedLogprobs
from pilotfish.steps.rows import SamplingRows, Supports, TokenRows


class DrawRule(IntEnum):
    """Which noise the target's draws of a row use (target.proto)."""

    MATCH = 1
    OUTSIDE = 2


class FeatureRule(IntEnum):
    """Which tokens of a row want their features (target.proto)."""

    NONE = 1
    ALL = 2
    MATCHED = 3


@dataclass(frozen=True, slots=True)
class TargetStep:
    """One batch for the target; see target.proto."""

    step_id: int
    rows: TokenRows
    sampling: SamplingRows
    output_nodes: Ints  # [outputs], ascending indices into rows.token_ids
    draw_rules: Bytes  # [rows], DrawRule
    supports: Supports = field(default_factory=Supports)  # one group per output, or none
    feature_rules: Bytes = field(default_factory=empty_bytes)  # [rows] FeatureRule, or [0] for none
    logprobs: WantedLogprobs | None = None

    def validate(self, grant: Grant) -> None:
        """Raises ``InvalidArgumentError`` naming the first field at fault."""
        self.rows.validate(grant)
        rows, tokens = len(self.rows.lengths), len(self.rows.token_ids)
        self.sampling.validate(rows)
        require(len(self.draw_rules) == rows, "length of draw_rules", len(self.draw_rules), f"must equal {rows} rows")
        require_range(self.draw_rules, "draw_rules", 1, 2, "must be MATCH (1) or OUTSIDE (2)")
        require_range(self.output_nodes, "output_nodes", 0, tokens - 1, f"must be in [0, {tokens})")
        ascending = bool((np.diff(self.output_nodes) > 0).all())
        require(ascending, "output_nodes", "not ascending", "must be strictly ascending")
        if len(self.feature_rules):
            self._validate_features(grant)
        if self.logprobs is not None:
            require(grant.gives_logprobs, "logprobs", "given", "this target gives none")
            self.logprobs.validate(tokens, len(self.output_nodes), grant.vocab_size)
        self.supports.validate(len(self.output_nodes), grant.vocab_size)
        if len(self.supports.counts):
            row_of_output = np.searchsorted(self.rows.row_offsets, self.output_nodes, side="right") - 1
            matched = (self.draw_rules[row_of_output] == DrawRule.MATCH) & (self.supports.counts > 0)
            require(not matched.any(), "supports.counts", "positive in a MATCH row", "must be 0 there")

    def _validate_features(self, grant: Grant) -> None:
        rules, rows = self.feature_rules, len(self.rows.lengths)
        require(len(rules) == rows, "length of feature_rules", len(rules), f"must be 0 or equal the {rows} rows")
        require_range(rules, "feature_rules", 1, 3, "must be NONE (1), ALL (2) or MATCHED (3)")
        wanted = bool((rules != FeatureRule.NONE).any())
        require(not wanted or grant.feature_width > 0, "feature_rules", "given", "this target stores no features")
        matched = rules == FeatureRule.MATCHED
        drawn = np.diff(np.searchsorted(self.output_nodes, self.rows.row_offsets))
        followed = (self.draw_rules == DrawRule.MATCH) & (drawn == self.rows.lengths)
        if (matched & ~followed).any():
            row = int((matched & ~followed).argmax())
            limit = "MATCHED needs a row of draw rule MATCH whose every token wants an output"
            require(False, f"feature_rules[{row}]", int(rules[row]), limit)


@dataclass(frozen=True, slots=True)
class TargetResult:
    """Answer to a TargetStep; see target.proto."""

    step_id: int
    token_ids: Ints  # [outputs]
    tail_masses: Floats  # [outputs]
    support_probs: Floats  # [sum of support counts]
    compute_us: int
    features: npt.NDArray[Any] | None = None  # [as many as the rules ask for, feature_width]
    logprobs: Logprobs | None = None
