"""From logits to the children of tree nodes, one function for each way of proposing.

Every row of logits is one node, or several that share them; its children are ranked by chance, or in the order
drawn. With a reduced vocabulary the columns are tokens of other ids: noise is keyed by the target's ids, so ``ids``
names them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draft_svc.drafters.trees import Doubles, Longs, Support
from pilotfish.noise import Purpose
from pilotfish.runtime import sampling
from pilotfish.steps import SamplingRows


class Children(NamedTuple):
    """Of n nodes, as ``Tree.grow`` takes them: i64[n, m], f64[n, m], and n supports or none."""

    token_ids: Longs
    scores: Doubles
    supports: tuple[Support, ...] = ()


def likeliest_children(logits: Tensor, count: int, ids: Tensor | None = None) -> Children:
    """The likeliest tokens, of equals any; scored by log q at temperature 1, whatever the request's.

    Args:
        logits: f32[n, columns].
        count: most children of a node.
        ids: token of each column, i64[columns]; None where column v is token v.
    """
    top = logits.topk(min(count, logits.shape[-1]), dim=-1)
    totals = logits.logsumexp(-1, keepdim=True)
    return Children(_named(top.indices, ids), _doubles(top.values.double() - totals.double()))


def matched_children(
    logits: Tensor, rows: SamplingRows, positions: Longs, count: int, ids: Tensor | None = None
) -> Children:
    """The tokens that come first in the target's own race, if its p were q.

    The target's draw is the v with the smallest r_v = -log(u_v) / p_v; here q stands for p. A child's chance is
    taken to be its share of the 1 / r_v: what it would be if log p missed log q by Gumbel noise of its own.

    Args:
        logits: f32[n, columns].
        rows: how each node's row samples.
        positions: of the tokens to be drawn, i64[n].
        count, ids: as above.
    """
    p = sampling.probabilities(logits, rows)
    keys = sampling.draw_keys(rows.seeds, Purpose.MATCH, np.zeros_like(rows.rounds), positions)
    speeds = 1 / sampling.race_times(p, keys, ids)
    top = speeds.topk(min(count, p.shape[-1]), dim=-1)
    return Children(_named(top.indices, ids), _doubles((top.values / speeds.sum(-1, keepdim=True)).log()))


def drawn_children(
    logits: Tensor,
    rows: SamplingRows,
    positions: Longs,
    count: int,
    support_limit: int,
    ids: Tensor | None = None,
    shared: Longs | None = None,
) -> Children:
    """Tokens drawn from the truncated q without replacement, and that q: the first ones home in one race.

    (Gumbel-top-k: Kool et al., "Stochastic Beams and Where to Find Them", arXiv 1903.06059, section 2.)

    Args:
        logits: f32[m, columns].
        rows: how the row of each of them samples.
        positions: that key each node's noise, i64[n]; of a row's nodes no two may be equal, or their subtrees
            would not be independent.
        count, ids: as above.
        support_limit: most tokens of q that are kept.
        shared: which of the logits each node has, i64[n]; None: node i has the i-th.
    """
    columns, q = sampling.truncate(sampling.probabilities(logits, rows), support_limit)
    if shared is not None:
        of_nodes = torch.from_numpy(shared).to(logits.device)
        columns, q, rows = columns[of_nodes], q[of_nodes], sampling.take_rows(rows, shared)
    tokens = columns if ids is None else ids[columns]
    keys = sampling.draw_keys(rows.seeds, Purpose.DRAFT, rows.rounds, positions)
    drawn = sampling.race_times(q, keys, tokens).topk(min(count, q.shape[-1]), largest=False)
    scores = np.where(np.isfinite(drawn.values.cpu().numpy()), 0.0, -np.inf)
    host_ids, host_q = sampling.to_ints(tokens), sampling.to_floats(q)
    supports = tuple(Support(i[w > 0], w[w > 0]) for i, w in zip(host_ids, host_q, strict=True))
    return Children(tokens.gather(-1, drawn.indices).cpu().numpy(), scores, supports)


def _named(columns: Tensor, ids: Tensor | None) -> Longs:
    named: Longs = (columns if ids is None else ids[columns]).cpu().numpy()
    return named


def _doubles(values: Tensor) -> Doubles:
    doubles: Doubles = values.double().cpu().numpy()
    return doubles
