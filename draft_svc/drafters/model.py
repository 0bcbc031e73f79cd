"""A small language model of the target's tokenizer drafts a chain, token by token.

Leviathan et al., arXiv 2211.17192, and Chen et al., arXiv 2302.01318, with q made sparse before
anything is drawn from it, so that the q on the wire is the very q of the draw.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from draft_svc.drafters import Drafter, Proposals
from pilotfish.noise import Purpose
from pilotfish.runtime import cores, sampling
from pilotfish.runtime.grants import ModelInfo
from pilotfish.runtime.loading import LoadedModel
from pilotfish.runtime.paged_model import PagedModel
from pilotfish.runtime.slots import Longs
from pilotfish.steps import DraftStep, Floats, Ints, ProposalKind, SamplingRows, Supports, TokenRows


@dataclass(frozen=True, slots=True)
class _Support:
    """q of one draw."""

    token_ids: Ints
    probs: Floats


_NO_SUPPORT = _Support(np.zeros(0, np.int32), np.zeros(0, np.float32))


class ModelDrafter(Drafter):
    """See the module.

    Args:
        model: loaded.
        pages: pages of the cache.
        page_size: slots per page.
        max_len: longest row, in tokens; None for what the model was made for.
    """

    kinds = (ProposalKind.GREEDY, ProposalKind.SAMPLED, ProposalKind.MATCHED)

    def __init__(self, model: LoadedModel, *, pages: int, page_size: int = 16, max_len: int | None = None) -> None:
        self._model = PagedModel(model, pages=pages, page_size=page_size)
        # Padded ids of the output layer mean nothing to a target that pads otherwise.
        self._vocab_limit = min(model.config.vocab_size, model.tokenizer_vocab_size)
        self._info = model.info(max_len)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @torch.inference_mode()
    def propose(self, step: DraftStep) -> Proposals:
        with cores.working():
            return self._propose(step)

    def _propose(self, step: DraftStep) -> Proposals:
        hidden = self._model.extend(step.rows)
        chains: list[list[int]] = [[] for _ in step.rows.lengths]
        supports: list[list[_Support]] = [[] for _ in step.rows.lengths]
        rows = np.flatnonzero(step.draft_lengths > 0)
        last_tokens = step.rows.row_offsets[1:][rows] - 1
        depth = 0
        while len(rows):
            logits = self._model.logits(hidden, torch.from_numpy(last_tokens).to(self._model.device))
            tokens, drawn_from = self._draw(step, rows, logits, depth)
            for row, token, support in zip(rows.tolist(), tokens.tolist(), drawn_from, strict=True):
                chains[row].append(token)
                supports[row].append(support)
            depth += 1
            going_on = step.draft_lengths[rows] > depth
            rows, tokens = rows[going_on], tokens[going_on]
            if len(rows):
                hidden = self._model.extend(_next_tokens(step.rows, rows, tokens, depth))
                last_tokens = np.arange(len(rows), dtype=np.int64)
        return _collect(chains, supports, sampled=_proposes(step, ProposalKind.SAMPLED))

    def _draw(self, step: DraftStep, rows: Longs, logits: Tensor, depth: int) -> tuple[Ints, list[_Support]]:
        """Next token of each row, and the q that it was drawn from where that is to be told."""
        sampling.require_finite(logits, "the draft model")
        logits = logits[:, : self._vocab_limit]
        positions = (step.rows.starts + step.rows.lengths)[rows].astype(np.int64) + depth
        kinds = step.proposal_kinds[rows]
        tokens = sampling.to_ints(sampling.likeliest(logits)).copy()
        supports = [_NO_SUPPORT] * len(rows)
        matched, sampled = np.flatnonzero(kinds == ProposalKind.MATCHED), np.flatnonzero(kinds == ProposalKind.SAMPLED)
        if len(matched):
            of_rows = sampling.take_rows(step.sampling, rows[matched])
            keys = sampling.draw_keys(of_rows.seeds, Purpose.MATCH, np.zeros_like(of_rows.rounds), positions[matched])
            tokens[matched] = sampling.draw_plain(self._take(logits, matched), of_rows, keys).token_ids
        if len(sampled):
            of_rows = sampling.take_rows(step.sampling, rows[sampled])
            drawn = _draw_sparse(self._take(logits, sampled), of_rows, positions[sampled], step.support_limit)
            for i, (token, support) in zip(sampled.tolist(), drawn, strict=True):
                tokens[i], supports[i] = token, support
        return tokens, supports

    def _take(self, logits: Tensor, rows: Longs) -> Tensor:
        return logits.index_select(0, torch.from_numpy(rows).to(logits.device))


def _draw_sparse(logits: Tensor, rows: SamplingRows, positions: Longs, limit: int) -> list[tuple[int, _Support]]:
    """One token per row from the truncated q, and that q."""
    ids, q = sampling.truncate(sampling.probabilities(logits, rows), limit)
    keys = sampling.draw_keys(rows.seeds, Purpose.DRAFT, rows.rounds, positions)
    winners = sampling.race(q, keys, ids)
    tokens = ids.gather(-1, winners.unsqueeze(-1)).squeeze(-1)
    host_ids, host_q = sampling.to_ints(ids), sampling.to_floats(q)
    supports = [_Support(i[w > 0], w[w > 0]) for i, w in zip(host_ids, host_q, strict=True)]
    return list(zip(tokens.tolist(), supports, strict=True))


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


def _proposes(step: DraftStep, kind: ProposalKind) -> bool:
    return bool(((step.proposal_kinds == kind) & (step.draft_lengths > 0)).any())


def _collect(chains: list[list[int]], supports: list[list[_Support]], *, sampled: bool) -> Proposals:
    """Rows concatenated; a row's supports are those of its last token and its nodes, the leaf's empty."""
    flat = [token for chain in chains for token in chain]
    proposals = Proposals(
        node_counts=np.array([len(chain) for chain in chains], np.int32), token_ids=np.array(flat, np.int32)
    )
    if not sampled:
        return proposals
    groups = [support for row in supports for support in (*row, _NO_SUPPORT)]
    return replace(
        proposals,
        supports=Supports(
            counts=np.array([len(support.token_ids) for support in groups], np.int32),
            token_ids=np.concatenate([support.token_ids for support in groups]),
        ),
        support_probs=np.concatenate([support.probs for support in groups]),
    )
