"""Goes through the checks, each with its share of the time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from pilotfish.check.asking import Asker
from pilotfish.check.checks import Check
from pilotfish.check.pace import Forecast, Schedule
from pilotfish.check.rehearsal import forecast
from pilotfish.check.results import EVERY_ANSWER, Result, failed, from_faults
from pilotfish.errors import UnavailableError


class Watcher(Protocol):
    """Told how a run gets on."""

    def planned(self, asker: Asker, least: Forecast, expected: Forecast) -> None:
        """The speed is known: what all checks ask at the least, and what they probably will."""

    def began(self, check: Check, expected: Forecast, left: Forecast) -> None:
        """A check begins that will probably ask so much; with those after it so much is left."""

    def ended(self, check: Check) -> None:
        """It has come to its end."""


@dataclass
class Run:
    """What a run has come to so far.

    Attributes:
        results: of all checks, as they came; statistical ones are not decided yet.
        ended: names of the checks that have come to their end.
        stopped: why the run went no further; empty if it did.
    """

    checks: Sequence[Check]
    results: list[Result] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    stopped: str = ""

    async def go(self, asker: Asker, watcher: Watcher) -> None:
        """Asks all there is to ask, and finds at the end what was wrong with any answer by itself.

        A check that cannot go on fails, be it that answers lack what it reads; the others still run. Once the server
        is gone, nothing does.
        """
        try:
            await self._all(asker, watcher)
        except UnavailableError as error:
            self.stopped = f"the server is gone: {error}"
        finally:
            self.judge_every_answer([asker, *([asker.laboratory] if asker.laboratory else [])])

    async def _all(self, asker: Asker, watcher: Watcher) -> None:
        started = time.perf_counter()
        for each in filter(None, (asker, asker.laboratory)):
            await each.measure()
        forecasts = {check.name: await forecast(check, asker) for check in self.checks}
        schedule = Schedule(forecasts, asker.setting.budget_s)
        elapsed = time.perf_counter() - started
        at_least = sum((least for least, _ in forecasts.values()), Forecast())
        watcher.planned(asker, at_least, schedule.left(elapsed))
        for check in self.checks:
            begun = time.perf_counter()
            scale = schedule.begin(begun - started)
            least, full = forecasts[check.name]
            expected = least + (full - least) * scale
            watcher.began(check, schedule.probable(expected), schedule.left(begun - started))
            await self.find(check, asker, scale)
            schedule.end(check.name, expected.seconds, time.perf_counter() - begun)
            watcher.ended(check)

    async def find(self, check: Check, asker: Asker, scale: float) -> None:
        """Goes through one check, which asks so much."""
        for each in filter(None, (asker, asker.laboratory)):
            each.scale = scale
        try:
            async for result in check.find(asker):
                self.results.append(replace(result, check=check.name))
        except UnavailableError:
            raise
        except Exception as error:
            why = f"the check could not go on: {type(error).__name__}: {error}"
            self.results.append(replace(failed("answers", why), check=check.name))
        else:
            self.ended.append(check.name)

    def judge_every_answer(self, askers: Sequence[Asker]) -> None:
        """Finds what was wrong with any answer by itself."""
        counted = sum((asker.faults for asker in askers), type(askers[0].faults)())
        faults = [f"{fault}, in {count} answers" for fault, count in counted.most_common()]
        answers, tokens = sum(asker.requests for asker in askers), sum(asker.tokens for asker in askers)
        if answers:
            result = from_faults("is sound by itself", faults, answers=answers, tokens=tokens)
            self.results.append(replace(result, check=EVERY_ANSWER))
