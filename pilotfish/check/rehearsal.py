"""Runs a check against answers that are made up, to learn what it will ask: how many answers, and how long they take.

So nothing has to be declared beside a check, and no estimate can grow old.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from pilotfish.check.asking import Asker
from pilotfish.check.pace import Forecast
from pilotfish.client.results import Completion, Piece, Prompt, RoundTimes, Token, TokenLogprobs, Usage

if TYPE_CHECKING:
    from pilotfish.check.checks import Check
    from pilotfish.client.params import SamplingParams

_SOME = 0.1  # of the way from the least to all: what is asked grows evenly, so that less need be made up
_PROMPT = tuple(range(8))
_LONG = 256  # tokens, more than any prompt of which log probabilities are asked
_TIMES = RoundTimes(0, 0, 0, 0)


async def forecast(check: Check, asker: Asker) -> tuple[Forecast, Forecast]:
    """What a check asks at the least, and in full."""
    least, some = [await _rehearse(check, asker, scale) for scale in (0.0, _SOME)]
    return least, least.towards(some, 1 / _SOME)


async def _rehearse(check: Check, asker: Asker, scale: float) -> Forecast:
    stage = Rehearsal(asker)
    stage.scale = scale
    async for _ in check.find(stage):
        pass
    return stage.forecast


class Silent:
    """Progress that nobody watches."""

    def begin(self, what: str, count: int, seconds: float) -> None: ...

    def advance(self) -> None: ...


class Rehearsal(Asker):
    """Answers what it is asked itself, with as many tokens as it is asked for."""

    def __init__(self, of: Asker) -> None:
        laboratory = None if of.laboratory is None else Rehearsal(of.laboratory)
        super().__init__(of.client, of.info, of.capabilities, of.setting, Silent(), laboratory)
        self.speed = of.speed

    @property
    def forecast(self) -> Forecast:
        """Of all that was asked so far."""
        own = Forecast(self.requests, self.seconds)
        return own + self.laboratory.forecast if isinstance(self.laboratory, Rehearsal) else own

    async def _send(self, prompt: str | Sequence[int], params: SamplingParams) -> Completion:
        return _made_up(params, self.info.vocab_size)

    async def _visit(self, prompt: str, params: SamplingParams, stay: int) -> None:
        self.requests += 1


def _made_up(params: SamplingParams, vocab_size: int) -> Completion:
    token_ids = tuple(index % min(vocab_size, 16) for index in range(params.max_tokens))
    logprobs = _law(params.logprobs, vocab_size)
    tokens = tuple(Token(each, f" {each}", "bonus", logprobs) for each in token_ids)
    count = len(token_ids)
    usage = Usage(len(_PROMPT), count, 0, count, 0, 0, (), (), 0, 1, count, _TIMES, _TIMES, 0)
    scored = _law(params.prompt_logprobs, vocab_size)
    prompt = Prompt(_PROMPT, (), () if scored is None else (None, *[scored] * _LONG))
    return Completion(
        text="".join(token.text for token in tokens),
        token_ids=token_ids,
        finish_reason="length",
        usage=usage,
        request_id="",
        model="",
        pieces=tuple(Piece((token,), 0, _TIMES) for token in tokens),
        prompt=prompt,
    )


def _law(likeliest: int | None, vocab_size: int) -> TokenLogprobs | None:
    if likeliest is None:
        return None
    even = -math.log(vocab_size)
    return TokenLogprobs(even, tuple((token_id, even) for token_id in islice(range(vocab_size), likeliest)))
