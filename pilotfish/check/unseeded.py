"""Requests without a seed have nothing in common, and nor do the samples of one request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import combinations, islice

from pilotfish.check.asking import Asker
from pilotfish.check.compare import first_difference
from pilotfish.check.prompts import STORY
from pilotfish.check.results import Result, from_faults, skipped
from pilotfish.check.speculation import OFF, ways
from pilotfish.client.params import SamplingParams

_COUNT = 20
_LONGEST = 12
_HOT = 1000.0
_N = 4
_SAMPLES = "samples of one request"


async def unseeded(asker: Asker) -> AsyncIterator[Result]:
    """No two of 20 requests may share their first 12 tokens, and no two samples of one request theirs.

    At temperature 1000 every model is all but uniform: logits that lie 100 apart change the odds by a tenth. Even
    with 30 tokens to choose from, two of 20 requests share 12 of them once in 10^15 runs.
    """
    drafting = dict(islice(ways(asker).items(), 1))  # how a seed comes about has little to do with draft lengths
    for name, way in {"speculation off": OFF, **drafting}.items():
        params = SamplingParams(max_tokens=_LONGEST, temperature=_HOT, ignore_eos=True, **way)
        count = asker.some(_COUNT // 2, 3)
        together = await asker.ask(f"{name}, all at once", [(STORY, params)] * (_COUNT - count))
        in_turn = await asker.ask_in_turn(f"{name}, in turn", [(STORY, params)] * count)
        texts = [answer.token_ids for answer in together + in_turn]
        faults = [
            f"requests {one + 1} and {other + 1} begin with the same {_LONGEST} tokens"
            for one, other in combinations(range(_COUNT), 2)
            if first_difference(texts[one], texts[other]) is None
        ]
        yield from_faults(name, faults, answers=_COUNT)
    if (missing := asker.lacks("n")) is not None:
        yield skipped(_SAMPLES, missing)
        return
    params = SamplingParams(max_tokens=_LONGEST, temperature=_HOT, ignore_eos=True, seed=asker.seed(_SAMPLES), n=_N)
    [answer] = await asker.ask(_SAMPLES, [(STORY, params)])
    texts = [sample.token_ids for sample in answer.samples]
    faults = [
        f"samples {one + 1} and {other + 1} are the same"
        for one, other in combinations(range(_N), 2)
        if texts[one] == texts[other]
    ]
    yield from_faults(_SAMPLES, faults, samples=len(texts))
