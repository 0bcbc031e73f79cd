"""Log probabilities are the target's, with speculation and without."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from pilotfish.check.asking import Asker
from pilotfish.check.own_law import TOP
from pilotfish.check.prompts import PROMPTS
from pilotfish.check.results import Result, from_faults, skipped
from pilotfish.check.same import in_every_way
from pilotfish.check.speculation import OFF, RULES, Way, ways
from pilotfish.client.params import SamplingParams
from pilotfish.client.results import Completion, TokenLogprobs


async def logprobs(asker: Asker) -> AsyncIterator[Result]:
    """The same numbers in every way of speculating and under every rule, and when a text is scored as a prompt."""
    if reason := asker.lacks("logprobs", "prompt_logprobs", "echo"):
        yield skipped("all", reason)
        return
    base = SamplingParams(max_tokens=asker.some(48, 16), logprobs=TOP, ignore_eos=True)
    greedy = [(prompt, base) for prompt in PROMPTS]
    seeded = [(prompt, replace(base, temperature=1.0, seed=asker.seed("logprobs", prompt))) for prompt in PROMPTS]
    questions = greedy + seeded
    plain = await asker.ask("speculation off", [(prompt, replace(params, **OFF)) for prompt, params in questions])
    rules: dict[str, Way] = {f"acceptance {rule}": {"acceptance": rule} for rule in RULES} if ways(asker) else {}
    found = await in_every_way(asker, "every way", {**ways(asker), **rules}, questions)
    for name, (asked, answers) in found.items():
        # Of a seed, only match gives the same text.
        count = len(greedy) if asked[0][1].acceptance in ("ratio", "block") else len(questions)
        pairs = zip(plain[:count], answers[:count], strict=True)
        faults = [fault for pair in pairs for fault in _apart(asker, *map(told, pair))]
        yield from_faults(name, faults, answers=count)
    yield await _scored(asker, [answer.token_ids for answer in plain], plain)


async def _scored(asker: Asker, texts: Sequence[tuple[int, ...]], plain: Sequence[Completion]) -> Result:
    """What an answer said of its last tokens, they get as the end of a prompt, too."""
    name = "scored as a prompt"
    echoed = await asker.ask(name, [(prompt, SamplingParams(max_tokens=1, echo=True)) for prompt in PROMPTS] * 2)
    prompts = [
        (*answer.prompt.token_ids, *text)
        for answer, text in zip(echoed, texts, strict=True)
        if answer.prompt is not None
    ]
    params = SamplingParams(max_tokens=1, prompt_logprobs=TOP)
    scored = await asker.ask(name, [(token_ids, params) for token_ids in prompts])
    faults = []
    for answer, wanted in zip(scored, plain, strict=True):
        assert answer.prompt is not None
        count = len(wanted.token_ids)
        found = list(zip(wanted.token_ids, answer.prompt.logprobs[-count:], strict=True))
        faults += _apart(asker, told(wanted), [(token_id, each) for token_id, each in found if each is not None])
    return from_faults(name, faults, answers=len(scored))


Told = Sequence[tuple[int, TokenLogprobs]]
"""Token ids, and what was said of each."""


def told(answer: Completion) -> Told:
    return [
        (token.id, token.logprobs) for piece in answer.pieces for token in piece.tokens if token.logprobs is not None
    ]


def _apart(asker: Asker, one: Told, other: Told) -> list[str]:
    """Where what is said of the same tokens differs; behind the first other token nothing is compared."""
    if not one or not other:
        return ["there are no log probabilities"]
    faults, limit = [], asker.setting.near_tie
    for index, ((token_id, wanted), (other_id, got)) in enumerate(zip(one, other, strict=False)):
        if token_id != other_id:
            break
        pairs = [(wanted.logprob, got.logprob), *((value, dict(got.top).get(each)) for each, value in wanted.top)]
        most = max(abs(a - b) for a, b in pairs if b is not None)
        if most > limit:
            faults.append(f"token {index + 1}: log probabilities are up to {most:.3g} apart")
    return faults
