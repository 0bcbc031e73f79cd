"""A whole run as one value, and what to say of it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pilotfish.bench.origin import Origin
from pilotfish.check.results import EVERY_ANSWER, Result, Status
from pilotfish.check.setting import Setting
from pilotfish.check.significance import detectable

POWER_NOTE = (
    "finds: share of draws that, moved from one outcome of probability 1/10 to another, the best test of a check finds "
    "nine times in ten"
)

Outcome = Literal["passed", "failed", "skipped", "incomplete"]
"""What a whole run comes to."""


@dataclass(frozen=True)
class Report:
    """What a run asked, of whom, and what it found."""

    origin: Origin
    setting: Setting
    about: dict[str, str]
    """What each check is about, by name, in the order of the run; all that were to be made."""
    results: Sequence[Result]
    """Decided."""
    requests: int
    tokens: int
    seconds: float
    unfinished: tuple[str, ...] = ()
    """Checks that have not come to their end, or not begun."""
    stopped: str = ""
    """Why the run ended early; empty if it did not."""

    @property
    def status(self) -> Outcome:
        """Failed if any result failed; else incomplete if a check has not come to its end; skipped if all were."""
        counts = self.counts(self.results)
        if counts["failed"]:
            return "failed"
        if self.unfinished:
            return "incomplete"
        return "passed" if counts["passed"] else "skipped"

    @cached_property
    def groups(self) -> dict[str, list[Result]]:
        """The results of each check that has any, in the order of the run."""
        found: dict[str, list[Result]] = {}
        for result in self.results:
            found.setdefault(result.check, []).append(result)
        return found

    @property
    def statistical(self) -> list[Result]:
        """The results that have a p-value, the smallest first."""
        return sorted((each for each in self.results if each.p_value is not None), key=lambda each: each.p_value or 0.0)

    def finds(self, results: Sequence[Result]) -> float | None:
        """Smallest share of draws that the most powerful test of some finds misplaced; None if none is statistical."""
        tests = len(self.statistical)
        shares = [
            detectable(int(each.numbers["draws"]), int(each.numbers["freedom"]), self.setting.false_alarms, tests)
            for each in results
            if each.p_value is not None and each.numbers.get("draws") and each.numbers.get("freedom")
        ]
        return min(shares, default=None)

    @staticmethod
    def counts(results: Sequence[Result]) -> Counter[Status]:
        return Counter(result.status for result in results)


def verdict(report: Report) -> str:
    """One sentence, or two."""
    counts = report.counts(report.results)
    parts = [f"{counts[status]} {status}" for status in ("failed", "passed", "skipped") if counts[status]]
    found = f"{', '.join(parts) or 'nothing found'}, from {report.requests:,} answers of {report.tokens:,} tokens"
    if not report.unfinished:
        return found
    why = f" ({report.stopped})" if report.stopped else ""
    count, names = len([name for name in report.about if name != EVERY_ANSWER]), ", ".join(report.unfinished)
    lost = f"{len(report.unfinished)} of {count} checks did not come to their end ({names})"
    return f"incomplete{why}: {lost}; {found}"


def smallest(results: Sequence[Result]) -> float | None:
    """The smallest p-value; None if none has one."""
    return min((result.p_value for result in results if result.p_value is not None), default=None)


def numbers(result: Result) -> str:
    """What a result rests on, in a few words."""
    parts = [f"{value:.4g} {name.replace('_', ' ')}" for name, value in result.numbers.items()]
    if result.p_value is not None:
        parts.append(f"p = {result.p_value:.2g}")
    return ", ".join(parts)
