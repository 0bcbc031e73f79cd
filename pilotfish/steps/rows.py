"""Rows of a step of either worker: their tokens, and how they sample (types.proto)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pilotfish.steps.arrays import Floats, Ints, empty_ints, require, require_range
from pilotfish.steps.grants import Grant
from pilotfish.steps.shaping import ShapingRows

MAX_SUPPORT = 1024
"""Most ids in the support of one node."""


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Ragged rows of new tokens over paged caches; see ``TokenRows`` in types.proto."""

    token_ids: Ints  # [tokens]
    lengths: Ints  # [rows]
    starts: Ints  # [rows]
    page_counts: Ints  # [rows]
    page_ids: Ints  # [sum of page_counts]
    parents: Ints = field(default_factory=empty_ints)  # [tokens], or [0] for chains
    slot_copies: Ints = field(default_factory=lambda: np.zeros((0, 2), np.int32))  # [copies, 2]

    def validate(self, grant: Grant, reserved: Ints | None = None) -> None:
        """Checks every index, so that nothing outside the grant can be touched.

        Args:
            grant: of the stream that the step came on.
            reserved: slots each row needs beyond its tokens, i32[rows].

        Raises:
            InvalidArgumentError: naming the first field at fault.
        """
        self.validate_counts(grant)
        rows, tokens = len(self.lengths), len(self.token_ids)
        for name in ("starts", "page_counts"):
            count = len(getattr(self, name))
            require(count == rows, f"length of {name}", count, f"must equal the {rows} rows")
        require_range(self.lengths, "lengths", 1, tokens, "a row has at least one token")
        total = int(self.lengths.sum())
        require(total == tokens, "sum of lengths", total, f"must equal the {tokens} token_ids")
        require_range(self.token_ids, "token_ids", 0, grant.vocab_size - 1, f"must be in [0, {grant.vocab_size})")
        require_range(self.starts, "starts", 0, grant.max_len, f"must be in [0, {grant.max_len}]")
        require_range(self.page_counts, "page_counts", 0, grant.page_count, f"at most {grant.page_count} are granted")
        self._validate_pages(grant, reserved)
        if len(self.parents):
            self._validate_parents()

    def validate_counts(self, grant: Grant) -> None:
        """Checks how many rows, tokens and copies there are, before anything is done for each."""
        rows, tokens, copies = len(self.lengths), len(self.token_ids), len(self.slot_copies)
        most = grant.max_step_tokens
        require(rows > 0, "rows", rows, "a step has at least one row")
        require(tokens <= most, "tokens", tokens, f"at most {most} a step")
        require(rows <= tokens, "rows", rows, f"each has at least one of the {tokens} token_ids")
        require(copies <= most, "slot_copies", f"{copies} copies", f"at most {most} a step, as of tokens")

    def _validate_pages(self, grant: Grant, reserved: Ints | None) -> None:
        total = int(self.page_counts.sum())
        require(total == len(self.page_ids), "length of page_ids", len(self.page_ids), f"page_counts sum to {total}")
        ends = self.starts.astype(np.int64) + self.lengths + (0 if reserved is None else reserved)
        require_range(ends, "start + length", 1, grant.max_len, f"a row holds at most {grant.max_len} tokens")
        slots = self.page_counts.astype(np.int64) * grant.page_size
        if (ends > slots).any():
            row = int((ends > slots).argmax())
            require(False, f"page_counts[{row}]", self.page_counts[row], f"row {row} needs {ends[row]} slots")
        low, high = grant.first_page, grant.first_page + grant.page_count - 1
        require_range(self.page_ids, "page_ids", low, high, f"this stream was granted [{low}, {high}]")
        slot_limit = f"this stream was granted slots of pages [{low}, {high}]"
        low_slot, high_slot = low * grant.page_size, (high + 1) * grant.page_size - 1
        require_range(self.slot_copies, "slot_copies", low_slot, high_slot, slot_limit)

    def _validate_parents(self) -> None:
        require(
            len(self.parents) == len(self.token_ids),
            "length of parents",
            len(self.parents),
            f"must be 0 or equal the {len(self.token_ids)} token_ids",
        )
        within = np.arange(len(self.token_ids)) - np.repeat(self.row_offsets[:-1], self.lengths)
        bad = (self.parents < -1) | (self.parents >= within)
        if bad.any():
            index = int(bad.argmax())
            require(False, f"parents[{index}]", self.parents[index], f"must be in [-1, {within[index]})")

    @property
    def row_offsets(self) -> npt.NDArray[np.int64]:
        """Index of each row's first token, and the total. i64[rows + 1]."""
        return np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64)))


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each row samples; see ``SamplingRows`` in types.proto."""

    temperatures: Floats  # [rows], 0 is greedy
    top_ks: Ints  # [rows], 0 keeps all
    top_ps: Floats  # [rows], 1 keeps all
    min_ps: Floats  # [rows], 0 keeps all
    seeds: npt.NDArray[np.uint64]  # [rows]
    rounds: npt.NDArray[np.int64]  # [rows]
    shaping: ShapingRows | None = None  # None: no row asks

    def validate(self, rows: int) -> None:
        """Raises ``InvalidArgumentError`` naming the first field at fault."""
        for name in ("temperatures", "top_ks", "top_ps", "min_ps", "seeds", "rounds"):
            count = len(getattr(self, name))
            require(count == rows, f"length of {name}", count, f"must equal the {rows} rows")
        finite = float(np.finfo(np.float32).max)
        require_range(self.temperatures, "temperatures", 0, finite, "must be finite and >= 0")
        require_range(self.top_ks, "top_ks", 0, 2**31 - 1, "must be >= 0")
        require_range(self.top_ps, "top_ps", float(np.finfo(np.float32).smallest_subnormal), 1, "must be in (0, 1]")
        require_range(self.min_ps, "min_ps", 0, 1, "must be in [0, 1]")
        require_range(self.rounds, "rounds", 0, 2**62, "must be >= 0")
        if self.shaping is not None:
            self.shaping.validate(rows)


@dataclass(frozen=True, slots=True)
class Supports:
    """Ragged token ids, one group per node."""

    counts: Ints = field(default_factory=empty_ints)  # [nodes]
    token_ids: Ints = field(default_factory=empty_ints)  # [sum of counts]

    def validate(self, nodes: int, vocab_size: int) -> None:
        """Raises ``InvalidArgumentError`` unless there is a count per node (or none at all)."""
        if not len(self.counts) and not len(self.token_ids):
            return
        require(len(self.counts) == nodes, "length of supports.counts", len(self.counts), f"must equal {nodes} nodes")
        most = min(MAX_SUPPORT, vocab_size)
        require_range(self.counts, "supports.counts", 0, most, f"must be in [0, {most}]")
        total, ids = int(self.counts.sum()), self.token_ids
        require(total == len(ids), "length of supports.token_ids", len(ids), f"supports.counts sum to {total}")
        require_range(ids, "supports.token_ids", 0, vocab_size - 1, f"must be in [0, {vocab_size})")
        groups = np.repeat(np.arange(nodes, dtype=np.int64), self.counts)
        distinct = len(np.unique(groups * vocab_size + ids)) == len(ids)
        require(distinct, "supports.token_ids", "repeated", "ids must be distinct within a node")
