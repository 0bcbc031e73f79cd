"""What a check found, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["passed", "failed", "skipped"]

EVERY_ANSWER = "every answer"
"""Name of what is judged beside the checks: all answers, by themselves."""


@dataclass(frozen=True)
class Counts:
    """How often each outcome came, beside how often it should have come."""

    labels: tuple[str, ...]
    observed: tuple[float, ...]
    expected: tuple[float, ...]


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    name: str
    status: Status
    why: str = ""
    """One sentence: what is wrong, why it was skipped, or what a reader should know although it passed."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """What it rests on: how many answers, tokens, and so on."""
    p_value: float | None = None
    """Of a statistical result: how likely a sound deployment looks at least so wrong. Whether it fails is decided
    beside all the others of the run (``significance.decide``)."""
    counts: Counts | None = None
    """Of a statistical result."""
    check: str = ""
    """Name of the check that found it; the run fills it in."""


def passed(name: str, why: str = "", **numbers: float) -> Result:
    return Result(name, "passed", why, numbers)


def failed(name: str, why: str, **numbers: float) -> Result:
    return Result(name, "failed", why, numbers)


def skipped(name: str, why: str) -> Result:
    return Result(name, "skipped", why)


def from_faults(name: str, faults: Sequence[str], why: str = "", **numbers: float) -> Result:
    """Failed with the first fault and the number of the others; passed without any."""
    if not faults:
        return passed(name, why, **numbers)
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return failed(name, faults[0] + more, **numbers)
