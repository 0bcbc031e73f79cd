"""Runs a check against answers that are made up, to learn what it will ask: how many answers, and how long they take.

So nothing has to be declared beside a check, and no estimate can grow old.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pilotfish.check.asking import Asker
from pilotfish.check.pace import Forecast
from pilotfish.client.results import Completion, Piece, Prompt, RoundTimes, Token, Usage

if TYPE_CHECKING:
    from pilotfish.check.checks import Check
    from pilotfish.client.params import SamplingParams

_SOME = 0.02  # of the way to all samples: they grow evenly, so that few need be made up
_PROMPT, _LONG = tuple(range(8)), 256
_TIMES = RoundTimes(0, 0, 0, 0)


async def forecast(check: Check, asker: Asker) -> tuple[Forecast, Forecast]:
    """What a check asks at the least, and in full; nothing of one that cannot be rehearsed, as its run will show."""
    try:
        least, whole, some = [await _rehearse(check, asker, *each) for each in ((0.0, 0.0), (1.0, 0.0), (0.0, _SOME))]
    except Exception:
        return Forecast(), Forecast()
    return least, whole + (some - least) * (1 / _SOME)


async def _rehearse(check: Check, asker: Asker, scale: float, of_samples: float) -> Forecast:
    stage = Rehearsal(asker, scale, of_samples)
    async for _ in check.find(stage):
        pass
    return stage.forecast


class Silent:
    """Progress that nobody watches."""

    def begin(self, what: str, count: int, seconds: float) -> None: ...

    def advance(self) -> None: ...


class Rehearsal(Asker):
    """Answers what it is asked itself, with as many tokens as it is asked for."""

    def __init__(self, of: Asker, scale: float, of_samples: float) -> None:
        laboratory = None if of.laboratory is None else Rehearsal(of.laboratory, scale, of_samples)
        super().__init__(of.client, of.info, of.capabilities, of.setting, Silent(), laboratory)
        self.speed, self.plenty, self.growth, self.scale = of.speed, of.plenty, of.growth, scale
        self._of_samples = of_samples

    @property
    def forecast(self) -> Forecast:
        """Of all that was asked so far."""
        own = Forecast(self.requests, self.seconds)
        return own + self.laboratory.forecast if isinstance(self.laboratory, Rehearsal) else own

    def samples(self, full: int, least: int) -> int:
        return round(self.plenty * (least + self.growth * self._of_samples * (full - least)))

    async def _send(self, prompt: str | Sequence[int], params: SamplingParams) -> Completion:
        answer = _made_up(params)
        return replace(answer, others=(answer,) * (params.n - 1))

    async def _visit(self, prompt: str, params: SamplingParams, stay: int) -> None:
        self.requests += 1


def _made_up(params: SamplingParams) -> Completion:
    """Token after token; whoever asked for log probabilities judges them at length, and gets none to judge."""
    token_ids = tuple(range(params.max_tokens))
    pieces = () if params.logprobs is not None else tuple(_piece(token_id) for token_id in token_ids)
    count = len(token_ids)
    return Completion(
        text="".join(piece.text for piece in pieces),
        token_ids=token_ids,
        finish_reason="length",
        usage=Usage(len(_PROMPT), count, 0, count, 0, 0, (), (), 0, 1, count, _TIMES, _TIMES, 0),
        request_id="",
        model="",
        pieces=pieces,
        prompt=Prompt(_PROMPT, (), (None,) * max(count, _LONG)),
    )


def _piece(token_id: int) -> Piece:
    return Piece((Token(token_id, f" {token_id}", "bonus"),), 0, _TIMES)
