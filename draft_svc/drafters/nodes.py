"""Puts the nodes of a step's rows together into one proposal."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from draft_svc.drafters import Proposals
from draft_svc.drafters.trees import NO_SUPPORT, ROOT, Nodes
from pilotfish.steps import DraftStep, Ints, ProposalKind, Supports, empty_ints

_NOTHING = Nodes(np.zeros(0, np.int32), np.zeros(0, np.int32), (NO_SUPPORT,))


def collect(step: DraftStep, nodes: Mapping[int, Nodes]) -> Proposals:
    """Rows concatenated; supports only if a row was sampled.

    Args:
        step: what was asked for.
        nodes: of the rows that propose.
    """
    rows = [nodes.get(row, _NOTHING) for row in range(len(step.rows.lengths))]
    token_ids = np.concatenate([row.token_ids for row in rows])
    parents = np.concatenate([row.parents for row in rows])
    counts = np.array([len(row.token_ids) for row in rows], np.int32)
    if not ((step.proposal_kinds == ProposalKind.SAMPLED) & (step.draft_lengths > 0)).any():
        return Proposals(counts, token_ids, _unless_chains(parents, rows))
    supports = [support for row in rows for support in row.supports]
    return Proposals(
        node_counts=counts,
        token_ids=token_ids,
        parents=_unless_chains(parents, rows),
        supports=Supports(
            counts=np.array([len(support.token_ids) for support in supports], np.int32),
            token_ids=np.concatenate([support.token_ids for support in supports]),
        ),
        support_probs=np.concatenate([support.probs for support in supports]),
    )


def _unless_chains(parents: Ints, rows: list[Nodes]) -> Ints:
    """The parents, if one row is no chain."""
    are_chains = all(np.array_equal(row.parents, np.arange(ROOT, len(row.parents) + ROOT)) for row in rows)
    return empty_ints() if are_chains else parents
