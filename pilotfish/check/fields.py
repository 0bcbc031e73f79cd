"""Every sampling field under every acceptance rule: what the field does must not depend on speculation."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from pilotfish.check.asking import Asker, Question
from pilotfish.check.chi_square import of_two_samples
from pilotfish.check.heeding import breaches
from pilotfish.check.law import Draw, by_rank
from pilotfish.check.own_law import TOP, drawn_from
from pilotfish.check.prompts import LOOP, STORY
from pilotfish.check.results import Result, from_faults, skipped
from pilotfish.check.same import brief, compared
from pilotfish.check.speculation import OFF, RULES, Way, drafters, without_draft
from pilotfish.client.params import SamplingParams
from pilotfish.client.results import Completion

_K = 4
_LENGTH = 8  # tokens of a sampled answer
_PROMPTS = (STORY, LOOP)


@dataclass(frozen=True, eq=False)
class Case:
    """One setting of a field."""

    name: str
    params: Mapping[str, Any]
    is_of_sampling: bool = False
    """It does nothing at temperature 0."""
    must_show: bool = False
    """Greedy text cannot be what it is without the field."""


def cases(seen: Sequence[int]) -> list[Case]:
    """All of them.

    Args:
        seen: greedy tokens that come without any of these fields; at least three different ones.
    """
    common = [token_id for token_id, _ in Counter(seen).most_common()]
    return [
        Case("temperature 1", {}, is_of_sampling=True),
        Case("temperature 0.6", {"temperature": 0.6}, is_of_sampling=True),
        Case("temperature 1.5", {"temperature": 1.5}, is_of_sampling=True),
        Case("top_k", {"top_k": 5}, is_of_sampling=True),
        Case("top_p", {"top_p": 0.7}, is_of_sampling=True),
        Case("min_p", {"min_p": 0.1}, is_of_sampling=True),
        Case("top_k, top_p and min_p", {"temperature": 1.3, "top_k": 8, "top_p": 0.9, "min_p": 0.02}, True),
        Case("repetition_penalty", {"repetition_penalty": 1.5}),
        Case("presence_penalty", {"presence_penalty": 2.0}),
        Case("frequency_penalty", {"frequency_penalty": 2.0}, must_show=True),
        Case("logit_bias", {"logit_bias": {common[0]: -4.0, common[1]: 2.0}}),
        Case("logit_bias -100", {"logit_bias": dict.fromkeys(common[:2], -100.0)}, must_show=True),
        Case("banned_token_ids", {"banned_token_ids": common[:2]}, must_show=True),
        Case("allowed_token_ids", {"allowed_token_ids": common[1:]}, must_show=True),
        Case("min_tokens", {"stop_token_ids": common[:2], "min_tokens": _LENGTH}, must_show=True),
        Case(
            "all together",
            {
                "temperature": 0.9,
                "top_p": 0.95,
                "repetition_penalty": 1.2,
                "presence_penalty": 0.5,
                "frequency_penalty": 0.5,
                "logit_bias": {common[1]: 1.0},
                "banned_token_ids": common[:1],
            },
            must_show=True,
        ),
    ]


async def fields(asker: Asker) -> AsyncIterator[Result]:
    """Match, and temperature 0 under any rule: the same text as without speculation, token for token.

    Ratio and block: samples follow the law that the field makes of the model's own, token by token (chi-square by
    rank); where log probabilities cannot tell that law, samples with speculation and without come from one (chi-square
    of two samples). A field that cannot but change greedy text must change it.
    """
    if reason := without_draft(asker):
        yield reason
        return
    base = SamplingParams(max_tokens=asker.some(48, 16), ignore_eos=True, **OFF)
    bare = await asker.ask("without any field", [(prompt, base) for prompt in _PROMPTS])
    seen = [token_id for answer in bare for token_id in answer.token_ids]
    if len(set(seen)) < 3:
        yield skipped("all fields", f"greedy answers have no three different tokens: {sorted(set(seen))}")
        return
    honoured = []
    for case in cases(seen):
        if (missing := asker.lacks(*case.params)) is not None:
            yield skipped(case.name, missing)
        else:
            honoured.append(case)
    async for result in _exact(asker, honoured, base, bare):
        yield result
    async for result in _laws(asker, honoured):
        yield result


async def _exact(
    asker: Asker, asked: Sequence[Case], base: SamplingParams, bare: Sequence[Completion]
) -> AsyncIterator[Result]:
    """All settings at once, in every way of speculating."""
    can_tell = asker.lacks("logprobs") is None
    questions = {case: _exact_questions(asker, case, base, can_tell) for case in asked}
    plain = await _ask_of_each(asker, "fields, speculation off", questions)
    for case, answers in plain.items():
        if case.must_show:
            ignored = [answer.token_ids for answer in answers[2:]] == [answer.token_ids for answer in bare]
            yield from_faults(f"{case.name} shows", ["greedy text is the same with the field and without"] * ignored)
        if can_tell:
            faults = [
                f"after {brief(prompt)}: {fault}"
                for (prompt, params), answer in zip(questions[case], answers, strict=True)
                for fault in breaches(answer, params, asker.setting.near_tie)
            ]
            yield from_faults(f"{case.name} is heeded", faults, answers=len(answers))
    for scheme, way in _schemes(asker).items():
        again = {case: _with(each, way) for case, each in questions.items()}
        for case, answers in (await _ask_of_each(asker, f"fields × match{scheme}", again)).items():
            yield await compared(asker, f"{case.name} × match{scheme}", again[case], plain[case], answers)
        for rule in RULES[1:]:
            greedy = {
                case: _with(each[2:], {**way, "acceptance": rule}) for case, each in questions.items() if each[2:]
            }
            for case, answers in (await _ask_of_each(asker, f"fields × {rule}{scheme}, greedy", greedy)).items():
                name = f"{case.name} × {rule}{scheme}, greedy"
                yield await compared(asker, name, greedy[case], plain[case][2:], answers)


def _exact_questions(asker: Asker, case: Case, base: SamplingParams, can_tell: bool) -> list[Question]:
    """Both prompts with a seed, and greedy, too, if the field does anything there."""
    params = replace(base, **{"temperature": 1.0, **case.params}, seed=asker.seed(case.name))
    questions: list[Question] = [(prompt, params) for prompt in _PROMPTS]
    if not case.is_of_sampling:
        questions += [(prompt, replace(params, temperature=0.0)) for prompt in _PROMPTS]
    return _with(questions, {"logprobs": TOP} if can_tell else {})


async def _ask_of_each(
    asker: Asker, what: str, questions: Mapping[Case, Sequence[Question]]
) -> dict[Case, list[Completion]]:
    """The answers to the questions of all cases, asked together."""
    answers = iter(await asker.ask(what, [question for each in questions.values() for question in each]))
    return {case: [next(answers) for _ in each] for case, each in questions.items()}


def _schemes(asker: Asker) -> dict[str, Way]:
    """Every kind of draft replicas, by what is added to a name; one way without a name where there is but one."""
    return {f", {name}": way for name, way in drafters(asker).items()} or {"": {"draft_length": _K}}


async def _laws(asker: Asker, asked: Sequence[Case]) -> AsyncIterator[Result]:
    """Samples of every setting; a rule's are asked for together, so that batches of it alone are judged, too."""
    can_tell = asker.lacks("logprobs") is None
    told = [case for case in asked if can_tell and "repetition_penalty" not in case.params]
    others = [case for case in asked if case not in told]
    off = {case: _samples(asker, case, OFF, "off") for case in others}
    reference = await _ask_of_each(asker, "fields, speculation off", off)
    for rule, (scheme, way) in product(RULES[1:], _schemes(asker).items()):
        drafting = {**way, "acceptance": rule}
        questions = {case: _samples(asker, case, drafting, rule + scheme) for case in asked}
        questions |= {case: _with(questions[case], {"logprobs": TOP}) for case in told}
        answers = await _ask_of_each(asker, f"fields × {rule}{scheme}", questions)
        for case in asked:
            name = f"{case.name} × {rule}{scheme}"
            if case in told:
                draws = list(_draws(answers[case], questions[case]))
                barred = [f"token {draw.token_id} came, which the field leaves out" for draw in draws if draw.is_barred]
                yield from_faults(f"{name}, what may come", barred, draws=len(draws))
                yield by_rank(draws).result(f"{name}, by rank", len(answers[case]))
                continue
            for what, view in _VIEWS.items():
                test = of_two_samples(Counter(map(view, answers[case])), Counter(map(view, reference[case])))
                yield test.result(f"{name}, {what}", len(answers[case]))


def _draws(answers: Sequence[Completion], questions: Sequence[Question]) -> Iterator[Draw]:
    """The tokens of which the law is known, if one of the likeliest came."""
    for answer, (_, params) in zip(answers, questions, strict=True):
        tokens = [token for piece in answer.pieces for token in piece.tokens]
        for index, token in enumerate(tokens):
            assert token.logprobs is not None
            law = drawn_from(token.logprobs.top, params, answer.token_ids[:index])
            if law is not None and token.id in dict(token.logprobs.top):
                yield Draw(token.id, law, index, frozenset(), None)


_VIEWS: dict[str, Callable[[Completion], Hashable]] = {
    "second token": lambda answer: answer.token_ids[1],
    "third token": lambda answer: answer.token_ids[2],
    "different tokens": lambda answer: len(set(answer.token_ids)),
}


def _with(questions: Sequence[Question], way: Way) -> list[Question]:
    return [(prompt, replace(params, **way)) for prompt, params in questions]


def _samples(asker: Asker, case: Case, way: Way, *what: object) -> list[Question]:
    params = SamplingParams(max_tokens=_LENGTH, ignore_eos=True, **{"temperature": 1.0, **case.params, **way})
    count = asker.samples(240, 3)
    return [(STORY, replace(params, seed=asker.seed(case.name, *what, index))) for index in range(count)]
