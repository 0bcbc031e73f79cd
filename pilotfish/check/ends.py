"""Answers end where they should, also inside a run of accepted tokens, and nothing that follows leaks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

from pilotfish.check.asking import Asker, Question
from pilotfish.check.endings import Ending, cut_at_stop_text, cut_at_stop_token, misses, stop_texts
from pilotfish.check.prompts import CODE, LOOP, PROMPTS, STORY
from pilotfish.check.results import Result, from_faults, skipped
from pilotfish.check.same import brief, in_every_way
from pilotfish.check.speculation import OFF, Way, ways
from pilotfish.client.params import SamplingParams
from pilotfish.client.results import Completion
from pilotfish.errors import InvalidArgumentError

_LONGEST_CONTEXT = 8192  # tokens; a longer prompt takes minutes to read without a GPU
_QUICK_CONTEXT = 1024


async def ends(asker: Asker) -> AsyncIterator[Result]:
    """Asks for long answers without speculation, works out where each must end, and asks for that in every way."""
    base = SamplingParams(max_tokens=asker.some(64, 16), ignore_eos=True, **OFF)
    prompts = (STORY, CODE, LOOP)[: asker.some(3, 1)]
    plain = await asker.ask("whole answers", [(prompt, base) for prompt in prompts])
    every: dict[str, Way] = {"speculation off": OFF, **ways(asker)}
    kinds = {"max_tokens": _lengths, "stop texts": _stop_texts, "stop tokens": _stop_tokens}
    for kind, make in kinds.items():
        wanted = [each for prompt, answer in zip(prompts, plain, strict=True) for each in make(prompt, answer, base)]
        async for result in _ended(asker, kind, wanted, every):
            yield result
    yield await _end_tokens(asker, base)
    async for result in _context(asker, plain[0].token_ids, every):
        yield result


Wanted = tuple[Question, Ending]


def _lengths(prompt: str, answer: Completion, base: SamplingParams) -> list[Wanted]:
    """Every length around one and two rounds of four draft tokens."""
    return [
        ((prompt, replace(base, max_tokens=length)), Ending(answer.token_ids[:length], None, "length"))
        for length in range(1, 12)
    ]


def _stop_texts(prompt: str, answer: Completion, base: SamplingParams) -> list[Wanted]:
    endings = [(stops, cut_at_stop_text(answer, stops)) for stops in stop_texts(answer)]
    return [((prompt, replace(base, stop=stops)), ending) for stops, ending in endings if ending is not None]


def _stop_tokens(prompt: str, answer: Completion, base: SamplingParams) -> list[Wanted]:
    """At each of the first nine tokens, with room left and with none."""
    wanted: list[Wanted] = []
    for index in range(9):
        ending = cut_at_stop_token(answer, answer.token_ids[index])
        params = replace(base, stop_token_ids=[answer.token_ids[index]])
        wanted.append(((prompt, params), ending))
        wanted.append(((prompt, replace(params, max_tokens=len(ending.token_ids))), ending))
    return wanted


async def _ended(asker: Asker, kind: str, wanted: Sequence[Wanted], every: Mapping[str, Way]) -> AsyncIterator[Result]:
    found = await in_every_way(asker, kind, every, [question for question, _ in wanted])
    for name, (asked, answers) in found.items():
        faults = [
            f"after {brief(prompt)}: {fault}"
            for (prompt, _), (_, ending), answer in zip(asked, wanted, answers, strict=True)
            for fault in misses(ending, answer)
        ]
        yield from_faults(f"{kind}, {name}", faults, answers=len(answers))


async def _end_tokens(asker: Asker, base: SamplingParams) -> Result:
    """ignore_eos goes on behind the end token, with the same tokens up to it."""
    name = "ignore_eos"
    params = replace(base, ignore_eos=False, draft_length=None)
    own = await asker.ask("answers that end by themselves", [(prompt, params) for prompt in PROMPTS])
    ended = [(prompt, answer) for prompt, answer in zip(PROMPTS, own, strict=True) if answer.finish_reason == "stop"]
    if not ended:
        return skipped(name, f"none of {len(own)} answers came to an end of its own within {params.max_tokens} tokens")
    on = await asker.ask(name, [(prompt, replace(params, ignore_eos=True)) for prompt, _ in ended])
    faults = []
    for (prompt, answer), further in zip(ended, on, strict=True):
        if further.token_ids[: len(answer.token_ids)] != answer.token_ids:
            faults.append(f"after {brief(prompt)}: other tokens before the end token")
        if len(further.token_ids) < params.max_tokens:
            faults.append(f"after {brief(prompt)}: ended after {len(further.token_ids)} tokens all the same")
    return from_faults(name, faults, answers=len(on))


async def _context(asker: Asker, token_ids: Sequence[int], every: dict[str, Way]) -> AsyncIterator[Result]:
    """Prompts that leave room for 1 to 6 tokens: proposals would reach over the end of the context."""
    limit, longest = asker.info.max_len, asker.some(_LONGEST_CONTEXT, _QUICK_CONTEXT)
    if limit > longest:
        yield skipped("full context", f"the context has {limit} tokens; prompts of more than {longest} are not asked")
        return
    whole = (list(token_ids) * (limit // len(token_ids) + 1))[:limit]
    params = [SamplingParams(max_tokens=room, ignore_eos=True) for room in range(1, 7)]
    questions: list[Question] = [(whole[: limit - each.max_tokens], each) for each in params]
    plain = await asker.ask_in_turn("full context", [(ids, replace(each, **OFF)) for ids, each in questions])
    wanted = [
        (question, Ending(answer.token_ids, answer.text, "length"))
        for question, answer in zip(questions, plain, strict=True)
    ]
    async for result in _ended(asker, "full context", wanted, every):
        yield result
    yield await _beyond(asker, whole)


async def _beyond(asker: Asker, whole: Sequence[int]) -> Result:
    """One token more than fits is refused, not cut."""
    name = "beyond the context"
    try:
        await asker.ask(name, [(whole[:-4], SamplingParams(max_tokens=5))])
    except InvalidArgumentError:
        return from_faults(name, [])
    return from_faults(name, ["a prompt and max_tokens of one token more than max_len together were not refused"])
