"""The text of a seed depends on seed, prompt and model alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

from pilotfish.check.asking import Asker
from pilotfish.check.prompts import CODE, LOOP, QUESTION, STORY
from pilotfish.check.results import Result
from pilotfish.check.same import compared, in_every_way, same
from pilotfish.check.speculation import OFF, ways
from pilotfish.client.params import SamplingParams

_PROMPTS = (STORY, CODE, LOOP)
_EDGES = (0, 2**64 - 1)


async def seeded(asker: Asker) -> AsyncIterator[Result]:
    """Asked alone, again, in a batch of 8 with other seeds, and in every way of speculating."""
    base = SamplingParams(max_tokens=asker.some(64, 20), temperature=1.0, ignore_eos=True, **OFF)
    seeds = (*_EDGES, 42, asker.seed("seeded"))
    prompts = _PROMPTS[: asker.some(len(_PROMPTS), 1)]
    questions = [(prompt, replace(base, seed=seed)) for prompt in prompts for seed in seeds]
    alone = await asker.ask_in_turn("seeds, one after the other", questions)
    yield await same(asker, "asked again, all at once", questions, alone)

    others = [(QUESTION, replace(base, seed=asker.seed("another", index), draft_length=None)) for index in range(7)]
    at_42 = seeds.index(42)
    for name, (asked, answers) in (await in_every_way(asker, "every way", ways(asker), questions)).items():
        yield await compared(asker, name, asked, alone, answers)
    prompt, params = questions[at_42]
    for name, way in {"speculation off": OFF, **ways(asker)}.items():
        batch = [(prompt, replace(params, **way)), *others]
        yield await same(asker, f"in a batch of 8, {name}", batch, [alone[at_42]])
