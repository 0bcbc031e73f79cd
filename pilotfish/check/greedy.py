"""Greedy text is the same with speculation and without, token for token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

from pilotfish.check.asking import Asker
from pilotfish.check.prompts import PROMPTS
from pilotfish.check.results import Result
from pilotfish.check.same import compared, in_every_way
from pilotfish.check.speculation import OFF, RULES, ways, without_draft
from pilotfish.client.params import SamplingParams


async def greedy(asker: Asker) -> AsyncIterator[Result]:
    """Every draft length, and every rule by name: at temperature 0 they all keep just the likeliest token."""
    if reason := without_draft(asker):
        yield reason
        return
    params = SamplingParams(max_tokens=asker.some(96, 32), ignore_eos=True)
    questions = [(prompt, params) for prompt in PROMPTS]
    plain = await asker.ask("speculation off", [(prompt, replace(params, **OFF)) for prompt in PROMPTS])
    every = {**ways(asker), **{f"acceptance {rule}": {"acceptance": rule} for rule in RULES}}
    for name, (asked, answers) in (await in_every_way(asker, "every way", every, questions)).items():
        yield await compared(asker, name, asked, plain, answers)
