"""Short ways to write the rows of a step in a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pilotfish.steps import Ints, SamplingRows, ShapingRows, TokenRows


def ints(*values: int) -> Ints:
    return np.array(values, np.int32)


@dataclass(frozen=True)
class Row:
    """New tokens of one row, where they start, its page table, and its tree if it is one."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    parents: Sequence[int] = field(default_factory=tuple)


def token_rows(*rows: Row, copies: Sequence[tuple[int, int]] = ()) -> TokenRows:
    """The rows as one ragged batch; with a tree among them, chains are spelt out too."""
    chain = all(not row.parents for row in rows)
    parents = [p for row in rows for p in (row.parents or range(-1, len(row.tokens) - 1))]
    return TokenRows(
        token_ids=ints(*(t for row in rows for t in row.tokens)),
        lengths=ints(*(len(row.tokens) for row in rows)),
        starts=ints(*(row.start for row in rows)),
        page_counts=ints(*(len(row.pages) for row in rows)),
        page_ids=ints(*(p for row in rows for p in row.pages)),
        parents=ints() if chain else ints(*parents),
        slot_copies=np.array(copies, np.int32).reshape(-1, 2),
    )


def sampling_rows(
    rows: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    round_index: int = 0,
) -> SamplingRows:
    """The same sampling for so many rows; their seeds count up from ``seed``."""
    return SamplingRows(
        temperatures=np.full(rows, temperature, np.float32),
        top_ks=np.full(rows, top_k, np.int32),
        top_ps=np.full(rows, top_p, np.float32),
        min_ps=np.full(rows, min_p, np.float32),
        seeds=np.arange(seed, seed + rows, dtype=np.uint64),
        rounds=np.full(rows, round_index, np.int64),
    )


@dataclass(frozen=True)
class Shape:
    """What one row asks of its logits; names as in ``ShapingRows``."""

    row: int
    prompt_length: int = 1
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    biases: Mapping[int, float] = field(default_factory=dict)
    allowed: Sequence[int] = ()
    min_tokens: int = 0
    ends: Sequence[int] = ()


def shaping_rows(*rows: Shape) -> ShapingRows:
    """The rows that ask."""
    return ShapingRows(
        rows=ints(*(row.row for row in rows)),
        prompt_lengths=ints(*(row.prompt_length for row in rows)),
        repetition_penalties=np.array([row.repetition for row in rows], np.float32),
        presence_penalties=np.array([row.presence for row in rows], np.float32),
        frequency_penalties=np.array([row.frequency for row in rows], np.float32),
        bias_counts=ints(*(len(row.biases) for row in rows)),
        bias_token_ids=ints(*(token for row in rows for token in row.biases)),
        bias_values=np.array([bias for row in rows for bias in row.biases.values()], np.float32),
        allowed_counts=ints(*(len(row.allowed) for row in rows)),
        allowed_token_ids=ints(*(token for row in rows for token in row.allowed)),
        min_tokens=ints(*(row.min_tokens for row in rows)),
        end_counts=ints(*(len(row.ends) for row in rows)),
        end_token_ids=ints(*(token for row in rows for token in row.ends)),
    )


def greedy_rows(rows: int) -> SamplingRows:
    """Temperature 0 for so many rows."""
    return sampling_rows(rows, temperature=0.0)
