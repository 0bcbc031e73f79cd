"""Each verdict on a draft token: was it kept as often as both laws say, and what came in the place of one that was not.

The rule ratio keeps a token x, drawn from q, with probability min(1, p(x) / q(x)), and else draws from the normalised
(p - q)+. A wrong rule can leave the law of the text nearly as it is, where q is near p; what becomes of each x then
still tells. Both laws must be known as a whole for that: top_k leaves so few tokens that they can all be told. Where
some are tied with the last of them, which are kept, too, nothing is judged.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pilotfish.check.asking import Asker, Question
from pilotfish.check.chi_square import NO_COUNTS, Doubles, Test, of_laws
from pilotfish.check.own_law import KEPT, TOP, is_plain, sampled_from
from pilotfish.check.prompts import QUESTION, STORY
from pilotfish.check.results import Result, from_faults, skipped
from pilotfish.check.speculation import Way, without_draft
from pilotfish.client.params import SamplingParams

if TYPE_CHECKING:
    from pilotfish.client.results import Completion, Piece

_LENGTH = 40
_TEMPERATURE = 0.8  # not 1, at which one that is forgotten does not show
_BANDS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Of the probability of being kept."""
_ROUNDING = 1e-3

Law = dict[int, float]
"""Probabilities of all tokens that can come."""


def cases() -> dict[str, Way]:
    """What is asked, by name. Block does as ratio on one token, and on more judges what is not told."""
    return {"ratio": {"acceptance": "ratio"}, "block, one token": {"acceptance": "block", "draft_length": 1}}


async def acceptance(asker: Asker) -> AsyncIterator[Result]:
    """Chi-square of drafted tokens against q, of verdicts on them against min(1, p / q), and of what follows one that
    was rejected against (p - q)+."""
    if (reason := without_draft(asker)) is not None:
        yield reason
        return
    if (missing := asker.lacks("logprobs", "show_proposals")) is not None:
        yield skipped("all", missing)
        return
    params = SamplingParams(
        max_tokens=_LENGTH, temperature=_TEMPERATURE, top_k=KEPT, logprobs=TOP, ignore_eos=True, show_proposals=True
    )
    for name, way in cases().items():
        answers = await asker.ask(name, list(_questions(asker, name, replace(params, **way))))
        of_answers = [list(verdicts_of(answer, params)) for answer in answers]
        verdicts = [verdict for each in of_answers for verdict in each]
        if not verdicts:
            yield skipped(name, "no draft token of a chain was judged by this rule")
            continue
        faults = [fault for verdict in verdicts if (fault := verdict.fault)]
        yield from_faults(f"{name}, what cannot be", faults, verdicts=len(verdicts))
        for what, test in tests(of_answers).items():
            yield test.result(f"{name}, {what}", len(answers))


def _questions(asker: Asker, name: str, params: SamplingParams) -> Iterator[Question]:
    for index in range(asker.samples(960, 12)):
        length = (1, 2, 4)[index // 2 % 3] if params.draft_length is None else params.draft_length
        seed = asker.seed("acceptance", name, index)
        yield (STORY, QUESTION)[index % 2], replace(params, seed=seed, draft_length=length)


@dataclass(frozen=True)
class Verdict:
    """A draft token that was judged, and what came in its place.

    Attributes:
        drafted: token id.
        came: token id; the drafted one, if it was kept.
        is_kept: whether the server calls it accepted.
        p: law of the target in this place.
        q: law that the token was drawn from.
    """

    drafted: int
    came: int
    is_kept: bool
    p: Law
    q: Law

    @property
    def chance(self) -> float:
        """Probability that the token is kept."""
        return min(1.0, self.p.get(self.drafted, 0.0) / self.q[self.drafted])

    @property
    def residual(self) -> Law:
        """Law of what comes instead; nothing if p is q."""
        rest = {token_id: p - self.q.get(token_id, 0.0) for token_id, p in self.p.items()}
        rest = {token_id: more for token_id, more in rest.items() if more > 0}
        total = sum(rest.values())
        return {token_id: more / total for token_id, more in rest.items()}

    @property
    def fault(self) -> str:
        """What can never be, not even by chance; empty if nothing."""
        if self.is_kept and self.came != self.drafted:
            return f"token {self.drafted} was kept, and {self.came} came"
        if self.is_kept and self.chance == 0:
            return f"token {self.drafted} was kept, which the target never writes there"
        if not self.is_kept and self.p.get(self.drafted, 0.0) > self.q[self.drafted] * (1 + _ROUNDING):
            return f"token {self.drafted} was rejected, though p {self.p[self.drafted]:.4f} is above its q"
        short = self.p.get(self.came, 0.0) < self.q.get(self.came, 0.0) * (1 - _ROUNDING)
        if not self.is_kept and short:
            return f"token {self.came} came after a rejection, though its p is below its q"
        return ""


def verdicts_of(answer: Completion, params: SamplingParams) -> Iterator[Verdict]:
    """Of all draft tokens that were judged; of trees none, since what their siblings came to is not told."""
    for piece in answer.pieces:
        yield from _of_piece(piece, params)


def _of_piece(piece: Piece, params: SamplingParams) -> Iterator[Verdict]:
    proposal = piece.proposal
    if proposal is None or not proposal.logprobs or proposal.parents != tuple(range(-1, len(proposal.parents) - 1)):
        return
    for drafted, of_draft, token in zip(proposal.token_ids, proposal.logprobs, piece.tokens, strict=False):
        assert token.logprobs is not None
        p = sampled_from(token.logprobs.top, params.temperature, params.top_k)
        q = {token_id: math.exp(logprob) for token_id, logprob in of_draft.top}
        if not is_plain(token.logprobs.top, params.top_k) or abs(sum(q.values()) - 1) > _ROUNDING:
            return
        is_kept = token.kind == "accepted"
        yield Verdict(drafted, token.id, is_kept, {each: math.exp(score) for each, score in p.items()}, q)
        if not is_kept:
            return


def tests(of_answers: Sequence[Sequence[Verdict]]) -> dict[str, Test]:
    """Every test of the verdicts of some answers, by name."""
    verdicts = [verdict for each in of_answers for verdict in each]
    open_ones = [verdict for verdict in verdicts if 0 < verdict.chance < 1]
    found = {
        "drafted by rank": _by_rank([(verdict.q, verdict.drafted) for verdict in verdicts]),
        "kept": _kept(open_ones, [0] * len(open_ones), ["all"]),
        "kept by chance": _kept(
            open_ones, [int(np.digitize(each.chance, _BANDS[1:-1])) for each in open_ones], [*map(str, _BANDS[1:])]
        ),
        "kept by rank in q": _kept(open_ones, [_rank(each.q, each.drafted) for each in open_ones], _RANKS),
    }
    rejected = [
        (residual, verdict.came) for verdict in verdicts if not verdict.is_kept and (residual := verdict.residual)
    ]
    found["after a rejection, by rank"] = _by_rank(rejected)
    found["luck carried on"] = _by_luck(of_answers)
    return found


def _by_luck(of_answers: Sequence[Sequence[Verdict]]) -> Test:
    """Whether verdicts go with those before them in the same answer; as ``law``'s test of surprise."""
    total = variance = 0.0
    count = 0
    for verdicts in of_answers:
        carried = 0.0
        for verdict in verdicts:
            luck = verdict.is_kept - verdict.chance
            total += carried * luck
            variance += carried**2 * verdict.chance * (1 - verdict.chance)
            carried += luck
            count += 1
    return Test(total**2 / variance if variance else 0.0, int(variance > 0), NO_COUNTS, draws=float(count))


_RANKS = [f"{rank}." for rank in range(1, TOP + 1)]


def _rank(law: Law, token_id: int) -> int:
    return sorted(law, key=law.__getitem__, reverse=True).index(token_id)


def _by_rank(draws: Sequence[tuple[Law, int]]) -> Test:
    """The likeliest token, the second likeliest, and so on, each an outcome; of draws that can be."""
    draws = [(law, token_id) for law, token_id in draws if token_id in law]
    laws, drawn = np.zeros((len(draws), TOP)), np.zeros(len(draws), np.intp)
    for row, (law, token_id) in enumerate(draws):
        p = sorted(law.values(), reverse=True)
        laws[row, : len(p)] = p
        drawn[row] = _rank(law, token_id)
    return of_laws(laws / laws.sum(1, keepdims=True), drawn, _RANKS)


def _kept(verdicts: Sequence[Verdict], bands: Sequence[int], labels: Sequence[str]) -> Test:
    """Kept or not in each band, two outcomes of which a verdict can come to those of its own."""
    laws: Doubles = np.zeros((len(verdicts), 2 * len(labels)))
    drawn = np.zeros(len(verdicts), np.intp)
    for row, (verdict, band) in enumerate(zip(verdicts, bands, strict=True)):
        laws[row, 2 * band], laws[row, 2 * band + 1] = verdict.chance, 1 - verdict.chance
        drawn[row] = 2 * band + (not verdict.is_kept)
    return of_laws(laws, drawn, [f"{label} {what}" for label in labels for what in ("kept", "not")])
