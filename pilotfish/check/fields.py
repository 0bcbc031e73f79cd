"""Every sampling field under every acceptance rule: what the field does must not depend on speculation."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from pilotfish.check.asking import Asker, Question
from pilotfish.check.chi_square import of_two_samples
from pilotfish.check.heeding import breaches
from pilotfish.check.own_law import TOP
from pilotfish.check.prompts import LOOP, STORY
from pilotfish.check.results import Result, from_faults, skipped
from pilotfish.check.same import brief, same
from pilotfish.check.speculation import OFF, RULES, Way, drafters, without_draft
from pilotfish.client.params import SamplingParams
from pilotfish.client.results import Completion

_K = 4
_LENGTH = 8  # tokens of a sampled answer
_PROMPTS = (STORY, LOOP)


@dataclass(frozen=True)
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

    Ratio and block: samples with speculation and without come from one law (chi-square of two samples, at the
    second and third token, and at how many different tokens an answer has; the first is no draft's). A field that
    cannot but change greedy text must change it.
    """
    if reason := without_draft(asker):
        yield reason
        return
    base = SamplingParams(max_tokens=asker.some(48, 24), ignore_eos=True, **OFF)
    bare = await asker.ask("without any field", [(prompt, base) for prompt in _PROMPTS])
    seen = [token_id for answer in bare for token_id in answer.token_ids]
    if len(set(seen)) < 3:
        yield skipped("all fields", f"greedy answers have no three different tokens: {sorted(set(seen))}")
        return
    for case in cases(seen):
        if (missing := asker.lacks(*case.params)) is not None:
            yield skipped(case.name, missing)
            continue
        async for result in _exact(asker, case, base, bare):
            yield result
        async for result in _law(asker, case):
            yield result


async def _exact(asker: Asker, case: Case, base: SamplingParams, bare: Sequence[Completion]) -> AsyncIterator[Result]:
    params = replace(base, **{"temperature": 1.0, **case.params}, seed=asker.seed(case.name))
    questions: list[Question] = [(prompt, params) for prompt in _PROMPTS]
    if not case.is_of_sampling:
        questions += [(prompt, replace(params, temperature=0.0)) for prompt in _PROMPTS]
    can_tell = asker.lacks("logprobs") is None
    questions = _with(questions, {"logprobs": TOP} if can_tell else {})
    plain = await asker.ask(f"{case.name}, speculation off", questions)
    if case.must_show:
        ignored = [answer.token_ids for answer in plain[2:]] == [answer.token_ids for answer in bare]
        yield from_faults(f"{case.name} shows", ["greedy text is the same with the field and without"] * ignored)
    if can_tell:
        faults = [
            f"after {brief(prompt)}: {fault}"
            for (prompt, params), answer in zip(questions, plain, strict=True)
            for fault in breaches(answer, params, asker.setting.near_tie)
        ]
        yield from_faults(f"{case.name} is heeded", faults, answers=len(plain))
    for scheme, way in _schemes(asker).items():
        yield await same(asker, f"{case.name} × match{scheme}", _with(questions, way), plain)
        if not case.is_of_sampling:
            for rule in RULES[1:]:
                asked = _with(questions[2:], {**way, "acceptance": rule})
                yield await same(asker, f"{case.name} × {rule}{scheme}, greedy", asked, plain[2:])


def _schemes(asker: Asker) -> dict[str, Way]:
    """Every kind of draft replicas, by what is added to a name; one way without a name where there is but one."""
    return {f", {name}": way for name, way in drafters(asker).items()} or {"": {"draft_length": _K}}


async def _law(asker: Asker, case: Case) -> AsyncIterator[Result]:
    params = SamplingParams(max_tokens=_LENGTH, ignore_eos=True, **{"temperature": 1.0, **case.params})
    count = asker.some(240, 80)
    reference = await asker.ask(
        f"{case.name}, speculation off", [_sample(asker, params, OFF, case.name, index) for index in range(count)]
    )
    for rule, (scheme, way) in product(RULES[1:], _schemes(asker).items()):
        name = f"{case.name} × {rule}{scheme}"
        drafting = {**way, "acceptance": rule}
        questions = [_sample(asker, params, drafting, name, index) for index in range(count)]
        answers = await asker.ask(name, questions)
        for what, view in _VIEWS.items():
            test = of_two_samples(Counter(map(view, answers)), Counter(map(view, reference)))
            yield test.result(f"{name}, {what}", len(answers))


_VIEWS: dict[str, Callable[[Completion], Hashable]] = {
    "second token": lambda answer: answer.token_ids[1],
    "third token": lambda answer: answer.token_ids[2],
    "different tokens": lambda answer: len(set(answer.token_ids)),
}


def _with(questions: Sequence[Question], way: Way) -> list[Question]:
    return [(prompt, replace(params, **way)) for prompt, params in questions]


def _sample(asker: Asker, params: SamplingParams, way: Way, *what: object) -> Question:
    return STORY, replace(params, seed=asker.seed(*what), **way)
