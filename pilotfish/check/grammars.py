"""Structured output keeps to its grammar, also when many ask for different ones at once."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pilotfish.check.asking import Asker, Question
from pilotfish.check.prompts import QUESTION, STORY
from pilotfish.check.results import Result, failed, from_faults, skipped
from pilotfish.check.same import compared, in_every_way
from pilotfish.check.speculation import OFF, RULES, ways
from pilotfish.client.params import SamplingParams
from pilotfish.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pilotfish.client.results import Completion

_COLOURS = ["red", "green", "blue"]


@dataclass(frozen=True)
class Kind:
    """A grammar, and what its texts must be."""

    name: str
    params: Mapping[str, Any]
    fits: Callable[[str], bool]


def _is_object(text: str, key: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(value, dict) and value.keys() == {key, "big"} and value[key] in _COLOURS and value["big"] in (0, 1)
    )


def _schema(key: str) -> Kind:
    """An object of an enum and a truth value; the key tells one request's grammar from another's."""
    properties = {key: {"enum": _COLOURS}, "big": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": [key, "big"], "additionalProperties": False}
    return Kind("json_schema", {"json_schema": schema}, lambda text: _is_object(text, key))


def kinds(schemas: int) -> list[Kind]:
    """One of each sort, but of JSON schemas so many."""
    pattern = "[a-f]{2,6}-[0-9]{3}"
    return [
        *(_schema(f"key{index}") for index in range(schemas)),
        Kind("regex", {"regex": pattern}, lambda text: re.fullmatch(pattern, text) is not None),
        Kind("ebnf", {"ebnf": 'root ::= "yes" | "no" | "perhaps"'}, lambda text: text in ("yes", "no", "perhaps")),
        Kind("nothing", {}, lambda text: True),
    ]


async def grammars(asker: Asker) -> AsyncIterator[Result]:
    """Requests of up to eight grammars at once, half greedy and half sampled: each fits its own, in every way."""
    asked = [kind for kind in kinds(asker.some(5, 2)) if asker.lacks(*kind.params) is None]
    if len(asked) < 2:
        yield skipped("all", asker.lacks("json_schema") or "no grammar is honoured")
        return
    base = SamplingParams(max_tokens=asker.some(160, 40))
    pairs: list[tuple[Kind, Question]] = []
    for kind in asked:
        params = replace(base, **kind.params)
        pairs.append((kind, (STORY, params)))
        pairs.append((kind, (QUESTION, replace(params, temperature=1.0, seed=asker.seed("grammars", *kind.params)))))
    questions = [question for _, question in pairs]
    plain = await asker.ask("speculation off", [(prompt, replace(params, **OFF)) for prompt, params in questions])
    yield from_faults("fit, speculation off", misfits(pairs, plain), answers=len(plain))
    for name, (again, answers) in (await in_every_way(asker, "every way", ways(asker), questions)).items():
        yield from_faults(f"fit, {name}", misfits(pairs, answers), answers=len(answers))
        yield await compared(asker, f"same, {name}", again, plain, answers)
    for rule in RULES[1:] if ways(asker) else ():
        sampled = [
            (kind, (prompt, replace(params, acceptance=rule, temperature=1.0, seed=asker.seed(rule, index, kind.name))))
            for kind, (prompt, params) in pairs
            for index in range(asker.some(6, 1))
        ]
        answers = await asker.ask(f"sampled, {rule}", [question for _, question in sampled])
        yield from_faults(f"fit, sampled × {rule}", misfits(sampled, answers), answers=len(answers))
    yield await _refused(asker, pairs)


def misfits(pairs: list[tuple[Kind, Question]], answers: list[Completion]) -> list[str]:
    """Texts that came to an end and do not fit; one that max_tokens cut may lack its end."""
    return [
        f"{kind.name}: {answer.text[:60]!r}"
        for (kind, _), answer in zip(pairs, answers, strict=True)
        if answer.finish_reason == "stop" and not kind.fits(answer.text)
    ]


async def _refused(asker: Asker, pairs: list[tuple[Kind, Question]]) -> Result:
    """A grammar that is none fails by itself, and the requests beside it go on."""
    name = "a broken grammar fails alone"
    broken = SamplingParams(regex="(", max_tokens=4)
    others = asker.ask(name, [question for _, question in pairs])
    answers, refusal = await asyncio.gather(others, asker.ask(name, [(STORY, broken)]), return_exceptions=True)
    if isinstance(answers, BaseException):
        return failed(name, f"the requests beside it failed: {answers}")
    faults = [] if isinstance(refusal, InvalidArgumentError) else [f"regex '(' was not refused, but gave {refusal}"]
    return from_faults(name, faults + misfits(pairs, answers), answers=len(answers))
