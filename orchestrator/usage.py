"""What a request has cost, counted from what really reached its client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from statistics import median

from orchestrator.core.acceptance import TokenKind
from orchestrator.core.requests import Request
from orchestrator.core.rounds import Run


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """One round, split; microseconds, and what features cost. Meanings as in generation.proto."""

    target_us: int = 0
    draft_us: int = 0
    hops_us: int = 0
    orchestrator_us: int = 0
    feature_read_us: int = 0
    feature_bytes: int = 0

    @classmethod
    def combine(cls, function: Callable[[Iterable[int]], float], rounds: Sequence[RoundTimes]) -> RoundTimes:
        """Applies ``sum`` or ``median`` to each part over the rounds; zeros without rounds."""
        if not rounds:
            return cls()
        return cls(*(int(function(getattr(times, part.name) for times in rounds)) for part in fields(cls)))


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts and times of a request; meanings as in generation.proto."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    rounds: int
    drafted: int
    accepted: int
    accepted_per_position: tuple[int, ...]
    drafted_per_position: tuple[int, ...]
    queue_us: int
    first_token_us: int
    total_us: int
    round_total: RoundTimes
    round_median: RoundTimes
    preemptions: int


@dataclass(slots=True)
class UsageMeter:
    """Adds up a request's runs. Times are ``time.perf_counter`` seconds.

    Args:
        arrived_at: when the request came in.
    """

    arrived_at: float
    scheduled_at: float | None = None
    completion_tokens: int = 0
    rounds: list[RoundTimes] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # per position
    drafted: list[int] = field(default_factory=list)  # per position
    first_token_at: float | None = None

    def add(self, run: Run, kept: int, times: RoundTimes, now: float) -> int:
        """Counts the first ``kept`` tokens of a run; returns the draft tokens judged for them.

        Draft tokens after the end of a text count neither as drafted nor as accepted: whether they
        would have been kept says nothing.
        """
        self.completion_tokens += kept
        if self.first_token_at is None:
            self.first_token_at = now
        if not run.is_round:
            return 0
        self.rounds.append(times)
        ended = run.reason is not None or kept < len(run.token_ids)
        drafted = min(run.drafted, kept) if ended else run.drafted
        accepted = sum(kind is TokenKind.ACCEPTED for kind in run.kinds[:kept])
        _count(self.drafted, drafted)
        _count(self.accepted, accepted)
        return drafted

    def usage(self, request: Request, now: float) -> Usage:
        """The totals, once the request's last run has been added."""
        first = self.first_token_at
        positions = len(self.drafted)
        accepted = [*self.accepted, *[0] * (positions - len(self.accepted))]
        scheduled = self.scheduled_at
        return Usage(
            prompt_tokens=len(request.prompt),
            completion_tokens=self.completion_tokens,
            cached_tokens=request.cached_tokens or 0,
            rounds=len(self.rounds),
            drafted=sum(self.drafted),
            accepted=sum(accepted),
            accepted_per_position=tuple(accepted),
            drafted_per_position=tuple(self.drafted),
            queue_us=_us((scheduled if scheduled is not None else now) - self.arrived_at),
            first_token_us=_us((first if first is not None else now) - self.arrived_at),
            total_us=_us(now - self.arrived_at),
            round_total=RoundTimes.combine(sum, self.rounds),
            round_median=RoundTimes.combine(median, self.rounds),
            preemptions=request.preemptions,
        )


def _count(positions: list[int], depth: int) -> None:
    positions += [0] * (depth - len(positions))
    for position in range(depth):
        positions[position] += 1


def _us(seconds: float) -> int:
    return max(0, int(seconds * 1e6))
