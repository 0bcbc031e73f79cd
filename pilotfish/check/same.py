"""Asks again in another way, and says whether the answers are the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pilotfish.check.asking import Asker, Question
from pilotfish.check.compare import difference, first_difference
from pilotfish.check.own_law import TOP, lead, shaped
from pilotfish.check.results import Result, from_faults
from pilotfish.check.speculation import OFF, Way
from pilotfish.client.results import Completion


async def same(asker: Asker, name: str, questions: Sequence[Question], wanted: Sequence[Completion]) -> Result:
    """Asks all questions at once; the first answers must be those wanted, the others only keep the server busy."""
    return await compared(asker, name, questions, wanted, (await asker.ask(name, questions))[: len(wanted)])


async def in_every_way(
    asker: Asker, what: str, ways: Mapping[str, Way], questions: Sequence[Question]
) -> dict[str, tuple[list[Question], list[Completion]]]:
    """Asks the questions in every way, all at once; by way what was asked, and the answers."""
    asked = {name: [(prompt, replace(params, **way)) for prompt, params in questions] for name, way in ways.items()}
    answers = iter(await asker.ask(what, [question for each in asked.values() for question in each]))
    return {name: (each, [next(answers) for _ in each]) for name, each in asked.items()}


async def compared(
    asker: Asker,
    name: str,
    questions: Sequence[Question],
    wanted: Sequence[Completion],
    answers: Sequence[Completion],
) -> Result:
    """Whether answers are those wanted.

    Where two part, the law of the target there decides: of two tokens that are equally likely but for rounding either
    may come, and all behind them is another text.
    """
    faults: list[str] = []
    near_ties: list[str] = []
    for (prompt, params), expected, got in zip(questions, wanted, answers, strict=False):
        if (what := difference(expected, got)) is None:
            continue
        seed = f", seed {params.seed}" if params.seed is not None else ""
        gap = await _gap(asker, (prompt, params), expected, got)
        is_near = gap is not None and abs(gap) <= asker.setting.near_tie
        apart = "" if gap is None else f"; {abs(gap):.2g} lies between the two, in logits"
        (near_ties if is_near else faults).append(f"after {brief(prompt)}{seed}: {what}{apart}")
    return from_faults(
        name,
        faults,
        f"parts at {len(near_ties)} near-ties: {near_ties[0]}" if near_ties else "",
        answers=len(answers),
        tokens=sum(answer.usage.completion_tokens for answer in answers),
        drafted=sum(answer.usage.drafted for answer in answers),
        accepted=sum(answer.usage.accepted for answer in answers),
    )


async def _gap(asker: Asker, question: Question, wanted: Completion, got: Completion) -> float | None:
    """How near two answers were to being the same where they part; None if that cannot be told."""
    index = first_difference(wanted.token_ids, got.token_ids)
    if asker.lacks("logprobs") or index is None or index >= min(len(wanted.token_ids), len(got.token_ids)):
        return None
    prompt, params = question
    so_far = replace(params, **OFF, logprobs=TOP, max_tokens=max(index + 1, params.min_tokens))
    [answer] = await asker.ask("the law where they part", [(prompt, so_far)])
    tokens = [token for piece in answer.pieces for token in piece.tokens]
    if answer.token_ids[:index] != wanted.token_ids[:index] or (logprobs := tokens[index].logprobs) is None:
        return None
    scores = shaped(logprobs.top, params, wanted.token_ids[:index])
    position = answer.usage.prompt_tokens + index
    return None if scores is None else lead(params, scores, position, wanted.token_ids[index], got.token_ids[index])


def brief(prompt: str | Sequence[int]) -> str:
    """A prompt in a few characters."""
    if not isinstance(prompt, str):
        return f"{len(prompt)} token ids"
    return repr(prompt if len(prompt) <= 24 else f"{prompt[:23]}…")
