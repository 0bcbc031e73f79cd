"""The steps of the contract as numpy arrays, without a trace of gRPC.

Engines take and return these, the orchestrator's core builds them, and ``pilotfish.rpc.codec``
turns them into messages and back. Shapes and meanings are those of ``protos/pilotfish/v1``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from pilotfish.errors import InvalidArgumentError

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


class DrawRule(IntEnum):
    """Which noise the target's draws of a row use (target.proto)."""

    MATCH = 1
    OUTSIDE = 2


class FeatureRule(IntEnum):
    """Which tokens of a row want their features (target.proto)."""

    NONE = 1
    ALL = 2
    MATCHED = 3


class ProposalKind(IntEnum):
    """How a drafter proposes (draft.proto)."""

    GREEDY = 1
    SAMPLED = 2
    MATCHED = 3


def empty_bytes() -> Bytes:
    return np.zeros(0, np.uint8)


def empty_ints() -> Ints:
    return np.zeros(0, np.int32)


def empty_floats() -> Floats:
    return np.zeros(0, np.float32)


def require(condition: bool | np.bool_, field_name: str, value: object, limit: str) -> None:
    """Raises ``InvalidArgumentError`` naming field, value and limit unless the condition holds."""
    if not condition:
        raise InvalidArgumentError(f"{field_name} is {value}; {limit}", field_name)


def require_range(values: npt.NDArray[Any], field_name: str, low: float, high: float, limit: str) -> None:
    """Requires ``low <= value <= high`` of every element; NaN fails."""
    if values.size and not (values.min() >= low and values.max() <= high):
        index = int((~((values >= low) & (values <= high))).argmax())
        require(False, f"{field_name}[{index}]", values.flat[index], limit)


@dataclass(frozen=True, slots=True)
class Grant:
    """What a worker granted one stream, and its limits; checked against every step.

    Fields as in ``StreamOpened``.
    """

    model_id: str
    weights_hash: str
    tokenizer_hash: str
    vocab_size: int
    page_size: int
    first_page: int
    page_count: int
    max_len: int
    max_step_tokens: int
    incarnation: int
    features: tuple[str, ...] = ()
    feature_width: int = 0
    shapes_logits: bool = False
    gives_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Capabilities:
    """How a drafter can propose; fields as in ``DraftOpened``."""

    kinds: tuple[ProposalKind, ...]
    tree_width: int = 0
    scheme: str = ""


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
        rows, tokens = len(self.lengths), len(self.token_ids)
        require(rows > 0, "rows", rows, "a step has at least one row")
        require(tokens <= grant.max_step_tokens, "tokens", tokens, f"at most {grant.max_step_tokens} a step")
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
        require_range(self.top_ps, "top_ps", float(np.finfo(np.float32).tiny), 1, "must be in (0, 1]")
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
        require_range(self.counts, "supports.counts", 0, vocab_size, f"must be in [0, {vocab_size}]")
        total, ids = int(self.counts.sum()), self.token_ids
        require(total == len(ids), "length of supports.token_ids", len(ids), f"supports.counts sum to {total}")
        require_range(ids, "supports.token_ids", 0, vocab_size - 1, f"must be in [0, {vocab_size})")
        groups = np.repeat(np.arange(nodes, dtype=np.int64), self.counts)
        distinct = len(np.unique(groups * vocab_size + ids)) == len(ids)
        require(distinct, "supports.token_ids", "repeated", "ids must be distinct within a node")


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
        require_range(self.counts, "logprobs.counts", -1, vocab_size, f"must be in [-1, {vocab_size}]")
        scored = len(self.scored_nodes)
        for name in ("scored_token_ids", "scored_counts"):
            count = len(getattr(self, name))
            require(count == scored, f"length of logprobs.{name}", count, f"must equal the {scored} scored_nodes")
        require_range(self.scored_nodes, "logprobs.scored_nodes", 0, tokens - 1, f"must be in [0, {tokens})")
        ascending = bool((np.diff(self.scored_nodes) > 0).all())
        require(ascending, "logprobs.scored_nodes", "not ascending", "must be strictly ascending")
        known = f"must be in [0, {vocab_size})"
        require_range(self.scored_token_ids, "logprobs.scored_token_ids", 0, vocab_size - 1, known)
        require_range(self.scored_counts, "logprobs.scored_counts", 0, vocab_size, f"must be in [0, {vocab_size}]")


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of a step's outputs, then of its scored nodes; see target.proto."""

    tokens: Floats  # [places]
    supports: Floats  # [support ids of the outputs that want any]
    top_token_ids: Ints  # [sum of counts]
    top: Floats  # [sum of counts]


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
