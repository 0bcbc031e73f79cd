"""Drafts chains, token by token, with whatever gives logits.

Leviathan et al., arXiv 2211.17192, and Chen et al., arXiv 2302.01318, with q made sparse before
anything is drawn from it, so that the q on the wire is the very q of the draw.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from draft_svc.drafters import Proposals
from pilotfish.noise import Purpose
from pilotfish.runtime import sampling
from pilotfish.runtime.slots import Longs
from pilotfish.steps import DraftStep, Floats, Ints, ProposalKind, SamplingRows, Supports, TokenRows


@dataclass(frozen=True, slots=True)
class Support:
    """q of one draw."""

    token_ids: Ints
    probs: Floats


NO_SUPPORT = Support(np.zeros(0, np.int32), np.zeros(0, np.float32))


class Runner(Protocol):
    """What drafts: it has run the committed tokens of a step, and runs drafted ones behind them.

    Attributes:
        ahead: how far the token that a slot predicts lies behind the next slot: 0 where slot i holds t_i, 1 in a
            head, where it holds t_{i+1}.
        token_ids: token of every column of the logits, i64[columns]; None where column v is token v.
    """

    ahead: int
    token_ids: Tensor | None

    def logits(self, tokens: Longs) -> Tensor:
        """Logits f32[n, columns] of tokens of the last run, i64[n]."""

    def advance(self, rows: TokenRows, parents: Longs) -> None:
        """Runs one drafted token of each row; ``parents`` i64[rows] are those before them, of the last run."""


def draft_chains(step: DraftStep, rows: Longs, runner: Runner) -> tuple[list[list[int]], list[list[Support]]]:
    """Chains for those ``rows`` of a step that ``runner`` has just run.

    Returns:
        Tokens of each row of the step, and the q that each was drawn from where that is to be told.
    """
    chains: list[list[int]] = [[] for _ in step.rows.lengths]
    supports: list[list[Support]] = [[] for _ in step.rows.lengths]
    last_tokens = step.rows.row_offsets[1:][rows] - 1
    depth = 0
    while len(rows):
        positions = (step.rows.starts + step.rows.lengths)[rows].astype(np.int64) + depth + runner.ahead
        tokens, drawn_from = draw(step, rows, runner.logits(last_tokens), positions, runner.token_ids)
        for row, token, support in zip(rows.tolist(), tokens.tolist(), drawn_from, strict=True):
            chains[row].append(token)
            supports[row].append(support)
        depth += 1
        going_on = step.draft_lengths[rows] > depth
        rows, tokens, last_tokens = rows[going_on], tokens[going_on], last_tokens[going_on]
        if len(rows):
            runner.advance(_next_tokens(step.rows, rows, tokens, depth), last_tokens)
            last_tokens = np.arange(len(rows), dtype=np.int64)
    return chains, supports


def draw(
    step: DraftStep, rows: Longs, logits: Tensor, positions: Longs, token_ids: Tensor | None
) -> tuple[Ints, list[Support]]:
    """Next token of each row, as its kind has it drawn, and the q that it was drawn from where that is to be told.

    Args:
        step: says how each row draws.
        rows: indices into it, i64[n].
        logits: f32[n, columns].
        positions: of the tokens drawn, i64[n].
        token_ids: as in ``Runner``. Noise is keyed by these, so that it is the target's for the same token.
    """
    sampling.require_finite(logits, "the draft model")
    kinds = step.proposal_kinds[rows]
    columns = sampling.likeliest(logits).to(logits.device)
    supports = [NO_SUPPORT] * len(rows)
    matched, sampled = np.flatnonzero(kinds == ProposalKind.MATCHED), np.flatnonzero(kinds == ProposalKind.SAMPLED)
    if len(matched):
        of_rows = sampling.take_rows(step.sampling, rows[matched])
        keys = sampling.draw_keys(of_rows.seeds, Purpose.MATCH, np.zeros_like(of_rows.rounds), positions[matched])
        index = _index(matched, logits)
        columns = columns.index_copy(0, index, _match(logits.index_select(0, index), of_rows, keys, token_ids))
    if len(sampled):
        of_rows = sampling.take_rows(step.sampling, rows[sampled])
        index = _index(sampled, logits)
        drawn, laws = _draw_sparse(
            logits.index_select(0, index), of_rows, positions[sampled], step.support_limit, token_ids
        )
        columns = columns.index_copy(0, index, drawn)
        for i, support in zip(sampled.tolist(), laws, strict=True):
            supports[i] = support
    tokens = columns if token_ids is None else token_ids.index_select(0, columns)
    return sampling.to_ints(tokens), supports


def collect(chains: list[list[int]], supports: list[list[Support]], *, sampled: bool) -> Proposals:
    """Rows concatenated; a row's supports are those of its last token and its nodes, the leaf's empty."""
    flat = [token for chain in chains for token in chain]
    proposals = Proposals(
        node_counts=np.array([len(chain) for chain in chains], np.int32), token_ids=np.array(flat, np.int32)
    )
    if not sampled:
        return proposals
    groups = [support for row in supports for support in (*row, NO_SUPPORT)]
    return replace(
        proposals,
        supports=Supports(
            counts=np.array([len(support.token_ids) for support in groups], np.int32),
            token_ids=np.concatenate([support.token_ids for support in groups]),
        ),
        support_probs=np.concatenate([support.probs for support in groups]),
    )


def proposes(step: DraftStep, kind: ProposalKind) -> bool:
    """Whether any row of the step proposes in that way."""
    return bool(((step.proposal_kinds == kind) & (step.draft_lengths > 0)).any())


def _match(logits: Tensor, rows: SamplingRows, keys: Longs, token_ids: Tensor | None) -> Tensor:
    """Columns that win with the noise of the target's own draws, i64[n]."""
    columns = sampling.likeliest(logits).to(logits.device)
    warm = np.flatnonzero(rows.temperatures > 0)
    if not len(warm):
        return columns
    index = _index(warm, logits)
    q = sampling.probabilities(logits.index_select(0, index), sampling.take_rows(rows, warm))
    return columns.index_copy(0, index, sampling.race(q, keys[warm], token_ids))


def _draw_sparse(
    logits: Tensor, rows: SamplingRows, positions: Longs, limit: int, token_ids: Tensor | None
) -> tuple[Tensor, list[Support]]:
    """One column per row from the truncated q, i64[n], and that q."""
    columns, q = sampling.truncate(sampling.probabilities(logits, rows), limit)
    ids = columns if token_ids is None else token_ids[columns]
    keys = sampling.draw_keys(rows.seeds, Purpose.DRAFT, rows.rounds, positions)
    winners = sampling.race(q, keys, ids)
    host_ids, host_q = sampling.to_ints(ids), sampling.to_floats(q)
    supports = [Support(i[w > 0], w[w > 0]) for i, w in zip(host_ids, host_q, strict=True)]
    return columns.gather(-1, winners.unsqueeze(-1)).squeeze(-1), supports


def _index(rows: Longs, like: Tensor) -> Tensor:
    return torch.from_numpy(rows).to(like.device)


def _next_tokens(rows: TokenRows, chosen: Longs, tokens: Ints, depth: int) -> TokenRows:
    """One more token for each chosen row, ``depth`` slots after its committed ones."""
    firsts = np.cumsum(rows.page_counts) - rows.page_counts
    tables = [rows.page_ids[firsts[row] : firsts[row] + rows.page_counts[row]] for row in chosen]
    return TokenRows(
        token_ids=tokens,
        lengths=np.ones(len(chosen), np.int32),
        starts=((rows.starts + rows.lengths)[chosen] + (depth - 1)).astype(np.int32),
        page_counts=rows.page_counts[chosen],
        page_ids=np.concatenate(tables),
    )
