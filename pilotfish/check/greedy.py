"""Greedy text is the same with speculation and without, token for token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

from pilotfish.check.asking import Asker
from pilotfish.check.prompts import PROMPTS
from pilotfish.check.results import Result
from pilotfish.check.same import same
from pilotfish.check.speculation import OFF, RULES, ways, without_draft
from pilotfish.client.params import SamplingParams


async def greedy(asker: Asker) -> AsyncIterator[Result]:
    """Every draft length, and every rule by name: at temperature 0 they all keep just the likeliest token."""
    if reason := without_draft(asker):
        yield reason
        return
    params = SamplingParams(max_tokens=asker.some(96, 40), ignore_eos=True)
    plain = await asker.ask("speculation off", [(prompt, replace(params, **OFF)) for prompt in PROMPTS])
    for name, way in ways(asker).items():
        questions = [(prompt, replace(params, **way)) for prompt in PROMPTS]
        yield await same(asker, name, questions, plain)
    for rule in RULES:
        questions = [(prompt, replace(params, acceptance=rule)) for prompt in PROMPTS]
        yield await same(asker, f"acceptance {rule}", questions, plain)
