"""Requests do not feel each other: each in a mixed batch gets what it gets alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import product
from typing import Any

from pilotfish.check.asking import Asker, Question
from pilotfish.check.prompts import PROMPTS
from pilotfish.check.results import Result
from pilotfish.check.same import same
from pilotfish.check.speculation import OFF, ways
from pilotfish.client.params import SamplingParams

_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.8},
    {"presence_penalty": 1.5},
)
_LENGTHS = (0, 1, 3, 9)


async def mixed(asker: Asker) -> AsyncIterator[Result]:
    """Greedy and seeded requests of all kinds and lengths at once; asking in turn has told what each must get."""
    questions = _questions(asker)
    plain = [(prompt, replace(params, **OFF)) for prompt, params in questions]
    alone = await asker.ask_in_turn("one after the other", plain)
    yield await same(asker, "all at once, speculation off", plain, alone)
    if not ways(asker):
        return
    yield await same(asker, "all at once, draft_length left to the server", questions, alone)
    various = [
        (prompt, replace(params, draft_length=_LENGTHS[index % len(_LENGTHS)]))
        for index, (prompt, params) in enumerate(questions)
    ]
    yield await same(asker, "all at once, draft_length 0, 1, 3 and 9", various, alone)
    yield await same(asker, "the same in the opposite order", various[::-1], alone[::-1])


def _questions(asker: Asker) -> list[Question]:
    """Every prompt under every setting, no two of the same length."""
    pairs = product(PROMPTS[: asker.some(len(PROMPTS), 1)], _SETTINGS)
    return [
        (prompt, SamplingParams(max_tokens=5 + 3 * index, seed=asker.seed("mixed", index), ignore_eos=True, **setting))
        for index, (prompt, setting) in enumerate(pairs)
    ]
