"""Where the commands print: answers to stdout, everything about them to stderr."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Protocol, cast

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from pilotfish.logs import as_json

_LINE_EVERY_S = 5.0

stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)


def note(text: str) -> None:
    """Tells in passing."""
    stderr.print(Text(text, style="dim"), soft_wrap=True)


def complain(text: str) -> None:
    """Tells of something that went wrong."""
    if (lines := json_lines()) is not None:
        lines.say("error", text)
        return
    stderr.print(Text(text, style="red"), soft_wrap=True)


class JsonLines(io.TextIOBase):
    """A file that makes each line written to it a JSON object on stderr.

    Args:
        service: whose lines they are.
    """

    def __init__(self, service: str) -> None:
        self._service, self._begun = service, ""

    def write(self, text: str) -> int:
        """Tells every line that is whole."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in filter(str.strip, lines):
            self.say("info", line)
        return len(text)

    def say(self, level: str, message: str, service: str | None = None) -> None:
        """Makes a line of a message, which may have several."""
        self.pass_on(as_json(level, message, service=service or self._service))

    def pass_on(self, line: str) -> None:
        """Writes a line that is JSON already."""
        print(line, file=sys.stderr, flush=True)


def speak_json(service: str) -> None:
    """From now on all that goes to stderr is JSON, an object a line: no colours, and nothing that moves."""
    stderr.file = cast("IO[str]", JsonLines(service))


def json_lines() -> JsonLines | None:
    """Where stderr's lines become JSON; None if they do not."""
    return stderr.file if isinstance(stderr.file, JsonLines) else None


class Report(Protocol):
    """Told what is being done, and how far it is: of things, or of bytes."""

    def __call__(self, what: str, done: int = 0, total: int = 0, *, is_bytes: bool = False) -> None: ...


@contextmanager
def waiting() -> Iterator[Report]:
    """Shows on stderr what a long block is doing, as the block reports it.

    In a terminal a bar for each thing that can be counted and a spinner for others; elsewhere a line for each new
    thing, and one now and then for bytes that take long.
    """
    if stderr.is_terminal:
        columns = (SpinnerColumn(finished_text=" "), TextColumn("{task.description}"), _Counted(BarColumn(24)))
        with Progress(*columns, _Count(), _Counted(TimeRemainingColumn()), console=stderr, transient=True) as progress:
            yield _Bars(progress)
    else:
        yield _Lines()


class _Bars:
    """A task of a progress display for each thing; one that cannot be counted is over when the next such begins."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}
        self._uncounted: str | None = None

    def __call__(self, what: str, done: int = 0, total: int = 0, *, is_bytes: bool = False) -> None:
        if not total and self._uncounted not in (None, what):
            self._progress.remove_task(self._tasks.pop(str(self._uncounted)))
            self._uncounted = None
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=None, is_bytes=False)
        if total:
            self._progress.update(self._tasks[what], completed=done, total=total, is_bytes=is_bytes)
        if not total:
            self._uncounted = what
        elif self._uncounted == what:
            self._uncounted = None


class _Counted(ProgressColumn):
    """Another column, where there is something to count."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: Task) -> object:  # type: ignore[override]
        return self._column.render(task) if task.total is not None else ""


class _Count(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(_count(int(task.completed), int(task.total), task.fields["is_bytes"]) if task.total else "")


class _Lines:
    """Prints what is new."""

    def __init__(self) -> None:
        self._last = ""
        self._told_at = time.monotonic()

    def __call__(self, what: str, done: int = 0, total: int = 0, *, is_bytes: bool = False) -> None:
        now = time.monotonic()
        if what != self._last and not (is_bytes and total):
            self._print(what, now)
            self._last = what
        elif is_bytes and total and now - self._told_at >= _LINE_EVERY_S:
            self._print(f"{what}: {_count(done, total, is_bytes)}", now)

    def _print(self, line: str, now: float) -> None:
        self._told_at = now
        stderr.print(Text(line), soft_wrap=True)


def _count(done: int, total: int, is_bytes: bool) -> str:
    return f"{decimal(done)} of {decimal(total)}" if is_bytes else f"{done}/{total}"
