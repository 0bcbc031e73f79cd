"""Sampled tokens follow the target's own probabilities, whatever the rule."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from pilotfish.check.asking import Asker, Question
from pilotfish.check.chi_square import NO_COUNTS, REST, Test, of_laws
from pilotfish.check.own_law import KEPT, TOP, Scores, is_plain, sampled_from
from pilotfish.check.prompts import QUESTION, STORY
from pilotfish.check.results import Result, failed, skipped
from pilotfish.check.speculation import OFF, RULES, Way
from pilotfish.client.params import SamplingParams

if TYPE_CHECKING:
    from pilotfish.client.results import Completion

_LENGTH = 40  # tokens of an answer; the longer, the more shows of noise that is used twice
_RECENT = 8  # tokens in which a repetition is looked for
_DRAFT_LENGTHS = (1, 2, 4, None)


def cases() -> dict[str, SamplingParams]:
    """What is asked, by name: two settings under every rule; one also without speculation, and without a seed.

    Those of one rule are asked together, and by themselves: batches of one rule alone are judged in a way of their own.
    """
    rules: dict[str, Way] = {rule: {"acceptance": rule} for rule in RULES}
    hot, few = SamplingParams(temperature=1.0), SamplingParams(temperature=0.7, top_k=KEPT)
    ways: dict[str, Way] = {"speculation off": OFF, **rules, "no seed": {}}
    settings = {"temperature 1": (hot, ways), "top_k": (few, rules)}
    return {
        f"{setting} × {name}": replace(params, **way)
        for name, way in ways.items()
        for setting, (params, asked) in settings.items()
        if name in asked
    }


async def law(asker: Asker) -> AsyncIterator[Result]:
    """Chi-square of what was drawn against what each answer says of the probabilities in each place.

    The first, second and third token by themselves; all tokens, by their ranks; repetitions; the first token of each
    round, by what the round before came to; and whether surprising tokens are followed by more of them. A token's law
    depends on the tokens before it and on nothing else: noise that is used twice shows in the last four.
    """
    if reason := asker.lacks("logprobs"):
        yield skipped("all", reason)
        return
    asked = {name: list(_questions(asker, name, params)) for name, params in cases().items()}
    for way, names in groupby(asked, key=lambda name: name.partition(" × ")[2]):
        together = list(names)
        answers = iter(await asker.ask(way, [question for name in together for question in asked[name]]))
        for name in together:
            for result in _judged(name, asked[name], [next(answers) for _ in asked[name]]):
                yield result


def _questions(asker: Asker, name: str, params: SamplingParams) -> Iterator[Question]:
    """Two prompts and all draft lengths, but for ``draft_length`` 0, in turn; seeds where a rule was named."""
    for index in range(asker.samples(320, 4)):
        draft_length = params.draft_length if params.draft_length == 0 else _DRAFT_LENGTHS[index // 2 % 4]
        seed = asker.seed("law", name, index) if params.acceptance or params.draft_length == 0 else None
        asked = replace(params, max_tokens=_LENGTH, logprobs=TOP, ignore_eos=True, draft_length=draft_length, seed=seed)
        yield (STORY, QUESTION)[index % 2], asked


def _judged(name: str, questions: Sequence[Question], answers: Sequence[Completion]) -> Iterator[Result]:
    draws = [draw for answer, (_, params) in zip(answers, questions, strict=True) for draw in draws_of(answer, params)]
    if barred := [draw for draw in draws if draw.is_barred]:
        yield failed(f"{name}, top_k", f"token {barred[0].token_id} came, which top_k leaves out", draws=len(barred))
    for what, test in tests(draws).items():
        yield test.result(f"{name}, {what}", len(answers))


@dataclass(frozen=True)
class Draw:
    """A token, the law that it came from, and what came before."""

    token_id: int
    law: Scores
    index: int
    """In the completion."""
    recent: frozenset[int]
    """The tokens just before it."""
    before: str | None
    """Of the first token of a round: what the round before ended with, "recovered" or "bonus"; else None."""

    @property
    def is_barred(self) -> bool:
        """Of probability 0 although the law is known as a whole."""
        return self.token_id not in self.law and self.rest < 1e-9

    @property
    def rest(self) -> float:
        """Probability of all tokens that the law does not name."""
        return max(0.0, 1.0 - sum(map(math.exp, self.law.values())))

    @property
    def surprise(self) -> tuple[float, float]:
        """How unlikely the token is among all that could come, and the variance of that; its mean is 0.

        The mass of likelier tokens and half of its own, less 1/2; of outcomes p its variance is (1 - sum p^3) / 12.
        Tokens that the law does not name are one outcome, the least likely.
        """
        p = np.array([*map(math.exp, self.law.values()), self.rest])
        p /= p.sum()
        rank = list(self.law).index(self.token_id) if self.token_id in self.law else len(self.law)
        return float(p[:rank].sum() + p[rank] / 2 - 0.5), float(1 - (p**3).sum()) / 12


def draws_of(answer: Completion, params: SamplingParams) -> Iterator[Draw]:
    """The tokens of an answer whose log probabilities were asked for, where they tell the law."""
    token_ids, before = answer.token_ids, None
    index = 0
    for piece in answer.pieces:
        for place, token in enumerate(piece.tokens):
            assert token.logprobs is not None
            recent = frozenset(token_ids[max(0, index - _RECENT) : index])
            if is_plain(token.logprobs.top, params.top_k):
                law = sampled_from(token.logprobs.top, params.temperature, params.top_k)
                yield Draw(token.id, law, index, recent, before if place == 0 else None)
            index += 1
        before = piece.kinds[-1]


def tests(draws: Sequence[Draw]) -> dict[str, Test]:
    """Every test of some draws, by name."""
    found = {
        f"{ordinal} token": _by_token([draw for draw in draws if draw.index == index])
        for index, ordinal in enumerate(("first", "second", "third"))
    }
    found["all tokens by rank"] = by_rank(draws)
    found["repetitions"] = _by_repetition(draws)
    for kind in ("recovered", "bonus"):
        if firsts := [draw for draw in draws if draw.before == kind]:
            found[f"after a {kind} token"] = by_rank(firsts)
    found["surprise carried on"] = _by_surprise(draws)
    return found


def _by_token(draws: Sequence[Draw]) -> Test:
    """Each token an outcome of its own where its probability is known."""
    token_ids = sorted({token_id for draw in draws for token_id in draw.law})
    columns = {token_id: column for column, token_id in enumerate(token_ids)}
    laws, drawn = np.zeros((len(draws), len(token_ids) + 1)), np.zeros(len(draws), np.intp)
    for row, draw in enumerate(draws):
        laws[row, [columns[token_id] for token_id in draw.law]] = np.exp(list(draw.law.values()))
        laws[row, -1] = draw.rest
        drawn[row] = columns[draw.token_id] if draw.token_id in draw.law else len(token_ids)
    return of_laws(laws, drawn, [*map(str, token_ids), REST])


def by_rank(draws: Sequence[Draw]) -> Test:
    """The likeliest token, the second likeliest, and so on, each an outcome."""
    laws, drawn = np.zeros((len(draws), TOP + 1)), np.zeros(len(draws), np.intp)
    for row, draw in enumerate(draws):
        ranks = list(draw.law)
        laws[row, : len(ranks)] = np.exp(list(draw.law.values()))
        laws[row, -1] = draw.rest
        drawn[row] = ranks.index(draw.token_id) if draw.token_id in draw.law else TOP
    return of_laws(laws, drawn, [*(f"{rank}." for rank in range(1, TOP + 1)), REST])


def _by_repetition(draws: Sequence[Draw]) -> Test:
    """Whether the token is one of those just before it, as far as their probabilities are known."""
    laws, drawn = np.zeros((len(draws), 2)), np.zeros(len(draws), np.intp)
    for row, draw in enumerate(draws):
        known = draw.recent & draw.law.keys()
        laws[row, 1] = min(1.0, sum(math.exp(draw.law[token_id]) for token_id in known))
        laws[row, 0] = 1.0 - laws[row, 1]
        drawn[row] = draw.token_id in known
    return of_laws(laws, drawn, ["another", "one of the last"])


def _by_surprise(draws: Sequence[Draw]) -> Test:
    """Whether a token's surprise goes with the sum of those before it in the same answer.

    Each product has mean 0 and, given what came before, a variance that is known; by the central limit theorem for
    martingales their sum is normal.
    """
    total = variance = carried = 0.0
    for draw in draws:
        carried = carried if draw.index else 0.0
        surprise, of_surprise = draw.surprise
        total += carried * surprise
        variance += carried**2 * of_surprise
        carried += surprise
    return Test(total**2 / variance if variance else 0.0, int(variance > 0), NO_COUNTS, draws=float(len(draws)))
