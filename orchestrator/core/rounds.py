"""What a round came to, and what the choice of draft lengths sees of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from orchestrator.core.acceptance import TokenKind
from orchestrator.core.draft_length import CHAINS, Round
from orchestrator.core.draft_steps import DraftPlan
from orchestrator.core.finish import FinishReason
from orchestrator.core.proposals import Proposal
from orchestrator.core.requests import Request, TokenLogprobs
from orchestrator.core.target_steps import TargetBatch


class Judged(NamedTuple):
    """A proposal, and which of its nodes were kept, from the root down."""

    proposal: Proposal
    path: tuple[int, ...]


class Run(NamedTuple):
    """What one answer of the target added to one request.

    Attributes:
        token_ids, kinds: the new tokens and how each came about, parallel; none of a request that wants none.
        drafted: longest path of the proposal that was judged.
        is_round: whether it was a round, rather than the token that a prefill ends with.
        reason: set if the request ended on a token.
        logprobs: of the new tokens, if they were asked for.
        judged: the proposal, if there was one and it was asked for.
        is_stuck: the request ended because nothing may follow: what it asks of its logits contradicts itself.
        drafter: name of the model that proposed.
    """

    request: Request
    token_ids: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    drafted: int
    is_round: bool
    reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    judged: Judged | None = None
    is_stuck: bool = False
    drafter: str = ""


@dataclass(frozen=True, slots=True)
class Timed:
    """A round that ended, and what it took.

    Attributes:
        batch, runs: of the round.
        drafts: all that proposed for it.
        caught_up, was_delayed: as in ``Round``.
        seconds: since the end of the round before.
        draft_seconds: of those, waited for proposals.
    """

    batch: TargetBatch
    drafts: Sequence[DraftPlan]
    caught_up: bool
    was_delayed: bool
    runs: Sequence[Run]
    seconds: float
    draft_seconds: float


def asked_for(drafts: Iterable[DraftPlan]) -> dict[str, tuple[int, int]]:
    """Longest path and most nodes that each row was asked for, by request id; as many of a chain."""
    asked: dict[str, tuple[int, int]] = {}
    for plan in drafts:
        lengths = plan.step.draft_lengths
        limits = plan.step.node_limits if len(plan.step.node_limits) else lengths
        rows = zip(plan.rows, lengths.tolist(), limits.tolist(), strict=True)
        asked |= {row.request.id: (length, limit) for row, length, limit in rows}
    return asked


def observed(timed: Timed) -> Round:
    """A round as the choice of draft lengths sees it."""
    asked = asked_for(timed.drafts)
    sizes = [nodes for length, nodes in asked.values() if nodes > length]
    runs = [run for run in timed.runs if run.is_round]
    judged = [run for run in runs if run.drafted and not run.is_stuck]
    kept = np.array([run.kinds.count(TokenKind.ACCEPTED) for run in judged], np.int64)
    return Round(
        seconds=timed.seconds,
        draft_seconds=timed.draft_seconds,
        rows=len(runs),
        tokens=len(timed.batch.step.rows.token_ids),
        committed=sum(len(run.token_ids) for run in runs),
        depth=max((length for length, _ in asked.values()), default=0),
        drafted=sum(nodes for _, nodes in asked.values()),
        nodes=max(sizes, default=CHAINS),
        replicas=len({plan.rows[0].place.replica for plan in timed.drafts}),
        has_prefill=not all(row.is_round for row in timed.batch.rows),
        caught_up=timed.caught_up,
        was_delayed=timed.was_delayed,
        judged=[run.request for run in judged],
        kept=kept,
        spoken_on=kept + np.array([_has_failed(run, *asked.get(run.request.id, (0, 0))) for run in judged], np.int64),
    )


def _has_failed(run: Run, length: int, nodes: int) -> bool:
    """Whether the target wrote on where the proposal did not: it took another token, or a tree had no further one."""
    if run.kinds[-1] is TokenKind.RECOVERED:
        return True
    is_leaf = run.kinds[-1] is TokenKind.BONUS and nodes > length
    return is_leaf and len(run.kinds) - 1 < length
