"""When to try a draft again that does not pay, and what that may cost.

An excursion is the drafting between two rests. It is charged with the time that it lost against plain
decoding of the same tokens, whatever lost it: proposals that were wrong, a row's prefill on the replica,
cores taken from the target. After it the draft rests until that loss is ``BUDGET`` of the time, and
twice as long for each excursion in a row that gained nothing. Then one row is probed: it catches up and
drafts a little, until its verdict is known or patience ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.core.requests import Request

BUDGET = 0.01
"""Share of the time that excursions may lose."""

PROBE_LENGTH, PROBE_ROUNDS = 2, 8
"""Draft tokens that a probed row is asked for, and the rounds in which they are judged."""

PATIENCE = 64
"""Rounds after which a probe ends in any case."""

MOST_DOUBLINGS = 2


@dataclass(slots=True)
class _Excursion:
    is_probe: bool
    """So far: it has not come to more."""
    lost: float = 0.0
    waited: float = 0.0
    """Seconds waited for proposals."""
    rounds: int = 0
    judged_rounds: int = 0
    probed: Request | None = None


class Probing:
    """Keeps the account of excursions. The first one is the calibration of a new draft."""

    def __init__(self) -> None:
        self._excursion: _Excursion | None = _Excursion(is_probe=False)
        self._gainless = 0  # excursions in a row
        self._elapsed = 0.0
        self._next_at = 0.0

    def observe(self, seconds: float, lost: float, waited: float, was_judged: bool) -> None:
        """Takes in one round.

        Args:
            seconds: that it took.
            lost: of those, beyond plain decoding of the same tokens; below 0 if drafting gained.
            waited: of those, waited for proposals.
            was_judged: it judged draft tokens.
        """
        self._elapsed += seconds
        if self._excursion is not None:
            self._excursion.lost += lost
            self._excursion.waited += waited
            self._excursion.rounds += 1
            self._excursion.judged_rounds += was_judged

    def drafting(self) -> None:
        """Drafting pays next round."""
        self._excursion = self._excursion or _Excursion(is_probe=False)
        self._excursion.is_probe = False

    @property
    def is_resting(self) -> bool:
        """Whether no excursion is under way."""
        return self._excursion is None

    @property
    def is_beyond(self) -> bool:
        """Whether an excursion is under way that is no probe, or one whose verdict is known."""
        return self._excursion is not None and not self.is_probing

    def begins(self) -> bool:
        """Ends an excursion that has come to nothing; whether a probe begins next round.

        Called whenever drafting does not pay next round.
        """
        if self._excursion is not None and not self.is_probing:
            self._rest(self._excursion)
        if self._excursion is not None or self._elapsed < self._next_at:
            return False
        self._excursion = _Excursion(is_probe=True)
        return True

    @property
    def is_probing(self) -> bool:
        """Whether a probe is under way and its verdict not known."""
        found = self._excursion
        return found is not None and found.is_probe and found.judged_rounds < PROBE_ROUNDS and found.rounds < PATIENCE

    def row(self, rows: Sequence[Request]) -> Request:
        """The row to be probed: the same as last round, or else the one with the least to catch up.

        Args:
            rows: that may draft so much, at least one; ``is_probing`` must hold.
        """
        assert self._excursion is not None
        if self._excursion.probed not in rows:
            self._excursion.probed = None
        self._excursion.probed = self._excursion.probed or min(rows, key=lambda request: request.draft_lag)
        return self._excursion.probed

    def _rest(self, ended: _Excursion) -> None:
        """Whatever noise says of the loss, a probe that came to nothing lost the time it waited.

        A gain does not shorten a wait, so that a load to and fro between the two is not probed each time.
        """
        lost = max(ended.lost, ended.waited) if ended.is_probe else max(ended.lost, 0.0)
        self._gainless = self._gainless + 1 if lost > 0 else 0
        wait = lost / BUDGET * 2 ** min(max(self._gainless - 1, 0), MOST_DOUBLINGS)
        self._next_at = max(self._next_at, self._elapsed + wait)
        self._excursion = None
