"""Drafts chains, token by token, with whatever gives logits.

Leviathan et al., arXiv 2211.17192, and Chen et al., arXiv 2302.01318, with q made sparse before
anything is drawn from it, so that the q on the wire is the very q of the draw.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from draft_svc.drafters.children import drawn_children
from draft_svc.drafters.trees import NO_SUPPORT, Nodes, Support
from pilotfish.noise import Purpose
from pilotfish.runtime import sampling
from pilotfish.runtime.shaping import Shaper
from pilotfish.runtime.slots import Longs
from pilotfish.steps import DraftStep, Ints, ProposalKind, SamplingRows, TokenRows, empty_ints

# Comparing arrays with members of an enum takes numpy longer than some passes.
_MATCHED, _SAMPLED = int(ProposalKind.MATCHED), int(ProposalKind.SAMPLED)


class Run(Protocol):
    """Tokens that a drafter has run, and how it goes on from there.

    Attributes:
        ahead: how far the token that a slot predicts lies behind the next slot: 0 where slot i holds t_i, 1 in a
            head, where it holds t_{i+1}.
        token_ids: token of every column of the logits, i64[columns]; None where column v is token v.
    """

    @property
    def ahead(self) -> int: ...

    @property
    def token_ids(self) -> Tensor | None: ...

    def logits(self, tokens: Longs) -> Tensor:
        """Logits f32[n, columns] of tokens of this run, i64[n]."""

    def advance(self, rows: TokenRows, parents: Longs) -> Run:
        """Runs one drafted token of each row behind tokens of this run, i64[rows]."""


def draft_chains(step: DraftStep, rows: Longs, run: Run, shaper: Shaper | None = None) -> dict[int, Nodes]:
    """Chains for those rows of a step, whose tokens are in ``run``; by row. ``shaper`` is that of the step."""
    chains: dict[int, list[int]] = {row: [] for row in rows.tolist()}
    supports: dict[int, list[Support]] = {row: [] for row in rows.tolist()}
    last_tokens = step.rows.row_offsets[1:][rows] - 1
    next_tokens = _first_tokens(step.rows, rows)
    depth = 0
    while len(rows):
        positions = next_tokens.starts.astype(np.int64) + run.ahead
        logits = run.logits(last_tokens)
        sampling.require_finite(logits, "the draft model")
        if shaper is not None:
            paths = [chains[row] for row in rows.tolist()]
            shaper(logits, rows, paths.__getitem__)
        tokens, drawn_from = draw(step, rows, logits, positions, run.token_ids)
        for row, token, support in zip(rows.tolist(), tokens.tolist(), drawn_from, strict=True):
            chains[row].append(token)
            supports[row].append(support)
        depth += 1
        going_on = step.draft_lengths[rows] > depth
        if not going_on.all():
            rows, tokens, last_tokens = rows[going_on], tokens[going_on], last_tokens[going_on]
            next_tokens = _first_tokens(step.rows, rows, depth - 1)
        if len(rows):
            run = run.advance(replace(next_tokens, token_ids=tokens), last_tokens)
            last_tokens = np.arange(len(rows), dtype=np.int64)
            next_tokens = replace(next_tokens, starts=next_tokens.starts + 1)
    return {row: _chain(chains[row], supports[row]) for row in chains}


def _chain(tokens: list[int], supports: list[Support]) -> Nodes:
    parents = np.arange(-1, len(tokens) - 1, dtype=np.int32)
    return Nodes(np.array(tokens, np.int32), parents, (*supports, NO_SUPPORT))


def draw(
    step: DraftStep, rows: Longs, logits: Tensor, positions: Longs, token_ids: Tensor | None
) -> tuple[Ints, list[Support]]:
    """Next token of each row, as its kind has it drawn, and the q that it was drawn from where that is to be told.

    Args:
        step: says how each row draws.
        rows: indices into it, i64[n].
        logits: f32[n, columns].
        positions: of the tokens drawn, i64[n].
        token_ids: as in ``Run``. Noise is keyed by these, so that it is the target's for the same token.
    """
    kinds, supports = step.proposal_kinds[rows], [NO_SUPPORT] * len(rows)
    columns = sampling.likeliest(logits).to(logits.device)
    matched, sampled = (kinds == _MATCHED).nonzero()[0], (kinds == _SAMPLED).nonzero()[0]
    if len(matched):
        of_rows = sampling.take_rows(step.sampling, rows[matched])
        keys = sampling.draw_keys(of_rows.seeds, Purpose.MATCH, np.zeros_like(of_rows.rounds), positions[matched])
        index = _index(matched, logits)
        columns = columns.index_copy(0, index, _match(logits.index_select(0, index), of_rows, keys, token_ids))
    tokens = sampling.to_ints(columns if token_ids is None else token_ids.index_select(0, columns))
    if len(sampled):
        of_rows = sampling.take_rows(step.sampling, rows[sampled])
        own = logits.index_select(0, _index(sampled, logits))
        children = drawn_children(own, of_rows, positions[sampled], 1, step.support_limit, token_ids)
        tokens[sampled] = children.token_ids[:, 0]
        for i, support in zip(sampled.tolist(), children.supports, strict=True):
            supports[i] = support
    return tokens, supports


def _match(logits: Tensor, rows: SamplingRows, keys: Longs, token_ids: Tensor | None) -> Tensor:
    """Columns that win with the noise of the target's own draws, i64[n]."""
    columns = sampling.likeliest(logits).to(logits.device)
    warm = np.flatnonzero(rows.temperatures > 0)
    if not len(warm):
        return columns
    index = _index(warm, logits)
    q = sampling.probabilities(logits.index_select(0, index), sampling.take_rows(rows, warm))
    return columns.index_copy(0, index, sampling.race(q, keys[warm], token_ids))


def _index(rows: Longs, like: Tensor) -> Tensor:
    return torch.from_numpy(rows).to(like.device)


def _first_tokens(rows: TokenRows, chosen: Longs, depth: int = 0) -> TokenRows:
    """Room for a token of each chosen row, ``depth`` slots behind its committed ones; which one is left open."""
    firsts = np.cumsum(rows.page_counts) - rows.page_counts
    tables = [rows.page_ids[firsts[row] : firsts[row] + rows.page_counts[row]] for row in chosen]
    return TokenRows(
        token_ids=np.zeros(len(chosen), np.int32),
        lengths=np.ones(len(chosen), np.int32),
        starts=((rows.starts + rows.lengths)[chosen] + depth).astype(np.int32),
        page_counts=rows.page_counts[chosen],
        page_ids=np.concatenate(tables) if tables else empty_ints(),
    )
