"""Single draft tokens: the step after next is laid out for both outcomes, before it is known which came.

Of a row that verifies one draft token d, two things can come: d stays and the target's draw behind it follows, or the
target's draw in the place of d follows. A head on features needs the pair of the row's last slot either way, and in the
first case the pair one slot on. So its next step can be laid out while the target verifies, with both slots of every
row, as the target's own batch is: tokens and features are filled in when the target answers, and the step is on its way
before anything is judged, committed or planned. Half of what is drafted for a row that loses d is wasted on purpose.

This is the schedule of Perplexity's single-token MTP. It hides what the orchestrator does between two steps; with
longer drafts the paths to prepare for would multiply, and the ordinary schedule drafts only where the row has gone on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orchestrator.core.batches import RowPart, params_of, sampling_rows, token_rows
from orchestrator.core.draft_steps import DraftPlan, DraftRow
from orchestrator.core.drafting import Drafting
from orchestrator.core.replicas import Replica
from orchestrator.core.requests import DraftPlace, Request
from orchestrator.core.target_steps import RowPlan, TargetBatch
from pilotfish.steps import DraftStep, DrawRule, FeatureRule, Ints, TargetResult, empty_ints

Longs = npt.NDArray[np.int64]

_TO_COME = np.zeros(1, np.int32)  # in the place of a token that the target has yet to draw


class _Outcome(NamedTuple):
    """One of the two lengths that a row may come to.

    Attributes:
        length: tokens of the row if it comes.
        draw: index among the target's outputs of the token that the row then ends with.
        feature: index among the target's features of the state that this token stands beside.
    """

    request: Request
    place: DraftPlace
    length: int
    draw: int
    feature: int


@dataclass(frozen=True, slots=True, eq=False)
class EarlyPlan:
    """A step for one replica that lacks the target's answer.

    Attributes:
        step: two rows for each row with a draft token, one for each without.
        draws: output of the target that is each row's token, i64[rows].
        features: feature of the target that is each row's, i64[rows].
    """

    replica: Replica
    step: DraftStep
    rows: tuple[DraftRow, ...]
    draws: Longs
    features: Longs


def plan_early(drafting: Drafting, batch: TargetBatch, node_budget: int, support_limit: int) -> list[EarlyPlan]:
    """What each replica can draft as soon as the target has answered ``batch``.

    Of rows that draft one token at a time by the match rule and are caught up. Nothing is planned where the target
    sends the features of accepted nodes only: which they are is not known yet.

    Args:
        drafting: the replicas.
        batch: under way.
        node_budget: most draft tokens that the target's next step has room for.
        support_limit: most ids in a support.
    """
    rules = batch.step.feature_rules
    if (rules == FeatureRule.MATCHED).any():
        return []
    ready: dict[str, list[_Outcome]] = {}
    budgets = {name: replica.grant.max_step_tokens for name, replica in drafting.replicas.items()}
    draw = feature = 0
    for row, rule, tokens in zip(batch.rows, rules.tolist(), batch.step.rows.lengths.tolist(), strict=False):
        place = _place(drafting, row) if rule == FeatureRule.ALL and node_budget > 0 else None
        if place is not None and tokens <= budgets[place.replica]:
            outcomes = (_Outcome(row.request, place, row.end + 1 + i, draw + i, feature + i) for i in range(tokens))
            ready.setdefault(place.replica, []).extend(outcomes)
            budgets[place.replica] -= tokens
            node_budget -= 1
        draw += tokens if row.is_round else row.wants_output
        feature += tokens if rule == FeatureRule.ALL else 0
    return [_plan(drafting.replicas[name], outcomes, support_limit) for name, outcomes in ready.items()]


def fill(drafting: Drafting, plan: EarlyPlan, result: TargetResult) -> DraftPlan | None:
    """The step to send, now that the target has answered; None if the answer does not suit the replica.

    Only what the replica must not see is checked here; the answer is judged by ``Scheduler.accept``, which follows.
    """
    found = drafting.replicas.get(plan.replica.name)
    features = result.features
    if found is not plan.replica or found.is_late or features is None:
        return None
    if plan.draws.max() >= len(result.token_ids) or plan.features.max() >= len(features):
        return None
    token_ids: Ints = result.token_ids[plan.draws]
    if token_ids.min() < 0 or token_ids.max() >= found.grant.vocab_size:
        return None
    beside = features[plan.features]
    step = replace(
        plan.step,
        step_id=found.next_step_id(row.request for row in plan.rows),
        rows=replace(plan.step.rows, token_ids=token_ids),
        features=beside if found.columns is None else beside[:, found.columns],
    )
    return DraftPlan(step, plan.rows)


def settle(plan: DraftPlan) -> set[Request]:
    """The rows that have come to an outcome of the plan; what they cached for it counts from now on."""
    settled = set()
    for row in plan.rows:
        if row.is_current:
            row.place.cache.commit(row.request.tokens, row.length - row.place.lookahead)
            settled.add(row.request)
    return settled


def _place(drafting: Drafting, row: RowPlan) -> DraftPlace | None:
    """Where the row can draft from both outcomes; None if it cannot."""
    request, place, nodes = row.request, row.request.draft, len(row.proposal.token_ids)
    if not row.is_round or nodes > 1 or place is None or place.cache.length != row.end - 1:
        return None
    if (
        request.draft_length != 1
        or request.tree_nodes > 1
        or request.draft_room <= 1 + nodes
        or request.params.draw_rule is not DrawRule.MATCH
    ):
        return None
    replica, slots = drafting.replicas[place.replica], row.end + nodes
    if not replica.wants_features or replica.is_late or slots > replica.grant.max_len:
        return None
    return place if place.cache.try_reserve(slots) else None


def _plan(replica: Replica, outcomes: list[_Outcome], support_limit: int) -> EarlyPlan:
    requests = [outcome.request for outcome in outcomes]
    params = params_of(requests)
    parts = [RowPart(_TO_COME, outcome.length - 2, outcome.place.cache.table) for outcome in outcomes]
    step = DraftStep(
        step_id=0,
        rows=token_rows(parts, ()),
        sampling=sampling_rows(requests, params),
        draft_lengths=np.ones(len(outcomes), np.int32),
        node_limits=empty_ints(),
        proposal_kinds=params["proposal_kind"],
        support_limit=support_limit,
    )
    return EarlyPlan(
        replica=replica,
        step=step,
        rows=tuple(DraftRow(outcome.request, outcome.place, outcome.length) for outcome in outcomes),
        draws=np.array([outcome.draw for outcome in outcomes], np.int64),
        features=np.array([outcome.feature for outcome in outcomes], np.int64),
    )
