"""How long asking takes, and how much may be asked in the time there is. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Speed:
    """Of a server: a forward pass takes so long, and each token that it makes so much longer."""

    pass_s: float = 0.0
    token_s: float = 0.0

    @classmethod
    def measured(cls, alone_s: float, together_s: float, rows: int) -> Speed:
        """From the seconds of a pass for one request, and for ``rows`` of them at once.

        >>> Speed.measured(alone_s=0.02, together_s=0.082, rows=32)
        Speed(pass_s=0.018, token_s=0.002)
        """
        token_s = max(together_s - alone_s, 0.0) / max(rows - 1, 1)
        return cls(max(alone_s - token_s, 0.0), token_s)

    def seconds(self, lengths: Sequence[int], at_once: int) -> float:
        """What completions of these lengths take, so many at a time.

        >>> round(Speed(pass_s=0.018, token_s=0.002).seconds([10] * 64, at_once=32), 2)
        1.64
        """
        if not lengths:
            return 0.0
        passes = max(max(lengths), sum(lengths) / min(at_once, len(lengths)))
        return passes * self.pass_s + sum(lengths) * self.token_s


@dataclass(frozen=True)
class Forecast:
    """What a check asks, and the seconds that takes."""

    answers: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Forecast) -> Forecast:
        return Forecast(self.answers + other.answers, self.seconds + other.seconds)

    def __sub__(self, other: Forecast) -> Forecast:
        return self + other * -1.0

    def __mul__(self, times: float) -> Forecast:
        return Forecast(self.answers * times, self.seconds * times)


class Schedule:
    """Shares the time out among the checks that are left, again before each.

    Args:
        checks: what each asks at the least, and in full, by its name and in their order.
        budget_s: seconds for all of them; None asks everything in full, however long that takes.
    """

    def __init__(self, checks: Mapping[str, tuple[Forecast, Forecast]], budget_s: float | None) -> None:
        self._left = dict(checks)
        self._budget_s = budget_s
        self._slowness = 1.0  # what checks took so far, against what was forecast
        self._forecast_s = self._taken_s = 0.0

    def begin(self, elapsed_s: float) -> float:
        """How much the next check may ask: from 0, the least, to 1, in full, and with a large budget beyond.

        Args:
            elapsed_s: of the budget.
        """
        if self._budget_s is None:
            return 1.0
        least, full = self._totals()
        room = (self._budget_s - elapsed_s) / self._slowness - least.seconds
        return max(room, 0.0) / max(full.seconds - least.seconds, 1e-9)

    def left(self, elapsed_s: float) -> Forecast:
        """What is still to be asked."""
        least, full = self._totals()
        return self.probable(least + (full - least) * self.begin(elapsed_s))

    def probable(self, forecast: Forecast) -> Forecast:
        """The same, in seconds as they have turned out so far."""
        return Forecast(forecast.answers, forecast.seconds * self._slowness)

    def end(self, name: str, forecast_s: float, taken_s: float) -> None:
        """A check has ended, for which so much was forecast, and which took so long."""
        del self._left[name]
        self._forecast_s += forecast_s
        self._taken_s += taken_s
        if self._forecast_s > 1.0:  # less says nothing
            self._slowness = min(max(self._taken_s / self._forecast_s, 0.2), 5.0)

    def _totals(self) -> tuple[Forecast, Forecast]:
        pairs = list(self._left.values())
        return sum((least for least, _ in pairs), Forecast()), sum((full for _, full in pairs), Forecast())
