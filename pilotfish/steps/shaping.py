"""What rows have done to their logits, and the grammars that completions keep to (types.proto)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from pilotfish.steps.arrays import Floats, Ints, empty_ints, require, require_range

MAX_GRAMMAR_BYTES = 65536
"""Most text of a grammar, as it is asked for."""

MAX_WRITTEN_BYTES = 4 * MAX_GRAMMAR_BYTES
"""The same as workers get it: what JSON schemas mean is written out for them."""

MAX_GRAMMAR_ENDS = 1024
"""Most end tokens of a grammar."""


class GrammarKind(IntEnum):
    """How a grammar is written (types.proto)."""

    JSON_SCHEMA = 1
    JSON_OBJECT = 2
    REGEX = 3
    EBNF = 4
    STRUCTURAL_TAG = 5


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a completion must keep to; fields as in ``Grammar`` of types.proto."""

    kind: GrammarKind
    text: str
    end_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShapingRows:
    """What some rows have done to their logits; see ``ShapingRows`` in types.proto."""

    rows: Ints  # [shaped], ascending
    prompt_lengths: Ints  # [shaped]
    repetition_penalties: Floats  # [shaped], 1 changes nothing
    presence_penalties: Floats  # [shaped]
    frequency_penalties: Floats  # [shaped]
    bias_counts: Ints  # [shaped]
    bias_token_ids: Ints  # [sum of bias_counts]
    bias_values: Floats  # [sum of bias_counts], -inf bans
    allowed_counts: Ints  # [shaped], 0 allows all
    allowed_token_ids: Ints  # [sum of allowed_counts]
    min_tokens: Ints  # [shaped]
    end_counts: Ints  # [shaped]
    end_token_ids: Ints  # [sum of end_counts]
    grammars: tuple[Grammar, ...] = ()
    grammar_indices: Ints = field(default_factory=empty_ints)  # [shaped], -1 for none, or [0] without grammars

    def validate(self, rows: int) -> None:
        """Raises ``InvalidArgumentError`` naming the first field at fault."""
        shaped, finite, most = len(self.rows), float(np.finfo(np.float32).max), 2**31 - 1
        require(shaped > 0, "rows", "empty", "without a row that asks, shaping is absent")
        require_range(self.rows, "rows", 0, rows - 1, f"must be in [0, {rows})")
        require(bool((np.diff(self.rows) > 0).all()), "rows", "not ascending", "must be strictly ascending")
        for name in (
            *("prompt_lengths", "repetition_penalties", "presence_penalties", "frequency_penalties"),
            *("bias_counts", "allowed_counts", "min_tokens", "end_counts"),
        ):
            count = len(getattr(self, name))
            require(count == shaped, f"length of {name}", count, f"must equal the {shaped} rows that ask")
        require_range(self.prompt_lengths, "prompt_lengths", 1, most, "must be >= 1")
        positive = float(np.finfo(np.float32).smallest_subnormal)
        require_range(self.repetition_penalties, "repetition_penalties", positive, finite, "must be finite and > 0")
        for name in ("presence_penalties", "frequency_penalties"):
            require_range(getattr(self, name), name, -finite, finite, "must be finite")
        require_range(self.min_tokens, "min_tokens", 0, most, "must be >= 0")
        for name in ("bias", "allowed", "end"):
            counts, ids = getattr(self, f"{name}_counts"), getattr(self, f"{name}_token_ids")
            require_range(counts, f"{name}_counts", 0, most, "must be >= 0")
            total = int(counts.sum(dtype=np.int64))
            require(len(ids) == total, f"length of {name}_token_ids", len(ids), f"{name}_counts sum to {total}")
            require_range(ids, f"{name}_token_ids", 0, most, "must be >= 0")
        values, total = self.bias_values, len(self.bias_token_ids)
        require(len(values) == total, "length of bias_values", len(values), f"must equal the {total} bias_token_ids")
        banned = np.isneginf(values)
        require_range(values[~banned], "bias_values", -finite, finite, "must be finite, or -inf")
        groups = np.repeat(np.arange(shaped, dtype=np.int64), self.bias_counts) << 31
        distinct = len(np.unique(groups + self.bias_token_ids)) == total
        require(distinct, "bias_token_ids", "repeated", "ids must be distinct within a row")
        count, expected = len(self.grammar_indices), shaped if self.grammars else 0
        require(count == expected, "length of grammar_indices", count, f"must equal the {expected} rows that ask")
        most = len(self.grammars) - 1
        require_range(self.grammar_indices, "grammar_indices", -1, most, f"must be in [-1, {most}]")
