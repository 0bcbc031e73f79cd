"""Log probabilities of tokens: which ones a step asks the target for, and which token of an answer has which.

They are of the model's own law, before temperature, truncation and whatever shapes the logits, so they say the same of
a token whether it was drafted or not. What the target answers of an output covers every token that can come of it: its
draw, and the support that a draft token or what a rejection leaves is taken from.

Those of a proposal are another matter: of the law that the drafter drew from, as it drew (``draft_logprobs``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from orchestrator.core.requests import TokenLogprobs, Tops
from pilotfish.errors import refusal
from pilotfish.steps import Floats, Ints, Logprobs, WantedLogprobs, empty_ints, require, require_range

if TYPE_CHECKING:
    from orchestrator.core.acceptance import Verdict
    from orchestrator.core.proposals import Proposal
    from orchestrator.core.target_steps import RowPlan

ROUNDING = 1e-3
"""Most by which a log probability may come out above 0."""


def wanted_logprobs(rows: Sequence[RowPlan], lengths: Ints) -> WantedLogprobs:
    """What to ask for beside a step.

    Args:
        rows: of the step.
        lengths: tokens of each, with its proposal, i32[rows].
    """
    counts: list[int] = []
    nodes: list[int] = []
    token_ids: list[int] = []
    scored_counts: list[int] = []
    first = 0
    for row, length in zip(rows, lengths.tolist(), strict=True):
        params = row.request.params
        if row.wants_output:
            counts += [-1 if params.logprobs is None else params.logprobs] * (1 + len(row.proposal.token_ids))
        begin, end = scored_tokens(row)
        nodes += range(first + begin - row.start, first + end - row.start)
        token_ids += row.request.prompt[begin + 1 : end + 1].tolist()
        scored_counts += [params.prompt_logprobs or 0] * (end - begin)
        first += length
    return WantedLogprobs(*(np.array(values, np.int32) for values in (counts, nodes, token_ids, scored_counts)))


class RowLogprobs(NamedTuple):
    """What the target says of the outputs of one row, its root first, and of its prompt tokens that were scored.

    Attributes:
        draws: log probability of each output's y, f32[outputs]; nothing if only the prompt was asked for.
        supports: ids of each output's support, and theirs.
        tops: the likeliest tokens of each output.
        scored: of the tokens that follow the scored ones, in order.
    """

    draws: Floats
    supports: Sequence[tuple[Ints, Floats]]
    tops: Sequence[Tops]
    scored: Sequence[TokenLogprobs]

    def of(self, verdict: Verdict, tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        """Of the tokens that a verdict emits, in order; ``tokens`` may have been cut short."""
        if not len(self.draws):
            return ()
        outputs = [0, *(node + 1 for node in verdict.path)]
        return tuple(self._of(output, token) for output, token in zip(outputs, tokens, strict=False))

    def _of(self, output: int, token: int) -> TokenLogprobs:
        """A token of an output is in its support, or the target's draw."""
        ids, values = self.supports[output]
        found = values[ids == token]
        return TokenLogprobs(float(found[0] if len(found) else self.draws[output]), self.tops[output])


NOTHING = RowLogprobs(np.zeros(0, np.float32), (), (), ())


def split_logprobs(
    rows: Sequence[RowPlan], wanted: WantedLogprobs | None, found: Logprobs | None, vocab_size: int
) -> list[RowLogprobs]:
    """The answer split by row, checked; ``NOTHING`` for a row that asks for none.

    Args:
        rows: of the step.
        wanted: of the step.
        found: what was answered; nothing in it is trusted.
        vocab_size: token ids are below it.

    Raises:
        InvalidArgumentError: naming the first field at fault, its value and its limit.
    """
    if wanted is None:
        require(found is None, "logprobs", "given", "none were asked for")
        return [NOTHING] * len(rows)
    outputs = [row for row in rows if _wants_outputs(row)]
    counts = np.concatenate((wanted.counts[wanted.counts >= 0], wanted.scored_counts))
    supports = np.concatenate([row.proposal.supports.counts for row in outputs] or [empty_ints()])
    found = _checked(found, len(counts), int(supports.sum()), int(counts.sum()), vocab_size)
    tops = _groups(counts, list(zip(found.top_token_ids.tolist(), np.minimum(found.top, 0).tolist(), strict=True)))
    tokens = np.minimum(found.tokens, 0)
    of_supports = np.split(np.minimum(found.supports, 0), np.cumsum(supports))
    place, scored = 0, len(wanted.counts[wanted.counts >= 0])
    split = []
    for row in rows:
        begin, end = scored_tokens(row)
        own = slice(scored, scored + end - begin)
        prompt = [TokenLogprobs(*each) for each in zip(tokens[own].tolist(), tops[own], strict=True)]
        scored += end - begin
        count = 1 + len(row.proposal.token_ids) if _wants_outputs(row) else 0
        at = slice(place, place + count)
        place += count
        groups = np.split(row.proposal.supports.token_ids, np.cumsum(row.proposal.supports.counts))
        split.append(RowLogprobs(tokens[at], list(zip(groups, of_supports[at], strict=False)), tops[at], prompt))
    return split


def draft_logprobs(proposal: Proposal, likeliest: int) -> tuple[TokenLogprobs, ...]:
    """Of each node by the q that it and its siblings were drawn from; nothing of a deterministic proposal.

    Args:
        proposal: of one row.
        likeliest: most tokens of each q to tell, likeliest first.
    """
    if not proposal.is_sampled:
        return ()
    bounds = np.concatenate(([0], np.cumsum(proposal.supports.counts)))
    found = []
    for token_id, parent in zip(proposal.token_ids.tolist(), proposal.parents.tolist(), strict=True):
        support = slice(bounds[parent + 1], bounds[parent + 2])
        ids, logs = proposal.supports.token_ids[support], np.log(proposal.support_probs[support])
        order = np.argsort(-logs, kind="stable")[:likeliest]
        top = tuple(zip(ids[order].tolist(), logs[order].tolist(), strict=True))
        found.append(TokenLogprobs(float(logs[ids == token_id][0]), top))
    return tuple(found)


def _wants_outputs(row: RowPlan) -> bool:
    return row.wants_output and row.request.params.logprobs is not None


def scored_tokens(row: RowPlan) -> tuple[int, int]:
    """Tokens of a row, from and to, after which the prompt's next token is to be scored in this step."""
    request = row.request
    if request.params.prompt_logprobs is None or row.is_round:
        return 0, 0
    begin, end = max(row.start, len(request.prompt_logprobs)), min(row.end, len(request.prompt) - 1)
    return (begin, end) if begin < end else (0, 0)


def _checked(found: Logprobs | None, places: int, ids: int, tops: int, vocab_size: int) -> Logprobs:
    if found is None:
        raise refusal("logprobs", "absent", "they were asked for")
    for name, count in (("tokens", places), ("supports", ids), ("top_token_ids", tops), ("top", tops)):
        length = len(getattr(found, name))
        require(length == count, f"length of logprobs.{name}", length, f"must be {count}")
    for name in ("tokens", "supports", "top"):
        require_range(getattr(found, name), f"logprobs.{name}", -np.inf, ROUNDING, "must be at most 0")
    known = f"must be in [0, {vocab_size})"
    require_range(found.top_token_ids, "logprobs.top_token_ids", 0, vocab_size - 1, known)
    return found


def _groups(counts: Ints, pairs: Sequence[tuple[int, float]]) -> list[Tops]:
    ends = np.cumsum(counts).tolist()
    return [tuple(pairs[end - count : end]) for end, count in zip(ends, counts.tolist(), strict=True)]
