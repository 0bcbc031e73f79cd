"""Clients that leave take everything with them."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from pilotfish.check.asking import Asker
from pilotfish.check.prompts import PROMPTS
from pilotfish.check.results import Result, from_faults
from pilotfish.check.same import compared
from pilotfish.check.speculation import OFF
from pilotfish.client.params import SamplingParams
from pilotfish.client.results import Completion

_WAVES, _FEWEST_WAVES = 3, 1
_VISITS, _FEWEST_VISITS = 48, 16  # of a wave
_LONGEST_STAY = 20  # tokens
_ALWAYS_FINE_S = 5.0


async def disconnects(asker: Asker) -> AsyncIterator[Result]:
    """Waves of requests for as many tokens as there is room for, each left at a random token, or before the first.

    Whoever asks next must get the answers of before, and soon: rows that nobody reads any more would hold their
    places for as long as they were asked to.
    """
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    questions = [(prompt, params) for prompt in PROMPTS]
    before = await asker.ask("before", [(prompt, replace(params, **OFF)) for prompt in PROMPTS])
    room = asker.info.max_len - max(answer.usage.prompt_tokens for answer in before)
    limit_s = max(_ALWAYS_FINE_S, 0.25 * room * _seconds_per_token(before))
    rng = random.Random(asker.seed("disconnects"))
    endless = SamplingParams(max_tokens=room, ignore_eos=True)
    wait_s = 0.0
    for wave in range(asker.some(_WAVES, _FEWEST_WAVES)):
        stays = [rng.randrange(_LONGEST_STAY) for _ in range(asker.some(_VISITS, _FEWEST_VISITS))]
        await asker.leave(
            f"wave {wave + 1}", [(PROMPTS[at % len(PROMPTS)], endless, stay) for at, stay in enumerate(stays)]
        )
        after = await asker.ask(f"after wave {wave + 1}", questions)
        wait_s = max(wait_s, *(answer.usage.queue_us / 1e6 for answer in after))
        yield await compared(asker, f"answers after wave {wave + 1} of {len(stays)}", questions, before, after)
    fault = f"a request waited {wait_s:.1f} s for those that have left"
    yield from_faults("a place is free at once", [fault] * (wait_s > limit_s), waited_s=wait_s, allowed_s=limit_s)


def _seconds_per_token(answers: Sequence[Completion]) -> float:
    return min(answer.usage.total_us / answer.usage.completion_tokens for answer in answers) / 1e6
