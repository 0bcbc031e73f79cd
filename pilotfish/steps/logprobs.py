"""Log probabilities that a step of the target wants, and gets (target.proto)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pilotfish.steps.arrays import Floats, Ints, empty_ints, require, require_range

MAX_TOPS = 1024
"""Most top tokens of one place."""


@dataclass(frozen=True, slots=True)
class WantedLogprobs:
    """Which log probabilities a step wants; see target.proto."""

    counts: Ints  # [outputs], top tokens of each; -1 for nothing
    scored_nodes: Ints = field(default_factory=empty_ints)  # [scored], ascending indices into rows.token_ids
    scored_token_ids: Ints = field(default_factory=empty_ints)  # [scored]
    scored_counts: Ints = field(default_factory=empty_ints)  # [scored]

    def validate(self, tokens: int, outputs: int, vocab_size: int) -> None:
        """Raises ``InvalidArgumentError`` naming the first field at fault."""
        require(len(self.counts) == outputs, "length of logprobs.counts", len(self.counts), f"must be {outputs}")
        most = min(MAX_TOPS, vocab_size)
        require_range(self.counts, "logprobs.counts", -1, most, f"must be in [-1, {most}]")
        scored = len(self.scored_nodes)
        for name in ("scored_token_ids", "scored_counts"):
            count = len(getattr(self, name))
            require(count == scored, f"length of logprobs.{name}", count, f"must equal the {scored} scored_nodes")
        require_range(self.scored_nodes, "logprobs.scored_nodes", 0, tokens - 1, f"must be in [0, {tokens})")
        ascending = bool((np.diff(self.scored_nodes) > 0).all())
        require(ascending, "logprobs.scored_nodes", "not ascending", "must be strictly ascending")
        known = f"must be in [0, {vocab_size})"
        require_range(self.scored_token_ids, "logprobs.scored_token_ids", 0, vocab_size - 1, known)
        require_range(self.scored_counts, "logprobs.scored_counts", 0, most, f"must be in [0, {most}]")


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of a step's outputs, then of its scored nodes; see target.proto."""

    tokens: Floats  # [places]
    supports: Floats  # [support ids of the outputs that want any]
    top_token_ids: Ints  # [sum of counts]
    top: Floats  # [sum of counts]
