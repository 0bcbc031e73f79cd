"""How far ``pilotfish check`` is: bars that move with every answer in a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from pilotfish.cli.console import note, stderr

if TYPE_CHECKING:
    from pilotfish.check.asking import Asker
    from pilotfish.check.checks import Check
    from pilotfish.check.pace import Forecast

_LINE_EVERY_S = 10.0


class Meter:
    """How far a run is, from the answers that have come and what was forecast of them.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._check_s = self._done_s = self._each_s = self._left_s = 0.0

    def began(self, check_s: float, left_s: float) -> None:
        """A check begins that will take so long; it and all that follow so long."""
        self._check_s, self._left_s, self._done_s = check_s, left_s, 0.0

    def begin(self, count: int, seconds: float) -> None:
        """So many requests come next, and take so long together."""
        self._each_s = seconds / max(count, 1)

    def advance(self) -> None:
        """One of them has ended."""
        self._done_s += self._each_s

    @property
    def of_check(self) -> float:
        """Share of the present check that is done."""
        return min(self._done_s / self._check_s, 1.0) if self._check_s else 0.0

    @property
    def remaining_s(self) -> float:
        return max(self._left_s - self.of_check * self._check_s, 0.0)

    @property
    def of_run(self) -> float:
        """Share of the whole run that is done."""
        elapsed = self._clock() - self._started
        return elapsed / (elapsed + self.remaining_s) if elapsed else 0.0


def duration(seconds: float) -> str:
    """In words that are as exact as an estimate.

    >>> duration(48.2), duration(130), duration(7300)
    ('48 s', '2 min 10 s', '2 h 2 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Shown(Protocol):
    """What shows the run: both a ``run.Watcher`` and an ``asking.Progress``."""

    def planned(self, asker: Asker, least: Forecast, expected: Forecast) -> None: ...

    def began(self, check: Check, expected: Forecast, left: Forecast) -> None: ...

    def ended(self, check: Check) -> None: ...

    def begin(self, what: str, count: int, seconds: float) -> None: ...

    def advance(self) -> None: ...


@contextmanager
def shown() -> Iterator[Shown]:
    """Shows how far the run is while the block runs."""
    if not stderr.is_terminal:
        yield _Lines()
        return
    columns = (
        TextColumn("{task.description:<36}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[left]}", style="dim"),
    )
    with Progress(*columns, console=stderr, transient=True) as progress:
        yield _Bars(progress)


class _Estimate:
    """Says up front how long it will take."""

    def __init__(self) -> None:
        self._meter = Meter()

    def planned(self, asker: Asker, least: Forecast, expected: Forecast) -> None:
        budget = asker.setting.budget_s
        rows = asker.setting.concurrency
        pace = 1 / max(asker.speed.pass_s / rows + asker.speed.token_s, 1e-9)
        note(
            f"this will take about {duration(expected.seconds)}: {expected.answers:,.0f} answers; "
            f"the server writes {pace:,.0f} tokens/s, {rows} requests at once"
        )
        if budget is not None and least.seconds > budget:
            note(f"that is more than the budget of {duration(budget)}: it is the least that these checks ask")


class _Bars(_Estimate):
    """A bar of the run, and one of the present check."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._run = progress.add_task("how fast the server is", total=1.0, left="")
        self._check = progress.add_task("", total=1.0, visible=False, left="")

    def began(self, check: Check, expected: Forecast, left: Forecast) -> None:
        self._meter.began(expected.seconds, left.seconds)
        self._progress.update(self._run, description="all checks")
        self._progress.reset(self._check, description=check.name, visible=True)
        self._show()

    def ended(self, check: Check) -> None:
        self._progress.update(self._check, completed=1.0)

    def begin(self, what: str, count: int, seconds: float) -> None:
        self._meter.begin(count, seconds)
        self._progress.update(self._check, left=what)

    def advance(self) -> None:
        self._meter.advance()
        self._show()

    def _show(self) -> None:
        left = f"about {duration(self._meter.remaining_s)} left"
        self._progress.update(self._run, completed=self._meter.of_run, left=left)
        self._progress.update(self._check, completed=self._meter.of_check)


class _Lines(_Estimate):
    """A line for each check, and one now and then while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self._name = ""
        self._last = time.monotonic()

    def began(self, check: Check, expected: Forecast, left: Forecast) -> None:
        self._meter.began(expected.seconds, left.seconds)
        self._name = check.name
        self._say(f"{check.name}: {check.about}")

    def ended(self, check: Check) -> None:
        pass

    def begin(self, what: str, count: int, seconds: float) -> None:
        self._meter.begin(count, seconds)

    def advance(self) -> None:
        self._meter.advance()
        if self._name and time.monotonic() - self._last > _LINE_EVERY_S:
            self._say(f"{self._name}: {self._meter.of_check:.0%} done")

    def _say(self, what: str) -> None:
        self._last = time.monotonic()
        left = f"{self._meter.of_run:4.0%}, about {duration(self._meter.remaining_s)} left"
        stderr.print(Text(f"[{left}] {what}"), soft_wrap=True)
