"""Faults to plant in real services, each as a slip of the hand would make it, and the check that must find it.

docs/check.md has them as a table; ``e2e/test_check_faults.py`` plants them one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from drafts import Wrapped

from draft_svc.drafters import Proposals
from orchestrator import admission
from orchestrator.core import acceptance, chains, scheduler, target_steps
from orchestrator.core.acceptance import TokenKind
from orchestrator.core.finish import StopScanner
from orchestrator.core.logprobs import RowLogprobs
from orchestrator.core.proposals import Proposal
from pilotfish import noise
from pilotfish.check import fields, law
from pilotfish.check.laboratory import PLENTY
from pilotfish.noise import Purpose
from pilotfish.runtime import sampling, shaping
from pilotfish.steps import DraftStep
from target_svc import engine

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: what is wrong.
        plant: puts it in.
        check: that must find it.
        result: part of the name of a result of that check that fails.
        drafter: takes the drafter's place, where the fault is its.
        has_trees: proposals must be trees for it to show.
        only: cases of ``law`` or ``fields`` that are asked, by a part of their names; all by default.
        plenty: how many draws the check takes; see ``Asker``.
        scale: how much else it asks; a draft that is late leaves a round without one, and greedy text few are kept in.
    """

    name: str
    plant: Plant
    check: str
    result: str
    drafter: type[Wrapped] | None = None
    has_trees: bool = False
    only: str = ""
    plenty: float = PLENTY
    scale: float = 0.0

    def __str__(self) -> str:
        return self.name


def only(fault: Fault, patch: pytest.MonkeyPatch) -> None:
    """Lets the checks ask no more than shows the fault."""
    laws, settings = law.cases(), fields.cases
    patch.setattr(law, "cases", lambda: {name: case for name, case in laws.items() if fault.only in name})
    patch.setattr(fields, "cases", lambda seen: [case for case in settings(seen) if fault.only in case.name])


def nothing(patch: pytest.MonkeyPatch) -> None:
    """The fault is the drafter's."""


# Verdicts


def match_bonus_row(patch: pytest.MonkeyPatch) -> None:
    judge = target_steps.match_chains

    def wrong(proposals: Sequence[Proposal], draws: Any) -> list[Any]:
        verdicts, begin = [], 0
        for proposal, verdict in zip(proposals, judge(proposals, draws), strict=True):
            if verdict.kind is TokenKind.BONUS and verdict.path:
                verdict = verdict._replace(token=int(draws[begin + len(verdict.path) - 1]))
            verdicts.append(verdict)
            begin += len(proposal.token_ids) + 1
        return verdicts

    patch.setattr(target_steps, "match_chains", wrong)


def match_near_misses(patch: pytest.MonkeyPatch) -> None:
    judge = target_steps.match_chains

    def wrong(proposals: Sequence[Proposal], draws: Any) -> list[Any]:
        lax, begin = draws.copy(), 0
        for proposal in proposals:
            at = slice(begin, begin + len(proposal.token_ids))
            near = np.abs(lax[at] - proposal.token_ids) <= 32
            lax[at][near] = proposal.token_ids[near]
            begin += len(proposal.token_ids) + 1
        return judge(proposals, lax)

    patch.setattr(target_steps, "match_chains", wrong)


def _residuals(patch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    """``change(batch, whole, at, rejected)`` gives what is left instead; ``whole(at, rejected)`` is right."""
    right = chains._Batch._residuals
    patch.setattr(
        chains._Batch, "_residuals", lambda batch, at, rejected: change(batch, partial_of(right, batch), at, rejected)
    )


def partial_of(method: Callable[..., Any], batch: Any) -> Callable[..., Any]:
    return lambda at, rejected: method(batch, at, rejected)


def ratio_bonus_row(patch: pytest.MonkeyPatch) -> None:
    def change(batch: Any, whole: Any, at: Any, rejected: Any) -> Any:
        return whole(np.where(~rejected & (at > batch._roots), at - 1, at), rejected)

    _residuals(patch, change)


def residual_of_q(patch: pytest.MonkeyPatch) -> None:
    def change(batch: Any, whole: Any, at: Any, rejected: Any) -> Any:
        weights, ids = whole(at, rejected)
        batch._p, batch._q = batch._q, batch._p
        of_q, _ = whole(at, rejected)
        batch._p, batch._q = batch._q, batch._p
        return np.where(rejected[:, None], of_q, weights), ids

    _residuals(patch, change)


def residual_is_p(patch: pytest.MonkeyPatch) -> None:
    _residuals(patch, lambda batch, whole, at, rejected: whole(at, np.zeros_like(rejected)))


def residual_unclamped(patch: pytest.MonkeyPatch) -> None:
    def change(batch: Any, whole: Any, at: Any, rejected: Any) -> Any:
        weights, ids = whole(at, rejected)
        p, _ = whole(at, np.zeros_like(rejected))
        batch._p, batch._q = batch._q, batch._p
        q, _ = whole(at, np.zeros_like(rejected))
        batch._p, batch._q = batch._q, batch._p
        return np.where(rejected[:, None], np.column_stack(((np.abs(p - q))[:, :-1], p[:, -1])), weights), ids

    _residuals(patch, change)


def no_tail(patch: pytest.MonkeyPatch) -> None:
    def change(batch: Any, whole: Any, at: Any, rejected: Any) -> Any:
        weights, ids = whole(at, rejected)
        inside = weights[:, :-1].sum(1) > 0
        weights[inside, -1] = 0.0
        return weights, ids

    _residuals(patch, change)


def _scaled_rates(patch: pytest.MonkeyPatch, factor: float) -> None:
    right = chains._Batch.kept

    def kept(batch: Any) -> Any:
        q = batch._q
        batch._q = q / factor
        found = right(batch)
        batch._q = q
        return found

    patch.setattr(chains._Batch, "kept", kept)


def too_often(patch: pytest.MonkeyPatch) -> None:
    _scaled_rates(patch, 1.1)


def too_rarely(patch: pytest.MonkeyPatch) -> None:
    _scaled_rates(patch, 0.9)


def coins_of_drafter(patch: pytest.MonkeyPatch) -> None:
    """The coin of a token is the very number by which the drafter drew it."""
    drawn: dict[tuple[int, int], dict[int, int]] = {}
    draw_keys = sampling.draw_keys

    def noted(seeds: Any, purpose: Purpose, rounds: Any, positions: Any) -> Any:
        keys = draw_keys(seeds, purpose, rounds, positions)
        if purpose is Purpose.DRAFT:
            for seed, round_index, position, key in zip(seeds, rounds, positions, keys, strict=True):
                drawn.setdefault((int(seed), int(round_index)), {})[int(position)] = int(key)
        return keys

    def coins(seeds: Any, purpose: Purpose, rounds: Any, positions: Any) -> Any:
        if purpose is not Purpose.COIN:
            return noise.keys(seeds, purpose, rounds, positions)
        found = []
        for seed, round_index, depth in zip(seeds.tolist(), rounds.tolist(), positions.tolist(), strict=True):
            found.append([key for _, key in sorted(drawn[seed, round_index].items())][depth])
        return np.array(found, np.int64)

    right = chains._Batch.kept

    def kept(batch: Any) -> Any:
        # The race of the drafter is over token ids, so that the number is that of the token.
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(chains, "uniform", lambda keys, zero: noise.uniform(keys, batch._nodes.astype(np.int64)))
            return right(batch)

    patch.setattr(sampling, "draw_keys", noted)
    patch.setattr(chains, "keys", coins)
    patch.setattr(chains._Batch, "kept", kept)


def coins_of_rounds(patch: pytest.MonkeyPatch) -> None:
    def shared(seeds: Any, purpose: Purpose, rounds: Any, positions: Any) -> Any:
        return noise.keys(seeds, purpose, np.zeros_like(rounds) if purpose is Purpose.COIN else rounds, positions)

    patch.setattr(chains, "keys", shared)


def one_number(patch: pytest.MonkeyPatch) -> None:
    """The number that rejected a token picks the one after it, too."""

    def tokens_after(batch: Any, kept: Any) -> Any:
        weights, ids = batch._residuals(batch._roots + kept, rejected=kept < batch.lengths)
        coins = noise.uniform(noise.keys(batch._seeds, Purpose.COIN, batch._rounds, kept), np.int64(0))
        totals = weights.cumsum(1)
        places = (totals < (coins * totals[:, -1])[:, None]).sum(1).clip(max=weights.shape[1] - 1)
        return np.take_along_axis(ids, places[:, None], axis=1)[:, 0]

    patch.setattr(chains._Batch, "tokens_after", tokens_after)


def block_weight(patch: pytest.MonkeyPatch) -> None:
    def rate(node: Any, child: int) -> float:
        at = node._place(child)
        return min(1.0, float(node.p[at]) / float(node.q[at]))

    patch.setattr(acceptance._Node, "rate", rate)


def siblings_reversed(patch: pytest.MonkeyPatch) -> None:
    right = Proposal.children
    patch.setattr(Proposal, "children", lambda proposal: [group[::-1] for group in right(proposal)])


# What the workers answer


class QBeforeTemperature(Wrapped):
    """Reports q as it is at temperature 1."""

    def propose(self, step: DraftStep) -> Proposals:
        proposals = super().propose(step)
        if not len(proposals.support_probs):
            return proposals
        counts = proposals.supports.counts
        rows = np.repeat(np.arange(len(proposals.node_counts)), proposals.node_counts + 1)
        temperatures = np.repeat(step.sampling.temperatures[rows], counts)
        warm = proposals.support_probs.astype(np.float64) ** temperatures
        owners = np.repeat(np.arange(len(counts)), counts)
        totals = np.bincount(owners, warm, minlength=len(counts))
        return replace(proposals, support_probs=(warm / totals[owners]).astype(np.float32))


def outside_likeliest(patch: pytest.MonkeyPatch) -> None:
    right = sampling.draw_outside

    def draw(p: Any, keys: Any, supports: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(sampling, "race", lambda weights, keys: weights.argmax(-1))
            return right(p, keys, supports)

    patch.setattr(sampling, "draw_outside", draw)


def ties(patch: pytest.MonkeyPatch) -> None:
    right = sampling.likeliest
    patch.setattr(sampling, "likeliest", lambda scores: right((scores * 2).round()))


def bonus_without_seed(patch: pytest.MonkeyPatch) -> None:
    right = engine._keys

    def keys(rows: Any, rules: Any, positions: Any) -> Any:
        is_last = np.append(positions[1:] != positions[:-1] + 1, True)
        return right(replace(rows, seeds=np.where(is_last, np.uint64(0), rows.seeds)), rules, positions)

    patch.setattr(engine, "_keys", keys)


def noise_without_position(patch: pytest.MonkeyPatch) -> None:
    def shared(seeds: Any, purpose: Purpose, rounds: Any, positions: Any) -> Any:
        is_targets = purpose in (Purpose.OUTSIDE, Purpose.MATCH)
        return noise.keys(seeds, purpose, rounds, np.zeros_like(positions) if is_targets else positions)

    patch.setattr(sampling, "draw_keys", shared)


def temperature_of_root(patch: pytest.MonkeyPatch) -> None:
    right = engine._keys

    def keys(rows: Any, rules: Any, positions: Any) -> Any:
        is_node = np.append(False, (positions[1:] == positions[:-1] + 1) & (rows.seeds[1:] == rows.seeds[:-1]))
        rows.temperatures[is_node] = 1.0  # the law is made of these rows, too
        return right(rows, rules, positions)

    patch.setattr(engine, "_keys", keys)


def penalties_lag(patch: pytest.MonkeyPatch) -> None:
    right = shaping._Row._penalise
    patch.setattr(
        shaping._Row, "_penalise", lambda row, logits, paths: right(row, logits, [path[:2] for path in paths])
    )


def bonus_without_grammar(patch: pytest.MonkeyPatch) -> None:
    right = shaping._Row._keep_to_grammar

    def keep(row: Any, grammar: Any, logits: Any, paths: Any) -> None:
        free = logits[-1].clone()
        right(row, grammar, logits, paths)
        if len(paths) > 1:
            logits[-1] = free

    patch.setattr(shaping._Row, "_keep_to_grammar", keep)


def min_tokens_less_one(patch: pytest.MonkeyPatch) -> None:
    right = shaping._Row._ban_early_ends

    def ban(row: Any, logits: Any, paths: Any) -> None:
        row._min_tokens -= 1
        right(row, logits, paths)
        row._min_tokens += 1

    patch.setattr(shaping._Row, "_ban_early_ends", ban)


# Around them


def logprobs_of_parent(patch: pytest.MonkeyPatch) -> None:
    def of(row: RowLogprobs, verdict: Any, tokens: Sequence[int]) -> Any:
        outputs = [0, 0, *(node + 1 for node in verdict.path)]
        pairs = zip(outputs, tokens, strict=False)
        return tuple(row._of(output, token) for output, token in pairs) if len(row.draws) else ()

    patch.setattr(RowLogprobs, "of", of)


def tree_not_copied(patch: pytest.MonkeyPatch) -> None:
    right = scheduler.target_step
    patch.setattr(
        scheduler, "target_step", lambda step_id, rows, copies, wants_features: right(step_id, rows, (), wants_features)
    )


def end_inside_a_run(patch: pytest.MonkeyPatch) -> None:
    right = scheduler.cut_run

    def cut(tokens: Sequence[int], generated: int, max_tokens: int, end_token_ids: Any) -> Any:
        return right(tokens, generated, max_tokens, set(end_token_ids) & set(tokens[-1:]))

    patch.setattr(scheduler, "cut_run", cut)


def one_token_less(patch: pytest.MonkeyPatch) -> None:
    right = scheduler.cut_run

    def cut(tokens: Sequence[int], generated: int, max_tokens: int, end_token_ids: Any) -> Any:
        return right(tokens, generated, max_tokens - (len(tokens) > 1), end_token_ids)

    patch.setattr(scheduler, "cut_run", cut)


def stop_text_leaks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StopScanner, "_open_length", lambda scanner, text: 0)


def samples_alike(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admission, "sample_seed", lambda seed, index: seed)


FAULTS = (
    Fault(
        "the bonus token under match is drawn one row too early", match_bonus_row, "greedy", "draft_length", scale=1.0
    ),
    Fault(
        "match keeps a draft token whose id is near that of the target's draw",
        match_near_misses,
        "greedy",
        "draft_length",
        scale=1.0,
    ),
    Fault(
        "the bonus token under ratio is drawn one row too early", ratio_bonus_row, "law", "× ratio", only="1 × ratio"
    ),
    Fault("the residual is (q - p)+", residual_of_q, "acceptance", "ratio, what cannot be"),
    Fault("the residual is p", residual_is_p, "acceptance", "ratio, what cannot be"),
    Fault("the residual is not clamped at 0", residual_unclamped, "acceptance", "ratio, what cannot be"),
    Fault("the residual has no mass outside the support", no_tail, "law", "by rank", only="1 × ratio"),
    Fault("draft tokens are kept 10 % too often", too_often, "acceptance", "ratio, kept"),
    Fault("draft tokens are kept 10 % too rarely", too_rarely, "acceptance", "ratio, what cannot be"),
    Fault("the coin is the number that drew the draft token", coins_of_drafter, "acceptance", "ratio, kept"),
    Fault("the rounds of a request share their coins", coins_of_rounds, "acceptance", "ratio, luck carried on"),
    Fault("the number that rejected a token picks the next one, too", one_number, "acceptance", "ratio, after"),
    Fault("block forgets the weight of the path", block_weight, "law", "× block", only="× block"),
    Fault(
        "siblings of a tree are judged in the opposite order",
        siblings_reversed,
        "law",
        "by rank",
        None,
        True,
        "1 × block",
    ),
    Fault("kept nodes of a tree stay in their old slots", tree_not_copied, "greedy", "draft_length", has_trees=True),
    Fault("q is told as it was before temperature", nothing, "acceptance", "drafted by rank", QBeforeTemperature),
    Fault(
        "the token outside the support is the likeliest, not drawn",
        outside_likeliest,
        "law",
        "by rank",
        only="1 × ratio",
    ),
    Fault("the likeliest token is looked for among rounded logits", ties, "fields", "is heeded", only="logit_bias"),
    Fault("the bonus token ignores the seed", bonus_without_seed, "seeded", "draft_length 4"),
    Fault("the target's noise ignores the position", noise_without_position, "law", "repetitions", only="1 × match"),
    Fault("the samples of a request share their noise", samples_alike, "unseeded", "samples of one request"),
    Fault(
        "temperature counts at the root of a proposal only",
        temperature_of_root,
        "fields",
        "× match",
        only="temperature 0.6",
    ),
    Fault(
        "penalties do not count from the second draft token on",
        penalties_lag,
        "fields",
        "× ratio, greedy",
        only="penalty",
    ),
    Fault("the grammar does not bind the bonus token", bonus_without_grammar, "grammars", "answers"),
    Fault(
        "min_tokens ends one token too early", min_tokens_less_one, "fields", "min_tokens is heeded", only="min_tokens"
    ),
    Fault("an end token inside a run of kept tokens ends nothing", end_inside_a_run, "ends", "stop tokens"),
    Fault("max_tokens cuts a long round one token too early", one_token_less, "ends", "max_tokens"),
    Fault("the beginning of a stop text gets out", stop_text_leaks, "ends", "stop texts"),
    Fault("log probabilities are those of the parent node", logprobs_of_parent, "logprobs", "draft_length 4"),
)
