"""A drafter without weights: agrees with the simulated target as often as its profile says."""

from __future__ import annotations

import time

import numpy as np

from draft_svc.drafters import Drafter, Proposals
from pilotfish.noise import Purpose, keys
from pilotfish.runtime.grants import ModelInfo
from pilotfish.runtime.slots import Longs, slots_at
from pilotfish.simulate.law import WIDTH, Doubles, Law, draw, shares, truncate
from pilotfish.simulate.model import SimulatedModel
from pilotfish.simulate.pages import HashedPages, marks_of
from pilotfish.simulate.profile import Profile, sleep_until
from pilotfish.steps import DraftStep, Ints, ProposalKind, Supports


class SimulatedDrafter(Drafter):
    """See the module.

    Args:
        profile: how long forwards take, and how often the draft agrees.
        model: what the folder says.
        pages: pages of the cache.
        page_size: slots per page.
    """

    kinds = (ProposalKind.GREEDY, ProposalKind.SAMPLED, ProposalKind.MATCHED)
    scheme = "simulated"

    def __init__(self, profile: Profile, model: SimulatedModel, *, pages: int, page_size: int = 16) -> None:
        self._cost, self._agreement = profile.draft, profile.agreement
        self._law, self._pages = Law(model.token_limit), HashedPages(pages, page_size)
        self._info = model.info

    @property
    def info(self) -> ModelInfo:
        return self._info

    def propose(self, step: DraftStep) -> Proposals:
        started, rows = time.perf_counter(), step.rows
        prefixes = self._pages.extend(rows)[rows.row_offsets[1:] - 1]
        duration_us = self._cost.forward_us(len(rows.token_ids), int(rows.starts.sum()))
        lengths, ends = step.draft_lengths, rows.starts.astype(np.int64) + rows.lengths
        tokens = np.zeros((len(lengths), int(lengths.max())), np.int32)
        firsts, q = np.zeros(tokens.shape, np.int64), _laws(step)
        for depth in range(tokens.shape[1]):
            firsts[:, depth] = self._law.draft(prefixes, self._agreement)
            tokens[:, depth] = self._draw(step, firsts[:, depth], q, ends + depth)
            at = np.flatnonzero(lengths > depth + 1)
            if len(at):
                duration_us += self._cost.forward_us(len(at), int((ends[at] + depth).sum()))
                marks = marks_of(tokens[at, depth], ends[at] + depth)
                prefixes[at] += marks
                self._pages.write(slots_at(rows, at, ends[at] + depth, self._pages.page_size), marks, prefixes[at])
        proposals = self._proposals(step, tokens, firsts, q)
        sleep_until(started, duration_us)
        return proposals

    def _draw(self, step: DraftStep, firsts: Longs, q: Doubles, positions: Longs) -> Ints:
        """The next token of every row."""
        if (step.proposal_kinds == ProposalKind.GREEDY).all():
            return firsts.astype(np.int32)
        seeds, rounds = step.sampling.seeds, step.sampling.rounds
        shared = keys(seeds, Purpose.MATCH, np.zeros_like(rounds), positions)
        fresh = keys(seeds, Purpose.DRAFT, rounds, positions)
        noise = np.where(step.proposal_kinds == ProposalKind.MATCHED, shared, fresh)
        return draw(self._law, firsts, q, noise)

    def _proposals(self, step: DraftStep, tokens: Ints, firsts: Longs, q: Doubles) -> Proposals:
        """Rows concatenated; a row's supports are those of its last token and its nodes, the leaf's empty."""
        lengths = step.draft_lengths
        is_node = np.arange(tokens.shape[1]) < lengths[:, None]
        sampled = step.proposal_kinds == ProposalKind.SAMPLED
        if not (sampled & (lengths > 0)).any():
            return Proposals(lengths, tokens[is_node])
        sizes = np.where(sampled, (q > 0).sum(axis=1), 0)
        counts = np.where(np.arange(tokens.shape[1] + 1) < lengths[:, None], sizes[:, None], 0)
        given = (np.arange(WIDTH) < sizes[:, None])[:, None] & is_node[:, :, None]
        ids = self._law.token(firsts[:, :, None], np.arange(WIDTH))
        return Proposals(
            node_counts=lengths,
            token_ids=tokens[is_node],
            supports=Supports(
                counts=counts[np.arange(tokens.shape[1] + 1) <= lengths[:, None]].astype(np.int32),
                token_ids=ids[given].astype(np.int32),
            ),
            support_probs=np.broadcast_to(q[:, None], ids.shape)[given].astype(np.float32),
        )


def _laws(step: DraftStep) -> Doubles:
    """q by rank for every row: all of p where noise is shared, else its support. f64[rows, WIDTH]."""
    p = shares(step.sampling)
    sampled = step.proposal_kinds == ProposalKind.SAMPLED
    return np.where(sampled[:, None], truncate(p, step.support_limit), p)
