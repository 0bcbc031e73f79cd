"""The target's steps: what a step asks of the target for each of its rows, and what the answer says of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.core.acceptance import NoiseChance, Rule, Verdict, accept
from orchestrator.core.batches import RowPart, params_of, sampling_rows, token_rows
from orchestrator.core.chains import match_chains, ratio_chains
from orchestrator.core.features import Features, count_of, split
from orchestrator.core.logprobs import wanted_logprobs
from orchestrator.core.pages import RowCache
from orchestrator.core.proposals import EMPTY, NOTHING_FOLLOWS, Proposal, outputs_from, plain_draws
from orchestrator.core.requests import PROPOSE_BEHIND, Request
from pilotfish.steps import (
    Bytes,
    DrawRule,
    FeatureRule,
    Ints,
    Supports,
    TargetResult,
    TargetStep,
    empty_bytes,
    require,
)


@dataclass(slots=True)
class RowPlan:
    """One row of a target step: tokens ``[start, end)`` of the request, then its proposal."""

    request: Request
    cache: RowCache
    start: int
    end: int
    is_round: bool
    """It verifies, rather than prefills."""
    wants_output: bool
    """It reaches the request's last token."""
    room: int = 0
    """Nodes that its pages have room for."""
    proposal: Proposal = EMPTY
    drafter: str = ""
    """Name of the model that proposed."""


@dataclass(frozen=True, slots=True)
class TargetPlan:
    """Rows of the next target step, pages allocated, proposals to be filled in."""

    rows: tuple[RowPlan, ...]


@dataclass(frozen=True, slots=True)
class TargetBatch:
    """A target step that is complete, and its rows in order."""

    step: TargetStep
    rows: tuple[RowPlan, ...]

    @property
    def prompt_tokens(self) -> int:
        """Tokens that it prefills."""
        return sum(row.end - row.start for row in self.rows if not row.is_round)


def target_step(
    step_id: int,
    rows: Sequence[RowPlan],
    copies: Sequence[tuple[int, int]],
    wants_features: Callable[[Request], bool] | None,
) -> TargetStep:
    """The step of rows whose proposals are known.

    Args:
        step_id: of the step.
        rows: in order.
        copies: slot copies that come before it.
        wants_features: whether a row's features are of use; None if nobody's are.
    """
    requests, tokens = [row.request for row in rows], token_rows([_part(row) for row in rows], copies)
    params = params_of(requests)
    return TargetStep(
        step_id=step_id,
        rows=tokens,
        sampling=sampling_rows(requests, params),
        output_nodes=_output_nodes(rows, tokens.lengths),
        draw_rules=params["draw_rule"],
        supports=_supports(rows),
        feature_rules=empty_bytes() if wants_features is None else _feature_rules(rows, wants_features),
        logprobs=wanted_logprobs(rows, tokens.lengths) if params["wants_logprobs"].any() else None,
    )


def judge(rows: Sequence[RowPlan], result: TargetResult, vocab_size: int, *, shaped: bool) -> list[Verdict]:
    """What stays of each row's proposal.

    Args:
        rows: that want outputs.
        result: the answer to them; not trusted.
        vocab_size: of the target.
        shaped: a row of the step has something done to its logits.

    Raises:
        InvalidArgumentError: if the answer breaks the contract.
    """
    verdicts = _judge(rows, result, vocab_size, shaped)
    if shaped:
        for row, verdict in zip(rows, verdicts, strict=True):
            is_answer = verdict.token != NOTHING_FOLLOWS or row.request.params.is_shaped
            require(is_answer, "token_ids", NOTHING_FOLLOWS, f"row of {row.request.id} asks nothing of its logits")
    return verdicts


def _judge(rows: Sequence[RowPlan], result: TargetResult, vocab_size: int, shaped: bool) -> list[Verdict]:
    proposals, requests = [row.proposal for row in rows], [row.request for row in rows]
    if all(map(_is_plain, rows)):
        return match_chains(proposals, plain_draws(result, proposals, vocab_size, shaped=shaped))
    outputs = outputs_from(result, proposals, vocab_size, shaped=shaped)
    if all(row.proposal.is_chain and row.request.params.rule is Rule.RATIO for row in rows):
        seeds, rounds = [request.params.seed for request in requests], [request.round_index for request in requests]
        return ratio_chains(proposals, outputs, seeds, rounds)
    return [
        accept(request.params.rule, proposal, output, NoiseChance(request.params.seed, request.round_index))
        for request, proposal, output in zip(requests, proposals, outputs, strict=True)
    ]


def split_features(
    batch: TargetBatch, verdicts: Sequence[Verdict], result: TargetResult, width: int
) -> list[tuple[RowPlan, Features]]:
    """The features of the slots that each row has computed and keeps.

    Args:
        batch: under way.
        verdicts: of the rows that want outputs.
        result: its answer; not trusted.
        width: of the target's features.

    Raises:
        InvalidArgumentError: if they are not those that were asked for.
    """
    step, paths = batch.step, iter([verdict.path for verdict in verdicts])
    if not len(step.feature_rules):
        require(result.features is None, "features", "given", "none were asked for")
        return []
    kept = [next(paths) if row.wants_output else () for row in batch.rows]
    rows = list(zip(step.feature_rules.tolist(), step.rows.lengths.tolist(), kept, strict=True))
    counts = [count_of(rule, tokens, len(path)) for rule, tokens, path in rows]
    found = []
    for row, values, (rule, _, path) in zip(batch.rows, split(result.features, counts, width), rows, strict=True):
        if values is None:
            continue
        if row.is_round and rule == FeatureRule.ALL:
            values = values[[0, *(node + 1 for node in path)]]
        found.append((row, Features(row.end - 1 if row.is_round else row.start, values)))
    return found


def _is_plain(row: RowPlan) -> bool:
    """Whether the target's draws alone decide, along a chain."""
    proposal = row.proposal
    is_matched = proposal.is_chain and not proposal.is_sampled and row.request.params.rule is Rule.MATCH
    return is_matched or not len(proposal.token_ids)


def _part(row: RowPlan) -> RowPart:
    tokens, proposal = row.request.tokens[row.start : row.end], row.proposal
    parents = None if proposal.is_chain else proposal.parents
    return RowPart(tokens, row.start, row.cache.table, proposal.token_ids, parents)


def _output_nodes(rows: Sequence[RowPlan], lengths: Ints) -> Ints:
    """The root and every node of a verification row; the last token of a prefill that ends here."""
    wanted, ends = np.ones(lengths.sum(), np.bool_), np.cumsum(lengths)
    for row, length, end in zip(rows, lengths.tolist(), ends.tolist(), strict=True):
        if not row.is_round:
            wanted[end - length : end] = False
            wanted[end - 1] = row.wants_output
    return wanted.nonzero()[0].astype(np.int32)


def _supports(rows: Sequence[RowPlan]) -> Supports:
    """The supports of the rows that want outputs, one group per output; none if nothing was sampled."""
    supports = [row.proposal.supports for row in rows if row.wants_output]
    if not any(len(support.token_ids) for support in supports):
        return Supports()
    return Supports(
        np.concatenate([support.counts for support in supports]),
        np.concatenate([support.token_ids for support in supports]),
    )


def _feature_rules(rows: Sequence[RowPlan], wants_features: Callable[[Request], bool]) -> Bytes:
    """The features of what a round may commit, and those of a short prompt; longer ones are read."""
    rules = []
    for row in rows:
        wanted = wants_features(row.request) and row.end - row.start <= PROPOSE_BEHIND
        # Of a single node the features are sent unseen, so that a step can be laid out for them; see ``early``.
        by_draws = row.is_round and row.request.params.draw_rule is DrawRule.MATCH and len(row.proposal.token_ids) > 1
        rule = FeatureRule.MATCHED if by_draws else FeatureRule.ALL
        rules.append(rule if wanted else FeatureRule.NONE)
    return np.array(rules, np.uint8)
