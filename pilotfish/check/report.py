"""A whole run as one value, and what to say of it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pilotfish.bench.origin import Origin
from pilotfish.check.results import Result, Status
from pilotfish.check.setting import Setting


@dataclass(frozen=True)
class Report:
    """What a run asked, of whom, and what it found."""

    origin: Origin
    setting: Setting
    about: dict[str, str]
    """What each check is about, by name, in the order of the run."""
    results: Sequence[Result]
    """Decided."""
    requests: int
    tokens: int
    seconds: float

    @property
    def status(self) -> Status:
        """Failed if any result failed; skipped if all were."""
        counts = self.counts(self.results)
        return "failed" if counts["failed"] else "passed" if counts["passed"] else "skipped"

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

    @staticmethod
    def counts(results: Sequence[Result]) -> Counter[Status]:
        return Counter(result.status for result in results)


def verdict(report: Report) -> str:
    """One sentence."""
    counts = report.counts(report.results)
    parts = [f"{counts[status]} {status}" for status in ("failed", "passed", "skipped") if counts[status]]
    return f"{', '.join(parts)}, from {report.requests:,} answers of {report.tokens:,} tokens"


def smallest(results: Sequence[Result]) -> float | None:
    """The smallest p-value; None if none has one."""
    return min((result.p_value for result in results if result.p_value is not None), default=None)


def numbers(result: Result) -> str:
    """What a result rests on, in a few words."""
    parts = [f"{value:.4g} {name.replace('_', ' ')}" for name, value in result.numbers.items()]
    if result.p_value is not None:
        parts.append(f"p = {result.p_value:.2g}")
    return ", ".join(parts)
